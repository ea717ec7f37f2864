"""What identifies a stage, and where it lies: hashes of parameters, parents and outside files.

The hash covers what can change a result: effective parameters, the parent's identity, and the digests of files read
from outside; not paths, devices or numbers of workers. Manifests and publishing are not this module's concern.
"""

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
    """Return the path of the stage's notebook in the checkout."""
    return PACKAGE.parent / "notebooks" / f"{NOTEBOOKS[stage]}.ipynb"


def outside_files(config: StageConfig) -> dict[str, Path | list[Path]]:
    """Return the files and folders that the stage reads from outside results: {parameter: path}.

    Raises FileNotFoundError when a corpus file is missing, and ConfigError when a model folder holds no model.
    """
    if config.stage == "partition":
        given = {name: getattr(config, name) for name in ("corpus_path", "heldout_path")}
        given = {name: value for name, value in given.items() if value and config.corpus != "synthetic"}
        return {name: _existing(name, value) for name, value in given.items()}
    if config.stage == "train" and (folder := model_folder(config.model)):
        if not (folder / "config.json").is_file():  # checked first: a digest would read all of a large wrong folder
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
    """Return {parameter: digest} of the files and folders that the stage reads from outside results.

    A preset that is built on first use has its recipe's digest, so that its stages have an identity before it exists.
    Raises what `outside_files` raises.
    """
    digests = {name: file_digest(path) for name, path in outside_files(config).items()}
    if config.stage == "train" and (recipe := recipes.digest(config.model)):
        digests["model"] = recipe
    return digests


def identity_of(config: StageConfig, parent_identity: str | None = None, digests: dict[str, str] | None = None) -> str:
    """Return the hash of everything that can change the stage's result.

    config: the stage's parameters. parent_identity: identity of the stage that it reads; None: it has no parent.
    digests: {parameter: digest}, used instead of the parameter's path; None: `outside_digests` computes them.

    Raises what `outside_digests` raises when digests is None.
    """
    digests = digests if digests is not None else outside_digests(config)
    effective = {name: value for name, value in config.effective().items() if name not in digests}
    return digest_of({"stage": config.stage, "parameters": effective, "parent": parent_identity, "outside": digests})


def stage_folder(config: StageConfig, stage_identity: str, root: Path | None = None) -> Path:
    """Return the folder of the stage with this identity.

    config: the stage's parameters, for the readable part of the name. stage_identity: from `identity`.
    root: the results folder; None: `results_root()`.
    """
    # cut to 80 characters: file systems limit a name to 255 bytes, and a character may take four
    slug = "".join(c if c.isalnum() or c in "._-" else "-" for c in config.slug)[:80]
    return (root or results_root()) / config.stage / f"{slug}-{stage_identity[:8]}"
