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
    """`results/studies/<name>`. Raises ConfigError for a name that is not one plain path component."""
    # The name becomes part of a path, so it must not contain separators or begin with a dot.
    if not re.fullmatch(r"\w[\w.=+ -]{0,99}", name):
        raise ConfigError(
            f"name of a study: got {name!r}; expected up to 100 letters, digits and . _ - = +, a letter first"
        )
    return results_root() / "studies" / name


def check_study_name(name: str, where: str) -> None:
    """Raise ConfigError for a name that a study in results cannot have. where: origin of the name, for the error."""
    study_folder(name)
    if name == "latest":
        raise ConfigError(
            f"{where}: got 'latest', which names the newest analysis in reports; give another name with --name"
        )


def report_identity(analyses: dict[str, str]) -> str:
    """Identity of a study's report. analyses: {run: identity of its analyze stage}."""
    return digest_of({"stage": "studies", "analyses": analyses})


def begin_report(study: str, analyses: dict[str, Stage]) -> Work:
    """Open the work folder of the report `results/studies/<study>/`. analyses: {run: its finished analyze stage}."""
    identities = {run: stage.identity for run, stage in analyses.items()}
    return Work("studies", study_folder(study), report_identity(identities), tuple(analyses.values()))


def open_study(name: str) -> tuple[dict, dict[str, Stage]]:
    """A study's description and the finished analyses of its runs ({run: analyze stage}).

    Runs without a finished analysis are left out of the second part. "latest" is the newest analysis of any study, as a
    study of one run. Raises StageError if there is no such study or its description is not valid.
    """
    if name == "latest":
        stage = find_stage("analyze")
        folders = {one.name: f"{one.name}/{one.folder.name}" for one in stage.lineage()}
        parameters = {k: v for config in stage.configs.values() for k, v in config.model_dump().items()}
        run = {"name": "latest", "parameters": parameters, "stages": folders}
        return {"name": name, "title": "The newest analysis", "note": "", "runs": [run]}, {"latest": stage}
    folder = study_folder(name)
    if not (folder / "study.json").is_file():
        known = sorted(p.parent.name for p in folder.parent.glob("*/study.json"))
        raise StageError(f"no study {name!r} in {folder.parent}; there are: {', '.join(known) or 'none'}, and 'latest'")
    try:
        description = json.loads((folder / "study.json").read_text(encoding="utf-8"))
        # access every entry that readers use, so that a broken file fails here and with a clear message
        _ = description["name"], description["title"], description["note"]
        _ = [str.strip(one) for run in description["runs"] for one in run["stages"].values()]
        stages = {run["name"]: results_root() / run["stages"]["analyze"] for run in description["runs"]}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StageError(
            f"{folder / 'study.json'} is not a description of a study ({type(error).__name__}: {error}): `fedmem run` "
            "on the study's YAML file writes it again"
        ) from None
    return description, {run: open_stage(path) for run, path in stages.items() if (path / MANIFEST).is_file()}


def run_table(description: dict, analyses: dict[str, Stage]):
    """DataFrame with a row for each run: state, resolved parameters, seconds of each stage; the index is the run.

    description, analyses: as `open_study` returns them.
    state: finished; stale, if a stage was made by other code than the present one or from other files than its parent
    has now; without an analysis failed or to do.
    """
    import pandas as pd

    rows, code = {}, {stage: digest_of(code_files(stage)) for stage in STAGES}
    for run in description["runs"]:
        analysis = analyses.get(run["name"])
        stages = list(analysis.lineage()) if analysis else []
        state = "finished" if analysis else _unfinished(run)
        if any(stage.manifest["code"] != code[stage.name] or stage.parent_changed for stage in stages):
            state = "stale"
        seconds = {f"seconds_{stage.name}": stage.manifest["seconds"] for stage in reversed(stages)}
        rows[run["name"]] = {"state": state} | run["parameters"] | seconds
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("run")


def _unfinished(run: dict) -> str:
    """State of a run without an analysis: failed if one of its stages has recorded an error, else to do."""
    folders = [results_root() / folder for folder in run.get("stages", {}).values()]
    return "failed" if any(f.with_name(f"{f.name}.failed.json").is_file() for f in folders) else "to do"
