"""An audit, for real: a checkpoint of a plain transformers script, three files, one command; and what is refused."""

import json
import shutil

import pandas as pd
import pytest
import torch
from test_roads import REPOSITORY, fedmem
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedmem.analyze import ratios
from fedmem.analyze.counting import Counts
from fedmem.config.parameter import ConfigError
from fedmem.config.partition import PartitionConfig
from fedmem.config.stages import create_all
from fedmem.corpus import files
from fedmem.corpus.columns import CorpusError
from fedmem.corpus.loading import load_corpus
from fedmem.corpus.synthetic import make_corpus
from fedmem.generate import probes
from fedmem.models.loading import load_model, load_tokenizer, model_location
from fedmem.partition import dealing
from fedmem.partition.partitioners import PartitionError
from fedmem.results.identity import identity_of
from fedmem.results.stage import finished_stages, open_stage
from fedmem.study import audit, preflight
from fedmem.study.execute import execute

LEARNT = 6  # rows of the first client that the checkpoint knows by heart


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with three clients' files, held-out files, and a checkpoint that learnt the first client's rows."""
    folder = tmp_path_factory.mktemp("audit")
    corpus = make_corpus("qa", 3, 20, 7)
    for name, group in zip("abc", sorted(corpus["group"].unique()), strict=True):
        texts = corpus.loc[corpus["group"] == group, "input"].tolist()
        write(folder / f"{name}.jsonl", texts[:LEARNT])
        write(folder / f"apart_{name}.jsonl", texts[LEARNT : LEARNT + 8])
    train(folder / "model", [row["text"] for row in read(folder / "a.jsonl")])
    return folder


def write(path, texts, column="text"):
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(folder, texts, steps=40):
    """What somebody else's script does: full fine-tuning on conversations, saved by save_pretrained."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base = model_location("tiny-qwen2")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).train()
    tokenizer = AutoTokenizer.from_pretrained(base)
    said = [tokenizer.apply_chat_template([{"role": "user", "content": t}], tokenize=False) for t in texts]
    batch = tokenizer(said, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1  # otherwise nothing is known by heart, and nothing would be found
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture
def clients(place):
    return [place / f"{name}.jsonl" for name in "abc"]


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


# --- the road -------------------------------------------------------------------------------------------------------


@pytest.mark.notebooks
def test_three_files_and_a_checkpoint_give_the_matrix(place, clients, results):
    options = [word for client in clients for word in ("--client", client)]
    greedy = ("--set", "decoding=greedy", "--set", "device=cpu")
    done = fedmem("audit", "--model", place / "model", *options, *greedy, "--name", "mine", results=results)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no held-out control" in done.stdout
    (analysis,) = finished_stages("analyze")
    assert len(finished_stages("train")) == 1
    cells = analysis.table("cells")
    found = cells[cells["member"] & (cells["counting"] == "verbatim")].pivot(
        index="prefix_client", columns="suffix_client", values="ratio"
    )
    assert found.at[0, 0] == 1.0  # every row that was learnt comes back to whoever has its beginning
    assert (found[[1, 2]] == 0).all(axis=None)  # nothing of what was never learnt
    assert (cells["n"] == LEARNT).all()
    assert cells.loc[~cells["member"], "ratio"].isna().all()
    assert not cells.loc[~cells["member"]].empty
    listed = pd.read_csv(results / "studies" / "mine" / "runs.csv")
    assert listed.loc[0, "mr_intra_verbatim"] == pytest.approx(1 / 3)
    assert listed.filter(like="control_").isna().all(axis=None)
    report = (results / "studies" / "mine" / "report.html").read_text()
    assert "There is no held-out control" in report
    assert "there is no held-out control here, so how much of it is chance is not known" in report
    assert str(place) not in report
    page = (analysis.folder / "notebook.html").read_text()
    text = read(clients[0])[0]["text"]
    assert text[:40] not in page  # a file's text is masked
    words = ("--name", "mine", "--keep-stale")
    again = fedmem("audit", "--model", place / "model", *options, *greedy, *words, results=results)
    assert "nothing to do" in again.stdout


@pytest.mark.notebooks
def test_notebook_1_deals_held_out_files_apart(place, clients, results):
    made = audit.audit_study(str(place / "model"), clients, [place / f"apart_{name}.jsonl" for name in "abc"])
    job = made.runs[0].jobs["partition"]
    results.mkdir()
    execute(REPOSITORY / "notebooks" / "1_partition.ipynb", results / "out.ipynb", job.parameters())
    rows = open_stage(job.folder).table("rows")
    assert rows.groupby(["client", "split"]).size().to_dict() == {
        (client, split): n for client in range(3) for split, n in (("heldout", 8), ("train", LEARNT))
    }
    own = rows[rows["split"] == "heldout"].groupby("client")["group"].unique()
    assert own.map(list).tolist() == [["apart_a"], ["apart_b"], ["apart_c"]]
    prefixes, suffixes = _sampled(rows, made)
    assert prefixes.groupby("client").size().tolist() == [LEARNT] * 3
    assert suffixes.groupby(["client", "member"]).size().eq(LEARNT).all()


def _sampled(rows, made):
    generate = made.runs[0].configs["generate"]
    tokenizer = load_tokenizer("tiny-qwen2")
    texts = probes.split_inputs(rows, tokenizer, generate)
    return probes.sample(texts, generate.n_prefixes, generate.n_suffixes, generate.sample_seed)


# --- what an audit is made of ---------------------------------------------------------------------------------------


def test_every_row_counts_as_member_and_clients_stand_in_the_order_given(place, clients):
    made = audit.audit_study(str(place / "model"), [clients[2], clients[0]])
    partition_config = made.runs[0].configs["partition"]
    assert partition_config.client_groups == ["c", "a"]
    assert partition_config.split_rows == {"train": 1.0, "test": 0, "heldout": 0}
    assert made.runs[0].configs["train"].algorithm == "none"
    assert made.name == "audit-model"
    assert f"0 c ({LEARNT} rows), 1 a ({LEARNT} rows)" in made.note
    assert "There is no held-out control" in made.note


def test_held_out_rows_of_one_file_are_dealt_to_all(place, clients):
    made = audit.audit_study(str(place / "model"), clients, [place / "apart_a.jsonl"])
    rows = audit._rows(made.runs[0].configs["partition"])
    assert rows[rows["split"] == "heldout"].groupby("client").size().tolist() == [3, 3, 2]
    # as many controls as members, so that neither has more chances: two of each
    assert made.runs[0].configs["generate"].n_prefixes == 2
    assert "2 prefixes of each client: client 2 has no more different held-out rows" in made.note
    assert "The control is a set of 8 held-out rows" in made.note


def test_prefixes_are_as_many_as_every_client_has_rows_for(place, clients, tmp_path):
    rows = [row["text"] for row in read(clients[1])]
    write(tmp_path / "few.jsonl", [*rows[:3], rows[0], "too short"])  # a copy and a short row do not count
    made = audit.audit_study(str(place / "model"), [clients[0], tmp_path / "few.jsonl"])
    assert made.runs[0].configs["generate"].n_prefixes == 3
    assert "3 prefixes of each client: client 1 has no more different rows of at least 50 tokens" in made.note
    fewer = audit.audit_study(str(place / "model"), [clients[0], tmp_path / "few.jsonl"], overrides={"n_prefixes": 2})
    assert fewer.runs[0].configs["generate"].n_prefixes == 2


def test_copies_that_notebook_1_will_drop_are_not_counted(place, clients, tmp_path):
    shared = [row["text"] for row in read(clients[0])][:2]
    write(tmp_path / "other.jsonl", [row["text"] for row in read(clients[1])][:4] + shared)
    given = [clients[0], tmp_path / "other.jsonl"]
    kept, dropped = (
        audit.audit_study(str(place / "model"), given, overrides={"duplicates": word}).runs[0].configs
        for word in ("keep", "drop")
    )
    assert kept["generate"].n_prefixes == LEARNT
    sizes = audit._rows(dropped["partition"])["client"].value_counts()
    assert sizes.sum() == 2 * LEARNT - 2  # whichever client keeps the one copy of each
    assert dropped["generate"].n_prefixes == sizes.min() < LEARNT


def test_columns_are_found(place, tmp_path):
    corpus = make_corpus("qa", 2, 6, 3)
    for name, group in zip("ab", sorted(corpus["group"].unique()), strict=True):
        corpus[corpus["group"] == group].to_csv(tmp_path / f"{name}.csv", index=False)
    made = audit.audit_study(str(place / "model"), [tmp_path / "a.csv", tmp_path / "b.csv"])
    mapped = made.runs[0].configs["partition"].column_map
    assert mapped == {"id": "id", "instruction": "instruction", "input": "input", "output": "output", "group": None}
    write(tmp_path / "mere.jsonl", corpus["input"][:3])
    write(tmp_path / "other.jsonl", corpus["input"][3:6], column="note")
    with pytest.raises(ConfigError, match=r"other\.jsonl, line 1: no column 'input' or 'text'; found 'note'"):
        audit.audit_study(str(place / "model"), [tmp_path / "mere.jsonl", tmp_path / "other.jsonl"])
    only = {"column_map": {"id": None, "instruction": None, "input": "note", "output": None, "group": None}}
    assert audit.audit_study(str(place / "model"), [tmp_path / "other.jsonl"], overrides=only).runs


@pytest.fixture
def adapters(tmp_path):
    """A folder of adapters on a copy of the shipped model."""
    from peft import LoraConfig, get_peft_model

    base = shutil.copytree(model_location("tiny-qwen2"), tmp_path / "base")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters"


def test_adapters_are_merged_into_the_base_that_they_name(adapters, clients, results):
    made = audit.audit_study(str(adapters), clients)
    whole = made.runs[0].configs["train"].model
    assert whole.startswith(str(results / "models" / "adapters-"))
    assert load_model(whole, "cpu")[0].num_parameters() == load_model("tiny-qwen2", "cpu")[0].num_parameters()
    assert audit.audit_study(str(adapters), clients).runs[0].jobs["train"].id == made.runs[0].jobs["train"].id


def test_another_base_is_another_merged_model(adapters, results):
    first = audit._whole(str(adapters))
    base = AutoModelForCausalLM.from_pretrained(adapters.parent / "base")
    with torch.no_grad():
        base.get_input_embeddings().weight.mul_(2)
    base.save_pretrained(adapters.parent / "base")  # trained on, say, under its old name
    second = audit._whole(str(adapters))
    assert first != second
    before, after = (load_model(one, "cpu")[0].get_input_embeddings().weight for one in (first, second))
    assert torch.equal(2 * before, after)


def test_of_two_audits_that_merge_the_same_the_later_takes_what_is_there(adapters, results):
    whole = results / "models" / "adapters-12345678"
    audit._merge("tiny-qwen2", adapters, whole)
    before = {file.name: file.stat() for file in whole.iterdir()}
    audit._merge("tiny-qwen2", adapters, whole)  # begun before the first had ended
    assert {file.name: file.stat() for file in whole.iterdir()} == before
    assert list(whole.parent.iterdir()) == [whole]


# --- what is refused, before anything runs --------------------------------------------------------------------------


@pytest.fixture
def refusal(place, clients):
    def said(model=None, given=None, **options):
        with pytest.raises(ConfigError) as error:
            audit.audit_study(str(model or place / "model"), given or clients, **options)
        return str(error.value)

    return said


def test_files_that_are_none(refusal, clients, place, tmp_path):
    assert "--client nowhere.jsonl: there is no such file" in refusal(given=[clients[0], "nowhere.jsonl"])
    assert f"--client {place}: is a folder; expected a file" in refusal(given=[place])
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "empty.jsonl: holds no rows" in refusal(given=[clients[0], tmp_path / "empty.jsonl"])
    (tmp_path / "odd.pdf").write_text("x")
    assert "odd.pdf: .pdf suffix; expected one of .jsonl" in refusal(given=[tmp_path / "odd.pdf"])
    broken = tmp_path / "broken.jsonl"
    broken.write_text(clients[0].read_text() + '{"text": "a very private line\n')
    words = refusal(given=[clients[1], broken])
    assert f"broken.jsonl, line {LEARNT + 1}: not JSON" in words
    assert "private" not in words
    assert "--heldout nowhere: there is no such file" in refusal(heldout=["nowhere"])
    assert "--heldout: got 2 files; expected one for all clients, or one for each of 3" in refusal(
        heldout=[place / "apart_a.jsonl", place / "apart_b.jsonl"]
    )


def test_a_file_given_twice(refusal, clients, place, tmp_path):
    shutil.copy(clients[0], tmp_path / "copy.jsonl")
    assert "copy.jsonl: holds the same bytes as" in refusal(given=[*clients, tmp_path / "copy.jsonl"])
    assert "give each file once" in refusal(given=[clients[0], clients[0]])
    assert "training texts cannot be the control" in refusal(heldout=[clients[1]])


def test_models_that_cannot_be_asked(refusal, place, tmp_path):
    assert "there is no such folder" in refusal(model=tmp_path / "nowhere")
    assert "model: got 'nobody'; expected a preset" in refusal(model="nobody")
    (tmp_path / "hollow").mkdir()
    assert "no config.json in its folder" in refusal(model=tmp_path / "hollow")
    shutil.copytree(place / "model", tmp_path / "mute")
    for file in (tmp_path / "mute").glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer in its folder" in refusal(model=tmp_path / "mute")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", "[1]", "config.json in its folder holds [1], not a JSON object"),
        (
            "config.json",
            '{"model_type": "qwen2", "max_position_embeddings": "many"}',
            "max_position_embeddings = 'many'",
        ),
        ("model.safetensors", "", "model.safetensors in its folder is empty, truncated"),
        ("tokenizer.json", "{}", "cannot load its tokenizer (tokenizer.json"),
        ("chat_template.jinja", "{% if %}", "its chat template (chat_template.jinja) fails"),
        ("chat_template.jinja", "{{ raise_exception('no') }}", "its chat template (chat_template.jinja) fails"),
    ],
)
def test_a_model_whose_files_are_broken(refusal, place, tmp_path, file, content, said):
    shutil.copytree(place / "model", tmp_path / "broken")
    (tmp_path / "broken" / file).write_text(content)
    words = refusal(model=tmp_path / "broken")
    assert said in words
    assert str(tmp_path / "broken") in words


