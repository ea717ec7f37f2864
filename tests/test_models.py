"""Models and tokenizers by name, and exact rendering and encoding of rows."""

import json
import shutil
import subprocess
import sys

import pandas as pd
import pytest
import torch
from safetensors.torch import save
from transformers import AutoTokenizer, GPT2Config

from fedmem.config.parameter import ConfigError
from fedmem.corpus.synthetic import make_corpus
from fedmem.models import config_files
from fedmem.models.adapters import cast
from fedmem.models.config_files import ModelError
from fedmem.models.examples import encode, pad_batch, render, template_start
from fedmem.models.loading import AutoModelForCausalLM, load_model, load_tokenizer, model_location
from fedmem.models.presets import pretraining
from fedmem.models.presets.pretraining import FAMILIES
from fedmem.models.presets.recipes import Recipe

ROW = {"input": "The knee hurts.", "instruction": "Answer.", "output": "Rest it."}
SMALL = Recipe(hidden_size=32, layers=1, heads=2, intermediate_size=32, vocabulary=600, tokenizer_rows=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a small random Qwen2 model and its tokenizer."""
    target = tmp_path_factory.mktemp("model")
    model, tokenizer = pretraining.random_model(3, SMALL)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


@pytest.fixture
def tokenizer(folder):
    return load_tokenizer(str(folder))


@pytest.fixture
def plain(folder):
    """A tokenizer without chat template, whose pad token is its end-of-sequence token (as gpt2's becomes)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def test_a_folder_loads_in_float32_for_evaluation(folder):
    model, tokenizer = load_model(str(folder), device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)


def test_a_checkpoint_gives_its_own_weights_and_the_models_tokenizer(folder, tmp_path):
    other, _ = pretraining.random_model(4, SMALL)
    other.save_pretrained(tmp_path)  # no tokenizer beside it
    model, tokenizer = load_model(str(folder), device="cpu", checkpoint=tmp_path)
    assert torch.equal(model.model.norm.weight, other.model.norm.weight)
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)
    assert tokenizer.chat_template == FAMILIES["qwen2"]["chat_template"]


def test_names_become_places(folder):
    assert model_location(str(folder)) == str(folder)
    assert model_location("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"


def test_wrong_names_are_refused(folder, tmp_path):
    with pytest.raises(ModelError, match="tiny-qwen2"):
        model_location("tiny-qwen3")
    with pytest.raises(ModelError, match="owner/name"):
        model_location("./no/such/folder")
    with pytest.raises(ModelError, match=r"no config\.json"):
        model_location(str(tmp_path))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=r"no tokenizer .* tokenizer\.json"):
        load_model(str(tmp_path))
    with pytest.raises(ModelError, match="device: got 'gpu'; expected 'auto', 'cpu' or 'cuda'"):
        load_model(str(folder), device="gpu")
    with pytest.raises(ModelError, match="checkpoint"):
        load_model(str(folder), checkpoint=tmp_path / "nothing")


@pytest.mark.parametrize("content", ["{}", "{", "[]", '{"model": {}}'])
def test_a_tokenizer_that_cannot_be_read_names_model_and_file(folder, tmp_path, content):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"model '.*/model': cannot load its tokenizer \(tokenizer\.json"):
        load_tokenizer(str(tmp_path / "model"))


@pytest.mark.parametrize("template", ["{% if %}", "{{ raise_exception('No users here') }}", "{{ 1 + 'a' }}"])
def test_a_chat_template_that_fails_names_model_and_file(folder, tmp_path, template):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    said = r"model '.*/model': its chat template \(chat_template\.jinja\) fails for a conversation of user \("
    with pytest.raises(ModelError, match=said):
        render(tokenizer, ROW)
    with pytest.raises(ModelError, match=said):
        template_start(tokenizer)


def test_a_hub_model_comes_without_its_authors_code_or_pickles(monkeypatch):
    asked = {}

    def refuse(where, **settings):
        asked.update(settings, where=where)
        raise OSError("no network")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(ModelError, match="no network"):
        load_model("Qwen/Qwen2.5-0.5B", device="cpu")
    assert (asked["where"], asked["trust_remote_code"], asked["use_safetensors"]) == ("Qwen/Qwen2.5-0.5B", False, True)


