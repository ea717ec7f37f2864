"""What a parameter is: typed, bounded, explained, owned by one stage; and what is said of one that is wrong.

`fedmem.config.stages` declares the stages' parameters with this. This module knows none of them.
"""

import ast
import difflib
from types import UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class ConfigError(ValueError):
    """A parameter that is unknown, of the wrong type, out of range, or at odds with another one."""


def field(default: Any, meaning: str, *, when: dict | None = None, identity: bool = True, **bounds: Any) -> Any:
    """A parameter. `when`: {field: values under which it matters}; `identity`: whether it can change bytes."""
    return Field(default, description=meaning, json_schema_extra={"when": when or {}, "identity": identity}, **bounds)


class StageConfig(BaseModel):
    """What every stage's parameters share: strict types, no unknown names, a readable slug, effective values."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    stage: ClassVar[str]
    owner: ClassVar[dict[str, str]] = {}  # of every parameter, the one stage that it belongs to
    parent: ClassVar[str | None] = None
    shown: ClassVar[tuple[str, ...]]  # what the notebook's parameters cell shows; the rest goes through `options`

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        StageConfig.owner.update(dict.fromkeys(cls.model_fields, cls.stage))

    @property
    def slug(self) -> str:
        """A few words that tell this stage's folder from its neighbours."""
        raise NotImplementedError

    @classmethod
    def create(cls, values: dict[str, Any], origin: dict[str, str] | None = None) -> Self:
        """The model of these values; a ConfigError says where (`origin`: name → file or flag), what and why."""
        try:
            return cls(**values)
        except ValidationError as error:
            said = dict.fromkeys(_explain(cls, e, origin or {}) for e in error.errors())  # a union's fault comes once
            raise ConfigError("\n".join(said)) from None

    @classmethod
    def from_notebook(cls, names: dict[str, Any]) -> Self:
        """The parameters that a notebook's first cells have set: `StageConfig.from_notebook(globals())`.

        Read are the shown parameters, what is in `options`, and whatever papermill injected; an injected name that is
        no parameter of this stage is an error (papermill itself only warns).
        """
        options = names.get("options", {})
        if not isinstance(options, dict):
            raise ConfigError(f"options: got {options!r}; allowed is a dict of {cls.stage} parameters, such as {{}}")
        both = sorted(set(options) & set(cls.shown))
        if both:
            raise ConfigError(f"options names {', '.join(both)}, which the parameters cell shows: set it there")
        injected = _injected_names(names.get("In", [])) - {"options", cls.parent}
        values = {name: names[name] for name in (*cls.shown, *sorted(injected)) if name in names}
        return cls.create(values | options)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # lists and mappings have no hash of their own

    def matters(self, name: str) -> bool:
        """Whether a parameter has any meaning beside the others."""
        when = type(self).model_fields[name].json_schema_extra["when"]
        return all(getattr(self, other) in allowed for other, allowed in when.items())

    def effective(self) -> dict[str, Any]:
        """The parameters that identify the stage's result: those that cannot matter are null, the rest as set."""
        fields = type(self).model_fields
        identifying = [name for name in fields if fields[name].json_schema_extra["identity"]]
        return {name: getattr(self, name) if self.matters(name) else None for name in identifying}

    def settled(self) -> Self:
        """The same with what cannot matter at its default, so that runs of one identity cannot differ by it."""
        fields = type(self).model_fields
        return self.model_copy(update={name: fields[name].default for name in fields if not self.matters(name)})

    def table(self):
        """The resolved parameters as a notebook shows them: a styled table (parameter, value, matters, meaning)."""
        import pandas as pd

        effective = self.effective()
        rows = [
            (name, str(getattr(self, name)), effective.get(name, "") is not None, info.description)
            for name, info in type(self).model_fields.items()
        ]
        table = pd.DataFrame(rows, columns=["parameter", "value", "matters", "meaning"]).set_index("parameter")
        return table.style.set_uuid("parameters").set_properties(**{"text-align": "left"})


def allowed_words(model: type[StageConfig], name: str) -> str:
    """What a parameter may be, in words."""
    info = model.model_fields[name]
    options = get_args(info.annotation) if get_origin(info.annotation) in (Literal, Union, UnionType) else ()
    if options and all(isinstance(option, str) for option in options):
        return " | ".join(options)
    kinds = [get_origin(kind) or kind for kind in (options or (info.annotation,)) if kind is not type(None)]
    words = {
        int: "a whole number",
        float: "a number",
        str: "a text",
        bool: "true or false",
        dict: "a mapping",
        list: "a list",
    }
    text = " or ".join(words.get(kind, str(kind)) for kind in kinds)
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [f"{signs[k]} {getattr(m, k)}" for m in info.metadata for k in signs if getattr(m, k, None) is not None]
    return text + (" " + " and ".join(bounds) if bounds else "") + (" or null" if type(None) in options else "")


def closest(name: str, known) -> str:
    """`; did you mean 'x'?` for the known name that is most like it, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def where(name: str, origin: dict[str, str]) -> str:
    return f"{origin[name]}: " if name in origin else ""


def unknown(name: str, known, origin: dict[str, str]) -> str:
    """The error for an unknown parameter: where it stood, and the name that is most like it, or all known ones."""
    likely = closest(name, known)
    return f"{where(name, origin)}unknown parameter {name!r}" + (likely or f" (allowed: {', '.join(sorted(known))})")


def _explain(model: type[StageConfig], error: dict, origin: dict[str, str]) -> str:
    """One pydantic error in the project's words: where, what, got, allowed, and whose name it may be instead."""
    name = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] == "extra_forbidden":
        owner = StageConfig.owner.get(name)
        hint = f"{name!r} is a parameter of the {owner} stage, not of {model.stage}: set it in that stage's notebook"
        return where(name, origin) + hint if owner else unknown(name, model.model_fields, origin)
    if not name:  # a check across fields: its message opens with the field's name
        message = error["msg"].removeprefix("Value error, ")
        return where(message.split(":")[0], origin) + message
    return f"{where(name, origin)}{name}: got {error['input']!r}; allowed is {allowed_words(model, name)}"


def _injected_names(history: list[str]) -> set[str]:
    """Names that papermill's injected cell binds, read from the kernel's input history.

    Papermill opens that cell with a comment of its own ("# Parameters"), which no cell of ours begins with.
    """
    names = set()
    for source in history:
        if source.startswith("# Parameters\n"):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
    return names
