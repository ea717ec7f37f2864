"""Adapters: what is trained, saved and loaded again, on Qwen2 (tied head) and on GPT-2 (Conv1D layers)."""

import copy
import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from fedmem.config.stages import TrainConfig
from fedmem.models import adapters
from fedmem.models.adapters import WEIGHTS_FILE
from fedmem.models.config_files import ModelError
from fedmem.models.loading import load_model, load_tokenizer, load_trainable, model_location, save_merged
from fedmem.train.local_trainer import trained_parameters
from fedmem.train.local_training import train_locally

TOKENIZER = load_tokenizer("tiny-qwen2")
IDS = torch.arange(3, 19).reshape(2, 8)
ROWS = [{"input_ids": ids, "labels": ids} for ids in ([5, 6, 7, 8, 9, 2], [15, 16, 17, 2], [3, 9, 27, 81, 2])]


def qwen2():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=len(TOKENIZER), num_key_value_heads=1, tie_word_embeddings=True, **sizes)
    )


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(TOKENIZER), n_embd=32, n_layer=2, n_head=2, n_positions=256))


@pytest.fixture(params=[qwen2, gpt2], ids=lambda make: make.__name__)
def folder(request, tmp_path):
    torch.manual_seed(0)
    request.param().save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def qwen2_folder(tmp_path):
    torch.manual_seed(0)
    qwen2().save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def settings(folder, **changes) -> TrainConfig:
    values = {"model": str(folder), "finetuning": "lora", "lora_rank": 4, "learning_rate": 1e-2, "max_tokens": 64}
    return TrainConfig(**values | changes)


def adapted(folder, **changes):
    model, _ = load_model(str(folder), "cpu")
    return adapters.add_adapters(model, settings(folder, **changes))


def trained_model(folder, **changes):
    model = adapted(folder, **changes)
    train_locally(model, ROWS, config=settings(folder, **changes), steps=10, seed=0)
    return model


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS).logits.float()


def test_only_the_adapters_are_trained_and_the_base_stays(folder):
    base, _ = load_model(str(folder), "cpu")
    model = adapted(folder)
    assert torch.equal(logits(model), logits(base))  # B is 0 at the start
    before = copy.deepcopy(model.state_dict())
    train_locally(model, ROWS, config=settings(folder), steps=3, seed=0)
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == set(trained_parameters(model))
    assert all(".lora_A." in name or ".lora_B." in name for name in moved)
    assert not torch.equal(logits(model), logits(base))


def test_saved_loaded_merged_the_outputs_stay(folder, tmp_path):
    base, _ = load_model(str(folder), "cpu")
    model = trained_model(folder)
    adapters.save(model, tmp_path / "adapter")
    loaded, _ = load_model(str(folder), "cpu", checkpoint=tmp_path / "adapter", merge=False)
    merged, _ = load_model(str(folder), "cpu", checkpoint=tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(model))
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-5, rtol=0)
    assert (logits(model) - logits(base)).abs().max() > 0.01
    assert trained_parameters(loaded).keys() == trained_parameters(model).keys()  # it can be trained on
    assert not hasattr(merged, "peft_config")
    assert trained_parameters(merged).keys() == trained_parameters(base).keys()


def test_the_merged_model_loads_anywhere_with_its_tokenizer_and_a_tied_head(folder, tmp_path):
    model = trained_model(folder)
    adapters.save(model, tmp_path / "adapter")
    save_merged(str(folder), tmp_path / "adapter", tmp_path / "merged")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(alone), logits(model), atol=1e-5, rtol=0)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "merged")("The knee")["input_ids"] == TOKENIZER("The knee").input_ids
    )
    assert isinstance(alone._tied_weights_keys, dict)  # as transformers 5 says which weights are one
    assert alone.get_output_embeddings().weight is alone.get_input_embeddings().weight
    saved = load_file(tmp_path / "merged" / "model.safetensors")
    assert saved.keys() == load_file(folder / "model.safetensors").keys()
    assert not any("lm_head" in name for name in saved)  # saved once, under the embeddings' name
    with pytest.raises(ModelError, match="not empty"):
        save_merged(str(folder), tmp_path / "adapter", tmp_path / "merged")


