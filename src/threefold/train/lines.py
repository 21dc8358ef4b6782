"""A file of JSON lines that holds whole lines only, whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threefold.errors import WorkerError


class LineFile:
    """Appends JSON objects, each as one line that is on its way to the disk when ``append`` returns.

    A line that can't be written whole, as on a full disk, is taken back, and WorkerError names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Unbuffered: what a buffer still holds would be tried again, and fail again, when the file is closed.
        self._file = path.open("ab", buffering=0)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._file.closed

    def append(self, fields: Mapping[str, Any]) -> None:
        """Write one line; numbers must be finite."""
        line = json.dumps(fields, allow_nan=False).encode() + b"\n"
        size = os.fstat(self._file.fileno()).st_size
        try:
            rest = memoryview(line)
            while rest:  # a write may end early, and the next one says why
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise cannot_write(self.path, error) from None

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def cannot_write(path: Path, error: OSError) -> WorkerError:
    """What to raise when a file of the run can't be written."""
    return WorkerError(f"{path} can't be written: {error.strerror}\n    fix: make room on its disk, and start again")
