"""What the README, environment.yml and the lock say is so."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from fedmem.cli import readme_tables
from fedmem.results.identity import NOTEBOOKS

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text()
LOCK = dict(line.split("==") for line in (REPOSITORY / "requirements.lock").read_text().split())


def test_the_tables_are_the_generated_ones():
    for table in readme_tables.tables():
        assert table in README, f"renew it with `make tables`: {table.splitlines()[0]}"


def test_every_notebook_and_study_is_listed():
    assert [line.split("]")[0][3:] for line in readme_tables.notebooks().splitlines()[2:]] == list(NOTEBOOKS.values())
    for study in (REPOSITORY / "params/studies").glob("*.yaml"):
        assert f"(params/studies/{study.name}) | {yaml.safe_load(study.read_text())['title']} |" in README


def test_tables_are_written_in_their_places():
    old = "# A\n\n" + "\n\ntext\n\n".join(table.split("\n")[0] + "\n| old |" for table in readme_tables.tables()) + "\n"
    new = readme_tables.written(old)
    assert new == "# A\n\n" + "\n\ntext\n\n".join(readme_tables.tables()) + "\n"
    assert readme_tables.written(new) == new
    with pytest.raises(ValueError, match="no table begins with"):
        readme_tables.written("# A\n")


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)]+)\)", README))))
def test_links_lead_somewhere(link):
    assert (REPOSITORY / link).exists()


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z0-9-]+)", README, flags=re.MULTILINE)) <= targets


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
