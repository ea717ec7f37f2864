"""A study as it may be shared: pages of executed notebooks, tables of figures, figures, manifests; no text of rows.

What is copied is made again, cell by cell and field by field, without passages of rows, row ids, absolute paths or
weights; at the end everything written is searched once more, and nothing stays where something is found. The rules hold
for every corpus, synthetic ones too. Pictures are copied as they are: fedmem's figures draw numbers.

A passage is a run of at least 40 characters that also occurs in some row's input or output; shorter ones are ordinary
language.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd

from fedmem.corpus import files as corpus_files
from fedmem.display.html_page import to_html
from fedmem.display.private_text import TEXT_COLUMNS
from fedmem.machine.paths import PACKAGE, results_root
from fedmem.results.stage import MANIFEST, Stage, StageError, open_stage
from fedmem.results.studies import open_study

MASK = "█████"

PASSAGE_CHARS = 40

_BLOCK = PASSAGE_CHARS // 2  # any 40 characters of a row contain a whole block: blocks start every 20 characters

LEAST_ID_CHARS = 4  # a shorter id is masked only in the names that fedmem builds from it (p0-7, s0-7)

# two names at least; the lookbehind rejects the end of a tag, a fraction, a URL or an Arrow type
_PATH = re.compile(r"(?<![\w.:/<&~)\]}])(?:~|[A-Za-z]:)?[/\\](?:[\w.@+~-]+[/\\])+[\w.@+~-]*")

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

_SPACE = re.compile(r"(?:\s|\\n|\\t|\\r)+")  # literal whitespace, and its escapes as repr writes them

_TOKEN = re.compile(r"[^\s\"'`,;()\[\]{}<>=|]+")


class Scrubber:
    """Removes passages and ids of rows, and paths, from strings."""

    def __init__(self, ids: Iterable[str], texts: Iterable[str], home: Iterable[str] = ()):
        """Index what must be removed.

        ids: row ids.
        texts: texts of rows, of which no run of 40 characters may remain.
        home: folders whose paths are removed as well.
        """
        self._ids = {str(one) for one in ids}
        self._odd = [one for one in self._ids if len(one) >= LEAST_ID_CHARS and not _TOKEN.fullmatch(one)]
        # longest first: a parent folder would otherwise leave the rest of a longer path
        self._home = sorted((str(place) for place in home if len(str(place)) > 1), key=len, reverse=True)
        self._texts = [folded for text in texts if len(folded := _fold(text)) >= PASSAGE_CHARS]
        self._blocks: dict[str, list[tuple[int, int]]] = {}
        for number, text in enumerate(self._texts):
            for start in range(0, len(text) - _BLOCK + 1, _BLOCK):
                places = self._blocks.setdefault(text[start : start + _BLOCK], [])
                if len(places) < 50:  # boilerplate: a bound on time; its first places suffice to find it
                    places.append((number, start))

    def holds_passage(self, text: str) -> bool:
        """Whether the text contains 40 consecutive characters of some row: raw, HTML-unescaped, or without tags.

        Terminal colours are ignored.
        """
        plain = _ANSI.sub("", text)
        return any(self._found(_fold(form)) for form in {plain, unescape(plain), _untagged(plain)})

    def names(self, text: str) -> str:
        """Return the text with row ids masked and absolute paths shortened to their last name."""
        text = _PATH.sub(lambda match: "…/" + re.split(r"[/\\]", match.group().rstrip("/\\"))[-1], text)
        for place in self._home:  # _PATH misses a folder of a single name, or with unusual characters
            text = text.replace(place, "…")
        for one in self._odd:
            text = text.replace(one, MASK)
        return _TOKEN.sub(lambda match: self._without_id(match.group()), text)

    def plain(self, text: str) -> str:
        """Return the text without terminal colours, ids and paths; lines that contain a passage are masked."""
        text = self.names(_ANSI.sub("", text))
        if not self.holds_passage(text):
            return text
        kept = [MASK if self.holds_passage(line) else line for line in text.split("\n")]
        joined = "\n".join(kept)
        # a passage may span lines, none of which contains 40 characters of it
        return MASK if self.holds_passage(joined) else joined

    def _without_id(self, token: str) -> str:
        bare = token.strip(".:!?…")
        if bare in self._ids and (len(bare) >= LEAST_ID_CHARS):
            return token.replace(bare, MASK)
        probe = re.fullmatch(r"([ps]\d+-)(.+)", bare)  # ids of prefixes and suffixes from the generate stage
        return token.replace(bare, probe.group(1) + MASK) if probe and probe.group(2) in self._ids else token

    def _found(self, text: str) -> bool:
        for start in range(len(text) - _BLOCK + 1):
            for number, place in self._blocks.get(text[start : start + _BLOCK], ()):
                if _common(self._texts[number], place, text, start) >= PASSAGE_CHARS:
                    return True
        return False


def _common(one: str, i: int, other: str, j: int) -> int:
    """Return the length of the common run around equal blocks at i and j; each side stops after PASSAGE_CHARS."""
    left = 0
    while left < min(i, j, PASSAGE_CHARS) and one[i - left - 1] == other[j - left - 1]:
        left += 1
    right = 0
    while (
        right < PASSAGE_CHARS and i + right < len(one) and j + right < len(other) and one[i + right] == other[j + right]
    ):
        right += 1
    return left + right


def _fold(text: str) -> str:
    """Return the text with single spaces, so that a line break does not hide a passage."""
    return _SPACE.sub(" ", text or "")


def _untagged(text: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", text))


# what a stage shares whose notebook does not say it; of the others, the manifest lists it (`work.path`)
SHARED = {"train": ("curves.parquet", "utility.parquet")}

LEFT_OUT = f"{MASK} left out: it held text of the corpus"

# the scrubber masks only texts that it has read; an HTML table with a text column and without a mask is left out
_TEXT_COLUMN = re.compile(rf"<th[^>]*>\s*(?:{'|'.join(TEXT_COLUMNS)})\s*</th>")

_PICTURES = ("image/png", "image/svg+xml", "image/jpeg")


class ExportError(RuntimeError):
    """The study cannot be exported, or something private was found in the export."""


@dataclass(frozen=True)
class Exported:
    """The result of an export: the folder, its number of files, and how many outputs were left out for their text."""

    folder: Path
    files: int
    left_out: int


def export(study: str, target: str | Path) -> Exported:
    """Write the shareable content of a study, and of every stage of its runs, to the new folder `target`.

    study: its name in results/studies. For failed stages, the executed notebook is exported too, as a page. Returns an
    Exported.

    Raises ExportError when `target` exists, or when a passage, a row id or a path was found in the files written, which
    are then removed. Raises StageError when the study does not exist or a file of its stages cannot be read. Raises
    CorpusError when a corpus file exists but cannot be read, because its texts cannot be searched for then.
    """
    target = Path(target).expanduser()
    if target.exists():
        raise ExportError(f"{target} exists already: give a folder that does not exist yet, or remove it first")
    description, _ = open_study(study)
    # runs share stages: each folder once
    folders = {folder: stage for run in description["runs"] for stage, folder in run["stages"].items()}
    scrubber = _scrubber(results_root(), [folder for folder, stage in folders.items() if stage == "partition"])
    target.parent.mkdir(parents=True, exist_ok=True)
    # written next to the target and moved after the check: nothing private is ever at `target`
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as hidden:
        writer = _Writer(Path(hidden) / "export", scrubber)
        for folder, stage in ({f"studies/{study}": "studies"} | folders).items():
            writer.stage(results_root() / folder, stage, folder)
        _check(writer.folder, scrubber)
        shutil.move(writer.folder, target)
    return Exported(target, sum(path.is_file() for path in target.rglob("*")), writer.left_out)


def _scrubber(root: Path, partitions: list[str]) -> Scrubber:
    ids: set[str] = set()
    texts: list[str] = []
    for folder in partitions:
        file = root / folder / "rows.parquet"
        if file.is_file():
            with _reading(file):
                rows = pd.read_parquet(file, columns=["row_id", "input", "output"])
            ids |= set(rows["row_id"].astype(str))
            texts += [*rows["input"], *rows["output"].dropna(), *_undealt(open_stage(root / folder))]
    home = (Path.home(), Path.cwd(), root, root.parent, PACKAGE.parent, Path(tempfile.gettempdir()))
    # paths appear with symbolic links resolved or not, so both forms are removed
    return Scrubber(ids, texts, {str(place) for place in home} | {str(place.resolve()) for place in home})


def _undealt(partition: Stage) -> Iterator[str]:
    """Yield the texts of the corpus files, of rows dealt to no client too; a missing file is skipped.

    Raises CorpusError when a file exists but cannot be read.
    """
    parameters = partition.manifest["parameters"]
    for path in (parameters.get("corpus_path"), parameters.get("heldout_path")):
        places = path if isinstance(path, list) else [path] if path else []
        for place in (one for one in places if Path(one).expanduser().exists()):
            for file in corpus_files.files_of(place):
                for _, record in corpus_files.read(file, parameters["corpus_encoding"]):
                    values = record.values() if isinstance(record, dict) else [record]
                    yield from (value for value in values if isinstance(value, str))


class _Writer:
    """Writes scrubbed stages below one folder, and counts in `left_out` the outputs that it left out."""

    def __init__(self, folder: Path, scrubber: Scrubber):
        self.folder, self.scrubber, self.left_out = folder, scrubber, 0
        folder.mkdir(parents=True)

    def stage(self, source: Path, stage: str, name: str) -> None:
        """Write one stage's folder; a failed stage has only its notebook.

        source: the stage's folder in results. stage: kind of the stage. name: folder below the export's.
        Raises StageError when a file cannot be read.
        """
        target = self.folder / name
        failed = source.with_name(f"{source.name}.failed.ipynb")
        if failed.is_file():
            self._write(target.with_name(f"{target.name}.failed.html"), self._page(failed, show_code=True))
        if not (source / MANIFEST).is_file():
            return
        self._write(target / MANIFEST, self._json(source / MANIFEST))
        for name in _shared_files(open_stage(source)):
            self._shared_file(source / name, target / name)
        page = "report.html" if stage == "studies" else "notebook.html"
        if (source / "notebook.ipynb").is_file():
            self._write(target / page, self._page(source / "notebook.ipynb", show_code=stage != "studies"))
        for figure in sorted((source / "figures").glob("*")):
            if figure.suffix == ".png":
                (target / "figures").mkdir(parents=True, exist_ok=True)
                shutil.copyfile(figure, target / "figures" / figure.name)
            elif figure.suffix in (".csv", ".txt"):
                self._write(target / "figures" / figure.name, self._plain(figure.read_text("utf-8")))

    def _shared_file(self, source: Path, target: Path) -> None:
        if source.suffix == ".parquet":
            self._write(target.with_suffix(".csv"), self.scrubber.names(_csv(source)))
        else:
            as_json = source.suffix == ".json"
            self._write(target, self._json(source) if as_json else self._plain(source.read_text("utf-8")))

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def _page(self, notebook: Path, show_code: bool) -> str:
        """Return the page of an executed notebook, made from a scrubbed copy."""
        import nbformat  # here, because only exported notebooks need it

        with _reading(notebook):
            content = nbformat.read(notebook, as_version=4)
        content.metadata.pop("papermill", None)  # holds absolute paths and the parameters
        for cell in content.cells:
            cell.metadata.pop("papermill", None)
            cell.source = self._plain(cell.source)
            if cell.cell_type == "code":
                cell.outputs = [self._output(output) for output in cell.outputs]
        with tempfile.TemporaryDirectory() as folder:
            scrubbed = Path(folder) / "notebook.ipynb"
            nbformat.write(content, scrubbed)
            return to_html(scrubbed, show_code=show_code)

    def _output(self, output: Any) -> Any:
        output = copy.deepcopy(output)
        if output.output_type == "stream":
            output.text = self._plain(output.text)
        elif output.output_type == "error":
            output.evalue = self._plain(output.evalue)
            output.traceback = [self._plain("\n".join(output.traceback))]
        else:
            # the plain text of an output repeats its HTML, and pages show the HTML
            kinds = [kind for kind in output.data if kind != "text/plain" or "text/html" not in output.data]
            output.data = {kind: self._datum(kind, output.data[kind]) for kind in kinds}
        return output

    def _datum(self, kind: str, datum: Any) -> Any:
        if kind in _PICTURES or not isinstance(datum, str):
            return datum
        if kind == "text/html":
            if self.scrubber.holds_passage(datum) or (MASK not in datum and _TEXT_COLUMN.search(datum)):
                self.left_out += 1
                return f"<p>{LEFT_OUT}</p>"
            return self.scrubber.names(datum)
        return self._plain(datum)

    def _plain(self, text: str) -> str:
        scrubbed = self.scrubber.plain(text)
        # row ids and paths are masked too, but only lost text counts as left out
        self.left_out += scrubbed.count(MASK) > text.count(MASK) and self.scrubber.holds_passage(text)
        return scrubbed

    def _json(self, path: Path) -> str:
        with _reading(path):
            content = json.loads(path.read_text(encoding="utf-8"))
        content = self._values(content)
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    def _values(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._plain(key): self._values(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self._values(one) for one in value]
        return self._plain(value) if isinstance(value, str) else value


def _shared_files(stage: Stage) -> list[str]:
    """Return the names of a stage's files that may be shared; raises StageError when it must list them and does not."""
    if "shared" not in stage.manifest and stage.name in ("analyze", "studies"):
        raise StageError(f"{stage.folder} does not list what may be shared: run the stage again, then export the study")
    names = {*stage.manifest.get("shared", ()), *SHARED.get(stage.name, ())}
    return sorted(name for name in names if (stage.folder / name).is_file())


def _csv(path: Path) -> str:
    with _reading(path):
        table = pd.read_parquet(path)
    return table.to_csv(index=False, lineterminator="\n")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise StageError, with one line of reason, when a file inside is truncated or is not of its format."""
    try:
        yield
    except ValueError as error:  # the errors of json, nbformat and pyarrow derive from it
        reason = str(error).partition("\n")[0][:200]
        raise StageError(
            f"{path} cannot be read ({reason}): remove its folder and run the study again, then export it"
        ) from None


def _check(folder: Path, scrubber: Scrubber) -> None:
    """Search all files written; raises ExportError, which names the files with text, row ids or paths."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".png":
            # base64 of embedded pictures is no text, and may contain an id by chance
            text = re.sub(r"data:[\w/+.-]+;base64,[\w+/=\s]+", "", path.read_text(encoding="utf-8"))
            if scrubber.holds_passage(text) or scrubber.names(text) != text:
                found.append(str(path.relative_to(folder)))
    if found:
        raise ExportError(
            f"text, row ids or paths were left in {', '.join(found[:5])}: nothing was exported; please report this"
        )
