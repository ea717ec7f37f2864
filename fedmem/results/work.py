"""A stage in the making: a hidden folder that takes the stage's place in one rename, its manifest written last."""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from fedmem.config.parameter import StageConfig
from fedmem.config.stages import check_together
from fedmem.machine.paths import PACKAGE, digest_of, file_digest
from fedmem.results.code_files import code_files
from fedmem.results.identity import identity_of, outside_digests, stage_folder
from fedmem.results.progress import KEPT, resume_or_create
from fedmem.results.stage import MANIFEST, Stage, StageError, open_stage

RECORDED_VERSIONS = (
    "accelerate", "datasets", "datasketch", "flwr", "flwr-datasets", "nltk", "numpy", "pandas", "pyarrow",
    "scikit-learn", "tantivy", "torch", "transformers",
)  # fmt: skip


# --- publishing -----------------------------------------------------------------------------------------------------


@dataclass
class Work:
    """An unfinished stage: a hidden folder to write into, which `publish` publishes as a whole.

    A stage that can continue after an interruption stores its state in `progress` (`fedmem.results.progress`). A new
    Work of
    the same identity and code then starts with the folder that the interrupted one left.
    """

    stage: str
    target: Path
    identity: str
    parents: tuple[Stage, ...] = ()
    config: StageConfig | None = None
    digests: dict[str, str] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)  # files that an export may contain

    def __post_init__(self) -> None:
        # Jupyter prefers a kernelspec of the user to that of the environment: the stage would run with other packages.
        interpreter = os.environ.get("FEDMEM_PYTHON")
        if interpreter and os.path.realpath(interpreter) != os.path.realpath(sys.executable):
            raise StageError(
                f"this kernel runs {sys.executable}, the runner {interpreter}: another kernel named python3 takes "
                "precedence over the environment's own; remove it (`jupyter kernelspec list` shows its folder)"
            )
        self.code_files = code_files(self.stage)  # as the files are now: a kernel lives long, and code is edited
        self.code = digest_of(self.code_files)
        self.folder, self.progress = resume_or_create(self.target, {"identity": self.identity, "code": self.code})
        self.started, self._clock = datetime.now(UTC), time.perf_counter() - self.progress.seconds

    def path(self, name: str, shared: bool = False) -> Path:
        """Path to write a file of this stage to; its parent folders are made.

        shared: whether an export may contain the file. It must hold no text of rows and no row ids.
        """
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.shared |= {name} if shared else set()
        return path

    def save_table(self, name: str, frame, shared: bool = False) -> None:
        """Write the DataFrame `frame` as `<name>.parquet`, without its index. name, shared: as in `path`."""
        frame.to_parquet(self.path(f"{name}.parquet", shared), index=False)

    def save_json(self, name: str, value: Any, shared: bool = False) -> None:
        """Write `value` as `<name>.json`; NaN becomes null. name, shared: as in `path`."""
        # allow_nan=False: JSON has no infinity either, and one in the results is an error
        text = json.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False)
        self.path(f"{name}.json", shared).write_text(text + "\n", encoding="utf-8")

    def publish(self, device: str = "cpu") -> Stage:
        """Write the manifest and move the folder to the stage's place; a former stage there is removed.

        device: recorded in the manifest. Raises StageError if the work folder was removed by another process.
        """
        if not (self.folder / KEPT).is_dir():
            raise StageError(f"{self.folder} is gone: another process considered this one dead. Run the stage again")
        (self.folder / MANIFEST).unlink(missing_ok=True)  # one of an interrupted publish is no file of the stage
        paths = {str(p.relative_to(self.folder)): p for p in sorted(self.folder.rglob("*")) if p.is_file()}
        paths = {name: path for name, path in paths.items() if not name.startswith(f"{KEPT}/")}
        files = {name: file_digest(path) for name, path in paths.items()}
        sizes = {name: path.stat().st_size for name, path in paths.items()}
        manifest = self._manifest(device) | {"files": files, "sizes": sizes}
        (self.folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        shutil.rmtree(self.folder / KEPT)  # not before: until here an interrupted stage can still be resumed
        # Two renames instead of a copy: at no time does the stage's folder contain only some of its files.
        former = self.target.parent / f".{self.target.name}.former{os.getpid()}"
        if self.target.exists():
            self.target.rename(former)
        self.folder.rename(self.target)
        shutil.rmtree(former, ignore_errors=True)
        for record in self.target.parent.glob(f"{self.target.name}.failed.*"):  # of an earlier attempt
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
            "shared": sorted(self.shared),
            "code": self.code,
            "code_files": self.code_files,
            "commit": _commit(),
            "versions": {"python": platform.python_version()}
            | {name: metadata.version(name) for name in RECORDED_VERSIONS},
            "device": device,
            "started": self.started.isoformat(timespec="milliseconds"),
            "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "seconds": round(time.perf_counter() - self._clock, 3),
            "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,  # Linux counts in KiB
        }


def begin_stage(config: StageConfig, parent: Stage | None = None) -> Work:
    """Check a stage's parameters against its ancestors' and open its work folder.

    config: the stage's parameters. parent: the finished stage that it is made from; None for a partition. The stage
    must use `work.config`, in which derived values (the round that "last" means) are filled in.
    Raises ConfigError or FileNotFoundError before anything is written.
    """
    configs = (parent.configs if parent else {}) | {config.stage: config}
    config = check_together(configs)[config.stage].settled()
    digests = outside_digests(config)
    stage_identity = identity_of(config, parent.identity if parent else None, digests)
    parents = (parent,) if parent else ()
    return Work(config.stage, stage_folder(config, stage_identity), stage_identity, parents, config, digests)


def _plain(value: Any) -> Any:
    """`value` in JSON's types: numpy scalars and arrays converted, keys as strings, NaN as None."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and value != value else value  # only NaN differs from itself


def _commit() -> str | None:
    """The commit of the checkout, with "-dirty" if the tree differs from it; None outside a checkout."""
    git = ["git", "-C", str(PACKAGE.parent), "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
