"""Files that the user names on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

from threefold.errors import JobError, Problem


def write_output(option: str, path: Path, text: str) -> None:
    """Write the file that ``option`` names. Raises JobError naming the option when it can't be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fix = "name a file in a directory that exists and can be written to"
        raise JobError([Problem(option, f"{path} can't be written: {error.strerror}", fix)]) from None


def say_written(path: Path, what_for: str = "") -> None:
    """Tell on stderr, since stdout may be what a program reads."""
    print(f"wrote {path}{what_for}", file=sys.stderr)
