"""How throughput scales on paper, next to published runs: writes docs/scaling.md and its two pictures.

    pip install -e '.[plots]'
    python benchmarks/scaling.py tests/data/published_runs.csv

Weak scaling keeps the batch of each device, strong scaling the batch of the step. At every number of devices the
planner chooses the strategy anew, as a user would. Published runs are predicted with their own configuration; the
constants were fitted to them among others (docs/accuracy.md says how well runs are predicted that were not).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from threefold.cost.hardware import Hardware, find_device
from threefold.cost.predict import Batch, Predictions, build_batch, predict
from threefold.cost.runs import Run, read_runs
from threefold.errors import InfeasibleError
from threefold.job.presets import presets
from threefold.job.spec import ModelSpec
from threefold.plan.planner import plan
from threefold.plan.plans import Plan

DOCS = Path(__file__).parents[1] / "docs"
PUBLISHED = ("Narayanan et al. 2021", "Llama Team 2024")


@dataclass(frozen=True)
class Curve:
    """One model on 8-device nodes. ``sequences_per_device`` is for weak scaling, ``batch`` for strong."""

    model: str
    gpu: str
    sequence_length: int
    sequences_per_device: float
    batch: int
    smallest: int

    @property
    def devices(self) -> list[int]:
        """Numbers of devices, doubling up to 16,384."""
        return [2**power for power in range(self.smallest.bit_length() - 1, 15)]


CURVES = (
    Curve("gpt3-175b", "a100-80gb", 2048, 1.5, 1536, 64),
    Curve("llama3-405b", "h100", 8192, 0.125, 2048, 1024),
)


@dataclass(frozen=True)
class Point:
    """What the planner found for ``devices``; None where nothing fits or the batch can't be divided."""

    devices: int
    batch: int
    plan: Plan | None


