"""Rank <-> (dp, pp, tp) coordinate, communication groups and nodes.

The world is a box of dp × pp × tp devices. ``order`` says which axis varies fastest as the rank counts up; the first
axis varies fastest. A launcher gives consecutive ranks to one node, so the first axis is the one whose groups lie
closest together: ``("tp", "pp", "dp")`` puts a tensor-parallel group on neighbouring devices of one node.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from threefold.errors import JobError, Problem

AXES = ("dp", "pp", "tp")
"""The mesh axes in canonical order: replicas, pipeline stages, tensor slices."""


@dataclass(frozen=True, order=True)
class Coord:
    """The position of one rank on each axis, counted from 0."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """How many ranks each axis has, and in which ``order`` ranks are numbered (the first axis varies fastest).

    Raises JobError for a size below 1 or an order that isn't a permutation of dp, pp and tp.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    order: tuple[str, ...] = ("tp", "pp", "dp")

    def __post_init__(self) -> None:
        problems = [
            Problem(f"parallelism.{axis}.size", f"{self.size(axis)} is no size of an axis", "use 1 or more")
            for axis in AXES
            if self.size(axis) < 1
        ]
        if sorted(self.order) != sorted(AXES):
            message = f"{','.join(self.order)!r} does not name dp, pp and tp once each"
            problems.append(Problem("parallelism.order", message, "use for example 'tp,pp,dp'"))
        if problems:
            raise JobError(problems)

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis`` ("dp", "pp" or "tp")."""
        return {"dp": self.dp, "pp": self.pp, "tp": self.tp}[axis]

    @property
    def world_size(self) -> int:
        """Number of ranks: dp · pp · tp."""
        return self.dp * self.pp * self.tp

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along ``axis``."""
        stride = 1
        for inner in self.order[: self.order.index(axis)]:
            stride *= self.size(inner)
        return stride

    def coord(self, rank: int) -> Coord:
        """The coordinate of ``rank``. Raises ValueError outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size} ranks")
        return Coord(**{axis: rank // self.stride(axis) % self.size(axis) for axis in AXES})

    def rank(self, dp: int = 0, pp: int = 0, tp: int = 0) -> int:
        """The rank at a coordinate, the inverse of ``coord``. Raises ValueError outside the world."""
        position = {"dp": dp, "pp": pp, "tp": tp}
        for axis, value in position.items():
            if not 0 <= value < self.size(axis):
                raise ValueError(f"{axis} coordinate {value} is outside 0..{self.size(axis) - 1}")
        return sum(value * self.stride(axis) for axis, value in position.items())

    def group(self, axes: str | Sequence[str], rank: int) -> tuple[int, ...]:
        """The ranks that share with ``rank`` every coordinate outside ``axes``, itself included.

        Sorted by coordinate (dp, then pp, then tp), whatever the order of ``axes``: the i-th rank of a tp group has tp
        coordinate i. Every member computes the same tuple.
        """
        inside = _axis_names(axes)
        here = self.coord(rank)
        first = rank - sum(getattr(here, axis) * self.stride(axis) for axis in inside)
        return tuple(first + offset for offset in self._offsets(inside))

    def groups(self, axes: str | Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """All groups over ``axes``: a partition of the world, ordered by the coordinate of their first rank."""
        return tuple(map(tuple, self.group_table(axes).tolist()))

    def group_table(self, axes: str | Sequence[str]) -> NDArray[np.int64]:
        """``groups`` as an array [group, member], for worlds of which nobody reads every group."""
        inside = _axis_names(axes)
        offsets, firsts = self._offsets(inside), self._offsets(frozenset(AXES) - inside)
        return np.add.outer(np.array(firsts, dtype=np.int64), np.array(offsets, dtype=np.int64))

    def _offsets(self, axes: frozenset[str]) -> list[int]:
        """Distances in ranks from a coordinate of 0 to every coordinate along ``axes``, in coordinate order."""
        steps = [range(0, self.size(axis) * self.stride(axis), self.stride(axis)) for axis in AXES if axis in axes]
        return [sum(step) for step in itertools.product(*steps)]

    def node(self, rank: int, devices_per_node: int) -> int:
        """The node that hosts ``rank``: launchers number ranks node by node."""
        return rank // devices_per_node


def _axis_names(axes: str | Sequence[str]) -> frozenset[str]:
    names = frozenset((axes,) if isinstance(axes, str) else axes)
    unknown = names - frozenset(AXES)
    if unknown:
        raise ValueError(f"unknown axes {sorted(unknown)}; the axes are {AXES}")
    return names
