"""Stage folders: how a stage is found, opened, and published whole or not at all.

A stage's folder is `results/<stage>/<slug>-<hash8>/`. It is finished when it holds a manifest and for no other reason;
a manifest is written last, in a hidden folder that then takes the stage's place in one rename. What the hash covers is
`fedmem.identity`'s matter. This module knows nothing of what the stages do.
"""

import contextlib
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from fedmem.config import STAGES, ConfigError, StageConfig, check_together
from fedmem.identity import (
    NOTEBOOKS,
    PACKAGE,
    code_digest,
    digest_of,
    file_digest,
    identity,
    notebook_file,
    outside_digests,
    results_root,
    stage_folder,
)
from fedmem.leftovers import KEPT, take_up

__all__ = [
    "NOTEBOOKS",
    "PACKAGE",
    "Stage",
    "StageError",
    "Work",
    "begin",
    "begin_report",
    "check_study_name",
    "code_digest",
    "file_digest",
    "find",
    "finished",
    "identity",
    "notebook_file",
    "open_stage",
    "open_study",
    "report_identity",
    "results_root",
    "run_table",
    "stage_folder",
    "study_folder",
]

MANIFEST = "manifest.json"
REQUIRED = {"stage", "identity", "parameters", "parents", "files", "sizes", "code", "finished", "seconds"}
RECORDED_VERSIONS = (
    "accelerate", "datasets", "datasketch", "flwr", "flwr-datasets", "nltk", "numpy", "pandas", "pyarrow",
    "scikit-learn", "tantivy", "torch", "transformers",
)  # fmt: skip


class StageError(RuntimeError):
    """A stage folder that is missing, unfinished or not of the expected kind."""


# --- finished stages ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A finished stage: its folder and its manifest."""

    folder: Path
    manifest: dict

    def __str__(self) -> str:
        """The folder as seen from beside results: executed notebooks are shared and name no path of a machine."""
        return f"{self.folder.parent.parent.name}/{self.folder.parent.name}/{self.folder.name}"

    @property
    def name(self) -> str:
        return self.manifest["stage"]

    @property
    def identity(self) -> str:
        return self.manifest["identity"]

    @property
    def files_digest(self) -> str:
        """One digest over the digests of all published files."""
        return digest_of(self.manifest["files"])

    @cached_property
    def config(self) -> StageConfig:
        """The stage's resolved parameters."""
        return STAGES[self.name].create(self.manifest["parameters"])

    @cached_property
    def parent(self) -> "Stage | None":
        """The finished stage that this one was made from, opened anew; None for a partition."""
        record = self.manifest["parents"]
        return open_stage(self.folder.parent.parent / record[0]["folder"]) if record else None

    @property
    def configs(self) -> dict[str, StageConfig]:
        """The resolved parameters of the stage and of its ancestors by stage, a partition's first."""
        return (self.parent.configs if self.parent else {}) | {self.name: self.config}

    @property
    def parent_changed(self) -> bool:
        """Whether its parent has other files now than those that it was made of."""
        return self.parent is not None and self.manifest["parents"][0]["files"] != self.parent.files_digest

    def ancestor(self, name: str) -> "Stage":
        """This stage or the one of that name that it descends from."""
        stage = self
        while stage is not None and stage.name != name:
            stage = stage.parent
        if stage is None:
            raise StageError(f"{self.folder} does not descend from a {name} stage")
        return stage

    def path(self, name: str) -> Path:
        """Path of one published file or folder."""
        path = self.folder / name
        if not path.exists():
            raise StageError(f"{self.folder} has no {name}; published are: {', '.join(sorted(self.manifest['files']))}")
        return path

    def damaged(self) -> str | None:
        """The first published file that is missing or of another size than when published; None if all is well."""
        for name, size in self.manifest["sizes"].items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != size:
                return name
        return None

    def table(self, name: str):
        """DataFrame of `<name>.parquet`."""
        import pandas as pd

        return pd.read_parquet(self.path(f"{name}.parquet"))

    def json(self, name: str) -> Any:
        """Content of `<name>.json`."""
        return json.loads(self.path(f"{name}.json").read_text(encoding="utf-8"))


