"""The tiny base models: what ships, short versions of the recipes, and every family's tokenizer."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from fedmem.corpus.synthetic import make_corpus, public_texts
from fedmem.models.examples import encode, pad_batch, render, template_start
from fedmem.models.loading import load_model, load_tokenizer
from fedmem.models.presets import pretraining
from fedmem.models.presets.recipes import DATA, RECIPES

SHORT = replace(
    RECIPES["tiny-qwen2"],
    hidden_size=64,
    layers=1,
    intermediate_size=128,
    vocabulary=1000,
    tokenizer_rows=400,
    steps=60,
    rehearsed_rows=20,
    rehearsals=12,
    warmup_steps=5,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def short():
    return pretraining.pretrain(SHORT)


def loss_per_token(model, tokenizer, rows) -> float:
    with torch.no_grad():
        return model(**pad_batch(encode(tokenizer, rows, 512).items)).loss.item()


def test_a_short_version_of_the_recipe_learns(short):
    model, tokenizer, record = short
    assert len(record["losses"]) == 60 + 12 * 3  # 20 rows make 3 steps of at most 8
    assert record["losses"][0] == pytest.approx(6.9, abs=0.3)  # ln(1000) = 6.91: it starts out knowing nothing
    fresh = make_corpus("dialog", 2, 5, seed=9)
    untrained, _ = pretraining.random_model(SHORT.seed, SHORT)
    assert loss_per_token(model, tokenizer, fresh) < loss_per_token(untrained, tokenizer, fresh) - 1.5
    rehearsed = public_texts(SHORT.rehearsed_rows, SHORT.seed)
    unseen = public_texts(SHORT.rehearsed_rows, SHORT.seed + 1)
    assert loss_per_token(model, tokenizer, rehearsed) < loss_per_token(model, tokenizer, unseen)


def test_the_learning_rate_rises_falls_and_rises_again():
    recipe = replace(SHORT, steps=4, warmup_steps=2, rows_per_step=1, learning_rate=1.0, rehearsed_rows=2, rehearsals=2)
    plan = list(pretraining._plan(recipe, [{"number": number} for number in range(4)]))
    # first part: warm-up 1/2, 2/2, then the way down (4 - 2) / 2 = 1 and (4 - 3) / 2; second part: 1/2, then 1
    assert [rate for _, rate in plan] == [0.5, 1, 1, 0.5, 0.5, 1, 1, 1]
    assert [batch[0]["number"] for batch, _ in plan[:4]] == [0, 1, 2, 3]
    assert sorted(batch[0]["number"] for batch, _ in plan[4:]) == [0, 0, 1, 1]


def test_the_same_recipe_gives_the_same_bytes(short, tmp_path):
    for folder in ("first", "second"):
        recipe = replace(SHORT, steps=3, rehearsals=1)
        pretraining.save(tmp_path / folder, recipe, *pretraining.pretrain(recipe))
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("first", "second")
    )
    assert first == second
    assert {"config.json", "manifest.json", "model.safetensors", "tokenizer.json"} <= set(first)


def test_building_leaves_the_callers_random_state_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    pretraining.random_model(5, SHORT)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama"])
def test_the_package_gets_no_other_preset(name, capsys):
    with pytest.raises(SystemExit):
        pretraining.main([name])
    assert {"tiny-qwen3": "tiny-qwen2", "tiny-llama": "--folder"}[name] in capsys.readouterr().err


def test_the_other_sizes_are_half_and_a_quarter():
    tokenizer = load_tokenizer("tiny-qwen2")
    with torch.device("meta"):  # counted, not made
        sizes = {
            name: AutoModelForCausalLM.from_config(pretraining.configuration(recipe, tokenizer)).num_parameters()
            for name, recipe in RECIPES.items()
        }
    assert sizes["tiny-qwen2"] == 1_270_848
    assert sizes["tiny-qwen2-half"] / sizes["tiny-qwen2"] == pytest.approx(0.5, abs=0.02)
    assert sizes["tiny-qwen2-quarter"] / sizes["tiny-qwen2"] == pytest.approx(0.25, abs=0.02)
    assert {sizes["tiny-llama"] // 10**6, sizes["tiny-gpt2"] // 10**6} == {1}
    same = {"hidden_size", "intermediate_size"}  # what the sizes of a model differ in; the recipe is one
    for name in ("tiny-qwen2-half", "tiny-qwen2-quarter"):
        pairs = zip(asdict(RECIPES[name]).items(), asdict(RECIPES["tiny-qwen2"]).items(), strict=True)
        assert {key for (key, one), (_, other) in pairs if one != other} == same


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
def test_every_family_learns_and_survives_the_disk(architecture, tmp_path):
    recipe = replace(SHORT, architecture=architecture, steps=12, rehearsals=1)
    model, tokenizer, record = pretraining.pretrain(recipe)
    assert record["losses"][11] < record["losses"][0] - 0.3
    pretraining.save(tmp_path, recipe, model, tokenizer, record)
    loaded, its_tokenizer = load_model(str(tmp_path), device="cpu")
    assert loaded.config.model_type == architecture
    assert loaded.get_input_embeddings().num_embeddings == len(its_tokenizer) == recipe.vocabulary
    row = public_texts(1, seed=3).to_dict("records")[0]
    text = render(tokenizer, row).text
    ids = its_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert its_tokenizer.decode(ids) == text
    assert its_tokenizer.eos_token_id in ids[-2:]  # ChatML ends a turn with a line break after it
    assert template_start(its_tokenizer) == template_start(tokenizer)


def test_gpt2_has_no_template_and_pads_with_the_token_that_ends(tmp_path):
    model, tokenizer = pretraining.random_model(1, replace(SHORT, architecture="gpt2"))
    assert (tokenizer.pad_token, tokenizer.chat_template) == (None, None)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.pad_token_id == loaded.eos_token_id == loaded.bos_token_id
    assert len(loaded) == len(tokenizer) == SHORT.vocabulary  # an existing token: the vocabulary never grows
    row = {"input": "The knee hurts.", "instruction": "Answer.", "output": "Rest it."}
    assert render(loaded, row).text == "The knee hurts.\n\nAnswer.\n\nRest it.<|endoftext|>"
    batch = pad_batch(encode(loaded, [row, row | {"output": "Rest."}], 64).items)
    assert (batch["labels"] == loaded.eos_token_id).sum(dim=1).tolist() == [1, 1]  # padding's are no labels


def test_llama_heads_its_turns(tmp_path):
    _, tokenizer = pretraining.random_model(1, replace(SHORT, architecture="llama"))
    row = {"input": "The knee hurts.", "instruction": "", "output": "Rest it."}
    assert render(tokenizer, row).text == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nThe knee hurts.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nRest it.<|eot_id|>"
    )
    ids = tokenizer(template_start(tokenizer), add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1


def test_what_ships_is_small_and_says_how_it_was_made():
    folder = DATA / "tiny-qwen2"
    assert (folder / "model.safetensors").stat().st_size <= 3_000_000
    manifest = json.loads((folder / "manifest.json").read_text())
    recipe = RECIPES["tiny-qwen2"]
    assert manifest["recipe"] == asdict(recipe)
    assert manifest["corpus_sha256"] == pretraining.corpus_digest(
        public_texts(recipe.steps * recipe.rows_per_step, recipe.seed)
    )
    assert not list(folder.glob("*.bin"))


def test_what_ships_knows_the_public_language_but_no_private_row():
    model, tokenizer = load_model("tiny-qwen2", device="cpu")
    recipe = RECIPES["tiny-qwen2"]
    config = model.config
    assert (config.model_type, config.tie_word_embeddings) == ("qwen2", True)
    assert 900_000 < model.num_parameters() < 1_500_000
    assert len(tokenizer) == config.vocab_size == recipe.vocabulary
    assert config.max_position_embeddings >= 512
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.eos_token == "<|im_end|>"
    rehearsed = public_texts(recipe.rehearsed_rows, recipe.seed)[:40]
    assert loss_per_token(model, tokenizer, rehearsed) < 0.5
    # a private row is no more than a fresh one to it: each word of a slot is a guess among about 30, ln(30) = 3.4
    for task in ("summarization", "dialog", "qa", "classification"):
        private = make_corpus(task, 3, 10, seed=1)
        assert 1.5 < loss_per_token(model, tokenizer, private) < 5
