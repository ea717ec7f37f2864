"""Suppresses slow imports that are not needed; they would add seconds to the start of every notebook."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Inside the block, importing one of these modules raises ImportError, which their importers handle.

    Modules that are imported already are not affected. After the block, all can be imported as usual.
    """
    idle = [name for name in names if name not in sys.modules]
    # None in sys.modules makes an import fail at once, without a search
    sys.modules |= dict.fromkeys(idle)
    try:
        yield
    finally:
        for name in idle:
            del sys.modules[name]
