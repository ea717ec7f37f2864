"""Other processes of this machine."""

import os


def process_is_alive(pid: int) -> bool:
    """Whether a process of this id lives on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
