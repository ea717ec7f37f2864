"""A study's YAML and what it builds on, or its description in results, to the runs that it consists of.

Precedence: task < base < model alias < study < study's `bases` < grid < points < --set. Every fault is a ConfigError
that names the file and the key. The whole grid is validated before anything starts. What a parameter may be is defined
in `fedmem.config.stages`.

A study's keys: `title`, `note`; `base` (a file of params/base); `parameters`; `bases: {small: {…}}`, parameters that
hold on that base alone (sizes, mostly); `grid: {parameter: [values]}`, whose product makes the runs; `points: {name:
{…}}`, named sets of parameters that change together, each combined with every point of the grid; `include: [studies]`;
`resources: {stage: {mem_mb, runtime, disk_mb, gpu}}`, what a stage asks of a cluster.
A base's keys: parameters, `resources`, and `models: {alias: name}`; an alias may be a mapping, `{model: name, …}`, of
parameters that this model needs.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedmem.config.parameter import ConfigError, closest, unknown
from fedmem.config.stages import OWNER, STAGES, create_all
from fedmem.config.yaml_files import read
from fedmem.results.studies import check_study_name
from fedmem.study.jobs import DESCRIPTION, Run, Study, jobs_of

SHAPES = {
    "title": str, "note": str, "base": str, "parameters": dict, "bases": dict, "grid": dict, "points": dict,
    "include": list, "resources": dict,
}  # fmt: skip

RUNS = {"parameters", "bases", "grid", "points"}  # a study with one of these keys has runs besides the included ones

RESOURCES = {"mem_mb": "MB of memory", "runtime": "minutes", "disk_mb": "MB of disk", "gpu": "GPUs"}

WORDS = {str: "a string", dict: "a mapping of keys to values", list: "a list"}

# Parameters whose value may be a file or folder, or a list of them.
PATHS = {"corpus_path", "heldout_path", "model", "paraphrase_model", "entity_model"}


@dataclass(frozen=True)
class Point:
    """One run as the files define it.

    name: made of the grid values and the point's name. values: flat parameters. origin: {parameter: the file and key it
    comes from}, for error messages. resources: {stage: what it requests from a cluster}.
    """

    name: str
    values: dict[str, Any]
    origin: dict[str, str]
    resources: dict[str, dict[str, int]]


def study_points(
    path: Path, base: str | None, overrides: dict[str, Any], seen: tuple[Path, ...] = ()
) -> tuple[dict[str, Any], list[Point]]:
    """Read a study's file and return (its content, its Points).

    path: the study's YAML file.
    base: name of a base in params/base that replaces the study's own, or None.
    overrides: {parameter: value} of --set, which win over every file.
    seen: resolved paths of the studies that include this one, outermost first.

    The Points of included studies come first, then one for each point of the study's own grid.
    Raises ConfigError when a file is missing or malformed, a key or base is unknown, or a study includes itself.
    """
    place = path.resolve()  # one file can be reached by several relative paths
    if place in seen:
        raise ConfigError(f"{path}: includes itself, through {', '.join(map(str, seen))}")
    content = read(path)
    _check_shape(path, content)
    found: list[Point] = []
    for included in content.get("include", []):
        _, more = study_points(path.parent / f"{included}.yaml", base, overrides, (*seen, place))
        found += [replace(one, name=f"{included}/{one.name}") for one in more]
    if RUNS & content.keys() or not found:
        found += _grid_points(path, content, base or content.get("base"), overrides)
    return content, found


def _check_shape(path: Path, content: dict[str, Any]) -> None:
    if not content:
        raise ConfigError(f"{path}: is empty; expected one or more of {', '.join(sorted(SHAPES))}")
    for key, value in content.items():
        if key not in SHAPES:
            hint = "; parameters belong under `parameters:` or `grid:`" if key in OWNER else closest(key, SHAPES)
            raise ConfigError(f"{path}: unknown key {key!r}{hint} (allowed: {', '.join(sorted(SHAPES))})")
        if not isinstance(value, SHAPES[key]):
            raise ConfigError(f"{path}: {key}: got {value!r}; expected {WORDS[SHAPES[key]]}")
    for key, values in content.get("grid", {}).items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{path}: grid: {key}: got {values!r}; expected a list of values")
        # repr: values may be lists, which no set holds, and 1, 1.0 and True are different values here
        if len({repr(value) for value in values}) < len(values):
            raise ConfigError(f"{path}: grid: {key}: a value appears twice in {values!r}")
    for key in ("points", "bases"):
        for name, values in content.get(key, {}).items():
            if not isinstance(values, dict):
                raise ConfigError(f"{path}: {key}: {name}: got {values!r}; expected {WORDS[dict]}, such as {{}}")
    if content.get("points") == {}:
        raise ConfigError(f"{path}: points: got {{}}, which makes no run; expected a mapping for each name")
    for name, values in content.get("points", {}).items():
        if both := values.keys() & content.get("grid", {}).keys():
            raise ConfigError(f"{path}: points: {name}: the grid already sets {', '.join(sorted(both))}")
    _check_bases(path, content.get("bases", {}))
    _check_resources(path, content.get("resources", {}))


def _check_bases(path: Path, bases: dict[str, dict[str, Any]]) -> None:
    """Check all of `bases`, including the bases that this run does not use.

    A misspelt name in an unused base would otherwise stay unnoticed until somebody runs the study with that base.
    """
    for base, values in bases.items():
        _base_file(path, base, "bases: ")
        for name in values:
            if name not in OWNER:
                raise ConfigError(unknown(name, OWNER, {name: f"{path}: bases: {base}"}))


def _check_resources(path: Path, resources: Any) -> None:
    if not isinstance(resources, dict):
        raise ConfigError(f"{path}: resources: got {resources!r}; expected {WORDS[dict]}")
    for stage, values in resources.items():
        if stage not in STAGES:
            raise ConfigError(f"{path}: resources: unknown stage {stage!r} (allowed: {', '.join(STAGES)})")
        for key, value in values.items() if isinstance(values, dict) else [("", values)]:
            # type() instead of isinstance(): True is an int
            if key not in RESOURCES or type(value) is not int or value < 0:
                allowed = ", ".join(f"{name} ({unit})" for name, unit in RESOURCES.items())
                raise ConfigError(
                    f"{path}: resources: {stage}: got {{{key}: {value!r}}}; expected whole numbers ≥ 0 for {allowed}"
                )


def _grid_points(path: Path, content: dict, base: str | None, overrides: dict[str, Any]) -> Iterator[Point]:
    # --set of a grid parameter collapses its axis: without this, equal runs would appear once for each grid value
    grid = {k: v for k, v in content.get("grid", {}).items() if k not in overrides}
    base_file, base_values, aliases, resources = _base(path, base)
    for stage, values in content.get("resources", {}).items():
        resources = resources | {stage: resources.get(stage, {}) | values}
    tasks = {file.stem: file for file in (path.parent.parent / "tasks").glob("*.yaml")}
    own = (content.get("parameters", {}), content.get("bases", {}).get(base, {}))
    for *values, (name, chosen) in itertools.product(*grid.values(), content.get("points", {"": {}}).items()):
        point = dict(zip(grid, values, strict=True))
        layers = [
            (base_file, base_values), (path, own[0]), (f"{path}: bases: {base}", own[1]), (f"{path}: grid", point),
            (f"{path}: points: {name}", chosen), ("--set", overrides),
        ]  # fmt: skip
        # Model and task may be set in any layer, so the layers that depend on them are inserted afterwards.
        alias = aliases.get(_last(layers, "model"))
        if isinstance(alias, dict):
            layers.insert(1, (f"{base_file}: models", {k: v for k, v in alias.items() if k != "model"}))
        task = _last(layers, "task")  # after the alias, which may set the task
        if task in tasks:
            layers.insert(0, (tasks[task], {"task": task} | read(tasks[task])))
        merged = {k: v for _, layer in layers for k, v in layer.items()}
        origin = {k: str(where) for where, layer in layers for k in layer}
        if alias is not None:
            merged["model"] = alias["model"] if isinstance(alias, dict) else alias
        words = [_word(k, v) for k, v in point.items()] + [name] * bool(name)
        yield Point("-".join(words) or path.stem, with_absolute_paths(merged), origin, resources)


def _last(layers: list[tuple[Any, dict[str, Any]]], name: str) -> str | None:
    """The parameter's value in the last layer that has it, when it is a string; otherwise None."""
    value = next((layer[name] for _, layer in reversed(layers) if name in layer), None)
    return value if isinstance(value, str) else None