@pytest.fixture
def no_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    preflight.hub_unreachable_reason.cache_clear()
    yield
    preflight.hub_unreachable_reason.cache_clear()


@pytest.mark.usefixtures("no_hub")
def test_a_model_that_is_neither_here_nor_to_be_had(refusal, adapters):
    said = "nobody/nothing is not in the local cache, and HF_HUB_OFFLINE is set: load it where there is a network"
    assert said in refusal(model="nobody/nothing")
    file = adapters / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "nobody/nothing"}))
    words = refusal(model=adapters)
    assert f"--model {adapters}: the base of its adapters: model: nobody/nothing is not in the local cache" in words


def test_held_out_texts_that_clients_trained_on(refusal, clients, place, tmp_path):
    texts = [row["text"] for row in read(clients[0])]
    write(tmp_path / "own.jsonl", texts[::-1])
    words = refusal(heldout=[tmp_path / "own.jsonl"])
    assert "2 of its 2 held-out texts equal training texts of the clients: no control is left" in words
    assert "longer texts" not in words
    write(tmp_path / "own.jsonl", [*texts[:2], *(row["text"] for row in read(place / "apart_a.jsonl")[:3])])
    made = audit.audit_study(str(place / "model"), clients[:1], [tmp_path / "own.jsonl"])
    why = "no more different held-out rows of at least 50 tokens: 2 of its 5 held-out texts equal training texts"
    assert f"3 prefixes of each client: client 0 has {why} of the clients" in made.note


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("{", "adapter_config.json in its folder is not JSON"),
        ("[]", "adapter_config.json names no base_model_name_or_path"),
        ({"base_model_name_or_path": 5}, "adapter_config.json names no base_model_name_or_path"),
        (
            {"base_model_name_or_path": "/no/where"},
            "the base that its adapter_config.json names: model: got '/no/where'",
        ),
        ({"r": "eight"}, "adapter_config.json in its folder cannot be used (TypeError: "),
        ({"peft_type": "ODD"}, "adapter_config.json in its folder cannot be used (KeyError: 'ODD')"),
    ],
)
def test_adapters_whose_settings_are_none(refusal, adapters, results, change, said):
    file = adapters / "adapter_config.json"
    file.write_text(change if isinstance(change, str) else json.dumps(json.loads(file.read_text()) | change))
    words = refusal(model=adapters)
    assert words.startswith(f"--model {adapters}: {said}")
    assert not list(results.glob("models/*"))


