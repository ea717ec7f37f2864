"""YAML as studies, bases and options write it: read strictly, with the place in every error."""

import re
from pathlib import Path
from typing import Any

import yaml

from fedmem.config.parameter import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, 010 and 1_0 are strings, and a repeated key is an error."""

    def construct_mapping(self, node, deep=False):
        # PyYAML keeps the last of two equal keys without a warning: a parameter given twice would be lost.
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a string", node.start_mark)
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} appears twice", node.start_mark)
        return super().construct_mapping(node, deep)


# PyYAML's number patterns follow YAML 1.1, where 010 is octal and 1e-3, without a dot, is a string. The resolvers are
# copied before they are changed, because yaml.SafeLoader's own table is shared by the whole process.
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
    """Parse a YAML string into a value. Raises ConfigError, which begins with `where`, when the string is not YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2024-13-45 matches YAML's pattern
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}") from None


def read(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file; an empty file gives an empty mapping.

    Raises ConfigError when the file is missing, is not YAML in UTF-8, or holds something other than a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        known = sorted(p.stem for p in path.parent.glob("*.yaml"))
        others = f"; files in {path.parent}: {', '.join(known)}" if known else ""
        raise ConfigError(f"{path}: there is no such file; expected the path of a YAML file{others}") from None
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a YAML file in UTF-8: {error}") from None
    content = parse(text, str(path))
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{path}: got {type(content).__name__}; expected a mapping of keys to values")
    return content or {}