def with_absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """The values with paths, which are relative to the current folder, made absolute: notebooks run in another one."""
    return values | {name: _absolute_path(values[name]) for name in PATHS & values.keys()}


def _absolute_path(value: Any) -> Any:
    if isinstance(value, list):
        return [_absolute_path(one) for one in value]
    # Only what exists is a path: a model may also be a preset or a hub id.
    if isinstance(value, str) and value and Path(value).expanduser().exists():
        return str(Path(value).expanduser().resolve())
    return value


def _base(study: Path, base: str | None) -> tuple[Path | None, dict, dict, dict]:
    """Read a base and return its file, parameters, model aliases and resources."""
    if base is None:
        return None, {}, {}, {}
    path = _base_file(study, base)
    values = read(path)
    aliases, resources = values.pop("models", {}), values.pop("resources", {})
    for alias, model in aliases.items() if isinstance(aliases, dict) else [("", aliases)]:
        if not isinstance(model.get("model") if isinstance(model, dict) else model, str) or not alias:
            raise ConfigError(
                f"{path}: models: {alias}: got {model!r}; expected a model's name, or {{model: NAME, PARAMETER: …}}"
            )
    _check_resources(path, resources)
    return path, values, aliases, resources


def _base_file(study: Path, base: str, key: str = "") -> Path:
    """The file of a base in the folder `base` beside the folder of studies. Raises ConfigError for an unknown name."""
    folder = study.parent.parent / "base"
    known = sorted(p.stem for p in folder.glob("*.yaml"))
    if base not in known:
        allowed = ", ".join(known) or f"none, because {folder} holds no file"
        raise ConfigError(f"{study}: {key}unknown base {base!r}{closest(base, known)} (allowed: {allowed})")
    return folder / f"{base}.yaml"