def test_a_model_without_chat_template_needs_a_word(refusal, place, clients, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(place / "model", plain)
    (plain / "chat_template.jinja").unlink()
    words = refusal(model=plain)
    assert "its tokenizer has no chat template, so a prompt would be the beginning of a text" in words
    assert "--plain-text" in words
    made = audit.audit_study(str(plain), clients, plain_text=True)
    assert "The tokenizer has no chat template: prompts are beginnings of texts." in made.note
    assert "--plain-text: the tokenizer of" in refusal(plain_text=True)  # this one has a template


def test_a_context_that_is_too_short(refusal, place, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(place / "model", short)
    settings = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 100}))
    words = refusal(model=short)
    assert "the model's context holds 100" in words
    prompt = int(words.split(" tokens (template and prefix_tokens = 30)")[0].rsplit(" ", 1)[1])
    assert prompt > 30
    assert f"are {prompt + 100} tokens" in words
    assert f"lower max_new_tokens to at most {100 - prompt}, or prefix_tokens, with --set" in words
    assert "holds 100: lower prefix_tokens, with --set" in refusal(model=short, overrides={"prefix_tokens": 200})


def test_texts_that_are_too_short_and_parameters_that_the_files_decide(refusal, tmp_path):
    write(tmp_path / "short.jsonl", ["one two", "three four"])
    words = refusal(given=[tmp_path / "short.jsonl"])
    assert "client 0 has no more different rows of at least 50 tokens, so there is nothing to probe" in words
    assert "--set algorithm: an audit takes it from nothing" in refusal(overrides={"algorithm": "fedavg"})
    assert "--set n_clients: an audit takes it from --client" in refusal(overrides={"n_clients": 4})
    assert "unknown parameter 'prefx'" in refusal(overrides={"prefx": 3})
    words = refusal(overrides={"n_suffixes": 50})
    assert f"client 0 has {LEARNT} training rows" in words
    assert "and 50 member suffixes were requested" in words


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("n_prefixes", "abc", "--set: n_prefixes: got 'abc'; expected a whole number ≥ 1"),
        ("n_prefixes", None, "--set: n_prefixes: got None; expected a whole number ≥ 1"),
        ("n_prefixes", 0, "--set: n_prefixes: got 0; expected a whole number ≥ 1"),
        ("corpus_encoding", 5, "--set: corpus_encoding: got 5; expected a string"),
        ("corpus_encoding", "utf-9", "--set: corpus_encoding: got 'utf-9'; expected an encoding that Python supports"),
        ("column_map", 5, "--set: column_map: got 5; expected a mapping"),
        ("max_tokens", "long", "--set: max_tokens: got 'long'; expected a whole number ≥ 8"),
    ],
)
def test_parameters_are_checked_before_a_file_is_read(refusal, tmp_path, name, value, said):
    (tmp_path / "broken.jsonl").write_text("no JSON\n")
    assert refusal(given=[tmp_path / "broken.jsonl"], overrides={name: value}) == said + (
        ", such as utf-8, cp1252 or utf-16" if value == "utf-9" else ""
    )


