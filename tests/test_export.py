"""What leaves the machine: a run on real text, executed with its texts shown, a failed notebook beside it, exported."""

import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from fedmem.cli.main import main
from fedmem.report.export import MASK, ExportError, Scrubber, export
from fedmem.results.stage import StageError
from fedmem.results.work import begin_stage
from fedmem.study.execute import NotebookError, execute
from fedmem.study.loading import load_study
from fedmem.study.plan import write_description

REPOSITORY = Path(__file__).resolve().parent.parent
SECRET = "The patient said that the pain in her left knee began after she fell from a ladder in June."


@pytest.fixture
def scrubber():
    return Scrubber(["row-0001", "hep-th/9901001", "7", "odd id 42"], [SECRET, "short"], ["/srv/of/mine"])


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("row-0001 and row-00012", f"{MASK} and row-00012"),
        ("see 'hep-th/9901001', p0-7 and s2-row-0001.", f"see '{MASK}', p0-{MASK} and s2-{MASK}."),
        ("7 of 7 clients", "7 of 7 clients"),  # a short id alone is a number like others
        ("an odd id 42!", f"an {MASK}!"),
        ("open /srv/of/mine/results/x.json", "open …/x.json"),
        ("File ~/lib/python3.11/site.py:3, C:\\Users\\me\\x.py", "File …/site.py:3, …/x.py"),
        ("</td><td>1/2 and a/b/c https://a.org/b/c j→k and w_j ∕ w", None),
        ("a line\n" + SECRET + "\nanother", f"a line\n{MASK}\nanother"),
        (f"\x1b[31m{SECRET[:40]}\x1b[0m", MASK),
        (SECRET[:39], SECRET[:39]),
        (f"x{SECRET[:30]}\n{SECRET[31:60]}", MASK),  # the passage runs over a line's end
    ],
)
def test_plain_texts_are_scrubbed(scrubber, text, left):
    assert scrubber.plain(text) == (text if left is None else left)


def test_passages_are_found_however_they_are_written(scrubber):
    start = SECRET[:60]
    for form in (
        start,
        start.replace(" ", "\\n"),
        start.replace(" ", "  \n"),
        f"<mark>{start[:30]}</mark>{start[30:]}",
    ):
        assert scrubber.holds_passage(f"before {form} after"), form
    quoted = Scrubber([], ['She said "stop" & left the clinic <early> that day without a word.'])
    assert quoted.holds_passage("She said &quot;stop&quot; &amp; left the clinic &lt;early&gt; that day")
    assert not scrubber.holds_passage(SECRET[:39])
    assert not scrubber.holds_passage("")


