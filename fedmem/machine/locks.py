"""Locks on open files. The system releases a lock when its last process ends, so that none is ever left behind."""

import fcntl
from typing import IO


def lock(file: IO, wait: bool = False, shared: bool = False) -> bool:
    """Take the lock of a file, until it is closed. Returns False when another process holds it.

    file: an open file. wait: True waits for the lock instead. shared: True takes a lock that others may share.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
