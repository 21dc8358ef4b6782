"""The way in and, for a rank, the way out.

Ctrl-C ends the process quietly, from the first import on, unless a verb listens to it itself.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn


def main() -> None:
    """The ``threefold`` command."""
    signal.signal(signal.SIGINT, _leave)
    from threefold.cli.main import main as run

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        end_at_once(run)
    run()


def end_at_once(run: Callable[[], None]) -> NoReturn:
    """Be a rank: run, and end with the status of ``run`` as soon as all that was printed is out.

    Python would take everything down first, while the backend's threads still watch their sockets and peers hang up one
    after the other. Gloo and its file store throw where nobody can catch it when that happens at the wrong moment, and
    a rank whose work is done, or whose error is told, would seem to have crashed (SIGABRT).
    """
    status = 1
    try:
        run()
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        else:
            status = end.code or 0
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads, or it is closed
            stream.flush()
    os._exit(status)


def _leave(signum: int, frame: FrameType | None) -> None:
    """Not by KeyboardInterrupt, whose traceback would be shown: what is open is closed all the same."""
    sys.exit(128 + signum)
