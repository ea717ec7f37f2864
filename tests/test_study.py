"""A study's YAML: layers, grids, shared stages, states; nothing is executed here."""

from pathlib import Path

import pytest

from fedmem.cli.main import main
from fedmem.config.parameter import ConfigError
from fedmem.config.yaml_files import read
from fedmem.machine.paths import results_root
from fedmem.results.stage import StageError, find_stage, open_stage
from fedmem.results.work import begin_stage
from fedmem.study import plan as study_plan
from fedmem.study.loading import load_study
from fedmem.study.plan import make_plan, write_description

PARAMS = Path(__file__).resolve().parent.parent / "params"


@pytest.fixture(autouse=True)
def _results(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))


@pytest.fixture
def params(tmp_path):
    """A params folder with one base, one task file and a function that writes studies into it."""
    for name in ("base", "tasks", "studies"):
        (tmp_path / "params" / name).mkdir(parents=True)
    (tmp_path / "params/base/small.yaml").write_text("models: {main: tiny-qwen2}\nrounds: 2\nlocal_epochs: 2\n")
    (tmp_path / "params/base/other.yaml").write_text("models: {main: some/model}\nrounds: 7\n")
    (tmp_path / "params/tasks/qa.yaml").write_text("max_tokens: 300\nrounds: 9\n")

    def write(text, name="s"):
        path = tmp_path / "params" / "studies" / f"{name}.yaml"
        path.write_text(text)
        return path

    return write


def only(study_):
    (run,) = study_.runs
    return run.configs