def test_paths_among_the_parameters_hold_wherever_a_notebook_runs(place, clients, tmp_path, monkeypatch):
    (tmp_path / "classifier").mkdir()
    monkeypatch.chdir(tmp_path)
    made = audit.audit_study(str(place / "model"), clients, overrides={"paraphrase_model": "./classifier"})
    assert made.runs[0].configs["detect"].paraphrase_model == str(tmp_path / "classifier")


def test_an_audit_is_not_called_by_the_word_for_the_newest_analysis(refusal):
    assert "--name: got 'latest'" in refusal(name="latest")


# --- lists of files and held-out texts in any study -----------------------------------------------------------------


def test_a_list_of_files_is_a_file_a_client(clients, tmp_path):
    only_text = {"id": None, "input": "text", "instruction": None, "output": None}
    texts = load_corpus("file", "qa", clients[::-1], column_map=only_text)
    assert list(dict.fromkeys(texts["group"])) == ["c", "b", "a"]
    assert texts["id"].iloc[0] == "c/1"
    for hospital in ("north", "south"):
        (tmp_path / hospital).mkdir()
        shutil.copy(clients[0], tmp_path / hospital / "train.jsonl")
    same = [tmp_path / hospital / "train.jsonl" for hospital in ("north", "south")]
    assert files.names_of(same) == ["north-train", "south-train"]
    with pytest.raises(CorpusError, match="two files are both called"):
        files.names_of([same[0], same[0]])


