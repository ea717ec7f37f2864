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
    """A stage in the making: a hidden folder to write into, published whole by `publish`.

    A stage that can go on after an interruption keeps in `progress` how far it has come (`fedmem.results.progress`); a
    new
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
        self.code_files = code_files(self.stage)  # as the files are now: a kernel lives long, and code is edited
        self.code = digest_of(self.code_files)
        self.folder, self.progress = resume_or_create(self.target, {"identity": self.identity, "code": self.code})
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
    """Checks a stage's parameters against its ancestors' and opens its work folder.

    `work.config` is what the stage shall use: derived values (the round that "last" means) are filled in. Raises
    ConfigError or FileNotFoundError before anything is written.
    """
    configs = (parent.configs if parent else {}) | {config.stage: config}
    config = check_together(configs)[config.stage].settled()
    digests = outside_digests(config)
    stage_identity = identity_of(config, parent.identity if parent else None, digests)
    parents = (parent,) if parent else ()
    return Work(config.stage, stage_folder(config, stage_identity), stage_identity, parents, config, digests)


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
