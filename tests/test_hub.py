"""Hub data sets through `datasets.load_dataset`, from files in their layout, with the parameters of params/tasks."""

import json
from pathlib import Path

import pytest
import yaml

from fedmem.config.partition import PartitionConfig
from fedmem.corpus import loading
from fedmem.corpus.columns import RULES, CorpusError, parsed_columns
from fedmem.corpus.loading import HubSource, load_corpus

TASKS = Path(__file__).resolve().parent.parent / "params" / "tasks"
WITH_ABSTRACTS = {"id": "abstract_id + sentence_id"}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def load(task, path, **changes):
    """As notebook 1 does it, with the task's own parameters."""
    values = yaml.safe_load((TASKS / f"{task}.yaml").read_text(encoding="utf-8"))
    values["hub_columns"] |= changes.pop("hub_columns", {})
    config = PartitionConfig.create(values | changes | {"task": task, "corpus": "hub", "corpus_path": str(path)})
    return load_corpus(config.corpus, config.task, **config.source)


def lines(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def layout(shared):
    return shared / "data/hub_layout"


def test_summarization(layout):
    corpus, rows = load("summarization", layout / "summarization.jsonl"), lines(layout / "summarization.jsonl")
    assert len(corpus) == 200
    assert corpus["id"].tolist() == [row["id"] for row in rows]
    assert corpus["group"].tolist() == [row["categories"][0].split(" ")[0] for row in rows]
    assert corpus["input"].tolist() == [" ".join(row["abstract"].split()) for row in rows]
    assert corpus["instruction"].unique().tolist() == ["Write a title for the following abstract."]


def test_dialog(layout):
    corpus, rows = load("dialog", layout / "dialog.jsonl"), lines(layout / "dialog.jsonl")
    assert corpus["input"].tolist() == [row["input"] for row in rows]  # line breaks kept
    assert corpus["output"].tolist() == [row["output"] for row in rows]
    assert corpus["id"].tolist() == [str(n) for n in range(1, 201)]
    assert corpus["group"].unique().tolist() == [""]


def test_qa(layout):
    corpus, rows = load("qa", layout / "qa.jsonl"), lines(layout / "qa.jsonl")
    assert corpus["id"].tolist() == [str(row["pubid"]) for row in rows]
    assert corpus["input"].tolist() == [" ".join(row["context"]["contexts"]) for row in rows]
    assert corpus["instruction"].tolist() == [row["question"] for row in rows]
    assert corpus["output"].tolist() == [row["long_answer"] for row in rows]
    sizes = corpus["group"].value_counts()
    assert set(sizes.index) == {"tumours_immunity", "internal", "brain_mind", "birth_injury", "other"}
    assert sizes.iloc[2] > 34_000 / 211_269 * len(corpus)  # the third largest is a client of the paper's size


def test_classification_in_each_of_its_forms(layout):
    corpus = load("classification", layout / "classification.jsonl", hub_columns=WITH_ABSTRACTS)
    rows = lines(layout / "classification.jsonl")
    assert corpus["id"].tolist() == [f"{row['abstract_id']}-{row['sentence_id']}" for row in rows]
    assert corpus["output"].tolist() == [row["label"] for row in rows]  # here `label`, at the hub `labels`
    original = load("classification", layout / "classification_rct.txt", hub_columns=WITH_ABSTRACTS)
    sentences = [text for text in (layout / "classification_rct.txt").read_text().splitlines() if "\t" in text]
    assert len(sentences) == len(original) == 200
    assert original["input"].tolist() == [text.split("\t")[1] for text in sentences]
    assert original["id"].str.startswith("21645374-").sum() > 5
    assert set(original["output"]) <= {"background", "objective", "methods", "results", "conclusions"}


def test_class_labels_come_by_name(tmp_path):
    import datasets

    labels = datasets.ClassLabel(names=["BACKGROUND", "METHODS"])
    features = datasets.Features({"labels": labels, "text": datasets.Value("string"), "uid": datasets.Value("string")})
    rows = {"labels": [1, 0], "text": ["We gave ice.", "Pain is common."], "uid": ["a", "b"]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    assert load("classification", tmp_path / "train.parquet")["output"].tolist() == ["methods", "background"]


def test_a_drawn_part_is_seeded_and_keeps_its_order(layout):
    few = load("summarization", layout / "summarization.jsonl", hub_rows=30)
    every = load("summarization", layout / "summarization.jsonl")["id"].tolist()
    assert len(few) == 30
    assert few["id"].tolist() == [name for name in every if name in set(few["id"])]
    other = load("summarization", layout / "summarization.jsonl", hub_rows=30, partition_seed=1)
    assert few["id"].tolist() != other["id"].tolist()


def test_columns_that_do_not_fit_are_listed(layout):
    with pytest.raises(CorpusError) as caught:
        load("qa", layout / "summarization.jsonl")
    message = str(caught.value)
    assert "no column 'pubid' for 'id'; found 'id', 'submitter', 'authors', 'title'" in message
    assert "expected 'pubid', 'question', 'context.contexts', 'long_answer', 'context.meshes'" in message
    assert "hub_columns" in message
    # another release's spelling: a field inside a column (B42)
    with pytest.raises(CorpusError, match=r"no column 'context\.CONTEXTS' for 'input'; found 'pubid'"):
        load("qa", layout / "qa.jsonl", hub_columns={"input": "context.CONTEXTS | join"})
    both = load("qa", layout / "qa.jsonl", hub_columns={"input": "context.CONTEXTS or context.contexts | join"})
    assert len(both) == 200


def test_empty_texts_are_left_out_and_listed(tmp_path):
    rows = [{"instruction": "i", "input": text, "output": "o"} for text in ("one", " ", "two", "")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = load("dialog", tmp_path / "rows.jsonl")
    assert corpus["input"].tolist() == ["one", "two"]
    assert [place.rpartition(", ")[2] for place in corpus.attrs["empty"]] == ["row 2", "row 4"]


def test_numbers_without_names_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"uid": "a", "text": "Some words.", "labels": 3}))
    with pytest.raises(CorpusError, match=r"row 1: 'output' \(column 'labels or label'\) is a number"):
        load("classification", tmp_path / "rows.jsonl")


