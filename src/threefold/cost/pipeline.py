"""How long a pipeline takes for all microbatches of a step, and how much of that its devices wait.

p stages, m microbatches, v chunks a device; t is the time of forward and backward of a microbatch on one device. The
slowest stage works through all m without a gap; the fill and the drain add what one microbatch spends on the other
stages (with t equal everywhere this is (m + p - 1) t, Huang et al. 2019; Narayanan et al. 2021). Chunks divide
the fill and drain by v. ZB-H1 fills the drain with weight gradients: (p - 1)(t_F + t_I - t_W) (Qi et al. 2023); ZB-V
halves that with its two chunks. Fewer microbatches than stages leave interleaved chunks waiting for the round trip:
(max(m, p) + (min(m, p) - 1)/v) t in all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from threefold.cost.case import Array, Case
from threefold.cost.stages import STAGES, StageSeconds, message_s, stage_layers
from threefold.cost.strategies import SCHEDULE_CODES


@dataclass(frozen=True)
class PipelineSeconds:
    """``busy_s`` of the slowest stage, ``bubble_s`` of its waiting, ``message_s`` of exposed messages between
    stages."""

    busy_s: Array
    bubble_s: Array
    message_s: Array
    slowest: Array
    """Index into ``STAGES``."""

    @property
    def total_s(self) -> Array:
        """All forwards and backwards of a step."""
        return self.busy_s + self.bubble_s + self.message_s


def pipeline_seconds(case: Case, stages: dict[str, StageSeconds]) -> PipelineSeconds:
    """Time of the m microbatches of a step through all stages."""
    strategies = case.strategies
    each = np.stack([stages[name].total_s for name in STAGES])
    slowest, each_max = each.argmax(axis=0), each.max(axis=0)
    others = _fill(case, stages)
    naive = strategies.schedule == SCHEDULE_CODES["naive"]
    chunks = _chunks(case)
    shorter = np.where(strategies.pp > 1, others / np.maximum(strategies.pp - 1, 1), 0.0)
    waits = np.maximum(strategies.pp - strategies.num_microbatches, 0) * (1 - 1 / chunks) * shorter
    bubble = np.where(naive, others * strategies.num_microbatches, others / chunks + waits)
    return PipelineSeconds(strategies.num_microbatches * each_max, bubble, _messages(case, chunks), slowest)


def _chunks(case: Case) -> Array:
    chunked = np.isin(case.strategies.schedule, [SCHEDULE_CODES[name] for name in ("interleaved_1f1b", "zb_v")])
    return np.where(chunked, np.maximum(case.strategies.chunks, 1), 1)


def _fill(case: Case, stages: dict[str, StageSeconds]) -> Array:
    """What one microbatch spends on all stages but the slowest; zero bubble takes the weight gradients out of it."""
    strategies = case.strategies
    zero_bubble = np.isin(strategies.schedule, [SCHEDULE_CODES[name] for name in ("zb_h1", "zb_v")])
    # A weight gradient to fill a gap of the drain comes only with a microbatch: m - 1 of the p - 1 gaps have one.
    filled = np.minimum(strategies.num_microbatches - 1, strategies.pp - 1) / np.maximum(strategies.pp - 1, 1)

    def waits(stage: StageSeconds) -> Array:
        return stage.total_s - np.where(zero_bubble, (1 + filled) * stage.weight_grad_s, 0.0)

    first, middle, last = (waits(stages[name]) for name in STAGES)
    pp = case.strategies.pp
    between = np.maximum(pp - 2, 0) * middle * stage_layers(case).evenness  # they hold layers, and nothing else
    every = first + np.where(pp > 1, last, 0.0) + between
    largest = np.maximum(np.maximum(first, np.where(pp > 1, last, 0.0)), np.where(pp > 2, middle, 0.0))
    return np.maximum(every - largest, 0.0)


def _messages(case: Case, chunks: Array) -> Array:
    """Forward and backward messages: in the steady state those that nothing hides, in the fill all of them."""
    strategies, once = case.strategies, 2 * message_s(case)
    steady = strategies.num_microbatches * chunks * once * case.constants.pp_exposed
    return np.where(strategies.pp > 1, steady + (strategies.pp - 1) * once, 0.0)
