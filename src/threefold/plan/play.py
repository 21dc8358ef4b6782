"""Plays the schedule of a plan with the plan's costs: the second opinion on bubble and memory."""

from __future__ import annotations

from dataclasses import replace

from threefold.cost.case import Cut
from threefold.cost.estimate import stage_costs
from threefold.cost.strategies import SCHEDULE_CODES, Strategies
from threefold.plan.plans import Plan
from threefold.plan.question import Question
from threefold.schedule import Schedule, build_schedule
from threefold.simulate import StepCosts, Timeline, simulate

MOST_ACTIONS = 16_000
"""A play with more actions than this is cut to fewer microbatches, so that it takes a fraction of a second."""


def play(
    question: Question, strategy: Strategies, schedule: Schedule | None = None, cut: Cut | None = None
) -> Timeline:
    """One step of one pipeline, by ``schedule`` or by the strategy's own.

    Of many microbatches only the first ones are played: see ``microbatches_played``.
    """
    if schedule is None or sum(map(len, schedule.rows)) > MOST_ACTIONS:
        schedule = build_schedule(
            _name(strategy), int(strategy.pp[0]), microbatches_played(strategy), _chunks(strategy)
        )
    return simulate(schedule, step_costs(question, strategy, schedule, cut))


def _name(strategy: Strategies) -> str:
    names = {code: name for name, code in SCHEDULE_CODES.items()}
    return names[int(strategy.schedule[0])]


def _chunks(strategy: Strategies) -> int:
    return int(strategy.chunks[0])


def played(question: Question, plan: Plan, schedule: Schedule | None = None) -> Plan:
    """The plan with its schedule played; it fits only if what the play holds fits, too."""
    timeline = play(question, plan.strategy, schedule, plan.cut)
    held = float(timeline.peak_memory_bytes.max())
    return replace(plan, timeline=timeline, fits=plan.fits and held <= plan.usable_memory_bytes)


def microbatches_played(strategy: Strategies) -> int:
    """All microbatches, or as many as make ``MOST_ACTIONS``, but at least three rounds of the pipeline."""
    ranks, microbatches = int(strategy.pp[0]), int(strategy.num_microbatches[0])
    return min(microbatches, max(3 * ranks, MOST_ACTIONS // (2 * ranks * _chunks(strategy))))


def step_costs(
    question: Question, strategy: Strategies, schedule: Schedule | None = None, cut: Cut | None = None
) -> StepCosts:
    """The costs of ``strategy`` as ``simulate`` takes them; what is said once a device is spread over its chunks.

    ``schedule`` is what they are for, where it isn't the strategy's own.
    """
    num_ranks, chunks = int(strategy.pp[0]), _chunks(strategy)
    num_stages = num_ranks * chunks
    schedule = schedule or build_schedule(_name(strategy), num_ranks, 1, chunks)
    rank_of = [schedule.stage_rank(stage) for stage in range(num_stages)]
    model, length = question.model, question.sequence_length
    costs = stage_costs(model, length, question.hardware, strategy, rank_of=rank_of, cut=cut)
    return StepCosts(
        forward_s=costs.forward_s,
        input_grad_s=costs.input_grad_s,
        weight_grad_s=costs.weight_grad_s,
        p2p_s=costs.p2p_s[:-1],
        sync_s=(costs.gradient_sync_s / chunks,) * num_stages,
        step_s=(costs.optimizer_s / chunks,) * num_stages,
        activation_bytes=costs.activation_bytes,
        static_bytes=costs.static_bytes,
    )