def open_stage(folder: str | Path) -> Stage:
    """The finished stage in a folder; StageError where there is none."""
    folder = Path(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise StageError(
            f"{folder} holds no finished stage (no {MANIFEST}): run its notebook to the end first"
        ) from None
    except ValueError as error:
        raise StageError(f"{folder / MANIFEST} is not JSON ({error}): run the stage again") from None
    if not isinstance(manifest, dict) or not manifest.keys() >= REQUIRED:
        raise StageError(f"{folder / MANIFEST} is no manifest of a stage: run the stage again")
    return Stage(folder, manifest)


def finished(stage: str, root: Path | None = None) -> list[Stage]:
    """All finished stages of one kind, oldest first."""
    folder = (root or results_root()) / stage
    stages = []
    for path in sorted(folder.glob(f"[!.]*/{MANIFEST}")):
        with contextlib.suppress(StageError):  # a broken manifest is an unfinished stage
            stages.append(open_stage(path.parent))
    return sorted(stages, key=lambda s: s.manifest["finished"])


def find(stage: str, wanted: str = "latest") -> Stage:
    """A notebook's parent: a folder (as it is, or seen from results), or "latest", the newest finished one."""
    if wanted != "latest":
        inside = results_root() / wanted
        found = open_stage(inside if (inside / MANIFEST).is_file() else wanted)
        if found.name != stage:
            raise StageError(f"{wanted} is a {found.name} stage; wanted is a {stage} stage")
        return found
    stages = finished(stage)
    if not stages:
        raise StageError(
            f"no finished {stage} stage in {results_root() / stage}: run notebooks/{NOTEBOOKS[stage]}.ipynb first"
        )
    return stages[-1]


# --- publishing -----------------------------------------------------------------------------------------------------


@dataclass
class Work:
    """A stage in the making: a hidden folder to write into, published whole by `publish`.

    A stage that can go on after an interruption keeps in `progress` how far it has come (`fedmem.leftovers`); a new
    Work of the same identity and code then begins with the folder that was left.
    """

    stage: str
    target: Path
    identity: str
    parents: tuple[Stage, ...] = ()
    config: StageConfig | None = None
    digests: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        interpreter = os.environ.get("FEDMEM_PYTHON")
        if interpreter and os.path.realpath(interpreter) != os.path.realpath(sys.executable):
            raise StageError(
                f"this kernel runs {sys.executable}, the runner {interpreter}: another kernel named python3 stands "
                "before the environment's own; remove it (`jupyter kernelspec list` shows where it lies)"
            )
        self.code = code_digest(self.stage)
        self.folder, self.progress = take_up(self.target, {"identity": self.identity, "code": self.code})
        self.started, self._clock = datetime.now(UTC), time.perf_counter() - self.progress.seconds

    def path(self, name: str) -> Path:
        """Where to write a file of this stage; folders on the way are made."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def save_table(self, name: str, frame) -> None:
        """Writes a DataFrame as `<name>.parquet`, without its index."""
        frame.to_parquet(self.path(f"{name}.parquet"), index=False)

    def save_json(self, name: str, value: Any) -> None:
        """Writes `<name>.json`; a NaN becomes null."""
        text = json.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False)
        self.path(f"{name}.json").write_text(text + "\n", encoding="utf-8")

    def publish(self, device: str = "cpu") -> Stage:
        """Writes the manifest and puts the folder in the stage's place; the former one is removed whole."""
        if not (self.folder / KEPT).is_dir():
            raise StageError(f"{self.folder} is gone: another process took this one for dead. Run the stage again")
        (self.folder / MANIFEST).unlink(missing_ok=True)  # of a publishing that was interrupted
        paths = {str(p.relative_to(self.folder)): p for p in sorted(self.folder.rglob("*")) if p.is_file()}
        paths = {name: path for name, path in paths.items() if not name.startswith(f"{KEPT}/")}
        files = {name: file_digest(path) for name, path in paths.items()}
        sizes = {name: path.stat().st_size for name, path in paths.items()}
        manifest = self._manifest(device) | {"files": files, "sizes": sizes}
        (self.folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        shutil.rmtree(self.folder / KEPT)  # now: an interruption while large files were read has cost nothing
        former = self.target.parent / f".{self.target.name}.former{os.getpid()}"
        if self.target.exists():
            self.target.rename(former)
        self.folder.rename(self.target)
        shutil.rmtree(former, ignore_errors=True)
        for record in self.target.parent.glob(f"{self.target.name}.failed.*"):  # of an attempt before
            record.unlink()
        return open_stage(self.target)

    def _manifest(self, device: str) -> dict:
        root = self.target.parent.parent
        return {
            "stage": self.stage,
            "identity": self.identity,
            "parameters": self.config.model_dump() if self.config else {},
            "effective": self.config.effective() if self.config else {},
            "outside": self.digests,
            "parents": [
                {
                    "stage": p.name,
                    "folder": os.path.relpath(p.folder, root),
                    "identity": p.identity,
                    "files": p.files_digest,
                }
                for p in self.parents
            ],
            "code": self.code,
            "commit": _commit(),
            "versions": {"python": platform.python_version()}
            | {name: metadata.version(name) for name in RECORDED_VERSIONS},
            "device": device,
            "started": self.started.isoformat(timespec="milliseconds"),
            "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "seconds": round(time.perf_counter() - self._clock, 3),
            "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,  # Linux counts in KiB
        }


def begin(config: StageConfig, parent: Stage | None = None) -> Work:
    """Checks a stage's parameters against its ancestors' and opens its work folder.

    `work.config` is what the stage shall use: derived values (the round that "last" means) are filled in. Raises
    ConfigError or FileNotFoundError before anything is written.
    """
    configs = (parent.configs if parent else {}) | {config.stage: config}
    config = check_together(configs)[config.stage].settled()
    digests = outside_digests(config)
    stage_identity = identity(config, parent.identity if parent else None, digests)
    parents = (parent,) if parent else ()
    return Work(config.stage, stage_folder(config, stage_identity), stage_identity, parents, config, digests)


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
        stage, folders, parameters = find("analyze"), {}, {}
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

    rows, code = {}, {stage: code_digest(stage) for stage in STAGES}
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


def _plain(value: Any) -> Any:
    """JSON's own types: numpy scalars and arrays unpacked, keys as text, NaN as None."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and value != value else value


def _commit() -> str | None:
    """The checkout's commit, marked when the tree differs from it; None outside a checkout."""
    git = ["git", "-C", str(PACKAGE.parent), "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
