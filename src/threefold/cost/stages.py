"""How many layers the first, a middle and the last stage hold, and what a microbatch costs there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from threefold.cost.case import Array, Case
from threefold.cost.collectives import scatter_s, send_s
from threefold.cost.layer import PartCost, embedding_cost, head_cost, layer_cost
from threefold.cost.strategies import PARTITION_CODES

STAGES = ("first", "middle", "last")


@dataclass(frozen=True)
class StageLayers:
    """Layers on the first device of a pipeline, on the fullest one between, and on the last, over all their chunks.

    A pipeline of one has all of them in ``first``, which then is also ``last``.
    """

    first: Array
    middle: Array
    last: Array


def stage_layers(case: Case) -> StageLayers:
    """Layers of each stage by the strategy's partition, as ``layout.split_layers`` gives them."""
    layers = np.broadcast_to(np.asarray(case.shape.layers, dtype=float), len(case.strategies))
    stages = case.strategies.pp
    balanced = case.strategies.partition == PARTITION_CODES["balanced"]
    even = _split(layers, stages)
    counted = _split(layers + 2, stages)
    first = np.where(balanced, counted.first - 1, even.first)
    last = np.where(balanced, counted.last - 1, even.last)
    middle = np.where(balanced, counted.middle, even.middle)
    alone = stages == 1
    return StageLayers(np.where(alone, layers, first), np.where(alone, layers, middle), np.where(alone, layers, last))


def _split(layers: Array, stages: Array) -> StageLayers:
    """Spare layers go to the middle stages, then to the first; the last gets none of them."""
    base, spare = np.divmod(layers, stages)
    between = np.maximum(stages - 2, 0)
    return StageLayers(base + (spare > between), base + (spare > 0), base)


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
    layers = stage_layers(case)
    layer, embedding, head = layer_cost(case), embedding_cost(case), head_cost(case)
    alone = (case.strategies.pp == 1).astype(float)
    one = np.ones(len(case.strategies))
    return {
        "first": _combine(layer, layers.first, embedding, one, head, alone),
        "middle": _combine(layer, layers.middle, embedding, alone, head, alone),
        "last": _combine(layer, layers.last, embedding, alone, head, one),
    }


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