def test_what_a_configuration_trains(qwen2_folder):
    whole, tokenizer = load_trainable(settings(qwen2_folder, finetuning="full", precision="bf16"))
    assert {p.dtype for p in trained_parameters(whole).values()} == {torch.float32}
    assert tokenizer.chat_template == TOKENIZER.chat_template
    half, _ = load_trainable(settings(qwen2_folder, precision="bf16"))
    assert trained_parameters(half).keys() == trained_parameters(adapted(qwen2_folder)).keys()
    assert {p.dtype for p in half.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_the_start_depends_on_the_seed_alone(qwen2_folder):
    first = trained_parameters(adapted(qwen2_folder))
    torch.rand(7)
    drawn = torch.get_rng_state()
    again, other = trained_parameters(adapted(qwen2_folder)), trained_parameters(adapted(qwen2_folder, train_seed=1))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_saved_adapter_names_its_base_and_no_folder_of_the_package(tmp_path):
    model, _ = load_model("tiny-qwen2", "cpu")
    model = adapters.add_adapters(model, settings("tiny-qwen2"))
    adapters.save(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    text = (tmp_path / "adapter_config.json").read_text()
    assert json.loads(text)["base_model_name_or_path"] == "tiny-qwen2"
    assert str(model_location("tiny-qwen2")) not in text
    assert json.loads(text)["target_modules"] == sorted(json.loads(text)["target_modules"])


def test_nothing_is_warned_of(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapted(folder)


def test_targets_are_named_or_refused(qwen2_folder):
    two = trained_parameters(adapted(qwen2_folder, lora_targets=["q_proj", "v_proj"]))
    assert {name.split(".")[-4] for name in two} == {"q_proj", "v_proj"}
    assert len(two) == 2 * 2 * 2  # layers, modules, matrices
    assert trained_parameters(adapted(qwen2_folder, lora_targets="o_proj")).keys() == {
        f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_{side}.default.weight"
        for layer in (0, 1)
        for side in "AB"
    }
    for wrong in ("c_attn", "mlp", "lm_head", "embed_tokens"):  # no such module, not linear, tied, not linear
        with pytest.raises(ModelError, match=rf"'{wrong}'.*all-linear, or a list of: down_proj, .*, v_proj"):
            adapted(qwen2_folder, lora_targets=["q_proj", wrong])


def test_a_second_layer_of_adapters_is_refused(qwen2_folder, tmp_path):
    model = adapted(qwen2_folder)
    adapters.save(model, tmp_path / "adapter")
    for again in (model, model.get_base_model()):
        with pytest.raises(ModelError, match="has adapters"):
            adapters.put_on(again, tmp_path / "adapter")
        with pytest.raises(ModelError, match="has adapters"):
            adapters.add_adapters(again, settings(qwen2_folder))


def test_what_does_not_fit_is_refused(qwen2_folder, tmp_path):
    adapters.save(adapted(qwen2_folder), tmp_path / "good")
    weights = load_file(tmp_path / "good" / WEIGHTS_FILE)
    name = next(iter(weights))
    wrong = {
        "missing: ": {n: w for n, w in weights.items() if n != name},
        r"unknown: .*norm": weights | {"base_model.model.norm.lora_A.weight": torch.zeros(1)},
        r"size mismatch|shape": weights | {name: torch.zeros(1, 2)},
    }
    for number, (message, changed) in enumerate(wrong.items()):
        folder = tmp_path / f"bad-{number}"
        shutil.copytree(tmp_path / "good", folder)
        save_file(changed, folder / WEIGHTS_FILE)
        with pytest.raises(ModelError, match=message):
            load_model(str(qwen2_folder), "cpu", checkpoint=folder)
    (folder / WEIGHTS_FILE).write_bytes(b"no weights")
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(str(qwen2_folder), "cpu", checkpoint=folder)
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(ModelError, match=r"cannot be read: no adapter_model\.safetensors in it; give a folder"):
        load_model(str(qwen2_folder), "cpu", checkpoint=folder)
    (folder / "adapter_model.bin").write_bytes(b"PK")
    with pytest.raises(ModelError, match=r"adapter_model\.bin is a pickle, and nothing is unpickled here"):
        load_model(str(qwen2_folder), "cpu", checkpoint=folder)


def test_the_proximal_term_runs_over_the_adapters_alone(qwen2_folder, capfd):
    one, two = adapted(qwen2_folder), adapted(qwen2_folder)
    start = {name: p.detach().clone() for name, p in trained_parameters(one).items()}
    for model, steps in ((one, 1), (two, 2)):
        result = train_locally(model, ROWS, config=settings(qwen2_folder), seed=0, steps=steps, proximal_mu=3.0)
    moved = sum((p.detach() - start[name]).square().sum().item() for name, p in trained_parameters(one).items())
    assert moved > 0
    assert [step.penalty for step in result.course] == pytest.approx([0.0, 1.5 * moved], rel=1e-5)
    assert "".join(capfd.readouterr()) == ""


def test_recomputed_activations_give_the_same_adapters(folder):
    kept, recomputed = (
        trained_parameters(trained_model(folder, gradient_checkpointing=again)) for again in (False, True)
    )
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)


def test_bf16_freezes_in_bf16_and_trains_in_fp32(folder, tmp_path):
    config = settings(folder, precision="bf16")
    model = adapted(folder, precision="bf16")
    assert {p.dtype for p in trained_parameters(model).values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    before = {name: p.detach().clone() for name, p in trained_parameters(model).items()}
    train_locally(model, ROWS, config=config, steps=1, seed=0)
    assert any(not torch.equal(p, before[name]) for name, p in trained_parameters(model).items())
    assert {p.dtype for p in trained_parameters(model).values()} == {torch.float32}
    adapters.save(model, tmp_path / "adapter")
    kept = load_model(str(folder), "cpu", checkpoint=tmp_path / "adapter", precision="bf16", merge=False)[0]
    assert torch.equal(logits(kept), logits(model))
    merged = load_model(str(folder), "cpu", checkpoint=tmp_path / "adapter", precision="bf16")[0]
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
