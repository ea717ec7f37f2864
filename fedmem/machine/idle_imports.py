"""Imports without what takes longest in them and is of no use here: seconds of every notebook's start."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Inside, importing a module of these is an ImportError, which those who import them allow for.

    Modules that are imported already stay; afterwards all can be imported as ever.
    """
    idle = [name for name in names if name not in sys.modules]
    sys.modules |= dict.fromkeys(idle)
    try:
        yield
    finally:
        for name in idle:
            del sys.modules[name]