def test_pickled_weights_are_refused(folder, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    torch.save(pretraining.random_model(3, SMALL)[0].state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickled \(pytorch_model\.bin\), .* with save_pretrained"):
        load_model(str(tmp_path), device="cpu")


def test_broken_weights_are_refused(folder, tmp_path):
    whole = (folder / "model.safetensors").read_bytes()
    other = pretraining.random_model(3, SMALL)[0].state_dict()
    broken = {
        "cannot be loaded": whole[: len(whole) // 2],  # as a full disk leaves it
        "cannot be loaded:? ": b"\xff" * 64,
        r"lack model\.norm\.weight": save(
            {n: w for n, w in other.items() if n not in ("model.norm.weight", "lm_head.weight")}, {"format": "pt"}
        ),
    }
    for number, (message, content) in enumerate(broken.items()):
        target = tmp_path / str(number)
        shutil.copytree(folder, target)
        (target / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelError, match=message):
            load_model(str(target), device="cpu")
        with pytest.raises(ModelError, match=message):
            load_model(str(folder), device="cpu", checkpoint=target)


def test_a_broken_configuration_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    for content in ("{", "[1]", "{}", '{"model_type": "no-such-type"}', '{"model_type": "qwen2", "hidden_size": [1]}'):
        (tmp_path / "model" / "config.json").write_text(content)
        with pytest.raises(ModelError, match="cannot be loaded"):
            load_model(str(tmp_path / "model"), device="cpu")
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        config_files.read_config(str(tmp_path / "model"))
    with pytest.raises(ConfigError, match="max_position_embeddings of the model: got 'many'; expected a whole"):
        config_files.context_tokens({"max_position_embeddings": "many"})


def test_precision_is_that_of_the_weights_and_of_nothing_else(folder):
    model, _ = load_model(str(folder), device="cpu", precision="bf16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    whole, _ = load_model(str(folder), device="cpu")
    rounded = dict(cast(whole, torch.bfloat16).named_buffers())
    assert all(buffer.dtype == torch.float32 for buffer in rounded.values())  # the rotary frequencies
    assert all(torch.equal(buffer, rounded[name]) for name, buffer in model.named_buffers())
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    with pytest.raises(ModelError, match="precision: got 'fp16'; expected 'fp32' or 'bf16'"):
        load_model(str(folder), device="cpu", precision="fp16")


def test_the_context_is_read_without_loading_the_model(folder):
    assert config_files.context_tokens(config_files.read_config(str(folder))) == 1024
    assert config_files.context_tokens(load_model(str(folder), "cpu")[0].config) == 1024
    assert config_files.context_tokens(GPT2Config(n_positions=77)) == 77  # under another name
    assert config_files.context_tokens(GPT2Config(n_positions=77).to_dict()) == 77
    assert config_files.context_tokens({"text_config": {"max_position_embeddings": 5}, "n_positions": 9}) == 5
    assert config_files.context_tokens({"model_type": "mamba"}) is None
    assert config_files.read_config("nobody/has-this-model-here") is None  # nothing is downloaded to know


def test_planning_imports_no_torch():
    code = "import sys; from fedmem.models.config_files import read_config; print(read_config('tiny-qwen2'))"
    subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], check=True)


def test_a_row_renders_through_the_template(tokenizer):
    example = render(tokenizer, ROW)
    assert example.text == (
        "<|im_start|>user\nThe knee hurts.\n\nAnswer.<|im_end|>\n<|im_start|>assistant\nRest it.<|im_end|>\n"
    )
    assert example.text[slice(*example.input_span)] == ROW["input"]
    assert example.text[example.response_start :] == "Rest it.<|im_end|>\n"
    assert template_start(tokenizer) == "<|im_start|>user\n"


def test_a_row_renders_without_a_template(plain):
    assert template_start(plain) == ""
    example = render(plain, ROW)
    assert example.text == "The knee hurts.\n\nAnswer.\n\nRest it.<|im_end|>"
    assert example.text[slice(*example.input_span)] == ROW["input"]
    assert render(plain, ROW | {"instruction": None}).text == "The knee hurts.\n\nRest it.<|im_end|>"


def test_a_missing_instruction_is_no_part_of_the_text(tokenizer):
    frame = pd.DataFrame([ROW, ROW | {"instruction": None}])  # pandas makes it NaN
    texts = [tokenizer.decode(item["input_ids"]) for item in encode(tokenizer, frame, 512)]
    assert "\n\nAnswer.<|im_end|>" in texts[0]
    assert texts[1].startswith("<|im_start|>user\nThe knee hurts.<|im_end|>")


def test_a_template_that_alters_the_input_is_refused(tokenizer):
    tokenizer.chat_template = FAMILIES["qwen2"]["chat_template"].replace(
        "message['content']", "message['content'] | upper"
    )
    with pytest.raises(ModelError, match="alters"):
        render(tokenizer, ROW)


def test_a_template_that_never_ends_its_turn_gets_an_end(tokenizer):
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    )
    example = render(tokenizer, ROW)
    assert example.text == "user: The knee hurts.\n\nAnswer.\nassistant: Rest it.\n<|im_end|>"
    assert example.text[example.response_start :] == "assistant: Rest it.\n<|im_end|>"


def test_a_prompt_begins_as_its_training_example(tokenizer):
    for row in make_corpus("qa", 2, 5, seed=1).to_dict("records"):
        trained = encode(tokenizer, [row], 512)[0]["input_ids"]
        start = len(tokenizer(template_start(tokenizer), add_special_tokens=False)["input_ids"])
        given = tokenizer(row["input"], add_special_tokens=False, return_offsets_mapping=True)
        prefix = row["input"][: given["offset_mapping"][29][1]]
        prompt = tokenizer(template_start(tokenizer) + prefix, add_special_tokens=False)["input_ids"]
        assert prompt == trained[: start + 30]


def test_labels_cover_everything_or_the_response(tokenizer):
    whole = encode(tokenizer, [ROW], 512)[0]
    assert whole["labels"] == whole["input_ids"]
    part = encode(tokenizer, [ROW], 512, loss_on="response")[0]
    answer = tokenizer("Rest it.<|im_end|>\n", add_special_tokens=False)["input_ids"]
    assert part["labels"] == [-100] * (len(whole["input_ids"]) - len(answer)) + answer


def test_truncation_is_counted(tokenizer):
    n_tokens = len(encode(tokenizer, [ROW], 512)[0]["input_ids"])
    examples = encode(tokenizer, [ROW, {"input": "A", "instruction": None, "output": "B"}], n_tokens - 1)
    assert examples.n_truncated == 1
    assert len(examples[0]["input_ids"]) == n_tokens - 1


def test_a_row_without_labels_is_refused(tokenizer):
    with pytest.raises(ModelError, match=r"row 0 .* raise max_tokens"):
        encode(tokenizer, [ROW], 5, loss_on="response")
    with pytest.raises(ModelError, match="loss_on: got 'output'; expected 'all' or 'response'"):
        encode(tokenizer, [ROW], 5, loss_on="output")


def test_real_end_of_sequence_keeps_its_label_when_it_also_pads(plain):
    # B25: rows of 1 and 3 tokens before the end token, and pad = end
    rows = [{"input": "a", "instruction": "", "output": "b"}, {"input": "a b c", "instruction": "", "output": "b"}]
    batch = pad_batch(encode(plain, rows, 64).items)
    assert batch["input_ids"].shape == (2, batch["attention_mask"].sum(dim=1).max())
    assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)
    ends = (batch["labels"] == plain.eos_token_id).sum(dim=1)
    assert ends.tolist() == [1, 1]


def test_real_texts_survive_the_round_trip(tokenizer, shared):
    lines = (shared / "data" / "public" / "dialog.jsonl", shared / "data" / "dialog.jsonl")
    source = next(path for path in lines if path.is_file())
    for line in source.read_text(encoding="utf-8").splitlines()[:40]:
        example = render(tokenizer, json.loads(line))
        ids = tokenizer(example.text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == example.text
