"""The way in: Ctrl-C ends the process quietly, from the first import on, unless a verb listens to it itself."""

from __future__ import annotations

import signal
import sys
from types import FrameType


def main() -> None:
    """The ``threefold`` command."""
    signal.signal(signal.SIGINT, _leave)
    from threefold.cli.main import main as run

    run()


def _leave(signum: int, frame: FrameType | None) -> None:
    """Not by KeyboardInterrupt, whose traceback would be shown: what is open is closed all the same."""
    sys.exit(128 + signum)