def test_a_data_set_made_by_a_script_is_refused(tmp_path):
    (tmp_path / "pubmed_qa").mkdir()
    (tmp_path / "pubmed_qa/pubmed_qa.py").write_text("raise SystemExit('this code must never run')\n")
    source = HubSource(str(tmp_path / "pubmed_qa"))
    with pytest.raises(CorpusError, match="made by a script are not run") as caught:
        list(loading.records(source, parsed_columns({"input": "text"}), None, 0))
    assert "pubmed_qa" in str(caught.value)


def test_without_a_network_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    source = HubSource("somebody/something", revision="abc")
    with pytest.raises(
        CorpusError, match=r"somebody/something \(train, revision abc\): cannot be loaded .*corpus_path"
    ):
        list(loading.records(source, parsed_columns({"input": "text"}), None, 0))


@pytest.mark.parametrize("text", ["", "a + ", "a | shout", "a |", " or b"])
def test_a_table_that_cannot_be_read_is_refused(text):
    with pytest.raises(CorpusError, match="hub_columns: input: got"):
        parsed_columns({"input": text})


def test_rules_by_hand():
    topic = RULES["mesh_topic"]
    assert topic(["Humans", "Breast Neoplasms", "Mastectomy", "Blood Pressure"]) == "tumours_immunity"
    assert topic(["Humans", "Blood Pressure", "Female"]) == "internal"
    assert topic(["Humans", "Brain", "Stroke"]) == "internal"  # one each: the first of the table
    assert topic(["Humans"]) == topic([]) == "other"
    assert RULES["first_word"](["q-fin.ST stat.AP"]) == RULES["first_word"]("q-fin.ST stat.AP") == "q-fin.ST"
    assert RULES["first_word"]([]) == ""
    assert RULES["unwrap"]("  a\n b ") == "a b"
    assert RULES["join"](["a", "b"]) == "a b"


def test_params_pin_a_revision_where_one_is_known():
    for task in ("summarization", "qa", "classification"):
        values = yaml.safe_load((TASKS / f"{task}.yaml").read_text(encoding="utf-8"))
        assert len(values["hub_revision"]) == 40
