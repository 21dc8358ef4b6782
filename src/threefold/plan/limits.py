"""What binds a plan: memory, computation, the bubble, or which link."""

from __future__ import annotations

from collections.abc import Iterator

from threefold.plan.locality import locality
from threefold.plan.plans import Plan
from threefold.plan.question import Question
from threefold.plan.wording import PARTS, format_gigabytes, format_seconds, parts_s, percent

MEMORY_ERROR = 0.07
"""Mean error of predicted peaks on runs that were not fitted to (docs/accuracy.md)."""

LINKED = ("tp", "pp", "dp", "cp")


def limits(question: Question, plan: Plan) -> Iterator[str]:
    """Where the step's time goes, how full the memory is, and what the played schedule says to it."""
    losses = {name: seconds for name, seconds in parts_s(plan).items() if name != "compute"}
    largest = max(losses, key=lambda name: losses[name])
    over = f" over {link_words(question, plan, largest)}" if largest in LINKED else ""
    yield (
        f"What binds: {percent(plan.compute_s / plan.step_s)} of the {format_seconds(plan.step_s)} is computation; the "
        f"largest loss is {PARTS[largest]}{over}, {percent(losses[largest] / plan.step_s)}. The fullest device holds "
        f"{format_gigabytes(plan.peak_memory_bytes)}, {percent(plan.peak_memory_bytes / plan.usable_memory_bytes)} of "
        f"the usable memory, most of it {_largest_items(plan)}."
    )
    if plan.fits and plan.peak_memory_bytes > (1 - MEMORY_ERROR) * plan.usable_memory_bytes:
        yield (
            f"A tight fit: predicted peaks are off by {percent(MEMORY_ERROR)} on average. Should it run out of memory, "
            "take the next plan that holds less, or fix a smaller micro_batch or more recompute."
        )
    is_whole = plan.timeline is not None and plan.timeline.num_microbatches == plan.size("num_microbatches")
    if plan.timeline is not None and is_whole and plan.size("pp") > 1:
        yield (
            f"Played action by action, the schedule {plan.parallelism['schedule']} leaves the average device a bubble "
            f"of {percent(plan.timeline.bubble_fraction)}."
        )


def _largest_items(plan: Plan) -> str:
    items = sorted(plan.memory_bytes.items(), key=lambda item: (-item[1], item[0]))
    return " and ".join(f"{name} ({format_gigabytes(size)})" for name, size in items[:2])


def stays_in_node(question: Question, plan: Plan, axis: str) -> bool:
    """Whether all ranks of an axis share a node."""
    sizes = {name: plan.size(name) for name in LINKED}
    here = locality(sizes, plan.size("order"), question.hardware.devices_per_node)
    return here.ranks_in_node[axis] >= sizes[axis]


def link_words(question: Question, plan: Plan, axis: str) -> str:
    """The slowest links that an axis crosses."""
    hardware = question.hardware
    if stays_in_node(question, plan, axis):
        return f"links of {hardware.device.nvlink_bytes_per_s / 1e9:.3g} GB/s inside the node"
    return f"the network between nodes, {hardware.inter_node_bytes_per_s / 1e9:.3g} GB/s a device"
