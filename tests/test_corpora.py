import csv
import json

import pandas as pd
import pytest

from fedmem.config.vocabulary import SCHEMA
from fedmem.corpus.columns import CorpusError
from fedmem.corpus.loading import load_corpus

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
        (line(id="b")[:-1] + ', "input": "other"}', "key 'input' appears more than once"),
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
    assert "is a folder without files" in refusal(tmp_path)
    assert "holds no rows" in refusal(write(tmp_path))
    assert "holds no rows" in refusal(write(tmp_path, "", "  "))
    assert "corpus_path" in refusal(None)


def test_unknown_source():
    with pytest.raises(CorpusError, match=r"corpus: got .*; expected 'synthetic', 'file' or 'hub'"):
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


# --- other formats --------------------------------------------------------------------------------------------------

HEADER = "id,instruction,input,output,group"


def csv_file(folder, *lines, encoding="utf-8", name="rows.csv", end="\n"):
    file = folder / name
    file.write_bytes((end.join(lines) + end).encode(encoding))
    return file


def test_csv_cells_stay_texts_of_any_length(tmp_path):
    long = "word " * 40_000  # 200,000 characters; Python's csv stops at 131,072
    file = csv_file(
        tmp_path, HEADER, f'a,NA,"{long}",null,nan', 'b,,"two\nlines, ""quoted""",3,', "c,None, x ,1.50,007"
    )
    corpus = load(file)
    assert corpus["input"].tolist() == [long, 'two\nlines, "quoted"', " x "]
    assert corpus["instruction"].tolist() == ["NA", "", "None"]
    assert corpus["output"].tolist() == ["null", "3", "1.50"]  # labels of mixed type are what stands there
    assert corpus["group"].tolist() == ["nan", "", "007"]
    assert csv.field_size_limit() == 131_072  # the process' own limit is as it was


def test_csv_with_byte_order_mark_and_windows_line_ends(tmp_path):
    file = csv_file(tmp_path, HEADER, "a,,text,,", encoding="utf-8-sig", end="\r\n")
    assert load(file).iloc[0].tolist() == ["a", "", "text", "", ""]


def test_cp1252_is_refused_with_its_place_or_read_by_parameter(tmp_path):
    file = csv_file(tmp_path, HEADER, "a,,plain,,", "b,,café \u20ac,,", encoding="cp1252")
    # b,,caf: six signs stand before é
    said = (
        f"{file}, line 3: not UTF-8 (byte 0xe9 at position 7 of the line); save the file as UTF-8, or name its encoding"
    )
    assert refusal(file).startswith(said)
    assert load_corpus("file", "qa", path=file, encoding="cp1252")["input"].tolist() == ["plain", "café \u20ac"]
    wide = csv_file(tmp_path, HEADER, "a,,tëxt,,", encoding="utf-16", name="wide.csv")
    assert "not UTF-8" in refusal(wide)
    assert load_corpus("file", "qa", path=wide, encoding="utf-16")["input"].tolist() == ["tëxt"]


def test_a_file_without_a_header_does_not_show_its_text(tmp_path):
    message = refusal(csv_file(tmp_path, "1,what?,PRIVATE text of patient Meier,yes,a", "2,what?,more of it,no,a"))
    assert "PRIVATE" not in message
    assert "Meier" not in message
    assert "a header?" in message
    twice = refusal(csv_file(tmp_path, "1,PRIVATE of Meier,PRIVATE of Meier", "2,b,c"))
    assert "PRIVATE" not in twice


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([HEADER, "a,,text,,", "b,,  ,,"], "line 3: 'input' is empty"),
        ([HEADER, 'a,,"two\nlines",,', "b,,,,"], "line 4: 'input' is empty"),  # the row before takes two lines
        ([HEADER, "a,,text,", ""], "line 2: has 4 cells, but the header has 5 columns"),
        ([HEADER, "a,,text,,,"], "line 2: has 6 cells"),
        ([HEADER, 'a,,"text"x,,'], "line 2: not CSV"),
        ([HEADER, 'a,,"text,,'], "not CSV (unexpected end of data)"),
        ([HEADER, ",,text,,"], "line 2: 'id' is empty"),
        (["id,text,text", "a,b,c"], "line 1: column 'text' appears more than once"),
        ([HEADER], "holds no rows"),
        (
            ["id;instruction;input;output;group", "a;;b;;"],
            "no column 'id' for 'id'; found 1 columns whose names read like text and are not shown",
        ),
    ],
)
def test_csv_that_does_not_fit_is_named(tmp_path, lines, said):
    message = refusal(csv_file(tmp_path, *lines))
    assert str(tmp_path / "rows.csv") in message
    assert said in message


