"""Where a layout puts its groups: facts about nodes, and the sentences that state them.

Every sentence is derived from the layout; none assumes an order of the axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from threefold.layout import Layout
from threefold.report.words import count_of, format_integers, sentence


@dataclass(frozen=True)
class Placement:
    """A layout on nodes of ``devices_per_node`` devices; ranks fill node after node."""

    layout: Layout
    devices_per_node: int

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node; the last node may be partly filled."""
        world, size = self.layout.world_size, self.devices_per_node
        return tuple(tuple(range(start, min(start + size, world))) for start in range(0, world, size))

    def nodes_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The nodes that ``ranks`` are on, ascending."""
        return tuple(sorted({self.layout.node(rank, self.devices_per_node) for rank in ranks}))

    def most_nodes(self, axes: str | Sequence[str]) -> int:
        """The largest number of nodes that one group over ``axes`` touches."""
        return max(len(self.nodes_of(group)) for group in self.layout.groups(axes))

    def links(self, axes: str | Sequence[str]) -> str:
        """Which links a group over ``axes`` crosses, in words."""
        groups = self.layout.groups(axes)
        if len(groups[0]) == 1:
            return "none"
        num_crossing = sum(len(self.nodes_of(group)) > 1 for group in groups)
        if num_crossing == 0:
            return "inside a node"
        return "across nodes" if num_crossing == len(groups) else "some inside a node, some across nodes"

    def links_word(self, axes: str | Sequence[str]) -> str:
        """``links`` in one word, for tables."""
        return {"inside a node": "inside", "across nodes": "across", "none": "none"}.get(self.links(axes), "both")

    def fills_whole_nodes(self, ranks: Sequence[int]) -> bool:
        """Whether ``ranks`` are all ranks of all nodes that they are on."""
        return sum(self._num_ranks(node) for node in self.nodes_of(ranks)) == len(ranks)

    def _num_ranks(self, node: int) -> int:
        return min(self.devices_per_node, self.layout.world_size - node * self.devices_per_node)


def describe_placement(placement: Placement) -> list[str]:
    """How tp groups, pipelines and replicas lie on the nodes: one sentence each."""
    return [_tensor_sentence(placement), _pipeline_sentence(placement), _replica_sentence(placement)]


def _tensor_sentence(placement: Placement) -> str:
    layout = placement.layout
    if layout.tp == 1:
        return "tp is 1: every layer is whole on its device."
    groups = layout.groups("tp")
    if placement.most_nodes("tp") > 1:
        return f"A tp group spans {count_of(placement.most_nodes('tp'), 'node')}."
    if all(placement.fills_whole_nodes(group) for group in groups):
        return f"Each node is one tp group: its {layout.tp} devices share every layer of one stage."
    per_node = len({group for group in groups if placement.nodes_of(group) == (0,)})
    return sentence(f"each node holds {count_of(per_node, 'tp group')} of {layout.tp} devices.")


def _pipeline_sentence(placement: Placement) -> str:
    layout = placement.layout
    pipelines = layout.groups(("pp", "tp"))
    stages = count_of(layout.pp, "stage")
    spans = [placement.nodes_of(ranks) for ranks in pipelines]
    if all(placement.fills_whole_nodes(ranks) for ranks in pipelines):
        num_nodes = len(spans[0])
        where = "; ".join(format_integers(nodes) for nodes in spans[:4]) + ("; ..." if len(spans) > 4 else "")
        verb = "forms" if num_nodes == 1 else "form"
        return sentence(f"{count_of(num_nodes, 'node')} {verb} a pipeline of {stages} (nodes {where}).")
    if max(map(len, spans)) == 1:
        per_node = sum(nodes == (0,) for nodes in spans)
        return sentence(f"each node holds {count_of(per_node, 'whole pipeline')} of {stages}.")
    touched = count_of(max(map(len, spans)), "node")
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


def node_rows(placement: Placement) -> list[NodeRow]:
    """One row a node; tp groups are numbered as ``Layout.groups`` lists them, pipelines by their dp coordinate."""
    layout = placement.layout
    tp_number = {rank: number for number, group in enumerate(layout.groups("tp")) for rank in group}
    rows = []
    for node, ranks in enumerate(placement.nodes):
        coords = [layout.coord(rank) for rank in ranks]
        tp_groups = tuple(sorted({tp_number[rank] for rank in ranks}))
        stages = tuple(sorted({coord.pp for coord in coords}))
        rows.append(NodeRow(node, ranks, tp_groups, stages, tuple(sorted({coord.dp for coord in coords}))))
    return rows


def placement_warnings(placement: Placement) -> list[str]:
    """What about the placement costs speed, why, and what to do about it."""
    layout = placement.layout
    if layout.tp == 1 or placement.most_nodes("tp") == 1:
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
