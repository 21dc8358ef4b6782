"""What is public about the machines and settings of well-known runs: a run that names its origin need not repeat it.

Facts only, each with its source: the network of a node and the software. Nothing here is fitted.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

TABLE = "data/known_runs.csv"


@dataclass(frozen=True)
class KnownRuns:
    """``nic_bytes_per_s`` is the network of one device in one direction; ``software`` is empty where the run shows
    it."""

    pattern: re.Pattern[str]
    nic_bytes_per_s: float
    software: str


def find_known(text: str) -> KnownRuns | None:
    """The runs that ``text`` names; None for any other."""
    return next((known for known in _table() if known.pattern.search(text)), None)


@lru_cache(maxsize=1)
def _table() -> tuple[KnownRuns, ...]:
    lines = files("threefold.cost").joinpath(TABLE).read_text(encoding="utf-8").splitlines()
    return tuple(
        KnownRuns(
            re.compile(row["said"]),
            float(row["node_gbps"]) * 1e9 / 8 / float(row["devices_per_node"]),
            row["software"],
        )
        for row in csv.DictReader(lines)
    )
