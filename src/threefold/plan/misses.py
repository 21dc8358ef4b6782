"""Nothing fits: the nearest misses, and what would make them fit, found by asking again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from threefold.cost.hardware import device_names, find_device
from threefold.cost.strategies import Strategies
from threefold.errors import InfeasibleError
from threefold.plan.plans import Plan, PlanResult, predict
from threefold.plan.question import Question
from threefold.plan.what_if import best_of
from threefold.plan.wording import format_gigabytes, layout_words, settings_words
from threefold.report.words import format_count

MOST_NODES = 64
"""Up to so many times the nodes are tried."""


class NothingFitsError(InfeasibleError):
    """``result`` has no plans, but the counts."""

    def __init__(self, message: str, result: PlanResult) -> None:
        super().__init__(message)
        self.result = result


def nothing_fits(question: Question, misses: Strategies) -> str:
    """The message: what is asked, the nearest misses, what would make them fit."""
    hardware = question.hardware
    plans = predict(question, misses)
    lines = [
        f"nothing fits: {format_count(question.model.num_parameters)} parameters on {hardware.nodes} × "
        f"{hardware.devices_per_node} {hardware.device.name} with a global batch of {question.global_batch} sequences "
        f"of {question.sequence_length} tokens",
        "nearest misses:",
        *(f"  {number}. {_miss_words(plan)}" for number, plan in enumerate(plans, start=1)),
        "what would make it fit:",
        *(f"  - {remedy}" for remedy in _remedies(question, plans)),
    ]
    return "\n".join(lines)


def _miss_words(plan: Plan) -> str:
    over = format_gigabytes(plan.peak_memory_bytes - plan.usable_memory_bytes)
    items = sorted(plan.memory_bytes.items(), key=lambda item: -item[1])
    largest = ", ".join(f"{name} {format_gigabytes(size)}" for name, size in items[:3])
    return (
        f"{layout_words(plan)} ({settings_words(plan)}) needs {format_gigabytes(plan.peak_memory_bytes)} a device, "
        f"{over} more than the {format_gigabytes(plan.usable_memory_bytes)} that are usable: {largest}, ..."
    )


def _remedies(question: Question, plans: list[Plan]) -> Iterator[str]:
    yield from _without_decisions(question)
    yield from _more_nodes(question)
    yield from _larger_device(question, plans)
    yield from _shorter_sequences(question)


def _without_decisions(question: Question) -> Iterator[str]:
    for name in question.fixed:
        fixed = {key: value for key, value in question.fixed.items() if key != name}
        plan = best_of(replace(question, fixed=fixed))
        if plan is not None:
            yield f"leave --fix {name} out: {_fit_words(plan)}"


def _more_nodes(question: Question) -> Iterator[str]:
    nodes, factor = question.hardware.nodes, 2
    while factor <= MOST_NODES:
        plan = best_of(replace(question, hardware=replace(question.hardware, nodes=nodes * factor)))
        if plan is not None:
            yield f"{nodes * factor} nodes instead of {nodes}: {_fit_words(plan)}"
            return
        factor *= 2


def _larger_device(question: Question, plans: list[Plan]) -> Iterator[str]:
    """The smallest device of the table on which a plan fits."""
    device = question.hardware.device
    larger = [find_device(name) for name in device_names()]
    larger = sorted(
        (other for other in larger if other.memory_bytes > device.memory_bytes), key=lambda d: d.memory_bytes
    )
    for other in larger:
        plan = best_of(replace(question, hardware=replace(question.hardware, device=other)))
        if plan is not None:
            yield f"devices with {format_gigabytes(other.memory_bytes)}, like {other.name}: {_fit_words(plan)}"
            return
    if plans:
        yield f"no known device has the {format_gigabytes(plans[0].peak_memory_bytes)} of the first one"


def _shorter_sequences(question: Question) -> Iterator[str]:
    for length in (question.sequence_length // 2, question.sequence_length // 4):
        plan = best_of(replace(question, sequence_length=length)) if length else None
        if plan is not None:
            yield f"sequences of {length} tokens: {_fit_words(plan)}"
            return


def _fit_words(plan: Plan) -> str:
    return f"{layout_words(plan)} fits with {format_gigabytes(plan.peak_memory_bytes)} a device"
