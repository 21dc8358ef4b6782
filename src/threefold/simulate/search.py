"""Searches the schedule with the shortest simulated step, for costs that are measured or assumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from threefold.schedule.playing import Durations
from threefold.schedule.schedule import Schedule
from threefold.schedule.search import BUDGET, Found, default_limits, search_schedule
from threefold.simulate.costs import StepCosts
from threefold.simulate.play import step_s


def search(
    costs: StepCosts,
    num_ranks: int,
    num_microbatches: int,
    *,
    limit_microbatches: float | None = None,
    limit_bytes: Sequence[float] | None = None,
    budget: int = BUDGET,
) -> Found:
    """The schedule with the shortest step found for stages of ``costs`` on ``num_ranks`` ranks.

    In the simulator it is never slower than 1F1B, interleaved 1F1B, ZB-H1 or ZB-V, as far as they have as many stages
    and keep within the same memory. Each rank may hold the activations of ``limit_microbatches`` microbatches of its
    stages (default: as many as there are ranks, the memory of 1F1B), or activations of ``limit_bytes[rank]``. Raises
    JobError naming the limit when a rank can't hold even one microbatch.
    """
    durations = _durations(costs)
    limits = default_limits(num_ranks, durations)
    if limit_microbatches is not None:
        limits = tuple(limit * limit_microbatches / num_ranks for limit in limits)
    if limit_bytes is not None:
        limits = tuple(limit_bytes)

    def evaluate(schedule: Schedule) -> float:
        return step_s(schedule, costs)

    return search_schedule(num_microbatches, durations, limits, evaluate, budget)


def search_chunks(
    costs_of: Callable[[int], StepCosts],
    num_ranks: int,
    num_microbatches: int,
    chunks: Sequence[int],
    *,
    limit_microbatches: float | None = None,
) -> Found:
    """The best of the schedules with each number of ``chunks`` a rank; ``costs_of`` gives the costs for a number."""
    found = [
        search(
            costs_of(number),
            num_ranks,
            num_microbatches,
            limit_microbatches=limit_microbatches,
            budget=BUDGET // len(chunks),
        )
        for number in chunks
    ]
    return min(found, key=lambda one: one.length)


def _durations(costs: StepCosts) -> Durations:
    """The costs as the search takes them; where nothing is known of memory, every stage holds the same."""
    known = any(costs.activation_bytes)
    return Durations(
        forward=tuple(costs.forward_s),
        input_grad=tuple(costs.input_grad_s),
        weight_grad=tuple(costs.weight_grad_s),
        transfer=tuple(costs.p2p_s),
        after=tuple(sync + step for sync, step in zip(costs.sync_s, costs.step_s, strict=True)),
        held=tuple(costs.activation_bytes) if known else (1.0,) * costs.num_stages,
    )
