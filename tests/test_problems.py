"""What is found before a study starts: problems, estimates, and the plan as it is printed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedmem.cli import study_commands
from fedmem.cli.main import main
from fedmem.config.parameter import ConfigError
from fedmem.machine.paths import PACKAGE
from fedmem.models.config_files import Size, size_of
from fedmem.results.stage import open_stage
from fedmem.results.work import begin_stage
from fedmem.study import estimates, gpus, preflight
from fedmem.study.estimates import START_SECONDS, Estimate, Past
from fedmem.study.loading import load_study
from fedmem.study.plan import make_plan, session_jobs
from fedmem.study.preflight import Problem

STUDIES = Path(__file__).resolve().parent.parent / "params" / "studies"
PRESET = PACKAGE / "data" / "tiny-qwen2"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """No hub, no GPU, no cache, results of one's own."""
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    caches = (preflight.hub_unreachable_reason, gpus._count, preflight._read)
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


def found(**overrides):
    """{message: whether it is certain} of the demo's first run with these parameters."""
    loaded = load_study(STUDIES / "demo.yaml", overrides={"algorithm": "fedavg"} | overrides)
    plan = make_plan(loaded)
    return {
        problem.message: problem.certain for problem in preflight.find_problems(plan, estimates.estimate_study(loaded))
    }


