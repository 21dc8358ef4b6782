"""How many layers the first, a middle and the last device of a pipeline hold, and what a microbatch costs there.

The first device holds the embedding and the last one the head; only under ZB-V, whose stages go down the devices and
come back up, is the head on the first, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from threefold.cost.case import Array, Case, Cut
from threefold.cost.collectives import scatter_s, send_s
from threefold.cost.layer import PartCost, embedding_cost, head_cost, layer_cost
from threefold.cost.strategies import PARTITION_CODES, SCHEDULE_CODES
from threefold.layout import balanced_sizes, split_layers

STAGES = ("first", "middle", "last")


@dataclass(frozen=True)
class StageLayers:
    """Layers on the first device of a pipeline, on the fullest one between, and on the last, over all their chunks.

    A pipeline of one has all of them in ``first``, which then is also ``last``. ``evenness`` is what a device between
    the ends holds on average, as a share of ``middle``.
    """

    first: Array
    middle: Array
    last: Array
    evenness: float = 1.0

    @classmethod
    def of_cut(cls, cut: Cut) -> StageLayers:
        """Those of one pipeline whose stages have stated sizes."""
        first, *between, last = cut.device_layers if len(set(cut.devices)) > 1 else 2 * cut.device_layers
        fullest = max(between or (first, last))
        evenness = sum(between) / len(between) / fullest if between and fullest else 1.0
        return cls(np.full(1, first), np.full(1, fullest), np.full(1, last), evenness)


def stage_layers(case: Case) -> StageLayers:
    """Layers of each stage by the case's cut, or the strategy's partition, as ``layout.split_layers`` gives them."""
    if case.cut is not None:
        return StageLayers.of_cut(case.cut)
    layers = np.broadcast_to(np.asarray(case.shape.layers, dtype=float), len(case.strategies))
    stages = case.strategies.pp
    balanced = case.strategies.partition == PARTITION_CODES["balanced"]
    even = _split(layers, stages)
    counted = _split(layers + 2, stages)
    first = np.where(balanced, counted.first - 1, even.first)
    last = np.where(balanced, counted.last - 1, even.last)
    middle = np.where(balanced, counted.middle, even.middle)
    alone = stages == 1
    turns_back = case.strategies.schedule == SCHEDULE_CODES["zb_v"]
    if turns_back.any():
        halves, counted = _split_v(layers, stages), _split_v(layers + 2, stages)
        first = np.where(turns_back, np.where(balanced, counted.first - 2, halves.first), first)
        middle = np.where(turns_back, np.where(balanced, counted.middle, halves.middle), middle)
        last = np.where(turns_back, np.where(balanced, counted.last, halves.last), last)
    middle = np.where(stages == 2, np.maximum(first, last), middle)  # there is none, so it must not be the slowest
    return StageLayers(np.where(alone, layers, first), np.where(alone, layers, middle), np.where(alone, layers, last))


def _split(layers: Array, stages: Array) -> StageLayers:
    """Spare layers go to the middle stages, then to the first; the last gets none of them."""
    base, spare = np.divmod(layers, stages)
    between = np.maximum(stages - 2, 0)
    return StageLayers(base + (spare > between), base + (spare > 0), base)


def _split_v(layers: Array, stages: Array) -> StageLayers:
    """Two stages a device, r and 2p - 1 - r: spare layers go to the later middle stages, which lie on the devices 1 to
    p - 1, then to the earlier ones back again."""
    base, spare = np.divmod(layers, 2 * stages)
    ends = (spare > 2 * stages - 2).astype(float)
    middle = (spare > 0).astype(float) + (spare > stages)
    last = (spare >= stages - 1).astype(float) + (spare >= stages)
    return StageLayers(2 * base + ends, 2 * base + middle, 2 * base + np.where(stages > 1, last, ends))


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one microbatch on one stage, over all chunks of the device, forward, backward and what is exposed."""

    forward_s: Array
    input_grad_s: Array
    weight_grad_s: Array
    tp_s: Array
    cp_s: Array
    ep_s: Array

    @property
    def compute_s(self) -> Array:
        """Without communication."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s

    @property
    def total_s(self) -> Array:
        """With the exposed communication inside the stage."""
        return self.compute_s + self.tp_s + self.cp_s + self.ep_s


def stage_seconds(case: Case) -> dict[str, StageSeconds]:
    """What one microbatch costs on the first, a middle and the last stage."""
    layers, heads = stage_layers(case), heads_of(case)
    layer, embedding, head = layer_cost(case), embedding_cost(case), head_cost(case)
    alone = (case.strategies.pp == 1).astype(float)
    one = np.ones(len(case.strategies))
    return {
        "first": _combine(layer, layers.first, embedding, one, head, heads["first"]),
        "middle": _combine(layer, layers.middle, embedding, alone, head, heads["middle"]),
        "last": _combine(layer, layers.last, embedding, alone, head, heads["last"]),
    }


def heads_of(case: Case) -> dict[str, Array]:
    """1 where the first, a middle and the last device hold the head, else 0; a pipeline of one is all three."""
    alone = case.strategies.pp == 1
    turns_back = case.strategies.schedule == SCHEDULE_CODES["zb_v"]
    return {
        "first": (alone | turns_back).astype(float),
        "middle": alone.astype(float),
        "last": (alone | ~turns_back).astype(float),
    }


def virtual_stage_seconds(case: Case) -> list[StageSeconds]:
    """What one microbatch costs on each of the pp × chunks stages of a case of one strategy, in pipeline order."""
    layer, embedding, head = layer_cost(case), embedding_cost(case), head_cost(case)
    counts = virtual_stage_layers(case)
    last = len(counts) - 1

    def share(holds: bool) -> Array:
        return np.full(1, float(holds))

    return [
        _combine(layer, np.full(1, float(count)), embedding, share(stage == 0), head, share(stage == last))
        for stage, count in enumerate(counts)
    ]


def virtual_stage_layers(case: Case) -> tuple[float, ...]:
    """Layers of each of the pp × chunks stages of a case of one strategy, as ``layout.split_layers`` gives them."""
    if case.cut is not None:
        return case.cut.sizes
    num_layers = round(float(np.ravel(case.shape.layers)[0]))
    num_stages = int(case.strategies.pp[0]) * int(case.strategies.chunks[0])
    if int(case.strategies.partition[0]) == PARTITION_CODES["balanced"]:
        return balanced_sizes(num_layers, num_stages)
    return tuple(map(len, split_layers(num_layers, num_stages)))


def _combine(
    layer: PartCost, count: Array, embedding: PartCost, first: Array, head: PartCost, last: Array
) -> StageSeconds:
    def of(name: str) -> Array:
        return getattr(layer, name) * count + getattr(embedding, name) * first + getattr(head, name) * last

    return StageSeconds(
        of("forward_s"),
        of("input_grad_s"),
        of("weight_grad_s"),
        of("tp_forward_s") + of("tp_backward_s"),
        of("cp_s"),
        of("ep_s"),
    )


def message_bytes(case: Case) -> Array:
    """Hidden states of a microbatch between two stages; under sequence parallelism each tp rank sends its part, and so
    do stacks that split messages (Narayanan et al. 2021, scatter/gather optimization).
    """
    split = np.where(np.asarray(case.constants.split_messages) > 0.5, case.strategies.tp, case.norm_split)
    return case.tokens * case.shape.hidden * case.element_bytes / split


def message_s(case: Case) -> Array:
    """One message from a stage to the next, 0 for a pipeline of one."""
    crosses = case.in_node("pp") < case.strategies.pp
    whole = case.tokens * case.shape.hidden * case.element_bytes
    split = (np.asarray(case.constants.split_messages) > 0.5) & ~case.strategies.sequence_parallel
    gathered = np.where(split, scatter_s(case, whole, case.strategies.tp, case.in_node("tp")), 0.0)
    return np.where(case.strategies.pp > 1, send_s(case, message_bytes(case), crosses) + gathered, 0.0)