# --- a run on real text ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(shared, tmp_path_factory):
    """(rows, exported folder, results) of a run that showed its texts, with a failed notebook beside it."""
    folder = tmp_path_factory.mktemp("export")
    corpus = folder / "private" / "visits.jsonl"
    corpus.parent.mkdir()
    lines = (shared / "data" / "qa.jsonl").read_text("utf-8").splitlines()[:120]
    corpus.write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings = {
        "task": "qa", "corpus": "file", "corpus_path": str(corpus), "partitioner": "iid", "n_clients": 2,
        "train_rows": 6, "test_rows": 2, "heldout_rows": 6, "algorithm": "none", "n_prefixes": 4, "max_new_tokens": 30,
    }  # fmt: skip
    study = REPOSITORY / "params" / "studies" / "demo.yaml"
    overrides = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    environment = os.environ | {"FEDMEM_RESULTS": str(folder / "results"), "FEDMEM_SHOW_TEXT": "1"}
    command = [sys.executable, "-m", "fedmem.cli.main"]
    done = subprocess.run(
        [*command, "run", str(study), *overrides, "--name", "real", "--cores", "1"],
        env=environment, capture_output=True, text=True, timeout=600, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (rows_file,) = (folder / "results").glob("partition/*/rows.parquet")
    _fail(rows_file, next((folder / "results").glob("train/[!.]*")))
    done = subprocess.run(
        [*command, "export", "real", str(folder / "shared")],
        env=environment, capture_output=True, text=True, timeout=600, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) outputs left out", done.stdout).group(1)) > 0
    return pd.read_parquet(rows_file), folder / "shared", folder / "results"


def _fail(rows_file, stage):
    """Executes a notebook that ends in an error which holds a row's text, its id and a path, beside a stage."""
    source = (
        f"import pandas as pd\nrows = pd.read_parquet({str(rows_file)!r})\nrow = rows.iloc[0]\nprint(row.to_dict())\n"
        "raise ValueError(f'row {row.row_id}: cannot tokenise {row.input!r}')"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, rows_file.parent.parent / "fails.ipynb")
    with pytest.raises(NotebookError, match="cannot tokenise"):
        execute(rows_file.parent.parent / "fails.ipynb", stage.with_name(f"{stage.name}.failed.ipynb"), {})


def readable(folder):
    """{file: its text as it is, unescaped, and without tags}; pictures inside pages are left out."""
    texts = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".png":
            text = re.sub(r"base64,[\w+/=\s]+", "", path.read_text("utf-8"))
            bare = unescape(re.sub(r"<[^>]*>", "", text))
            texts[path.relative_to(folder).as_posix()] = [
                " ".join(form.split()) for form in (text, unescape(text), bare)
            ]
    return texts


@pytest.mark.notebooks
def test_no_passage_of_a_row_is_exported(exported):
    rows, folder, results = exported
    corpus = pd.read_json(results.parent / "private" / "visits.jsonl", lines=True)
    undealt = corpus.loc[~corpus["id"].isin(rows["row_id"]), "input"]  # notebook 1 shows some of them, too
    pieces = set()
    for text in [*rows["input"], *rows["output"], *undealt]:
        folded = " ".join(text.split())
        pieces |= {folded[start : start + 40] for start in range(len(folded) - 39)}
    shown = " ".join(next((results / "partition").glob("*/notebook.ipynb")).read_text("utf-8").split())
    assert any(shown[start : start + 40] in pieces for start in range(len(shown) - 39))  # there was something to hide
    hits = [
        (name, form[start : start + 40])
        for name, forms in readable(folder).items()
        for form in forms
        for start in range(len(form) - 39)
        if form[start : start + 40] in pieces
    ]
    assert hits == []


@pytest.mark.notebooks
def test_no_row_id_and_no_path_is_exported(exported):
    rows, folder, results = exported
    for name, (text, *_) in readable(folder).items():
        assert not [one for one in rows["row_id"] if re.search(rf"(?<![\w.]){re.escape(one)}(?![\w.])", text)], name
        for place in (results, results.parent, Path.home(), REPOSITORY, Path(sys.prefix), "visits.jsonl/"):
            assert str(place) not in text, (name, place)
        assert not re.search(r"(?<![\w<:/.])/(?:home|root|tmp|usr|work|var|opt|Users)/", text), name


@pytest.mark.notebooks
def test_the_failed_notebook_is_there_without_what_it_said(exported):
    _, folder, results = exported
    (page,) = folder.glob("train/*.failed.html")
    text = page.read_text("utf-8")
    assert "ValueError" in text
    assert MASK in text
    assert "cannot tokenise" in next((results / "train").glob("*.failed.ipynb")).read_text("utf-8")


@pytest.mark.notebooks
def test_what_is_exported_is_worth_reading(exported):
    _, folder, _ = exported
    names = set(readable(folder))
    for wanted in ("studies/real/report.html", "studies/real/runs.csv", "studies/real/summary.csv"):
        assert wanted in names
    for pattern in ("analyze/*/cells.csv", "analyze/*/manifest.json", "partition/*/notebook.html"):
        assert list(folder.glob(pattern)), pattern
    assert list(folder.glob("analyze/*/figures/matrix_verbatim.png"))
    assert "data:image/png;base64" in (folder / "studies/real/report.html").read_text("utf-8")
    suffixes = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert suffixes <= {".html", ".csv", ".json", ".txt", ".png"}  # no weights, no Parquet, no notebook
    summary = pd.read_csv(folder / "studies/real/summary.csv")
    assert set(summary["counting"]) == {"paper", "strict", "verbatim"}


@pytest.mark.notebooks
def test_a_report_is_rebuilt_from_finished_analyses(exported):
    _, _, results = exported
    report = results / "studies" / "real" / "report.html"
    before = {path: path.stat().st_mtime_ns for path in results.glob("[a-z]*/*/manifest.json")}
    report.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "fedmem.cli.main", "report", "real"],
        env=os.environ | {"FEDMEM_RESULTS": str(results)}, capture_output=True, text=True, timeout=300, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(report) in done.stdout
    assert report.is_file()
    after = {path: path.stat().st_mtime_ns for path in results.glob("[a-z]*/*/manifest.json")}
    assert {path.parts[-3] for path in before if before[path] != after[path]} == {
        "studies"
    }  # nothing else was executed