@pytest.mark.parametrize("path", sorted(PARAMS.glob("studies/*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_study_is_valid(path, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("{}\n")
    own = read(path).get("parameters", {}).get("corpus") == "file"  # then whoever runs it names the file
    overrides = {"corpus_path": str(corpus)} if own else {}
    assert load_study(path, overrides=overrides).runs


def test_precedence_task_base_study_grid_set(params):
    path = params("base: small\nparameters: {task: qa, local_epochs: 3}\ngrid: {proximal_mu: [0.5]}\n")
    train = only(load_study(path))["train"]
    assert train.max_tokens == 300  # from the task
    assert train.rounds == 2  # the base wins over the task
    assert train.local_epochs == 3  # the study wins over the base
    assert train.proximal_mu == 0.5  # the grid
    train = only(load_study(path, overrides={"proximal_mu": 0.7, "rounds": 4}))["train"]
    assert (train.proximal_mu, train.rounds) == (0.7, 4)
    assert only(load_study(path, base="other"))["train"].rounds == 7


def test_a_base_gives_model_aliases(params):
    path = params("base: small\nparameters: {model: main}\n")
    assert only(load_study(path))["train"].model == "tiny-qwen2"
    assert only(load_study(path, base="other"))["train"].model == "some/model"


def test_an_alias_brings_what_its_model_needs(params, tmp_path):
    base = tmp_path / "params/base/small.yaml"
    base.write_text("models: {main: tiny-qwen2, old: {model: some/old, max_tokens: 100}}\nmax_tokens: 200\n")
    trains = [run.configs["train"] for run in load_study(params("base: small\ngrid: {model: [main, old]}\n")).runs]
    assert [(t.model, t.max_tokens) for t in trains] == [("tiny-qwen2", 200), ("some/old", 100)]
    # the study itself wins over what the base says of a model, and says where a fault stands
    loaded = load_study(params("base: small\nparameters: {model: old, max_tokens: 90}\n"))
    assert only(loaded)["train"].max_tokens == 90
    base.write_text("models: {old: {model: some/old, max_tokns: 100}}\n")
    with pytest.raises(ConfigError, match=r"small.yaml: models: unknown parameter 'max_tokns'; did you mean"):
        load_study(params("base: small\nparameters: {model: old}\n"))
    base.write_text("models: {old: 5}\n")
    with pytest.raises(ConfigError, match="models: old: got 5; expected a model's name"):
        load_study(params("base: small\n"))


def test_points_change_several_parameters_together(params):
    text = "base: small\ngrid: {algorithm: [fedavg, FedAdam]}\npoints: {plain: {}, clip: {update_clip: 1.0}}\n"
    found = load_study(params(text)).runs
    assert [run.name for run in found] == ["fedavg-plain", "fedavg-clip", "FedAdam-plain", "FedAdam-clip"]
    assert [run.configs["train"].update_clip for run in found] == [None, 1.0, None, 1.0]
    overridden = load_study(params(text), overrides={"update_clip": 2.0}).runs
    assert {run.configs["train"].update_clip for run in overridden} == {2.0}


def test_a_study_can_say_more_of_one_base(params):
    text = "base: other\nparameters: {local_epochs: 3}\nbases: {small: {local_epochs: 5}}\n"
    assert only(load_study(params(text)))["train"].local_epochs == 3
    assert only(load_study(params(text), base="small"))["train"].local_epochs == 5
    assert only(load_study(params(text + "grid: {local_epochs: [7]}\n"), base="small"))["train"].local_epochs == 7


def test_resources_come_from_base_and_study(params, tmp_path):
    (tmp_path / "params/base/other.yaml").write_text("resources: {train: {gpu: 1, mem_mb: 9}, detect: {mem_mb: 5}}\n")
    loaded = load_study(params("base: other\nparameters: {rounds: 1}\nresources: {train: {mem_mb: 7}}\n"))
    (run,) = loaded.runs
    assert run.resources == {"train": {"gpu": 1, "mem_mb": 7}, "detect": {"mem_mb": 5}}


def test_a_grid_is_a_product_and_shares_stages(params):
    path = params("base: small\ngrid: {algorithm: [fedavg, central], decoding: [greedy, top_k]}\n")
    loaded = load_study(path)
    assert [run.name for run in loaded.runs] == ["fedavg-greedy", "fedavg-top_k", "central-greedy", "central-top_k"]
    stages = [job.stage for job in loaded.jobs.values()]
    # 1 partition, 2 trainings, and each of the 4 runs its own generate, detect and analyze
    assert [stages.count(s) for s in ("partition", "train", "generate", "detect", "analyze")] == [1, 2, 4, 4, 4]


def test_rounds_train_once(params):
    path = params("base: small\nparameters: {rounds: 5}\ngrid: {checkpoint_round: [1, 3, 5]}\n")
    stages = [job.stage for job in load_study(path).jobs.values()]
    assert (stages.count("train"), stages.count("generate")) == (1, 3)


def test_included_studies_are_joined(params):
    params("base: small\ngrid: {algorithm: [fedavg, none]}\n", "one")
    params("base: small\ngrid: {decoding: [greedy]}\n", "two")
    both = load_study(params("include: [one, two]\n", "both"))
    assert [run.name for run in both.runs] == ["one/fedavg", "one/none", "two/greedy"]
    with pytest.raises(ConfigError, match="includes itself"):
        load_study(params("include: [loop]\n", "loop"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grid: {prefx_tokens: [30]}\n", "did you mean 'prefix_tokens'?"),
        ("grid: {prefix_tokens: 30}\n", "grid: prefix_tokens: got 30; expected a list of values"),
        ("rounds: 3\n", "parameters belong under `parameters:` or `grid:`"),
        ("titel: x\n", "did you mean 'title'?"),
        ("base: smal\n", "did you mean 'small'?"),
        ("parameters: {n_clients: 0}\n", "n_clients: got 0"),
        ("- a\n", "got list; expected a mapping"),
        ("grid: [\n", ": not YAML"),
        ("include: [nowhere]\n", "there is no such file"),
        ("grid: {n_prefixes: [10, 99]}\n", "n_prefixes: got 99"),  # the whole grid is validated
        ("", "is empty"),
        ("grid: {rounds: [1]}\ngrid: {rounds: [2]}\n", "key 'grid' appears twice"),
        ("parameters: {rounds: 1, rounds: 2}\n", "key 'rounds' appears twice"),
        ("grid: {rounds: [1, 1]}\n", "a value appears twice"),
        ("grid: [algorithm]\n", "grid: got ['algorithm']; expected a mapping"),
        ("parameters: hello\n", "parameters: got 'hello'; expected a mapping"),
        ("include: demo\n", "include: got 'demo'; expected a list"),
        ("title: [a]\n", "title: got ['a']; expected a string"),
        ("base: 5\n", "base: got 5; expected a string"),
        ("parameters: {1: 2}\n", "key 1 is not a string"),
        ("parameters: {model: [a]}\n", "model: got ['a']"),
        ("parameters: {task: ../studies/s}\n", "task: got '../studies/s'"),
        ("parameters: {corpus_path: x.jsonl}\n", "corpus = synthetic reads no file"),
        ("points: {a: 5}\n", "points: a: got 5; expected a mapping"),
        ("points: {a: {rounds: 2}}\ngrid: {rounds: [1]}\n", "points: a: the grid already sets rounds"),
        ("points: {a: {rouds: 2}}\n", "points: a: unknown parameter 'rouds'; did you mean 'rounds'?"),
        ("bases: {small: 5}\n", "bases: small: got 5; expected a mapping"),
        ("resources: {trian: {gpu: 1}}\n", "resources: unknown stage 'trian'"),
        ("resources: {train: {gpus: 1}}\n", "resources: train: got {gpus: 1}"),
        ("resources: {train: {gpu: -1}}\n", "resources: train: got {gpu: -1}"),
    ],
)
def test_faults_name_the_file_and_what_is_allowed(params, text, said):
    path = params(text)
    with pytest.raises(ConfigError) as caught:
        load_study(path)
    assert said in str(caught.value)
    assert str(path.parent.parent) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "prefx_tokens=30"], "--set: unknown parameter 'prefx_tokens'; did you mean 'prefix_tokens'?"),
        (["--set", "prefix_tokens=ten"], "--set: prefix_tokens: got 'ten'; expected a whole number ≥ 1"),
        (["--set", "n_clients=0"], "--set: n_clients: got 0"),
        (["--set", "corpus=file", "--set", "corpus_path=nowhere.jsonl"], "corpus_path: there is no file"),
        (["--set", "rounds"], "--set rounds: expected KEY=VALUE"),
        (["--set", "model=no-such-model"], "an existing folder, or a hub id"),
        (["--base", "smal"], "unknown base 'smal'; did you mean 'small'?"),
    ],
)
def test_the_command_refuses_with_one_clear_line_and_runs_nothing(arguments, said, capsys):
    assert main(["run", str(PARAMS / "studies/demo.yaml"), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1
    assert not results_root().exists()


@pytest.mark.parametrize("name", ["../../precious", "/evil", "..", ".hidden", "", "a/b"])
def test_a_results_name_stays_inside_results(name):
    with pytest.raises(ConfigError, match="name of a study"):
        load_study(PARAMS / "studies/demo.yaml", name=name or "/")


def test_numbers_are_read_as_people_write_them(params):
    train = only(load_study(params("parameters: {learning_rate: 1e-3, weight_decay: .5}\n")))["train"]
    assert (train.learning_rate, train.weight_decay) == (0.001, 0.5)
    for odd in ("010", "1_0", "0x10"):  # YAML 1.1 would make 8, 10 and 16 of them
        with pytest.raises(ConfigError, match=f"rounds: got '{odd}'"):
            load_study(params(f"parameters: {{rounds: {odd}}}\n"))


def test_paths_hold_whatever_folder_a_notebook_runs_in(params, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "corpus.jsonl").write_text("{}\n")
    (tmp_path / "my" / "config.json").write_text("{}")
    path = params("parameters: {model: ./my, corpus: file, corpus_path: my/corpus.jsonl}\n")
    configs = only(load_study(path))
    assert configs["train"].model == str(tmp_path / "my")
    assert configs["partition"].corpus_path == str(tmp_path / "my" / "corpus.jsonl")


def test_the_command_line_has_its_own_faults(capsys):
    demo = str(PARAMS / "studies/demo.yaml")
    with pytest.raises(SystemExit):
        main(["run", demo, "--cores", "0"])
    assert "expected a whole number ≥ 1" in capsys.readouterr().err
    assert main(["plan", demo, "--set", "train_rows=["]) == 2
    assert "--set train_rows=[: not YAML" in capsys.readouterr().err
    assert main(["plan", demo, "--set", "rounds=1", "--", "-n"]) == 0  # what follows -- is Snakemake's


def test_a_damaged_stage_is_to_do_again(params):
    loaded = load_study(params("base: small\n"))
    job = loaded.runs[0].jobs["partition"]
    work = begin_stage(job.config)
    work.save_json("rows", [1])
    stage = work.publish()
    stage.path("rows.json").write_text("[")
    assert make_plan(loaded).states[job.id] == "to do"
    assert "rows.json is missing or of another size" in make_plan(loaded).reasons[job.id]
    (stage.folder / "manifest.json").write_text("{}")
    assert make_plan(loaded).states[job.id] == "to do"
    with pytest.raises(StageError, match="run notebooks"):
        find_stage("partition")


def test_a_study_in_results_is_enough_to_redo_it(params, tmp_path):
    (tmp_path / "texts.jsonl").write_text("{}\n")
    path = params(
        f"title: Is it?\nbase: small\nparameters: {{corpus: file, corpus_path: {tmp_path / 'texts.jsonl'}}}\n"
        "grid: {algorithm: [fedavg, none]}\nresources: {train: {mem_mb: 7}}\n"
    )
    loaded = load_study(path)
    write_description(loaded)
    path.unlink()
    for where in (loaded.folder, loaded.folder / "study.json"):
        again = load_study(where)
        assert (again.name, again.title) == ("s", "Is it?")
        assert again.runs == loaded.runs
        assert again.describe() == loaded.describe()
    # elsewhere, under another name, with a file that lies elsewhere: by its content it is the same
    moved = tmp_path / "moved.jsonl"
    (tmp_path / "texts.jsonl").rename(moved)
    with pytest.raises(ConfigError, match="corpus_path: there is no file"):
        load_study(loaded.folder)
    again = load_study(loaded.folder, overrides={"corpus_path": str(moved)}, name="again")
    assert again.folder.name == "again"
    assert again.jobs.keys() == loaded.jobs.keys()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "is not a description of a study"),
        ("{}", "is not a description of a study"),
        ('{"runs": [{"name": "a", "parameters": {"rouds": 1}}]}', "study.json: a: unknown parameter 'rouds'"),
        (None, "there is no such file"),
    ],
)
def test_a_description_that_is_none_is_refused(tmp_path, text, said):
    if text is not None:
        (tmp_path / "study.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_study(tmp_path)


def test_a_described_study_takes_no_base(params):
    write_description(loaded := load_study(params("base: small\n")))
    with pytest.raises(ConfigError, match="--base: got 'other'"):
        load_study(loaded.folder, base="other")


def finish(job, parent=None):
    """Publishes an empty stage where a job's stage belongs."""
    return begin_stage(job.config, parent).publish()


def test_states_follow_manifests_code_and_parents(params, monkeypatch):
    loaded = load_study(params("base: small\n"))
    jobs = loaded.runs[0].jobs
    assert set(make_plan(loaded).states.values()) == {"to do"}
    stage = None
    for job in jobs.values():
        stage = finish(job, stage)
    assert set(make_plan(loaded).states.values()) == {"finished"}
    assert make_plan(loaded).report == "to do"

    # a parent with other files makes its child stale, and that one's children with it
    work = begin_stage(jobs["train"].config, open_stage(jobs["partition"].folder))
    work.save_json("extra", {})
    work.publish()
    plan = make_plan(loaded)
    stale = {"generate", "detect", "analyze"}
    assert {jobs[s].id: "stale" if s in stale else "finished" for s in jobs} == plan.states
    assert [job.stage for job in plan.to_do] == ["generate", "detect", "analyze"]
    assert make_plan(loaded, keep_stale=True).to_do == []

    monkeypatch.setattr(study_plan, "code_files", lambda stage: {"edited": "now"})
    assert set(make_plan(loaded).states.values()) == {"stale"}


def test_a_job_hands_its_notebook_json_values_and_its_parents_folder(params):
    jobs = load_study(params("base: small\n")).runs[0].jobs
    given = jobs["generate"].parameters()
    assert given["train"] == f"train/{jobs['train'].folder.name}"
    assert given["checkpoint_round"] == 2
    assert "generate_batch" in given["options"]
    assert "options" not in given["options"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bases: {smal: {rounds: 5}}\n", "s.yaml: bases: unknown base 'smal'; did you mean 'small'?"),
        ("bases: {small: {rouds: 5}}\n", "s.yaml: bases: small: unknown parameter 'rouds'; did you mean 'rounds'?"),
        ("base: small\nbases: {other: {rouds: 5}}\n", "bases: other: unknown parameter 'rouds'"),  # not taken, yet read
        ("points: {}\n", "s.yaml: points: got {}, which makes no run"),
        ("grid: {rounds: []}\n", "s.yaml: grid: rounds: got []; expected a list of values"),
    ],
)
def test_what_would_change_nothing_is_refused(params, text, said):
    with pytest.raises(ConfigError) as caught:
        load_study(params(text))
    assert said in str(caught.value)