def main() -> None:
    """Plan every point, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    options = parser.parse_args()
    batch = build_batch([run for run in read_runs(options.runs) if run.origin in PUBLISHED])
    found = predict(batch)
    weak = {curve: [point(curve, n, round(n * curve.sequences_per_device)) for n in curve.devices] for curve in CURVES}
    strong = {curve: [point(curve, n, curve.batch) for n in curve.devices] for curve in CURVES}
    draw_weak(weak, batch, found)
    draw_strong(strong)
    (DOCS / "scaling.md").write_text("\n".join(page(weak, strong, batch, found)) + "\n", encoding="utf-8")


def point(curve: Curve, devices: int, batch: int) -> Point:
    """The best plan at one number of devices."""
    device = find_device(curve.gpu)
    hardware = Hardware(device, devices // 8, 8, device.nic_bytes_per_s)
    model = ModelSpec.model_validate(presets()[curve.model])
    try:
        best = plan(model, curve.sequence_length, hardware, batch, top=1).plans[0]
    except InfeasibleError:
        best = None
    return Point(devices, batch, best)


def published(batch: Batch, found: Predictions) -> Iterator[tuple[Run, float, float, float, float]]:
    """Run, measured TFLOP/s of a device as the source counts them, predicted, and the bounds of the 90 % interval."""
    for index, run in enumerate(batch.runs):
        measured, ratio = run["tflops_per_gpu"], float(found.ratio[index])
        if measured is not None and np.isfinite(ratio):
            yield (
                run,
                measured,
                measured / ratio,
                measured / ratio / found.high[index],
                measured / ratio / found.low[index],
            )


def draw_weak(curves: dict[Curve, list[Point]], batch: Batch, found: Predictions) -> None:
    """TFLOP/s of each device over the number of devices, with the published runs."""
    figure, axes = plt.subplots(figsize=(8, 5))
    for curve, points in curves.items():
        fitting = [one for one in points if one.plan]
        label = f"{curve.model} on {curve.gpu}, planned"
        axes.plot([p.devices for p in fitting], [tflops(p) for p in fitting], marker=".", label=label)
    for origin, marker in zip(PUBLISHED, ("o", "s"), strict=True):
        rows = [row for row in published(batch, found) if row[0].origin == origin]
        sizes = [row[0]["n_gpus"] or 0.0 for row in rows]
        predicted = np.array([row[2:] for row in rows]).T
        spread = np.abs(predicted[1:] - predicted[0])
        axes.errorbar(sizes, predicted[0], spread, fmt="_", color="gray", capsize=3, label=f"{origin}, predicted, 90 %")
        axes.plot(sizes, [row[1] for row in rows], marker, label=f"{origin}, measured")
    finish(axes, "TFLOP/s of each device (Narayanan et al.: with recompute)", "Weak scaling")
    save(figure, "scaling-weak.svg")


def draw_strong(curves: dict[Curve, list[Point]]) -> None:
    """Tokens a second over the number of devices, with the line that the smallest number promises."""
    figure, axes = plt.subplots(figsize=(8, 5))
    for curve, points in curves.items():
        fitting = [one for one in points if one.plan]
        sizes = np.array([one.devices for one in fitting])
        speeds = np.array([speed(one) for one in fitting])
        (line,) = axes.plot(sizes, speeds, marker=".", label=f"{curve.model} on {curve.gpu}, batch {curve.batch:,}")
        axes.plot(sizes, speeds[0] / sizes[0] * sizes, "--", color=line.get_color(), label="linear")
    axes.set_yscale("log")
    finish(axes, "tokens a second", "Strong scaling")
    save(figure, "scaling-strong.svg")


def finish(axes: Axes, label: str, title: str) -> None:
    """Axes that both pictures share."""
    axes.set_xscale("log", base=2)
    axes.set_xlabel("devices")
    axes.set_ylabel(label)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def save(figure: Figure, name: str) -> None:
    """Without a date and with fixed ids, so that the same numbers give the same file."""
    plt.rcParams["svg.hashsalt"] = "threefold"
    figure.savefig(DOCS / name, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def tflops(one: Point) -> float:
    """Model TFLOP/s of each device."""
    assert one.plan is not None
    return one.plan.tflops_per_gpu


def speed(one: Point) -> float:
    """Tokens a second of all devices."""
    assert one.plan is not None
    return one.plan.tokens_per_s


def page(
    weak: dict[Curve, list[Point]], strong: dict[Curve, list[Point]], batch: Batch, found: Predictions
) -> Iterator[str]:
    """docs/scaling.md."""
    yield "# Scaling on paper"
    yield ""
    yield "Written by"
    yield ""
    yield "    python benchmarks/scaling.py tests/data/published_runs.csv"
    yield ""
    yield "with the cost model and the planner of this version. At each number of devices the planner chooses the"
    yield "strategy anew; the machines are the hardware table's, in nodes of eight. No run of threefold stands behind"
    yield "these numbers: how far predictions are off is in [accuracy.md](accuracy.md)."
    yield ""
    yield "## Published runs"
    yield ""
    yield "TFLOP/s of each device as the source counts them, with the run's own configuration: Narayanan et al. count"
    yield "what is recomputed, the Llama Team does not, and neither do the tables below."
    yield ""
    yield "| run | devices | measured | predicted | 90 % interval |"
    yield "|---|--:|--:|--:|--:|"
    for run, measured, predicted, low, high in published(batch, found):
        name = f"{run.text['model_name']}, {run.origin}"
        yield f"| {name} | {run['n_gpus']:,.0f} | {measured:.0f} | {predicted:.0f} | {low:.0f} to {high:.0f} |"
    yield from section("Weak scaling", "The batch grows with the devices.", "scaling-weak.svg", weak)
    yield from section("Strong scaling", "The batch stays the same.", "scaling-strong.svg", strong)


def section(title: str, words: str, picture: str, curves: dict[Curve, list[Point]]) -> Iterator[str]:
    """One picture and its tables."""
    yield ""
    yield f"## {title}"
    yield ""
    yield f"{words} Efficiency is tokens a second of a device over those at the smallest number."
    yield ""
    yield f"![{title}]({picture})"
    for curve, points in curves.items():
        yield ""
        yield f"{curve.model} on {curve.gpu}, sequences of {curve.sequence_length:,} tokens:"
        yield ""
        yield "| devices | batch | tp × pp × dp | schedule | tokens/s | TFLOP/s | efficiency | bubble |"
        yield "|--:|--:|---|---|--:|--:|--:|--:|"
        yield from rows(points)


def rows(points: Sequence[Point]) -> Iterator[str]:
    """A line a number of devices."""
    first = next(one for one in points if one.plan)
    for one in points:
        if one.plan is None:
            yield f"| {one.devices:,} | {one.batch:,} | nothing fits | | | | | |"
            continue
        layout = " × ".join(str(one.plan.size(axis)) for axis in ("tp", "pp", "dp"))
        schedule = one.plan.parallelism["schedule"] if one.plan.size("pp") > 1 else "-"
        efficiency = speed(one) / one.devices / (speed(first) / first.devices)
        yield (
            f"| {one.devices:,} | {one.batch:,} | {layout} | {schedule} | {speed(one):,.0f} | {tflops(one):.0f} "
            f"| {efficiency:.0%} | {one.plan.bubble_fraction:.0%} |"
        )


if __name__ == "__main__":
    main()
