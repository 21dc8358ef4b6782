"""How a rank ends: with its own status and all that it said, whatever Python's teardown would have done."""

import subprocess
import sys

import pytest

RANK = """
import atexit, os, sys
from threefold.cli.entry import end_at_once

def run():
    print("said", end="")
    {end}

atexit.register(os.abort)  # as a library's thread does when it is taken down at the wrong moment
end_at_once(run)
"""


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        ("pass", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no')", 1, "no"),
        ("raise ValueError('bad')", 1, "ValueError: bad"),
    ],
)
def test_a_rank_ends_as_its_work_did(end: str, status: int, error: str) -> None:
    ended = subprocess.run([sys.executable, "-c", RANK.format(end=end)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (status, "said")
    assert (ended.stderr.splitlines() or [""])[-1] == error