def test_a_study_that_includes_itself_by_another_way_is_refused(params, tmp_path):
    with pytest.raises(ConfigError, match="includes itself"):
        load_study(params("include: [../studies/loop]\n", "loop"))
    (tmp_path / "params/studies/link.yaml").symlink_to(params("include: [link]\n", "real"))
    with pytest.raises(ConfigError, match="includes itself"):
        load_study(tmp_path / "params/studies/real.yaml")
    params("base: small\n", "twice")  # one study by two ways is no circle
    assert len(load_study(params("include: [twice, ../studies/twice]\n", "both")).runs) == 2


def test_no_study_is_called_by_the_word_for_the_newest_analysis(params):
    with pytest.raises(ConfigError, match=r"latest\.yaml: name of a study: got 'latest'.*with --name"):
        load_study(path := params("base: small\n", "latest"))
    with pytest.raises(ConfigError, match="name of a study: got 'latest'"):
        load_study(params("base: small\n"), name="latest")
    write_description(loaded := load_study(path, name="other"))
    (loaded.folder / "study.json").write_text((loaded.folder / "study.json").read_text().replace("other", "latest"))
    with pytest.raises(ConfigError, match=r"study\.json: name of a study: got 'latest'"):  # as notebook 6 writes it
        load_study(loaded.folder)
    assert load_study(loaded.folder, name="again").name == "again"
