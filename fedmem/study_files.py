"""A study's YAML and what it builds on, layered into the flat parameters of each of its runs.

Precedence: task < base < study < grid < --set. Every fault is a ConfigError that names the file and the key. This
module knows the shape of the files; what a parameter may be is `fedmem.config`'s matter.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fedmem.config import OWNER, ConfigError, closest

SHAPES = {"title": str, "note": str, "base": str, "parameters": dict, "grid": dict, "include": list}
WORDS = {str: "a text", dict: "a mapping of keys to values", list: "a list"}
PATHS = {"corpus_path", "model", "paraphrase_model", "entity_model"}  # parameters that may name a file or folder

Point = tuple[str, dict[str, Any], dict[str, str]]  # run name, flat values, where each value stood


class _Loader(yaml.SafeLoader):
    """YAML as people write numbers today (1e-3 is one; 010 and 1_0 are texts), and no key twice."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a text", node.start_mark)
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


_NUMBERS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$|[-+]?\.inf$|\.nan$"),
    list("-+.0123456789"),
)


def parse(text: str, where: str) -> Any:
    """The value that a YAML text means; ConfigError with `where` it stood when it is none."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}") from None


def read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        known = sorted(p.stem for p in path.parent.glob("*.yaml"))
        others = f"; in {path.parent} are: {', '.join(known)}" if known else ""
        raise ConfigError(f"{path}: there is no such file{others}") from None
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a YAML file in UTF-8: {error}") from None
    content = parse(text, str(path))
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{path}: got {type(content).__name__}; allowed is a mapping of keys to values")
    return content or {}


def points(path: Path, base: str | None, overrides: dict[str, Any], seen: tuple[Path, ...] = ()):
    """(content of the study's file, its Points): one for each point of its grid, then those of included studies."""
    if path in seen:
        raise ConfigError(f"{path}: includes itself, by way of {', '.join(map(str, seen))}")
    content = read(path)
    _check_shape(path, content)
    found: list[Point] = []
    for included in content.get("include", []):
        _, more = points(path.parent / f"{included}.yaml", base, overrides, (*seen, path))
        found += [(f"{included}/{name}", *rest) for name, *rest in more]
    if "grid" in content or "parameters" in content or not found:
        found += _grid_points(path, content, base or content.get("base"), overrides)
    return content, found


def _check_shape(path: Path, content: dict[str, Any]) -> None:
    if not content:
        raise ConfigError(f"{path}: is empty; allowed are {', '.join(sorted(SHAPES))}")
    for key, value in content.items():
        if key not in SHAPES:
            hint = "; parameters stand under `parameters:` or `grid:`" if key in OWNER else closest(key, SHAPES)
            raise ConfigError(f"{path}: unknown key {key!r}{hint} (allowed: {', '.join(sorted(SHAPES))})")
        if not isinstance(value, SHAPES[key]):
            raise ConfigError(f"{path}: {key}: got {value!r}; allowed is {WORDS[SHAPES[key]]}")
    for key, values in content.get("grid", {}).items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{path}: grid: {key}: got {values!r}; allowed is a list of values")
        if len({repr(value) for value in values}) < len(values):
            raise ConfigError(f"{path}: grid: {key}: a value stands twice in {values!r}")


def _grid_points(path: Path, content: dict, base: str | None, overrides: dict[str, Any]) -> Iterator[Point]:
    grid = {k: v for k, v in content.get("grid", {}).items() if k not in overrides}
    base_file, base_values, aliases = _base(path, base)
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        layers = [
            (base_file, base_values), (path, content.get("parameters", {})), (f"{path}: grid", point),
            ("--set", overrides),
        ]  # fmt: skip
        task = next((layer["task"] for _, layer in reversed(layers) if "task" in layer), None)
        tasks = {file.stem: file for file in (path.parent.parent / "tasks").glob("*.yaml")}
        if isinstance(task, str) and task in tasks:
            layers.insert(0, (tasks[task], {"task": task} | read(tasks[task])))
        merged = {k: v for _, layer in layers for k, v in layer.items()}
        origin = {k: str(where) for where, layer in layers for k in layer}
        if isinstance(merged.get("model"), str):
            merged["model"] = aliases.get(merged["model"], merged["model"])
        yield "-".join(_word(k, v) for k, v in point.items()) or path.stem, _absolute(merged), origin


def _absolute(values: dict[str, Any]) -> dict[str, Any]:
    """Paths as seen from here made absolute: notebooks run in a folder of their own."""
    here = {
        name: str(Path(values[name]).expanduser().resolve())
        for name in PATHS & values.keys()
        if isinstance(values[name], str) and values[name] and Path(values[name]).expanduser().exists()
    }
    return values | here


def _base(study: Path, base: str | None) -> tuple[Path | None, dict, dict]:
    """File, parameters and model aliases of a base."""
    if base is None:
        return None, {}, {}
    folder = study.parent.parent / "base"
    known = sorted(p.stem for p in folder.glob("*.yaml"))
    if base not in known:
        raise ConfigError(f"{study}: unknown base {base!r}{closest(base, known)} (allowed: {', '.join(known)})")
    values = read(folder / f"{base}.yaml")
    return folder / f"{base}.yaml", values, values.pop("models", {})


def _word(key: str, value: Any) -> str:
    """A grid value in a run's name: texts speak for themselves, numbers say what they count."""
    text = Path(value).name if isinstance(value, str) else f"{key}={value}"
    return "".join(c if c.isalnum() or c in "._=-" else "_" for c in text)
