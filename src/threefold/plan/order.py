"""Which of two candidates is better: the faster one, and of those that are as good as fastest the simpler one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from threefold.cost.strategies import SCHEDULE_CODES, Array, Strategies

NEAR = 1e-3
"""A time that exceeds the least by no more than this share is as good as the least: no prediction is that exact."""

DIGITS = 9
"""Significant digits of a number that is compared; the order of additions changes those beyond."""


def rounded(numbers: Array) -> Array:
    """``numbers`` to ``DIGITS`` significant digits, so that the order of additions decides nothing."""
    positive = np.where(np.isfinite(numbers) & (numbers > 0), numbers, 1.0)
    unit = 10.0 ** (np.floor(np.log10(positive)) - (DIGITS - 1))
    return np.where(positive == numbers, np.round(numbers / unit) * unit, numbers)


def ranked(strategies: Strategies, cost: Array) -> Array:
    """Indexes from the least to the largest cost; all that are ``NEAR`` the least come by simplicity.

    The result does not depend on the order in which the strategies come.
    """
    cost = rounded(cost)
    near = cost.min(initial=np.inf) * (1 + NEAR)
    keys = [np.maximum(cost, near), *_complications(strategies)]
    keys += [getattr(strategies, field.name) for field in fields(Strategies)]
    return np.lexsort(keys[::-1])


def _complications(strategies: Strategies) -> Sequence[Array]:
    """What makes a strategy harder to run and to understand, the worst first."""
    axes = [getattr(strategies, name) > 1 for name in ("tp", "pp", "cp", "ep")]
    settings = (
        strategies.sequence_parallel,
        strategies.schedule != SCHEDULE_CODES["1f1b"],
        strategies.partition,
        strategies.order,
    )
    return (
        np.sum(axes, axis=0),
        strategies.offload_param.astype(int) + strategies.offload_optimizer,
        strategies.zero_stage,
        strategies.recompute,
        strategies.chunks,
        *settings,
    )
