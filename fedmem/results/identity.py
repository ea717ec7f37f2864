"""What identifies a stage, and where it lies: hashes of parameters, parents, outside files and code.

The hash covers what can change a result: effective parameters, the parent's identity, and the digests of files read
from outside; not paths, devices or numbers of workers. Manifests and publishing are not this module's concern.
"""

import json
from pathlib import Path

from fedmem.config.parameter import ConfigError, StageConfig
from fedmem.machine.paths import PACKAGE, digest_of, file_digest, results_root
from fedmem.models.config_files import model_folder, why_unloadable
from fedmem.models.presets import recipes

NOTEBOOKS = {
    "partition": "1_partition", "train": "2_train", "generate": "3_generate", "detect": "4_detect",
    "analyze": "5_analyze", "studies": "6_report",
}  # fmt: skip


def notebook_file(stage: str) -> Path:
    """The stage's notebook in the checkout."""
    return PACKAGE.parent / "notebooks" / f"{NOTEBOOKS[stage]}.ipynb"


def outside_files(config: StageConfig) -> dict[str, Path | list[Path]]:
    """Files and folders that the stage reads from outside results: {parameter: path}; one that is not there raises."""
    if config.stage == "partition":
        given = {name: getattr(config, name) for name in ("corpus_path", "heldout_path")}
        given = {name: value for name, value in given.items() if value and config.corpus != "synthetic"}
        return {name: _existing(name, value) for name, value in given.items()}
    if config.stage == "train" and (folder := model_folder(config.model)):
        if not (folder / "config.json").is_file():  # before a large folder that is no model is read for its digest
            raise ConfigError(f"model: {folder}: {why_unloadable(folder)}")
        return {"model": folder}
    if config.stage == "detect":
        named = {name: config.effective()[name] for name in ("paraphrase_model", "entity_model")}
        folders = {name: Path(value).expanduser() for name, value in named.items() if value not in (None, "none")}
        return {name: folder for name, folder in folders.items() if folder.is_dir()}
    return {}


def _existing(name: str, value: str | list[str]) -> Path | list[Path]:
    if isinstance(value, list):
        return [_existing(name, one) for one in value]
    path = Path(value).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"{name}: there is no file {value!r}, nor a folder (looked from {Path.cwd()}); give the path of a JSON "
            "Lines, CSV or Parquet file, or of a folder of them"
        )
    return path


def outside_digests(config: StageConfig) -> dict[str, str]:
    """Digests of what the stage reads from outside results: of files and folders, and of a preset's recipe.

    The recipe stands for a preset that is made on first use, so that its stages have their identity before it exists.
    """
    digests = {name: file_digest(path) for name, path in outside_files(config).items()}
    if config.stage == "train" and (recipe := recipes.digest(config.model)):
        digests["model"] = recipe
    return digests


def identity_of(config: StageConfig, parent_identity: str | None = None, digests: dict[str, str] | None = None) -> str:
    """Hash of what can change the stage's result. A file's digest stands in the place of its path."""
    digests = digests if digests is not None else outside_digests(config)
    effective = {name: value for name, value in config.effective().items() if name not in digests}
    return digest_of({"stage": config.stage, "parameters": effective, "parent": parent_identity, "outside": digests})


def stage_folder(config: StageConfig, stage_identity: str, root: Path | None = None) -> Path:
    """Where the stage with this identity lies."""
    slug = "".join(c if c.isalnum() or c in "._-" else "-" for c in config.slug)[:80]
    return (root or results_root()) / config.stage / f"{slug}-{stage_identity[:8]}"


def code_digest(stage: str) -> str:
    """Digest of the code that makes a stage: the package's modules and the notebook's cells, not its outputs."""
    cells = json.loads(notebook_file(stage).read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return digest_of({"modules": package_digest(), "notebook": code})


def package_digest() -> str:
    """Digest of the package's modules as they are installed here."""
    return digest_of({str(p.relative_to(PACKAGE)): file_digest(p) for p in sorted(PACKAGE.rglob("*.py"))})
