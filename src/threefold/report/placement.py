"""Where a layout puts its groups: facts about nodes, and the sentences that state them.

Every sentence is derived from the layout; none assumes an order of the axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from threefold.layout import Layout
from threefold.report.words import count_of, format_integers, sentence


@dataclass(frozen=True)
class Placement:
    """A layout on nodes of ``devices_per_node`` devices; ranks fill node after node."""

    layout: Layout
    devices_per_node: int

    @property
    def num_nodes(self) -> int:
        """Nodes that hold a rank; the last may be partly filled."""
        return -(-self.layout.world_size // self.devices_per_node)

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """The ranks on ``node``."""
        start = node * self.devices_per_node
        return tuple(range(start, min(start + self.devices_per_node, self.layout.world_size)))

    def spans(self, axes: str | Sequence[str]) -> Spans:
        """The nodes of every group over ``axes``."""
        nodes = np.sort(self.layout.group_table(axes) // self.devices_per_node, axis=1)
        return Spans(nodes, self.devices_per_node, self.layout.world_size)

    def links(self, axes: str | Sequence[str]) -> str:
        """Which links a group over ``axes`` crosses, in words."""
        spans = self.spans(axes)
        if spans.nodes.shape[1] == 1:
            return "none"
        crossing = spans.num_nodes > 1
        if not crossing.any():
            return "inside a node"
        return "across nodes" if crossing.all() else "some inside a node, some across nodes"

    def links_word(self, axes: str | Sequence[str]) -> str:
        """``links`` in one word, for tables."""
        return {"inside a node": "inside", "across nodes": "across", "none": "none"}.get(self.links(axes), "both")


@dataclass(frozen=True)
class Spans:
    """Which nodes groups touch: ``nodes`` is [group, member], ascending along each group."""

    nodes: NDArray[np.int64]
    devices_per_node: int
    world_size: int

    @property
    def is_new(self) -> NDArray[np.bool_]:
        """Which members are the first of their group on their node."""
        first = np.ones((len(self.nodes), 1), dtype=bool)
        return np.concatenate([first, self.nodes[:, 1:] != self.nodes[:, :-1]], axis=1)

    @property
    def num_nodes(self) -> NDArray[np.int64]:
        """How many nodes each group touches."""
        return self.is_new.sum(axis=1)

    @property
    def fill_whole_nodes(self) -> bool:
        """Whether every group is all ranks of all nodes that it touches."""
        size = np.minimum(self.devices_per_node, self.world_size - self.nodes * self.devices_per_node)
        return bool(((size * self.is_new).sum(axis=1) == self.nodes.shape[1]).all())

    @property
    def num_inside_first(self) -> int:
        """How many groups lie inside node 0."""
        return int((self.nodes == 0).all(axis=1).sum())

    def of(self, group: int) -> tuple[int, ...]:
        """The nodes that a group touches."""
        return tuple(np.unique(self.nodes[group]).tolist())


def describe_placement(placement: Placement) -> list[str]:
    """How tp groups, pipelines and replicas lie on the nodes: one sentence each."""
    return [_tensor_sentence(placement), _pipeline_sentence(placement), _replica_sentence(placement)]


def _tensor_sentence(placement: Placement) -> str:
    layout = placement.layout
    if layout.tp == 1:
        return "tp is 1: every layer is whole on its device."
    spans = placement.spans("tp")
    if spans.num_nodes.max() > 1:
        return f"A tp group spans {count_of(int(spans.num_nodes.max()), 'node')}."
    if spans.fill_whole_nodes:
        return f"Each node is one tp group: its {layout.tp} devices share every layer of one stage."
    return sentence(f"each node holds {count_of(spans.num_inside_first, 'tp group')} of {layout.tp} devices.")


def _pipeline_sentence(placement: Placement) -> str:
    layout = placement.layout
    spans = placement.spans(("pp", "tp"))
    stages = count_of(layout.pp, "stage")
    if spans.fill_whole_nodes:
        num_nodes, num_pipelines = int(spans.num_nodes[0]), len(spans.nodes)
        where = "; ".join(format_integers(spans.of(group)) for group in range(min(num_pipelines, 4)))
        where += "; ..." if num_pipelines > 4 else ""
        verb = "forms" if num_nodes == 1 else "form"
        return sentence(f"{count_of(num_nodes, 'node')} {verb} a pipeline of {stages} (nodes {where}).")
    if spans.num_nodes.max() == 1:
        return sentence(f"each node holds {count_of(spans.num_inside_first, 'whole pipeline')} of {stages}.")
    touched = count_of(int(spans.num_nodes.max()), "node")
    return f"A pipeline of {stages} touches {touched}, and shares them with other pipelines."


def _replica_sentence(placement: Placement) -> str:
    dp = placement.layout.dp
    if dp == 1:
        return "There is one pipeline: dp is 1."
    return f"There are {count_of(dp, 'pipeline')}, one a replica of the model; each trains on its own samples."


@dataclass(frozen=True)
class NodeRow:
    """What one node holds: ranks, and the numbers of its tp groups, stages and pipelines (replicas)."""

    node: int
    ranks: tuple[int, ...]
    tp_groups: tuple[int, ...]
    stages: tuple[int, ...]
    pipelines: tuple[int, ...]


def node_rows(placement: Placement, nodes: Iterable[int] | None = None) -> list[NodeRow]:
    """One row for each of ``nodes``, or for all; tp groups are numbered as ``Layout.groups`` lists them, pipelines by
    their dp coordinate."""
    layout = placement.layout
    rows = []
    for node in range(placement.num_nodes) if nodes is None else nodes:
        ranks = placement.ranks_of(node)
        coords = [layout.coord(rank) for rank in ranks]
        tp_groups = tuple(sorted({coord.dp * layout.pp + coord.pp for coord in coords}))
        stages = tuple(sorted({coord.pp for coord in coords}))
        rows.append(NodeRow(node, ranks, tp_groups, stages, tuple(sorted({coord.dp for coord in coords}))))
    return rows


def placement_warnings(placement: Placement) -> list[str]:
    """What about the placement costs speed, why, and what to do about it."""
    layout = placement.layout
    if layout.tp == 1 or placement.spans("tp").num_nodes.max() == 1:
        return []
    why = (
        "tp sends several messages in every layer of every microbatch, and the layer waits for each of them; links "
        "between nodes are many times slower than links inside"
    )
    size = placement.devices_per_node
    if layout.order[0] != "tp" and size % layout.tp == 0:
        fix = f"put tp first in parallelism.order: 'tp,{','.join(axis for axis in layout.order if axis != 'tp')}'"
    else:
        divisors = [str(divisor) for divisor in range(1, size + 1) if size % divisor == 0]
        fix = f"use a parallelism.tp.size that divides the {size} devices of a node ({', '.join(divisors)})"
    return [f"A tp group crosses nodes: {why}. Fix: {fix}."]
