"""The definition of a parameter (type, bounds, meaning, owning stage), and the error messages for wrong values.

`fedmem.config.stages` declares the stages' parameters with this module.
"""

import ast
import difflib
from types import UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class ConfigError(ValueError):
    """A parameter that is unknown, of the wrong type, out of range, or in conflict with another one."""


def field(default: Any, meaning: str, *, when: dict | None = None, identity: bool = True, **bounds: Any) -> Any:
    """The declaration of a parameter, as a pydantic field.

    default: the value when none is given. meaning: one phrase that explains it, shown in tables.
    when: {other parameter: the values for which this one matters}; None: it always matters.
    identity: whether it can change the bytes of a result, and so belongs to the stage's identity.
    bounds: pydantic's constraints: ge, gt, le, lt, min_length.
    """
    return Field(default, description=meaning, json_schema_extra={"when": when or {}, "identity": identity}, **bounds)


class StageConfig(BaseModel):
    """The base class of the stages' parameters: strict types, no unknown names, a readable slug, effective values."""

    # strict and forbid: neither a number in quotes nor a misspelt name may pass silently
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    stage: ClassVar[str]
    owner: ClassVar[dict[str, str]] = {}  # of every parameter, the stage that owns it; all subclasses share this dict
    parent: ClassVar[str | None] = None
    shown: ClassVar[tuple[str, ...]]  # what the notebook's parameters cell sets; the others go through `options`

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        StageConfig.owner.update(dict.fromkeys(cls.model_fields, cls.stage))

    @property
    def slug(self) -> str:
        """A few words that distinguish this stage's folder from the others."""
        raise NotImplementedError

    @classmethod
    def create(cls, values: dict[str, Any], origin: dict[str, str] | None = None) -> Self:
        """The configuration with these values.

        values: {parameter: value}. origin: {parameter: the file or flag that it comes from}, for the message.
        Raises ConfigError, which says where, what and why, with one line for each wrong value.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            # a dict removes repetitions in order: pydantic reports one error for each member of a union
            messages = dict.fromkeys(_explain(cls, e, origin or {}) for e in error.errors())
            raise ConfigError("\n".join(messages)) from None

    @classmethod
    def from_notebook(cls, names: dict[str, Any]) -> Self:
        """The parameters that a notebook's first cells have set: `StageConfig.from_notebook(globals())`.

        names: the notebook's global names. Used are the shown parameters, the entries of `options`, and the names that
        papermill injected. Raises ConfigError when a value is not valid, and when an injected name is not a parameter
        of this stage (papermill itself only warns).
        """
        options = names.get("options", {})
        if not isinstance(options, dict):
            raise ConfigError(f"options: got {options!r}; expected a dict of {cls.stage} parameters, such as {{}}")
        both = sorted(set(options) & set(cls.shown))
        if both:
            raise ConfigError(f"options names {', '.join(both)}, which the parameters cell shows: set it there")
        # `options` and the parent's folder are set in every notebook; they are not parameters
        injected = _injected_names(names.get("In", [])) - {"options", cls.parent}
        values = {name: names[name] for name in (*cls.shown, *sorted(injected)) if name in names}
        return cls.create(values | options)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # lists and mappings are not hashable

    def matters(self, name: str) -> bool:
        """Whether a parameter has any effect, given the values of the others."""
        when = type(self).model_fields[name].json_schema_extra["when"]
        return all(getattr(self, other) in allowed for other, allowed in when.items())

    def effective(self) -> dict[str, Any]:
        """The parameters that identify the stage's result; those without effect are None."""
        fields = type(self).model_fields
        identifying = [name for name in fields if fields[name].json_schema_extra["identity"]]
        return {name: getattr(self, name) if self.matters(name) else None for name in identifying}

    def settled(self) -> Self:
        """A copy with all parameters without effect at their defaults, so that runs of one identity are equal."""
        fields = type(self).model_fields
        return self.model_copy(update={name: fields[name].default for name in fields if not self.matters(name)})

    def table(self):
        """The resolved parameters as a styled table for a notebook: parameter, value, matters, meaning."""
        import pandas as pd  # imported here: the command line reads parameters without it

        effective = self.effective()
        rows = [
            (name, str(getattr(self, name)), effective.get(name, "") is not None, info.description)
            for name, info in type(self).model_fields.items()
        ]
        table = pd.DataFrame(rows, columns=["parameter", "value", "matters", "meaning"]).set_index("parameter")
        # a fixed uuid: pandas would put a random one into the HTML of every execution
        return table.style.set_uuid("parameters").set_properties(**{"text-align": "left"})


def allowed_words(model: type[StageConfig], name: str) -> str:
    """The values that a parameter accepts, in words: "a whole number ≥ 1"."""
    info = model.model_fields[name]
    options = get_args(info.annotation) if get_origin(info.annotation) in (Literal, Union, UnionType) else ()
    if options and all(isinstance(option, str) for option in options):
        return " | ".join(options)
    kinds = [get_origin(kind) or kind for kind in (options or (info.annotation,)) if kind is not type(None)]
    words = {
        int: "a whole number",
        float: "a number",
        str: "a string",
        bool: "true or false",
        dict: "a mapping",
        list: "a list",
    }
    text = " or ".join(words.get(kind, str(kind)) for kind in kinds)
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [f"{signs[k]} {getattr(m, k)}" for m in info.metadata for k in signs if getattr(m, k, None) is not None]
    return text + (" " + " and ".join(bounds) if bounds else "") + (" or null" if type(None) in options else "")


def closest(name: str, known) -> str:
    """`; did you mean 'x'?` for the known name most similar to `name`; empty if none is similar."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def where(name: str, origin: dict[str, str]) -> str:
    """The beginning of a message: the file or flag that a parameter comes from, and a colon; empty if unknown."""
    return f"{origin[name]}: " if name in origin else ""


def unknown(name: str, known, origin: dict[str, str]) -> str:
    """The error message for an unknown parameter, with the most similar known name, or all known names.

    name: the unknown name. known: the names that exist. origin: {parameter: the file or flag that it comes from}.
    """
    likely = closest(name, known)
    return f"{where(name, origin)}unknown parameter {name!r}" + (likely or f" (allowed: {', '.join(sorted(known))})")


def _explain(model: type[StageConfig], error: dict, origin: dict[str, str]) -> str:
    """One pydantic error as a message: where, parameter, got, expected; for an unknown name, the stage that owns it."""
    name = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] == "extra_forbidden":
        owner = StageConfig.owner.get(name)
        hint = f"{name!r} is a parameter of the {owner} stage, not of {model.stage}: set it in that stage's notebook"
        return where(name, origin) + hint if owner else unknown(name, model.model_fields, origin)
    if not name:  # a check across fields: its message begins with the field's name
        message = error["msg"].removeprefix("Value error, ")
        return where(message.split(":")[0], origin) + message
    return f"{where(name, origin)}{name}: got {error['input']!r}; expected {allowed_words(model, name)}"


def _injected_names(history: list[str]) -> set[str]:
    """The names that papermill's injected cell assigns, read from the kernel's input history.

    Papermill begins that cell with the comment "# Parameters", with which no cell of the notebooks begins.
    """
    names = set()
    for source in history:
        if source.startswith("# Parameters\n"):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
    return names
