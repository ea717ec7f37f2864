"""The READMEs, environment.yml and the lock agree with the repository: tables, links, commands, versions."""

import re
import shlex
import shutil
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from fedmem.cli import readme_tables
from fedmem.cli.main import _parser
from fedmem.results.identity import NOTEBOOKS
from fedmem.study.loading import load_study

REPOSITORY = Path(__file__).resolve().parent.parent
# {path from the repository's root: text} of every README
READMES = {
    str(file.relative_to(REPOSITORY)): file.read_text(encoding="utf-8")
    for folder in (".", "params", "results", "fedmem")
    for file in sorted((REPOSITORY / folder).glob("**/README.md" if folder == "fedmem" else "README.md"))
}
README, PARAMS = READMES["README.md"], READMES["params/README.md"]
LOCK = dict(line.split("==") for line in (REPOSITORY / "requirements.lock").read_text().split())

CODE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
LINKS = sorted(
    (document, link)
    for document, text in READMES.items()
    for link in set(re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", text)))
    if "://" not in link
)
# (document, words) of every line in a block of shell commands
COMMANDS = [
    (document, words)
    for document, text in READMES.items()
    for language, block in CODE.findall(text)
    for line in block.replace("\\\n", " ").splitlines()
    if language == "bash" and (words := shlex.split(line, comments=True))
]


def anchors(text: str) -> set[str]:
    """The anchors of a Markdown document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_tables_are_the_generated_ones():
    for document, tables in readme_tables.tables().items():
        for table in tables:
            assert f"\n\n{table}\n" in READMES[document], f"renew it with `make tables`: {table.splitlines()[0]}"


def test_every_notebook_and_study_is_listed():
    assert [line.split("]")[0][3:] for line in readme_tables.notebooks().splitlines()[2:]] == list(NOTEBOOKS.values())
    for study in (REPOSITORY / "params/studies").glob("*.yaml"):
        assert f"(studies/{study.name}) | {yaml.safe_load(study.read_text())['title']} |" in PARAMS


@pytest.mark.parametrize("tables", readme_tables.tables().values(), ids=list(readme_tables.tables()))
def test_tables_are_written_in_their_places(tables):
    old = "# A\n\n" + "\n\ntext\n\n".join(table.split("\n")[0] + "\n| old |" for table in tables) + "\n"
    new = readme_tables.written(old, tables)
    assert new == "# A\n\n" + "\n\ntext\n\n".join(tables) + "\n"
    assert readme_tables.written(new, tables) == new
    with pytest.raises(ValueError, match="no table begins with"):
        readme_tables.written("# A\n", tables)


def test_every_document_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(readme_tables, "REPOSITORY", tmp_path)
    for document, tables in readme_tables.tables().items():
        (tmp_path / document).parent.mkdir(exist_ok=True)
        (tmp_path / document).write_text("\n\n".join(table.split("\n")[0] for table in tables) + "\n")
    assert readme_tables.main(["--write"]) == 0
    assert not capsys.readouterr().out
    for document, tables in readme_tables.tables().items():
        assert (tmp_path / document).read_text() == "\n\n".join(tables) + "\n"
    assert readme_tables.main([]) == 0
    assert capsys.readouterr().out == "".join(t + "\n\n" for tables in readme_tables.tables().values() for t in tables)


def test_the_readme_is_short_and_names_its_test_command():
    assert len(README.encode()) <= 10_000
    assert ("README.md", ["make", "test"]) in COMMANDS
    # two commands, notebooks, own data and audit are found at the top
    top = "\n".join(README.splitlines()[:75])
    for wanted in ("make demo", "make test", "| [6_report]", "params/studies/own_data.yaml", "fedmem audit"):
        assert wanted in top, wanted


@pytest.mark.parametrize(("document", "link"), LINKS)
def test_links_lead_somewhere(document, link):
    path, _, anchor = link.partition("#")
    target = (REPOSITORY / document).parent / path if path else REPOSITORY / document
    assert target.exists()
    assert target.resolve().is_relative_to(REPOSITORY)
    if anchor:
        assert anchor in anchors(target.read_text(encoding="utf-8"))


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE))
    for text in READMES.values():
        assert set(re.findall(r"(?:`|^)make ([a-z0-9-]+)", text, flags=re.MULTILINE)) <= targets


@pytest.mark.parametrize(("document", "words"), COMMANDS, ids=[" ".join(words) for _, words in COMMANDS])
def test_commands_exist(document, words):
    if words[0] == "fedmem":
        _parser().parse_args(words[1:])  # ends the test when a command, an option or an argument is unknown
    else:
        installed = metadata.entry_points(group="console_scripts").names
        known = {"make", "conda", "export", "printf", "read", ".venv/bin/python"} | installed
        assert words[0] in known
    for word in words:
        if re.match(r"(params|notebooks|tests)/", word):
            assert (REPOSITORY / word).exists(), f"{document}: {word}"


@pytest.mark.parametrize("document", READMES)
def test_commands_named_in_sentences_exist(document):
    for name in re.findall(r"`fedmem ([a-z]+)", READMES[document]):
        with pytest.raises(SystemExit, match=r"^0$"):
            _parser().parse_args([name, "--help"])


def test_the_example_of_a_study_loads(tmp_path):
    shutil.copytree(REPOSITORY / "params", tmp_path / "params")
    (example,) = (block for language, block in CODE.findall(PARAMS) if language == "yaml")
    study = tmp_path / "params/studies/example.yaml"
    study.write_text(example)
    assert len(load_study(study).runs) == len(load_study(study, base="small").runs) == 4


def test_the_environment_installs_the_lock_and_the_project():
    pip = yaml.safe_load((REPOSITORY / "environment.yml").read_text())["dependencies"][-1]["pip"]
    assert pip == ["-r requirements.lock", "-e ."]
    assert "python=3.11" in (REPOSITORY / "environment.yml").read_text()


def test_the_lock_satisfies_the_project_and_is_what_is_installed():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = [r for group in project["optional-dependencies"].values() for r in group]
    locked = {name.lower().replace("_", "-"): version for name, version in LOCK.items()}
    for line in project["dependencies"] + extras:
        requirement = Requirement(line)
        if requirement.name != "fedmem":
            assert requirement.specifier.contains(locked[requirement.name.lower()]), line
    for name in ("torch", "transformers", "flwr", "nltk", "pandas", "papermill"):
        assert metadata.version(name).split("+")[0] == locked[name]
