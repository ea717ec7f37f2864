"""The tiny base model: what ships, and a short version of its recipe."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from fedmem import models, presets
from fedmem.synthetic import make_corpus, public_texts

SHORT = replace(
    presets.RECIPES["tiny-qwen2"],
    hidden_size=64,
    layers=1,
    intermediate_size=128,
    vocabulary=1000,
    tokenizer_rows=400,
    steps=60,
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
    return presets.pretrain(SHORT)


def loss_per_token(model, tokenizer, rows) -> float:
    with torch.no_grad():
        return model(**models.collate(tokenizer, models.encode(tokenizer, rows, 512).items)).loss.item()


def test_a_short_version_of_the_recipe_learns(short):
    model, tokenizer, record = short
    losses = record["losses"]
    assert len(losses) == SHORT.steps
    assert losses[0] == pytest.approx(6.9, abs=0.3)  # ln(1000) = 6.91: it starts out knowing nothing
    fresh = make_corpus("dialog", 2, 5, seed=9)
    untrained, _ = presets.random_model(SHORT.seed, SHORT)
    assert loss_per_token(model, tokenizer, fresh) < loss_per_token(untrained, tokenizer, fresh) - 1.5


def test_the_same_recipe_gives_the_same_bytes(short, tmp_path):
    for folder in ("first", "second"):
        recipe = replace(SHORT, steps=3)
        presets.save(tmp_path / folder, recipe, *presets.pretrain(recipe))
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("first", "second")
    )
    assert first == second
    assert {"config.json", "manifest.json", "model.safetensors", "tokenizer.json"} <= set(first)


def test_building_leaves_the_callers_random_state_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    presets.random_model(5, SHORT)
    assert torch.equal(torch.rand(3), expected)


def test_an_unknown_preset_is_refused(capsys):
    with pytest.raises(SystemExit):
        presets.main(["tiny-qwen3"])
    assert "tiny-qwen2" in capsys.readouterr().err


def test_what_ships_is_small_and_says_how_it_was_made():
    folder = presets.PRESETS["tiny-qwen2"]
    assert (folder / "model.safetensors").stat().st_size <= 3_000_000
    manifest = json.loads((folder / "manifest.json").read_text())
    recipe = presets.RECIPES["tiny-qwen2"]
    assert manifest["recipe"] == asdict(recipe)
    assert manifest["corpus_sha256"] == presets.corpus_digest(
        public_texts(recipe.steps * recipe.rows_per_step, recipe.seed)
    )
    assert not list(folder.glob("*.bin"))


def test_what_ships_knows_the_public_language_but_no_private_row():
    model, tokenizer = models.load("tiny-qwen2", device="cpu")
    recipe = presets.RECIPES["tiny-qwen2"]
    config = model.config
    assert (config.model_type, config.tie_word_embeddings) == ("qwen2", True)
    assert 900_000 < model.num_parameters() < 1_500_000
    assert len(tokenizer) == config.vocab_size == recipe.vocabulary
    assert config.max_position_embeddings >= 512
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.eos_token == "<|im_end|>"
    public, private = public_texts(60, seed=1), make_corpus("summarization", 3, 20, seed=1)
    assert loss_per_token(model, tokenizer, public) < 2
    # far above what a memorised text has (below 0.5), for each group of a private corpus
    assert 1 < loss_per_token(model, tokenizer, private) < 2.2
