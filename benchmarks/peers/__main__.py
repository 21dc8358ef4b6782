"""The command: ``python -m benchmarks.peers``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from benchmarks.peers.compare import compare, single_losses
from benchmarks.peers.hosts import PeerError, interpreters
from benchmarks.peers.report import table, write_results
from benchmarks.peers.systems import MODES, PEERS
from benchmarks.peers.work import SIZES


def main() -> int:
    """Compare and print; 1 if a system of threefold has no number."""
    options = _options()
    signal.signal(signal.SIGTERM, _leave)
    work, python = SIZES[options.size], interpreters(options.deepspeed_python)
    failed = False
    try:
        truth = single_losses(options, work, python)
        for mode in (mode for mode in MODES if mode in options.modes):
            results = compare(mode, options, work, python, truth)
            if not results:
                continue
            print(f"\n{table(results)}\n", flush=True)
            if options.write:
                write_results(options, work, results)
            failed |= any(result.error for result in results if result.system.peer == "threefold")
    except PeerError as error:
        print(f"error: without the bound nothing can be compared: {error}", file=sys.stderr)
        return 1
    return int(failed)


def _leave(signum: int, frame: FrameType | None) -> None:
    """The processes of all systems end too."""
    sys.exit(128 + signum)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=sys.modules["benchmarks.peers"].__doc__
    )
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="default: all")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="default: all")
    parser.add_argument("--systems", metavar="REGEX", help="only systems whose name matches")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each system; medians are over these")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="of every mode but 3d, which has 8")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="for one answer of a system")
    parser.add_argument("--verbose", action="store_true", help="print the log of a system that fails")
    parser.add_argument("--write", action="store_true", help="write the results into benchmarks/RESULTS.md")
    parser.add_argument(
        "--deepspeed-python",
        default=os.environ.get("DEEPSPEED_PYTHON") or _beside("deepspeed"),
        metavar="FILE",
        help="a Python that has DeepSpeed, torch, numpy, pydantic and pyyaml (or DEEPSPEED_PYTHON)",
    )
    return parser.parse_args()


def _beside(name: str) -> str | None:
    """A virtual environment that ``make bench`` has made for a peer."""
    python = Path(__file__).parents[2] / ".venv" / "peers" / name / "bin" / "python"
    return str(python) if python.exists() else None


if __name__ == "__main__":
    sys.exit(main())