@pytest.mark.notebooks
def test_an_export_overwrites_nothing_and_names_an_unknown_study(exported, monkeypatch, tmp_path):
    _, folder, results = exported
    monkeypatch.setenv("FEDMEM_RESULTS", str(results))
    with pytest.raises(ExportError, match="exists already"):
        export("real", folder)
    with pytest.raises(StageError, match="no study 'reel'"):
        export("reel", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.notebooks
def test_an_export_that_finds_something_left_writes_nothing(exported, monkeypatch, tmp_path):
    _, _, results = exported
    monkeypatch.setenv("FEDMEM_RESULTS", str(results))
    monkeypatch.setattr("fedmem.report.export._Writer._plain", lambda self, text: text)  # as if scrubbing had failed
    with pytest.raises(ExportError, match="nothing was exported"):
        export("real", tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


# --- a corpus in another encoding -----------------------------------------------------------------------------------


@pytest.fixture
def western(tmp_path, monkeypatch):
    """A corpus in cp1252 of which one row was dealt, and a failed notebook of the study `west` that shows the other."""
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))
    dealt, undealt = (f"{name} said that the café's stairs had been wet since morning." for name in ("José", "Zoë"))
    rows = [{"id": f"row-{n}", "input": text, "output": ""} for n, text in enumerate((dealt, undealt))]
    corpus = tmp_path / "visits.jsonl"
    corpus.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("cp1252"))
    settings = {"corpus": "file", "corpus_path": str(corpus), "corpus_encoding": "cp1252"}
    loaded = load_study(REPOSITORY / "params" / "studies" / "own_data.yaml", overrides=settings, name="west")
    write_description(loaded)
    work = begin_stage(loaded.runs[0].jobs["partition"].config)
    work.save_table("rows", pd.DataFrame(rows[:1]).rename(columns={"id": "row_id"}))
    work.save_table("sizes", pd.DataFrame({"client": [0], "rows": [1]}), shared=True)
    work.save_json("counts", {"rows": 1})
    folder = work.publish().folder
    shown = nbformat.v4.new_output("stream", text=f"first\n{undealt}\nlast\n")
    cell = nbformat.v4.new_code_cell("print(texts)", outputs=[shown])
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder.with_name(f"{folder.name}.failed.ipynb"))
    return corpus


def test_undealt_texts_of_another_encoding_are_left_out(western, tmp_path):
    assert main(["export", "west", str(tmp_path / "shared")]) == 0
    (page,) = (tmp_path / "shared").glob("partition/*.failed.html")
    text = page.read_text("utf-8")
    assert f"first\n{MASK}\nlast" in text
    assert "Zoë" not in text
    assert "stairs" not in text


@pytest.mark.parametrize("content", [b'{"input": "\x81"}\n', b"no JSON\n"])
def test_a_corpus_that_cannot_be_read_any_more_ends_the_export_in_words(western, tmp_path, capsys, content):
    western.write_bytes(content)
    assert main(["export", "west", str(tmp_path / "shared")]) == 1
    assert f"fedmem: {western}, line 1: not " in capsys.readouterr().err
    assert not (tmp_path / "shared").exists()