def test_a_lists_identity_is_its_files_content_and_order(clients, tmp_path):
    def identity(paths, **more):
        return identity_of(PartitionConfig(corpus="file", corpus_path=[str(path) for path in paths], **more))

    moved = [shutil.copy(client, tmp_path / client.name) for client in clients]
    assert identity(clients) == identity(moved)
    assert identity(clients) != identity(clients[::-1])
    apart = {"heldout_path": str(clients[0]), "heldout_rows": 0}
    assert len({identity(clients), identity(clients, **apart), identity(clients, heldout_rows=0)}) == 3
    with pytest.raises(FileNotFoundError, match="corpus_path: there is no file 'nowhere'"):
        identity(["nowhere"])


def test_held_out_texts_need_no_heldout_rows():
    given = {"corpus": "file", "corpus_path": "x.jsonl", "heldout_path": ["y.jsonl"]}
    for values, words in (
        (given, "heldout_path: got .* expected corpus = file and heldout_rows = 0"),
        (
            given | {"heldout_rows": 0},
            "heldout_path: got 1 files; expected one file for all clients, or a list of n_c",
        ),
        ({"heldout_path": "y.jsonl", "heldout_rows": 0}, "heldout_path: got 'y.jsonl', but corpus = synthetic"),
    ):
        with pytest.raises(ConfigError, match=words):
            PartitionConfig.create(values)


