"""Studies in results: their folders and descriptions, the finished analyses of their runs, the table of runs."""

import json
import re
from pathlib import Path

from fedmem.config.parameter import ConfigError
from fedmem.config.stages import STAGES
from fedmem.machine.paths import digest_of, results_root
from fedmem.results.code_files import code_files
from fedmem.results.stage import MANIFEST, Stage, StageError, find_stage, open_stage
from fedmem.results.work import Work


def study_folder(name: str) -> Path:
    """`results/studies/<name>`; ConfigError for a name that is not one plain path component."""
    if not re.fullmatch(r"\w[\w.=+ -]{0,99}", name):
        raise ConfigError(
            f"name of a study: got {name!r}; allowed are up to 100 letters, digits and . _ - = +, a letter first"
        )
    return results_root() / "studies" / name


def check_study_name(name: str, where: str) -> None:
    """ConfigError for a name that no study can have in results; where: who gave it."""
    study_folder(name)
    if name == "latest":
        raise ConfigError(
            f"{where}: got 'latest', the report's word for the newest analysis alone; give another one with --name"
        )


def report_identity(analyses: dict[str, str]) -> str:
    """Identity of a study's report: which run is which analysis ({run: identity of its analyze stage})."""
    return digest_of({"stage": "studies", "analyses": analyses})


def begin_report(study: str, analyses: dict[str, Stage]) -> Work:
    """Opens the work folder of `results/studies/<study>/`; `analyses`: {run: its finished analyze stage}."""
    identities = {run: stage.identity for run, stage in analyses.items()}
    return Work("studies", study_folder(study), report_identity(identities), tuple(analyses.values()))


def open_study(name: str) -> tuple[dict, dict[str, Stage]]:
    """A study's description and the finished analyses of its runs ({run: analyze stage}); the others are left out.

    "latest" is the newest analysis alone, whoever made it, as a study of one run.
    """
    if name == "latest":
        stage, folders, parameters = find_stage("analyze"), {}, {}
        ancestor = stage
        while ancestor is not None:
            folders[ancestor.name] = f"{ancestor.name}/{ancestor.folder.name}"
            parameters = ancestor.config.model_dump() | parameters
            ancestor = ancestor.parent
        run = {"name": "latest", "parameters": parameters, "stages": folders}
        return {"name": name, "title": "The newest analysis", "note": "", "runs": [run]}, {"latest": stage}
    folder = study_folder(name)
    if not (folder / "study.json").is_file():
        known = sorted(p.parent.name for p in folder.parent.glob("*/study.json"))
        raise StageError(f"no study {name!r} in {folder.parent}; there are: {', '.join(known) or 'none'}, and 'latest'")
    try:
        description = json.loads((folder / "study.json").read_text(encoding="utf-8"))
        _ = description["name"], description["title"], description["note"]
        _ = [str.strip(one) for run in description["runs"] for one in run["stages"].values()]
        stages = {run["name"]: results_root() / run["stages"]["analyze"] for run in description["runs"]}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StageError(
            f"{folder / 'study.json'} is no description of a study ({type(error).__name__}: {error}): `fedmem run` on "
            "the study's YAML file writes it again"
        ) from None
    return description, {run: open_stage(path) for run, path in stages.items() if (path / MANIFEST).is_file()}


def run_table(description: dict, analyses: dict[str, Stage]):
    """DataFrame, a row a run: state, resolved parameters, seconds of each stage; index run.

    state: finished; stale, when a stage was made by other code than there is here, or of other files than its parent
    has; failed, or to do, when there is no analysis.
    """
    import pandas as pd

    rows, code = {}, {stage: digest_of(code_files(stage)) for stage in STAGES}
    for run in description["runs"]:
        stages, stage = {}, analyses.get(run["name"])
        state = "finished" if stage else _unfinished(run)
        while stage is not None:
            stages[f"seconds_{stage.name}"] = stage.manifest["seconds"]
            if stage.manifest["code"] != code[stage.name] or stage.parent_changed:
                state = "stale"
            stage = stage.parent
        rows[run["name"]] = {"state": state} | run["parameters"] | dict(reversed(stages.items()))
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("run")


def _unfinished(run: dict) -> str:
    """What a run without an analysis is: failed, where the error of one of its stages lies, else to do."""
    folders = [results_root() / folder for folder in run.get("stages", {}).values()]
    return "failed" if any(f.with_name(f"{f.name}.failed.json").is_file() for f in folders) else "to do"
