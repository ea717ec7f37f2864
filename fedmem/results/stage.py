"""Finished stages: how one is opened and found.

A stage's folder is `results/<stage>/<slug>-<hash8>/`. It is finished when it holds a manifest and for no other reason.
What the hash covers is in `fedmem.results.identity`. This module does not depend on what the stages do.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedmem.config.parameter import StageConfig
from fedmem.config.stages import STAGES
from fedmem.machine.paths import digest_of, results_root
from fedmem.results.identity import NOTEBOOKS

MANIFEST = "manifest.json"

SHAPE: dict[str, type | tuple[type, ...]] = {  # what every manifest has
    "stage": str, "identity": str, "parameters": dict, "parents": list, "files": dict, "sizes": dict, "code": str,
    "device": str, "finished": str, "seconds": (int, float),
}  # fmt: skip


class StageError(RuntimeError):
    """A stage folder that is missing, unfinished or not of the expected kind."""


# --- finished stages ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A finished stage: its folder and its parsed manifest."""

    folder: Path
    manifest: dict

    def __str__(self) -> str:
        """The folder relative to the parent of results: executed notebooks are shared and must not show local paths."""
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
        """The finished stage that this one was made from, as it is on disk now; None for a partition."""
        record = self.manifest["parents"]
        return open_stage(self.folder.parent.parent / record[0]["folder"]) if record else None

    def lineage(self) -> Iterator["Stage"]:
        """This stage, its parent, and so on up to the partition; each is opened when its turn comes."""
        yield self
        if self.parent:
            yield from self.parent.lineage()

    @property
    def configs(self) -> dict[str, StageConfig]:
        """The resolved parameters of the stage and of its ancestors, by name of the stage, the partition's first."""
        return {stage.name: stage.config for stage in reversed(list(self.lineage()))}

    @property
    def parent_changed(self) -> bool:
        """Whether the parent's files differ from those that this stage was made from."""
        return self.parent is not None and self.manifest["parents"][0]["files"] != self.parent.files_digest

    def ancestor(self, name: str) -> "Stage":
        """This stage or its ancestor of that name. Raises StageError if no ancestor has the name."""
        for stage in self.lineage():
            if stage.name == name:
                return stage
        raise StageError(f"{self.folder} does not descend from a {name} stage")

    def path(self, name: str) -> Path:
        """Path of one published file or folder. Raises StageError if it does not exist."""
        path = self.folder / name
        if not path.exists():
            raise StageError(f"{self.folder} has no {name}; published: {', '.join(sorted(self.manifest['files']))}")
        return path

    def damaged(self) -> str | None:
        """The first published file that is missing or whose size has changed; None if there is no such file."""
        # sizes, not digests: `fedmem plan` asks this of every stage, and checkpoints are large
        for name, size in self.manifest["sizes"].items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != size:
                return name
        return None

    def table(self, name: str):
        """DataFrame of `<name>.parquet`."""
        import pandas as pd  # here, because planning reads manifests only and must start fast

        return pd.read_parquet(self.path(f"{name}.parquet"))

    def json(self, name: str) -> Any:
        """Content of `<name>.json`."""
        return json.loads(self.path(f"{name}.json").read_text(encoding="utf-8"))


def open_stage(folder: str | Path) -> Stage:
    """The finished stage in a folder. Raises StageError if there is no valid manifest."""
    folder = Path(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise StageError(f"{folder} has no finished stage (no {MANIFEST}): run its notebook to the end first") from None
    except ValueError as error:
        raise StageError(f"{folder / MANIFEST} is not JSON ({error}): run the stage again") from None
    manifest = manifest if isinstance(manifest, dict) else {}
    broken = next((key for key, kind in SHAPE.items() if not isinstance(manifest.get(key), kind)), None)
    if broken or manifest["stage"] not in NOTEBOOKS:
        key = broken or "stage"
        raise StageError(
            f"{folder / MANIFEST} is not a stage's manifest: got {manifest.get(key)!r} as its {key!r}; run the stage "
            "again"
        )
    return Stage(folder, manifest)


def finished_stages(stage: str, root: Path | None = None) -> list[Stage]:
    """All finished stages of one kind, oldest first. root: the results folder, None: the current one."""
    folder = (root or results_root()) / stage
    stages = []
    # hidden folders are unfinished work, also while they already have a manifest
    for path in sorted(folder.glob(f"[!.]*/{MANIFEST}")):
        with contextlib.suppress(StageError):  # a stage with a broken manifest counts as unfinished
            stages.append(open_stage(path.parent))
    return sorted(stages, key=lambda s: s.manifest["finished"])


def find_stage(stage: str, wanted: str = "latest") -> Stage:
    """The finished stage that a notebook takes as its parent.

    stage: kind of stage. wanted: a folder, as a path or relative to results or to the stage's folder there, or
        "latest", the newest finished stage.
    Raises StageError if there is no such stage or if it is of another kind.
    """
    if wanted != "latest":
        places = [results_root() / wanted, results_root() / stage / wanted, Path(wanted)]
        if not any(place.is_dir() for place in places):
            raise StageError(
                f"there is no folder {wanted}; expected one in {results_root() / stage}, by path or by name"
            )
        found = open_stage(next((place for place in places if (place / MANIFEST).is_file()), wanted))
        if found.name != stage:
            raise StageError(f"{wanted} is a {found.name} stage; expected a {stage} stage")
        return found
    stages = finished_stages(stage)
    if not stages:
        raise StageError(
            f"no finished {stage} stage in {results_root() / stage}: run notebooks/{NOTEBOOKS[stage]}.ipynb first"
        )
    return stages[-1]