# --- what a stage shares --------------------------------------------------------------------------------------------


def test_only_what_a_stage_lists_is_exported(western, tmp_path):
    export("west", tmp_path / "shared")
    (folder,) = (tmp_path / "shared" / "partition").glob("[!.]*/")
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "sizes.csv"}
    assert (folder / "sizes.csv").read_text() == "client,rows\n0,1\n"
    assert json.loads((folder / "manifest.json").read_text("utf-8"))["shared"] == ["sizes.parquet"]


def test_an_analysis_that_does_not_say_what_it_shares_is_named(western, tmp_path, capsys):
    (partition,) = (tmp_path / "results" / "partition").glob("*/manifest.json")
    manifest = json.loads(partition.read_text("utf-8"))
    del manifest["shared"]
    partition.write_text(json.dumps(manifest), encoding="utf-8")  # a partition may list nothing
    export("west", tmp_path / "shared")
    assert not list((tmp_path / "shared").glob("*/*/*.csv"))
    description = json.loads((tmp_path / "results" / "studies" / "west" / "study.json").read_text())
    analysis = tmp_path / "results" / description["runs"][0]["stages"]["analyze"]
    analysis.mkdir(parents=True)
    (analysis / "manifest.json").write_text(json.dumps(manifest | {"stage": "analyze"}), encoding="utf-8")
    line = refused(capsys, "export", "west", tmp_path / "again")
    assert line == f"fedmem: {analysis} does not list what may be shared: run the stage again, then export the study"
    assert not (tmp_path / "again").exists()


# --- what was cut or stands in the way ------------------------------------------------------------------------------


def refused(capsys, *arguments):
    """The one line that a command refuses with."""
    assert main([str(argument) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "FEDMEM_RESULTS" not in line  # the results are not at fault
    return line


@pytest.mark.parametrize("name", ["manifest.json", "notebook.ipynb", "rows.parquet"])
def test_a_stage_file_that_was_cut_is_named_and_nothing_is_exported(western, tmp_path, capsys, name):
    (folder,) = (tmp_path / "results" / "partition").glob("[!.]*/")
    cut = folder / name
    cut.write_bytes((cut.read_bytes() if cut.is_file() else b"{" * 200)[:100])
    line = refused(capsys, "export", "west", tmp_path / "shared")
    assert line.startswith(f"fedmem: {cut} ")
    assert "run the s" in line  # the stage, or the study
    assert not (tmp_path / "shared").exists()


def test_a_later_stages_manifest_that_was_cut_is_named(western, tmp_path, capsys):
    description = json.loads((tmp_path / "results" / "studies" / "west" / "study.json").read_text())
    cut = tmp_path / "results" / description["runs"][0]["stages"]["train"] / "manifest.json"
    cut.parent.mkdir(parents=True)
    cut.write_text('{"stage": "train", "ident')
    assert refused(capsys, "export", "west", tmp_path / "shared").startswith(f"fedmem: {cut} cannot be read (")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"name": "west", "runs": [1]}', "\x00"])
def test_a_description_that_is_none_is_named(western, tmp_path, capsys, content):
    described = tmp_path / "results" / "studies" / "west" / "study.json"
    described.write_text(content)
    for command in (["report", "west"], ["export", "west", tmp_path / "shared"]):
        line = refused(capsys, *command)
        assert line.startswith(f"fedmem: {described} is not a description of a study (")
        assert "writes it again" in line
    assert not (tmp_path / "shared").exists()


@pytest.mark.parametrize("below", ["", "x", "x/y"])
def test_a_file_where_a_folder_is_wanted_is_named(western, tmp_path, capsys, below):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    commands = [["split", "latest", file / below], *([["export", "west", file / below]] if below else [])]
    for command in commands:
        line = refused(capsys, *command)
        assert line == f"fedmem: DIR: got {file / below}, but {file} is a file: give a folder, or remove the file first"
    assert file.read_text() == "mine"