def test_own_column_names(tmp_path):
    file = csv_file(tmp_path, "note,ward,code", "Some text.,3 west,7", "Other text.,3 west,7")
    with pytest.raises(
        CorpusError, match=r"line 2: no column 'id' for 'id'; found 'note', 'ward', 'code', expected 'id'"
    ):
        load(file)
    columns = {"id": None, "instruction": None, "input": "note", "output": "code", "group": "ward"}
    corpus = load_corpus("file", "qa", path=file, column_map=columns)
    assert corpus.iloc[1].tolist() == ["2", "", "Other text.", "7", "3 west"]
    with pytest.raises(
        CorpusError, match=r"no column 'wards' for 'group'; found 'note', 'ward', 'code', .* column_map"
    ):
        load_corpus("file", "qa", path=file, column_map=columns | {"group": "wards"})
    empty = csv_file(tmp_path, "note,ward,code", " ,3 west,7", name="empty.csv")
    with pytest.raises(CorpusError, match=r"line 2: 'input' \(column 'note'\) is empty"):
        load_corpus("file", "qa", path=empty, column_map=columns)


def test_a_key_that_some_rows_lack_is_null_there(tmp_path):
    bare = json.dumps({"id": "b", "input": "Some text."})
    assert load(write(tmp_path, bare, line()))["output"].tolist() == ["", "An answer."]
    with pytest.raises(
        CorpusError, match=r"rows.jsonl: no column 'instruction' for 'instruction'; found 'id', 'input'"
    ):
        load(write(tmp_path, bare))


@pytest.mark.parametrize("last", [True, False])
def test_a_column_that_is_null_for_200_000_rows(tmp_path, last):
    nulls = [
        f'{{"id": "{n}", "instruction": null, "input": "x", "output": null, "group": "g"}}' for n in range(200_000)
    ]
    late = line(id="late", output="late")
    corpus = load(write(tmp_path, *([*nulls, late] if last else [late, *nulls])))
    assert corpus["output"].iloc[-1 if last else 0] == "late"
    assert (corpus["output"] == "").sum() == 200_000


def test_labels_of_mixed_type_are_refused_in_typed_formats(tmp_path):
    message = refusal(write(tmp_path, line(), line(id="b", output=3)))
    assert message.endswith(
        "line 2: 'output' is a number; expected a string (the answer, title, label or note; may be empty)"
    )
    pd.DataFrame([GOOD | {"output": 3}]).to_parquet(tmp_path / "rows.parquet")
    assert "rows.parquet, row 1: 'output' is a number" in refusal(tmp_path / "rows.parquet")


def test_parquet(tmp_path):
    rows = pd.DataFrame([GOOD, GOOD | {"id": "b", "input": "y" * 200_000, "output": "NA", "group": None}])
    rows.assign(number=1, instruction=pd.Categorical(["a", "null"])).to_parquet(tmp_path / "rows.parquet")
    corpus = load(tmp_path / "rows.parquet")
    assert corpus["output"].tolist() == ["An answer.", "NA"]
    assert corpus["group"].tolist() == ["g", ""]
    assert corpus["instruction"].tolist() == ["a", "null"]
    rows.assign(id=[1, 2]).to_parquet(tmp_path / "rows.parquet")
    assert load(tmp_path / "rows.parquet")["id"].tolist() == ["1", "2"]
    rows.assign(input=[None, "x"]).to_parquet(tmp_path / "rows.parquet")
    assert "rows.parquet, row 1: 'input' is null" in refusal(tmp_path / "rows.parquet")
    (tmp_path / "rows.parquet").write_bytes(b"no parquet")
    assert "not Parquet" in refusal(tmp_path / "rows.parquet")


def test_a_folder_has_one_file_a_client(tmp_path):
    (tmp_path / "in").mkdir()
    csv_file(tmp_path / "in", "id,input", "1,north text", "2,more", name="north.csv")
    (tmp_path / "in/south.jsonl").write_text('{"id": 1, "input": "south text"}\n')
    columns = {"instruction": None, "output": None}
    corpus = load_corpus("file", "qa", path=tmp_path / "in", column_map=columns)
    assert corpus["id"].tolist() == ["north/1", "north/2", "south/1"]
    assert corpus["group"].tolist() == ["north", "north", "south"]
    (tmp_path / "in/notes.doc").write_text("x")
    with pytest.raises(CorpusError, match=r"notes\.doc: \.doc suffix; expected one of \.jsonl, "):
        load_corpus("file", "qa", path=tmp_path / "in", column_map=columns)
    (tmp_path / "none").mkdir()
    assert "is a folder without files" in refusal(tmp_path / "none")
