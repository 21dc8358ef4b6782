"""Plans in words: how a strategy is written, where its time goes, what it loses against another."""

from __future__ import annotations

from collections.abc import Mapping

from threefold.layout import format_partition
from threefold.plan.plans import Plan

PARTS: Mapping[str, str] = {
    "compute": "computation",
    "bubble": "the pipeline's bubble",
    "tp": "tensor-parallel communication",
    "pp": "messages between stages",
    "dp": "the exchange between replicas",
    "cp": "context-parallel communication",
    "ep": "tokens on their way to experts",
    "optimizer": "the optimizer step",
}
"""The parts of a step, in words."""


def parts_s(plan: Plan) -> dict[str, float]:
    """Seconds of each part of a step; they add up to the step but for what is not put down to any."""
    return {"compute": plan.compute_s, "bubble": plan.bubble_s, **plan.exposed_comm_s, "optimizer": plan.optimizer_s}


def layout_words(plan: Plan) -> str:
    """``tp 8 × pp 2 × dp 4``, with cp and ep where they are used."""
    used = [axis for axis in ("cp", "ep") if plan.size(axis) > 1]
    sizes = [f"{axis} {plan.size(axis)}" for axis in ("tp", "pp", "dp")]
    return " × ".join(sizes) + "".join(f", {axis} {plan.size(axis)}" for axis in used)


def settings_words(plan: Plan) -> str:
    """The settings beside the layout: ``micro batch 2, ZeRO 1, selective recompute``."""
    words = plan.parallelism
    parts = [f"micro batch {words['micro_batch']}", f"ZeRO {words['zero_stage']}"]
    if words["recompute"] != "none":
        parts.append(f"{words['recompute']} recompute")
    if words["offload_optimizer"] or words["offload_param"]:
        what = [name for name in ("optimizer", "param") if words[f"offload_{name}"]]
        parts.append(f"{' and '.join(what)} offload")
    if plan.size("pp") > 1:
        chunks = f" × {words['chunks']}" if plan.size("chunks") > 1 else ""
        parts.append(f"{words['schedule']}{chunks}")
    if plan.cut is not None:
        parts.append(f"stages of {format_partition(plan.cut.sizes)} layers")
    return ", ".join(parts)


def format_seconds(seconds: float) -> str:
    """Three digits: ``97.0 s``, ``64.3 ms``."""
    value, unit = (seconds, "s") if seconds >= 0.9995 else (seconds * 1e3, "ms")
    if value >= 99.95:
        return f"{value:,.0f} {unit}"
    return f"{value:.1f} {unit}" if value >= 9.995 else f"{value:.2f} {unit}"


def format_gigabytes(num_bytes: float) -> str:
    """GB of 10⁹ bytes, whatever their number, so that sizes compare at a glance: ``83.3 GB``."""
    return f"{num_bytes / 1e9:,.0f} GB" if num_bytes >= 99.95e9 else f"{num_bytes / 1e9:.3g} GB"


def percent(share: float) -> str:
    """``42 %``, ``4.2 %``; what rounds to nothing is ``under 0.1 %``."""
    if 0 < share < 0.001:
        return "under 0.1 %"
    return f"{share * 100:.0f} %" if share >= 0.0995 or share <= 0 else f"{share * 100:.1f} %"


def loss_words(best: Plan, other: Plan) -> str:
    """Why ``other`` takes longer than ``best``: the part of its step that grew most."""
    mine, theirs = parts_s(best), parts_s(other)
    part = max(mine, key=lambda name: theirs[name] - mine[name])
    if theirs[part] <= mine[part]:
        return "no part of the step is to blame alone"
    why = _why_computation(best, other) if part == "compute" else ""
    return f"{PARTS[part]}{why}, {format_seconds(theirs[part])} instead of {format_seconds(mine[part])}"


def _why_computation(best: Plan, other: Plan) -> str:
    """What makes the same work take longer: recompute, or smaller matrices."""
    if other.size("recompute") > best.size("recompute"):
        return f" with {other.parallelism['recompute']} recompute"
    if other.size("micro_batch") < best.size("micro_batch"):
        return f" in micro batches of {other.size('micro_batch')}"
    return f" of layers split by {other.size('tp')}" if other.size("tp") > best.size("tp") else ""


def longer(best: Plan, other: Plan) -> str:
    """``97.1 s, 0.3 % longer``."""
    share = other.step_s / best.step_s - 1
    return f"{format_seconds(other.step_s)}, {percent(share)} longer" if share > 0 else format_seconds(other.step_s)