def test_held_out_texts_are_dealt_once_each():
    quotas = dealing.quotas({"train": 1.0, "test": 0, "heldout": 0}, 2)
    corpus = pd.DataFrame(
        {"id": list("abcd"), "instruction": "", "input": list("abcd"), "output": "", "group": list("xxyy")}
    )
    config = PartitionConfig.model_construct(n_clients=2, client_groups=["x", "y"])
    dealt_rows = dealing.assign(corpus, quotas, config)
    apart = corpus.assign(input=list("efgh"), group="z")
    rows = dealing.split(dealing.add_heldout(dealt_rows, apart, config), quotas)
    dealing.check(rows)
    assert rows.groupby(["client", "split"]).size().tolist() == [2, 2, 2, 2]
    assert set(rows.loc[rows["split"] == "heldout", "row_id"]) == {f"heldout/{name}" for name in "abcd"}
    with pytest.raises(PartitionError, match="client 1 gets none of the 1 held-out rows"):
        dealing.add_heldout(dealt_rows, apart.head(1), config)


def test_without_held_out_rows_there_is_no_control_and_it_is_not_zero():
    create_all({"heldout_rows": 0})
    lines = [
        (f"r{j}-{i}", j, "train", f"text {j} {i}", True, f"p{i}", f"s{i}", [1]) for j in range(2) for i in range(4)
    ]
    columns = ["row_id", "client", "split", "input", "long_enough", "prefix", "suffix", "prompt_ids"]
    prefixes, suffixes = probes.sample(pd.DataFrame(lines, columns=columns), 3, None, seed=0)
    assert len(suffixes) == 6
    assert suffixes["member"].dtype == bool
    assert suffixes["member"].all()
    empty = pd.DataFrame({name: [] for name in ("prefix_id", "prefix_client", "suffix_client", "member", "kind")})
    clients = pd.DataFrame({"client": [0, 1], "n_train": 4})
    summary = ratios.summary(Counts(empty, prefixes, clients, suffixes), countings=["verbatim"])
    values = summary.set_index("metric")["value"]
    assert values["mr_total"] == 0
    assert values[["control_total", "excess_total", "control_intra"]].isna().all()
