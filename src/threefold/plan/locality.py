"""Which ranks of an axis share a node: all that an axis order decides about links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from threefold.cost.strategies import ORDER_CODES


@dataclass(frozen=True)
class Locality:
    """``ranks_in_node``: how many ranks of each axis (tp, cp, pp, dp) that differ in nothing else share a node."""

    ranks_in_node: Mapping[str, float]
    tp_stays_inside: bool

    def is_better(self, other: Locality) -> bool:
        """Whether no axis has fewer ranks in a node, and some axis has more."""
        no_fewer = all(mine >= other.ranks_in_node[axis] for axis, mine in self.ranks_in_node.items())
        return no_fewer and self.ranks_in_node != other.ranks_in_node


def locality(sizes: Mapping[str, int], order: int, devices_per_node: int) -> Locality:
    """The locality of axes of ``sizes`` in the order with the code ``order``; cp comes next to tp."""
    name = next(name for name, code in ORDER_CODES.items() if code == order)
    found, stride, inside = {}, 1, True
    for axis in name.replace("tp", "tp,cp").split(","):
        size = sizes[axis]
        found[axis] = min(max(devices_per_node / stride, 1.0), size)
        stride *= size
        if axis == "tp":
            inside = size == 1 or devices_per_node % stride == 0
    return Locality(found, inside)
