"""Plays the schedule of a plan with the plan's costs: the second opinion on bubble and memory."""

from __future__ import annotations

from dataclasses import replace

from threefold.cost.estimate import stage_costs
from threefold.cost.strategies import SCHEDULE_CODES, Strategies
from threefold.job.spec import SCHEDULES
from threefold.plan.plans import Plan
from threefold.plan.question import Question
from threefold.schedule import build_schedule
from threefold.simulate import StepCosts, Timeline, simulate

MOST_ACTIONS = 16_000
"""A play with more actions than this is cut to fewer microbatches, so that it takes a fraction of a second."""


def play(question: Question, strategy: Strategies) -> Timeline | None:
    """One step of one pipeline; None for a schedule that only the cost model knows.

    Of many microbatches only the first ones are played: see ``microbatches_played``.
    """
    names = {code: name for name, code in SCHEDULE_CODES.items()}
    name = names[int(strategy.schedule[0])]
    if name not in SCHEDULES:
        return None
    schedule = build_schedule(name, int(strategy.pp[0]), microbatches_played(strategy))
    return simulate(schedule, step_costs(question, strategy))


def played(question: Question, plan: Plan) -> Plan:
    """The plan with its schedule played; it fits only if what the play holds fits, too."""
    timeline = play(question, plan.strategy)
    if timeline is None:
        return plan
    held = float(timeline.peak_memory_bytes.max())
    return replace(plan, timeline=timeline, fits=plan.fits and held <= plan.usable_memory_bytes)


def microbatches_played(strategy: Strategies) -> int:
    """All microbatches, or as many as make ``MOST_ACTIONS``, but at least three rounds of the pipeline."""
    stages, microbatches = int(strategy.pp[0]), int(strategy.num_microbatches[0])
    return min(microbatches, max(3 * stages, MOST_ACTIONS // (2 * stages)))


def step_costs(question: Question, strategy: Strategies) -> StepCosts:
    """The costs of ``strategy`` as ``simulate`` takes them; what is said once a device is spread over its chunks."""
    costs = stage_costs(question.model, question.sequence_length, question.hardware, strategy)
    num_stages, chunks = len(costs.forward_s), int(strategy.chunks[0])
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
