"""Where shared memory has its files while ranks open them, and how what a killed rank left is found (no torch)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

PLACE = Path("/dev/shm")
PARENT_VARIABLE = "THREEFOLD_PARENT"
"""Environment variable of a rank: process number of the launcher, with which the rank dies."""
_PREFIX = "threefold"


def directory_of(parent: int, number: int) -> Path:
    """The directory of one group of ranks whose launcher, or whose first rank, is process ``parent``."""
    return PLACE / f"{_PREFIX}-{parent}-{number:x}"


def sweep() -> None:
    """Remove this process's directories, and those of processes that are gone.

    Ranks remove them themselves as soon as all have opened the files; a rank that is killed meanwhile can't.
    """
    for path in PLACE.glob(f"{_PREFIX}-*-*") if PLACE.is_dir() else ():
        parent = path.name.split("-")[1]
        if parent.isdecimal() and (int(parent) == os.getpid() or not _lives(int(parent))):
            shutil.rmtree(path, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True
