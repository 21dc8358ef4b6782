"""One event of a step, and the columns that hold many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from threefold.schedule import Action, Kind

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

KINDS = tuple(Kind)
"""Kinds of actions, by their code in a column of codes."""
CODES: Mapping[Kind, int] = {kind: code for code, kind in enumerate(KINDS)}


def sum_by(index: Ints, values: Floats, size: int) -> Floats:
    """The sums of ``values`` of equal ``index``, for indexes 0 to ``size`` - 1."""
    return np.bincount(index, values, minlength=size).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Event:
    """One action of one rank, from ``start_s`` to ``end_s``."""

    rank: int
    action: Action
    start_s: float
    end_s: float

    @property
    def kind(self) -> Kind:
        """What the action does."""
        return self.action.kind

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s