def _word(key: str, value: Any) -> str:
    """A grid value as part of a run's name: a string alone, any other value as key=value."""
    text = Path(value).name if isinstance(value, str) else f"{key}={value}"
    # The name becomes part of file names.
    return "".join(c if c.isalnum() or c in "._=-" else "_" for c in text)


# --- reading --------------------------------------------------------------------------------------------------------


def load_study(
    path: str | Path, base: str | None = None, overrides: dict[str, Any] | None = None, name: str | None = None
) -> Study:
    """Read and validate a study with its base and the studies that it includes; nothing is executed.

    path: a study's YAML file; or a study in results, as its folder or `study.json`, whose parameters are kept.
    base: name of a base that replaces the study's own; None keeps it. Not valid for a study in results.
    overrides: {parameter: value}; they take precedence over every other source.
    name: name of the study in results; None takes the file's.
    Raises ConfigError, with the file, the key, the value and the expected values, one line for each fault.
    """
    path = Path(path)
    path = path / DESCRIPTION if path.is_dir() else path
    if path.name == DESCRIPTION:
        content, found_points = _described(path, base, overrides or {})
    else:
        content, found_points = study_points(path, base, overrides or {})
    name = name or content.get("name", path.stem)
    check_study_name(name, f"{path}: name of a study")
    faults, found, known = [], {}, {}
    for point in found_points:
        try:
            configs = create_all(point.values, point.origin)
            run = Run(point.name, configs, jobs_of(configs, known), point.resources)
            # the same run may appear twice; equal names with different parameters are a fault
            if found.setdefault(point.name, run) != run:
                faults.append(f"{path}: two runs are named {point.name!r}: their grid values are written alike")
        except (ConfigError, FileNotFoundError) as error:
            # collected, so that one attempt reports the faults of the whole grid
            faults += str(error).splitlines()
    if faults:
        # runs that share a stage repeat its fault
        raise ConfigError("\n".join(dict.fromkeys(faults)))
    return Study(name, content.get("title", path.stem), content.get("note", ""), tuple(found.values()))


def _described(path: Path, base: str | None, overrides: dict[str, Any]) -> tuple[dict[str, Any], list[Point]]:
    """Return (description, Points) of a file that `Study.describe` wrote; parameters come from it or an override."""
    if base is not None:
        raise ConfigError(
            f"{path}: --base: got {base!r}; expected no base: its runs list every parameter. Use --set, or the YAML"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        described = [(run["name"], run["parameters"], run.get("resources", {})) for run in content["runs"]]
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no such file; expected a study's folder in results, which contains it"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is not a description of a study ({type(error).__name__}: {error})") from None
    found = []
    for run, parameters, asked in described:
        origin = dict.fromkeys(parameters, f"{path}: {run}") | dict.fromkeys(overrides, "--set")
        found.append(Point(run, with_absolute_paths(parameters | overrides), origin, asked))
    return content, found
