import json

import pytest

from fedmem.corpora import SCHEMA, CorpusError, load_corpus

GOOD = {"id": "a", "instruction": "Ask.", "input": "Some text.", "output": "An answer.", "group": "g"}


def line(**changes) -> str:
    return json.dumps(GOOD | changes, ensure_ascii=False)


def write(folder, *lines: str, encoding: str = "utf-8"):
    file = folder / "rows.jsonl"
    file.write_bytes("\n".join(lines).encode(encoding))
    return file


def load(file):
    return load_corpus("file", "qa", path=file)


def refusal(file) -> str:
    with pytest.raises(CorpusError) as caught:
        load(file)
    return str(caught.value)


def test_texts_stay_as_they_are(tmp_path):
    text = " Zwei\r\nZeilen , é 然 🎉 \u2028 und 'NA' \t"
    corpus = load(write(tmp_path, line(input=text), line(id="b", output="NA", group="null"), ""))
    assert list(corpus.columns) == list(SCHEMA)
    assert corpus["input"].tolist() == [text, "Some text."]
    assert corpus.loc[1, ["output", "group"]].tolist() == ["NA", "null"]
    assert (corpus.dtypes == "str").all()


def test_null_is_an_empty_text_where_that_is_allowed(tmp_path):
    corpus = load(write(tmp_path, line(instruction=None, output=None, group=None, more=[1])))
    assert corpus.iloc[0].to_dict() == {"id": "a", "instruction": "", "input": "Some text.", "output": "", "group": ""}


def test_nulls_first_or_last_give_the_same_rows(tmp_path):
    nulls = [line(id=str(n), output=None) for n in range(5000)]
    late = line(id="late", output="late")
    first = load(write(tmp_path, *nulls, late))
    last = load(write(tmp_path, late, *nulls))
    assert first["output"].iloc[-1] == "late" == last["output"].iloc[0]
    assert first.sort_values("id").to_dict("records") == last.sort_values("id").to_dict("records")


def test_byte_order_mark_and_long_fields(tmp_path):
    corpus = load(write(tmp_path, line(input="x" * 200_000), encoding="utf-8-sig"))
    assert corpus["id"].tolist() == ["a"]
    assert corpus["input"].str.len().tolist() == [200_000]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{'id': 1}", "not JSON"),
        ('{"id": "b"', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", "holds a list, not an object"),
        ("null", "holds null, not an object"),
        (line(id="b").replace('"input"', '"text"'), "no column 'input' for 'input'; found 'id', 'instruction', 'text'"),
        (line(id="b", input=None), "'input' is null"),
        (line(id="b", input=" \n"), "'input' is empty"),
        (line(id="b", input=["Some text."]), "'input' is a list; expected a string"),
        (line(id="b", output=3), "'output' is a number; expected a string"),
        (line(id="b", group=True), "'group' is a boolean; expected a string"),
        (line(id=7.5), "'id' is a number"),
        (line(id=True), "'id' is a boolean"),
        (line(id=""), "'id' is empty"),
        (line(), "id 'a' was used before, at "),
        (line(id="b")[:-1] + ', "input": "other"}', "key 'input' stands there more than once"),
        ('{"id": "b", "instruction": "", "input": "\\ud83d", "output": "", "group": ""}', "half a surrogate pair"),
    ],
)  # fmt: skip
def test_a_line_that_does_not_fit_is_named(tmp_path, bad, said):
    file = write(tmp_path, line(), "", bad, line(id="z"))
    message = refusal(file)
    assert message.startswith(f"{file}, line 3: ")
    assert said in message


def test_messages_do_not_repeat_private_text(tmp_path):
    assert "Some text" not in refusal(write(tmp_path, line()[:-1]))
    assert "Some text" not in refusal(write(tmp_path, line(id="b", output=["Some text"])))


def test_another_encoding_is_named_by_its_byte(tmp_path):
    file = write(tmp_path, line(), line(id="b", input="caf\xe9"), encoding="cp1252")
    # {"id": "b", "instruction": "Ask.", "input": "café: 45 signs stand before é
    position = line(id="b", input="caf\xe9").index("\xe9") + 1
    assert f"{file}, line 2: not UTF-8 (byte 0xe9 at position {position} of the line)" in refusal(file)


def test_files_that_are_none(tmp_path):
    assert "does not exist" in refusal(tmp_path / "absent.jsonl")
    assert "is a folder" in refusal(tmp_path)
    assert "holds no rows" in refusal(write(tmp_path))
    assert "holds no rows" in refusal(write(tmp_path, "", "  "))
    assert "corpus_path" in refusal(None)


def test_unknown_source():
    with pytest.raises(CorpusError, match="allowed are 'synthetic', 'file' and 'hub'"):
        load_corpus("sinthetic", "qa")


def test_synthetic_rows_pass_the_same_gate():
    corpus = load_corpus("synthetic", "qa", n_groups=2, rows_per_group=3, seed=1)
    assert list(corpus.columns) == list(SCHEMA)
    assert corpus["group"].value_counts().tolist() == [3, 3]
    with pytest.raises(CorpusError, match="synthetic corpus: "):
        load_corpus("synthetic", "qa", n_groups=2, rows_per_group=0, seed=1)


@pytest.mark.parametrize(
    ("name", "n_rows"), [("summarization", 2220), ("dialog", 850), ("qa", 1000), ("classification", 3162)]
)
def test_real_files_load_whole(shared, name, n_rows):
    file = shared / "data" / f"{name}.jsonl"
    corpus = load(file)
    assert len(corpus) == n_rows
    with file.open(encoding="utf-8") as lines:
        assert corpus["input"].tolist() == [json.loads(text)["input"] for text in lines]