def printed(code):
    """What another Python prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def corpus(path, texts_of):
    rows = [{"id": f"{g}{n}", "input": t, "group": g} for g, texts in texts_of.items() for n, t in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"instruction": None, "output": None}
    return {"corpus": "file", "corpus_path": str(path), "column_map": columns}


def test_the_demo_has_no_problems():
    assert found() == {}


@pytest.mark.parametrize(
    ("overrides", "said", "certain"),
    [
        ({"model": "some/model"}, "model: some/model is not in the local cache, and HF_HUB_OFFLINE is set", False),
        ({"device": "cuda"}, "device: cuda, and this machine has no GPU", False),
        ({"precision": "bf16"}, "precision: bf16, and this machine has no GPU", False),
        (
            {"max_new_tokens": 1000},
            "are 1030 tokens, and the model's context holds 1024: lower max_new_tokens",
            True,
        ),
        ({"max_tokens": 2000}, "max_tokens: got 2000; the context of tiny-qwen2 holds 1024", False),
        ({"prefix_tokens": 60}, "synthetic_words: got 60; inputs need at least 80 tokens", False),
        ({"retriever": "elasticsearch"}, "FEDMEM_ES_URL is not set", True),
        ({"paraphrase_model": "nowhere"}, "paraphrase_model: got 'nowhere'; there is no such folder", True),
        ({"paraphrase_model": "some/model"}, "paraphrase_model: some/model is not in the local cache", False),
        (
            {"paraphrase_model": str(PRESET), "entity_model": "en_core_nowhere"},
            "entity_model: got 'en_core_nowhere'; no such spaCy model is installed",
            True,
        ),
        (
            {"algorithm": "FedAdam", "strategy_options": {"etta": 0.1}},
            "strategy_options: FedAdam has no option 'etta'; did you mean 'eta'?",
            True,
        ),
        ({"algorithm": "QFedAvg"}, "strategy_options: QFedAvg needs client_learning_rate", True),
        (
            {"algorithm": "FedAdam", "strategy_options": {"eta": "a"}},
            "strategy_options: eta: got 'a'; expected a number",
            True,
        ),
        (
            {"algorithm": "FedTrimmedAvg", "strategy_options": {"beta": 0.9}},
            "strategy_options of FedTrimmedAvg: `beta` must be in the range",
            True,
        ),
        (
            {"algorithm": "Krum", "strategy_options": {"num_malicious_nodes": 1}},
            "Krum with num_malicious_nodes = 1 needs 5 clients",
            True,
        ),
        ({"model": "Qwen/Qwen2.5-3B", "batch_size": 4096}, "memory: a train stage takes up to", False),
    ],
)
def test_a_problem_is_found_beforehand(overrides, said, certain, monkeypatch):
    monkeypatch.delenv("FEDMEM_ES_URL", raising=False)
    messages = {message: sure for message, sure in found(**overrides).items() if said in message}
    assert list(messages.values()) == [certain], found(**overrides)


def test_options_that_a_strategy_has_are_no_problem():
    assert found(algorithm="FedAdam", strategy_options={"eta": 0.1}) == {}


WHOLE = (PRESET / "model.safetensors").read_bytes()
SETTINGS = json.loads((PRESET / "config.json").read_text())


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer.json", None, "no tokenizer in its folder; expected one of tokenizer.json"),
        ("model.safetensors", None, "no weights in its folder; save_pretrained writes model.safetensors"),
        ("model.safetensors", b"", "model.safetensors in its folder is empty, truncated or not a safetensors file"),
        ("model.safetensors", WHOLE[:100], "model.safetensors in its folder is empty, truncated"),
        ("model.safetensors", WHOLE[:-1], "model.safetensors in its folder is empty, truncated"),
        ("config.json", b"{", "config.json in its folder is not JSON: "),
        ("config.json", b"\xff", "config.json in its folder is not JSON: "),
        ("config.json", b"[1]", "config.json in its folder holds [1], not a JSON object"),
        ("config.json", b"{}", "config.json in its folder has no model_type"),
        (
            "config.json",
            json.dumps(SETTINGS | {"max_position_embeddings": "many"}).encode(),
            "config.json in its folder has max_position_embeddings = 'many', which is not a whole number",
        ),
        (
            "config.json",
            json.dumps(SETTINGS | {"text_config": "wide"}).encode(),
            "config.json in its folder has text_config = 'wide', which is not an object",
        ),
    ],
)
def test_a_broken_folder_is_one_certain_problem(tmp_path, file, content, said, monkeypatch):
    monkeypatch.setattr(preflight.os, "sysconf", lambda name: 40_000)  # 1.6 GB: too little for a model of unknown size
    (tmp_path / "model").mkdir()
    for one in PRESET.iterdir():
        (tmp_path / "model" / one.name).write_bytes(one.read_bytes())
    (tmp_path / "model" / file).unlink()
    if content is not None:
        (tmp_path / "model" / file).write_bytes(content)
    messages = found(model=str(tmp_path / "model"))
    assert list(messages.values()) == [True], messages
    assert f"model: {tmp_path / 'model'}: {said}" in next(iter(messages))


def test_a_folder_that_is_no_model_is_refused_before_its_files_are_read(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(20 * 10**9)  # takes no room, but many seconds to be read
    with pytest.raises(ConfigError, match=r"model: .*: no config\.json in its folder; give a folder that save_pret"):
        found(model=str(tmp_path))


def test_weights_in_pickles_and_in_parts(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((PRESET / name).read_bytes())
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    (said,) = found(model=str(folder))
    assert "pickled (pytorch_model.bin), and fedmem unpickles nothing" in said
    assert "save_pretrained, which writes safetensors" in said
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    assert "model.safetensors.index.json in its folder is damaged" in next(iter(found(model=str(folder))))
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert "no model-1.safetensors in its folder, which" in next(iter(found(model=str(folder))))
    (folder / "model-1.safetensors").write_bytes(WHOLE)
    assert found(model=str(folder)) == {}


def test_a_model_in_the_local_cache_is_there(tmp_path):
    folder = tmp_path / "hub" / "models--some--model"
    snapshot = folder / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123")
    (snapshot / "config.json").write_text('{"max_position_embeddings": 64}')
    code = "from fedmem.study.preflight import has_model; print(*map(has_model, ['some/model', 'some/other']))"
    assert printed(code) == "True False"  # in a process of its own: the cache's place is read at import


def test_a_corpus_that_cannot_be_dealt(tmp_path):
    text = "a word and " * 60
    short = corpus(tmp_path / "two.jsonl", {"a": [text + str(n) for n in range(80)], "b": [text]})
    messages = found(**short)
    assert [sure for message, sure in messages.items() if "2 groups for 3 clients" in message] == [True]
    few = corpus(tmp_path / "few.jsonl", {g: [f"{text} {g} {n}" for n in range(20)] for g in "abc"})
    assert any("client 0 (group 'a') has 20 rows and needs 72" in message for message in found(**few))
    (tmp_path / "bad.jsonl").write_text("{\n")
    bad = few | {"corpus_path": str(tmp_path / "bad.jsonl")}
    assert any(message.startswith("corpus_path: ") and "bad.jsonl" in message for message in found(**bad))


def test_texts_that_are_too_short(tmp_path):
    rows = {g: [f"short {g} {n}" for n in range(80)] for g in "abc"}
    messages = found(**corpus(tmp_path / "short.jsonl", rows))
    assert any("at most 0 of its texts have the 50 tokens" in message for message in messages)
    rows = {g: [f"{'long ' * 60} {g} {n}" for n in range(80)] for g in "abc"}
    assert found(**corpus(tmp_path / "long.jsonl", rows)) == {}


def test_no_disk_and_a_folder_that_is_not_writable(tmp_path, monkeypatch):
    full = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda place: full)
    assert any(message.startswith("disk: about 0.") for message in found())
    monkeypatch.setattr(preflight.os, "access", lambda place, mode: False)
    assert [sure for message, sure in found().items() if "cannot be written to" in message] == [True]


def test_what_is_certain_is_refused_and_finished_stages_have_no_problems():
    with pytest.raises(ConfigError, match="one\ntwo"):
        preflight.raise_certain([Problem("one", True), Problem("perhaps", False), Problem("two", True)])
    preflight.raise_certain([Problem("perhaps", False)])
    loaded = load_study(STUDIES / "demo.yaml", overrides={"model": "some/model", "algorithm": "none"})
    for job in loaded.jobs.values():
        parent = open_stage(job.parent.folder) if job.parent else None
        begin_stage(job.config, parent).publish()
    assert preflight.find_problems(make_plan(loaded), estimates.estimate_study(loaded)) == []


# --- estimates ------------------------------------------------------------------------------------------------------


def test_sizes_of_models(tmp_path):
    assert size_of("tiny-qwen2").parameters == pytest.approx(1_270_848, rel=0.01)  # the recipe, against its file
    assert size_of(str(PRESET)) == Size(1_270_848, 2, 192, 192, 2000, 1024)
    assert size_of("Qwen/Qwen2.5-3B").layers == 36
    assert size_of("someone/model-1.5B-chat").parameters == 1_500_000_000
    assert size_of("someone/model") is None


def train_estimate(asked=None, **overrides):
    loaded = load_study(STUDIES / "demo.yaml", overrides={"algorithm": "fedavg"} | overrides)
    (job,) = (job for job in loaded.jobs.values() if job.stage == "train")
    return estimates.estimate(job, asked)


def test_the_rule_grows_with_what_it_should():
    plain, start = train_estimate(), START_SECONDS["train"]
    assert 30 < plain.seconds < 300
    double = train_estimate(rounds=24)
    assert 1.7 < (double.seconds - start) / (plain.seconds - start) < 2.1
    # 13 checkpoints, round 0 among them, of 1.27 million weights of 4 bytes and a tokenizer, and the page
    assert plain.disk_mb == pytest.approx(13 * (4 * 1.269 + 0.2) + 2, rel=0.01)
    lora = train_estimate(finetuning="lora")
    assert lora.disk_mb < plain.disk_mb / 3
    # weights, gradients and two moments of AdamW in fp32, and three models on the host for averaging
    large = train_estimate(model="Qwen/Qwen2.5-3B", batch_size=1)
    assert large.mem_mb > 3086 * (16 + 12)
    on_gpu = train_estimate({"gpu": 1}, model="Qwen/Qwen2.5-3B", batch_size=1)
    assert on_gpu.seconds < large.seconds / 100
    assert on_gpu.gpu_mb > 3086 * 16


def test_a_preset_that_is_still_to_be_made_takes_its_time(tmp_path):
    made, unmade = train_estimate(model="tiny-qwen2"), train_estimate(model="tiny-llama")
    assert unmade.seconds > made.seconds + 100
    folder = tmp_path / "results" / "models" / "tiny-llama"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    assert train_estimate(model="tiny-llama").seconds == pytest.approx(made.seconds, rel=0.01)


def test_a_past_stage_corrects_the_rule(monkeypatch):
    loaded = load_study(STUDIES / "demo.yaml", overrides={"algorithm": "fedavg"})
    jobs = list(loaded.jobs.values())
    stage = None
    for job in jobs[:2]:
        stage = begin_stage(job.config, stage).publish()
    manifest = json.loads((stage.folder / "manifest.json").read_text())
    by_rule = train_estimate().seconds
    # it took twice as long as the rule says, kernel and imports included
    manifest["seconds"] = 2 * by_rule - START_SECONDS["train"]
    (stage.folder / "manifest.json").write_text(json.dumps(manifest))
    other = load_study(STUDIES / "demo.yaml", overrides={"algorithm": "fedprox", "rounds": 6})
    (job,) = (job for job in other.jobs.values() if job.stage == "train")
    guess = estimates.estimate(job, past=Past())
    assert guess.source == f"like train/{stage.folder.name}"
    assert guess.seconds == pytest.approx(2 * estimates.estimate(job).seconds)
    # a stage that is far larger is not judged by it
    huge = load_study(STUDIES / "demo.yaml", overrides={"algorithm": "fedavg", "model": "Qwen/Qwen2.5-3B"})
    (job,) = (job for job in huge.jobs.values() if job.stage == "train")
    assert estimates.estimate(job, past=Past()).source == "rule"


def test_files_win_over_estimates():
    loaded = load_study(STUDIES / "all.yaml")
    asked, guesses = estimates.stated_resources(loaded), estimates.estimate_study(loaded)
    (job, *_) = (job for job in loaded.jobs.values() if job.stage == "train")
    wanted = estimates.resources(guesses[job.id], asked[job.id] | {"runtime": 77})
    assert (wanted["gpu"], wanted["runtime"]) == (1, 77)
    assert wanted["mem_mb"] > 1.2 * guesses[job.id].mem_mb
    assert all(type(amount) is int for amount in wanted.values())
    entries = session_jobs(make_plan(loaded), guesses)
    assert {entry["threads"] for entry in entries} == {1}
    assert {entry["resources"]["gpu"] for entry in entries if entry["stage"] in ("train", "generate")} == {1}
    assert {entry["resources"]["gpu"] for entry in entries if entry["stage"] in ("detect", "analyze")} == {0}


def test_hours_are_bounded_by_path_cores_and_gpus():
    loaded = load_study(STUDIES / "demo.yaml", overrides={"algorithm": "fedavg"})
    jobs = list(loaded.jobs.values())  # five stages in a row, an hour each
    hour = {job.id: Estimate(3600, 1, 0, 1, int(job.stage == "train")) for job in jobs}
    assert estimates.least_hours(jobs, hour, cores=8, devices=1) == 5
    two = list(load_study(STUDIES / "demo.yaml", overrides={"algorithm": "fedavg"} | {"rounds": 3}).jobs.values())[1:]
    hour |= {job.id: Estimate(3600, 1, 0, 1, int(job.stage == "train")) for job in two}
    assert estimates.least_hours(jobs + two, hour, cores=1, devices=1) == 9


# --- the plan -------------------------------------------------------------------------------------------------------


def test_the_plan_says_what_sharing_saves():
    plan = make_plan(load_study(STUDIES / "all.yaml"))
    lines, found_ = study_commands.plan_lines(plan, cores=2)
    text = "\n".join(lines)
    # 55 runs of 5 stages and the report, against 4 + 21 + 3 * 41 stages and the report
    assert "55 runs: 276 notebooks one by one, 149 where runs share stages" in text
    assert "(4 partition, 21 train, 41 generate, 41 detect, 41 analyze, the report)" in text
    assert "to do: 149 notebooks" in text
    assert any("Qwen/Qwen2.5-3B is not in the local cache" in str(problem) for problem in found_)
    assert not any(problem.certain for problem in found_), text


def test_planning_imports_no_torch():
    code = (
        "import sys; from fedmem.cli import study_commands; from fedmem.study import loading, plan; "
        f"study_commands.plan_lines(plan.make_plan(loading.load_study({str(STUDIES / 'all.yaml')!r}))); "
        "print(sorted({'torch', 'transformers', 'flwr', 'datasets', 'sklearn'} & set(sys.modules)))"
    )
    assert printed(code) == "[]"


def test_the_command_prints_problems_and_says_so_by_its_exit_code(capsys, monkeypatch):
    assert main(["plan", str(STUDIES / "demo.yaml")]) == 0
    assert "problems" not in capsys.readouterr().out
    monkeypatch.delenv("FEDMEM_ES_URL", raising=False)
    changed = ["--set", "retriever=elasticsearch", "--set", "device=cuda", "--set", "algorithm=fedavg"]
    assert main(["plan", str(STUDIES / "demo.yaml"), *changed]) == 1
    said = capsys.readouterr().out.partition("problems")[2].splitlines()
    assert "FEDMEM_ES_URL is not set" in said[1]
    assert "device: cuda, and this machine has no GPU" in said[4]


def test_a_job_takes_the_processors_that_it_uses():
    loaded = load_study(STUDIES / "demo.yaml", overrides={"torch_threads": 4, "detect_workers": 2})
    entries = session_jobs(make_plan(loaded), estimates.estimate_study(loaded))
    threads = {entry["stage"]: entry["threads"] for entry in entries}
    assert threads == {"partition": 1, "train": 4, "generate": 4, "detect": 2, "analyze": 1, "studies": 1}


def test_behind_a_proxy_the_hub_may_answer(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    assert "cannot be reached" in preflight.hub_unreachable_reason()
    preflight.hub_unreachable_reason.cache_clear()
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert preflight.hub_unreachable_reason() == ""
