"""The ladder of savings: settings that hold less memory for more time, each a rung below the ones it saves on.

From the top, where nothing is saved, each step down recomputes more, moves a state to the host, or lets microbatches
through the pipeline one by one. A step down never makes the training step faster. So when a rung fits, all rungs below
it are dominated; and when a rung is slower than the plans known, all below it are too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from threefold.cost.strategies import Array, Strategies
from threefold.plan.options import NAIVE, ONE_F_ONE_B, offload_values, recompute_values, values_of
from threefold.plan.question import Question

HOST_MEMORY_BYTES = 1e12
"""Of a node, for offloaded states: what servers with eight devices have at least."""

OPTIMIZER_BYTES = 12.0
"""Of a parameter in mixed precision with Adam: fp32 master copy and two moments (Rajbhandari et al. 2020)."""
PARAMETER_BYTES = 2.0


@dataclass(frozen=True)
class Rung:
    """One combination of savings; ``place`` is how many steps down it is, in each direction."""

    place: tuple[int, ...]
    recompute: int
    offload_optimizer: int
    offload_param: int
    one_by_one: int

    def is_right_below(self, other: Rung) -> bool:
        """Whether this is one step down from ``other``."""
        steps = [mine - theirs for mine, theirs in zip(self.place, other.place, strict=True)]
        return sorted(steps) == [0] * (len(steps) - 1) + [1]


def on_rungs(tops: Strategies, rungs: Sequence[Rung], index: Array) -> Strategies:
    """The strategies on rung ``index[i]`` below top i."""

    def chosen(name: str) -> Array:
        return np.array([getattr(rung, name) for rung in rungs])[index]

    return replace(
        tops,
        recompute=chosen("recompute"),
        offload_optimizer=chosen("offload_optimizer").astype(bool),
        offload_param=chosen("offload_param").astype(bool),
        schedule=np.where(chosen("one_by_one"), NAIVE, tops.schedule),
    )


def ladder(question: Question) -> tuple[Rung, ...]:
    """All rungs, from the top down: every rung comes after those that it is below."""
    directions = (
        recompute_values(question),
        offload_values(question, "offload_optimizer"),
        offload_values(question, "offload_param"),
        (0,) if "schedule" in question.fixed or question.fixed.get("chunks", 1) > 1 else (0, 1),
    )
    places = product(*(range(len(values)) for values in directions))
    rungs = [Rung(place, *(values[step] for values, step in zip(directions, place, strict=True))) for place in places]
    return tuple(sorted(rungs, key=lambda rung: (sum(rung.place), rung.place)))


def has_rung(tops: Strategies, rung: Rung) -> Array:
    """Whether the rung exists below each top: one by one is what 1F1B has beside it, in a pipeline."""
    return (tops.schedule == ONE_F_ONE_B) & (tops.pp > 1) if rung.one_by_one else np.ones(len(tops), dtype=bool)


def offload_is_sharded(tops: Strategies, rung: Rung) -> Array:
    """The ZeRO stage that offloading needs: 1 for the optimizer states, 3 for the parameters."""
    needed = max(rung.offload_optimizer, 3 * rung.offload_param)
    return tops.zero_stage >= needed


def offload_fits_hosts(question: Question, rung: Rung) -> bool:
    """All ranks together offload one copy of the states, spread evenly over the nodes."""
    each = OPTIMIZER_BYTES * rung.offload_optimizer + PARAMETER_BYTES * rung.offload_param
    return each * question.model.num_parameters <= HOST_MEMORY_BYTES * question.hardware.nodes


def repeats_lower_stage(question: Question, tops: Strategies, rung: Rung) -> Array:
    """Where one replica has nothing to share, each ZeRO stage is the lowest that the rung's offloading allows."""
    lowest = max(rung.offload_optimizer, 3 * rung.offload_param, min(values_of(question, "zero_stage", (0,))))
    return (tops.dp * tops.cp == 1) & (tops.zero_stage > lowest)
