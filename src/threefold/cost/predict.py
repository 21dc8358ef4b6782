"""Predicts published runs, each with its own model, machines and software, all in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from threefold.cost.calibration import Calibration, load_calibration, stack_calibrations
from threefold.cost.case import Array, Case, Machine
from threefold.cost.completion import Configuration, NotModelledError, complete
from threefold.cost.estimate import judge
from threefold.cost.flops import forward_flops_per_token
from threefold.cost.hardware import Device
from threefold.cost.runs import Run
from threefold.cost.shape import Shape
from threefold.cost.strategies import PRECISION_CODES, Strategies

MEMORY_DOUBT = 1.0
"""Share of the memory by which an unstated setting may exceed it until it is doubted most; in proportion below."""

LEAST_BELIEF = 0.3
"""Belief in a setting that needs far more memory than there is: activations may have moved to the host, unsaid too."""

Constants = Callable[[str, str], Calibration]
"""Software and device generation -> constants."""


@dataclass(frozen=True)
class Batch:
    """Runs as configurations: ``row`` says which run each configuration belongs to, ``observed_s`` what it measured.

    ``guessed``: the run ran, and has other configurations too, so that those which do not fit can be ruled out.
    """

    runs: tuple[Run, ...]
    reasons: tuple[str | None, ...]
    configurations: tuple[Configuration, ...]
    row: Array
    weight: Array
    shape: Shape
    machine: Machine
    strategies: Strategies
    observed_s: Array
    guessed: Array


def build_batch(runs: Sequence[Run]) -> Batch:
    """Complete every run; those that can't be predicted get a reason and no configuration."""
    configurations: list[Configuration] = []
    rows: list[int] = []
    reasons: list[str | None] = []
    for index, run in enumerate(runs):
        try:
            found = complete(run)
        except NotModelledError as error:
            reasons.append(str(error))
            continue
        reasons.append(None)
        configurations += found
        rows += [index] * len(found)
    row = np.array(rows, dtype=np.int64)
    shape = Shape(**{field.name: _column(configurations, field.name) for field in fields(Shape)})
    strategies = (
        Strategies.build(**_strategy_columns(configurations)) if configurations else Strategies.build().take([])
    )
    machine = _machine(configurations)
    batch = Batch(
        tuple(runs),
        tuple(reasons),
        tuple(configurations),
        row,
        np.array([one.weight for one in configurations]),
        shape,
        machine,
        strategies,
        observed_s=np.zeros(len(configurations)),
        guessed=_guessed(runs, row),
    )
    return replace(batch, observed_s=_observed(batch))


def _guessed(runs: Sequence[Run], row: Array) -> Array:
    ran = np.array([not run.is_oom for run in runs], dtype=bool)
    return ran[row] & (np.bincount(row, minlength=len(runs))[row] > 1)


def _column(configurations: Sequence[Configuration], name: str) -> Array:
    return np.array([one.shape.get(name, 0.0) for one in configurations], dtype=float)


def _strategy_columns(configurations: Sequence[Configuration]) -> dict[str, Array]:
    return {name: np.array([one.strategy[name] for one in configurations]) for name in configurations[0].strategy}


def _machine(configurations: Sequence[Configuration]) -> Machine:
    devices = [one.device for one in configurations]
    sizes = np.array([min(one.num_devices, one.device.nvlink_domain) for one in configurations], dtype=float)
    counts = np.array([one.num_devices for one in configurations], dtype=float)

    def of(name: str) -> Array:
        return np.array([getattr(device, name) for device in devices], dtype=float)

    return Machine(
        matmul_flops_per_s=of("matmul_flops_per_s"),
        peak_flops_per_s=np.array([_half(device) for device in devices], dtype=float),
        speedup=np.array([[_speedup(device, name) for device in devices] for name in PRECISION_CODES]),
        memory_bytes=of("memory_bytes"),
        memory_bytes_per_s=of("memory_bytes_per_s"),
        nvlink_bytes_per_s=of("nvlink_bytes_per_s"),
        nic_bytes_per_s=np.array([one.nic_bytes_per_s for one in configurations]),
        pcie_bytes_per_s=of("pcie_bytes_per_s"),
        devices_per_node=sizes,
        nodes=counts / np.maximum(sizes, 1),
    )


def _half(device: Device) -> float:
    return device.peak_flops_per_s.get("bf16", device.peak_flops_per_s["fp16"])


def _speedup(device: Device, name: str) -> float:
    return device.peak_flops_per_s.get(name, _half(device)) / _half(device)


def _observed(batch: Batch) -> Array:
    """Seconds of a step that each run measured, NaN where it measured none (out of memory)."""
    strategies, shape = batch.strategies, batch.shape
    samples = np.array([batch.runs[index]["global_batch"] or np.nan for index in batch.row], dtype=float)
    samples = np.where(np.isnan(samples), strategies.global_batch, samples)
    tokens = samples * shape.sequence
    forward = forward_flops_per_token(shape) * tokens
    layers = forward - 2 * np.asarray(shape.head_parameters) * tokens
    full = (strategies.recompute == 2).astype(float)
    counted = {"model": 3 * forward, "hardware": 3 * forward + full * layers}
    devices = strategies.num_devices
    seconds = np.full(len(batch.row), np.nan)
    for index, row in enumerate(batch.row):
        run = batch.runs[row]
        stated = run["iter_time_s"] or run["iter_time_derived_s"]
        kind = "hardware" if run.text["tflops_kind"].lower().startswith("hardware") else "model"
        if stated is not None:
            seconds[index] = stated
        elif run["tokens_per_s_per_gpu"] is not None:
            seconds[index] = tokens[index] / devices[index] / run["tokens_per_s_per_gpu"]
        elif run["tflops_per_gpu"] is not None:
            seconds[index] = counted[kind][index] / devices[index] / (run["tflops_per_gpu"] * 1e12)
        elif run["mfu_pct"] is not None:
            peak = np.asarray(batch.machine.peak_flops_per_s)[index]
            seconds[index] = counted["model"][index] / devices[index] / (run["mfu_pct"] / 100 * peak)
    # A batch that the replicas can't share evenly is trained by whole microbatches of each.
    return seconds * strategies.global_batch / samples


@dataclass(frozen=True)
class Predictions:
    """One value a run; NaN where it could not be predicted or measured nothing. ``ratio`` is predicted over
    measured."""

    step_s: Array
    observed_s: Array
    ratio: Array
    low: Array
    high: Array
    spread: Array
    memory_bytes: Array
    usable_bytes: Array
    fits: Array


def predict(batch: Batch, constants: Constants = load_calibration) -> Predictions:
    """Judge every configuration and mix those of each run by weight."""
    stacked = stack_calibrations([constants(one.software, one.device.generation) for one in batch.configurations])
    found = judge(Case(batch.shape, batch.machine, batch.strategies, stacked))
    weight = _possible(batch, found.peak_memory_bytes, found.usable_memory_bytes)
    count = len(batch.runs)
    logs = np.log(found.step_s / batch.observed_s)

    def mean(values: Array) -> Array:
        total = np.full(count, np.nan)
        sums = np.bincount(batch.row, weight * values, minlength=count)
        seen = np.bincount(batch.row, minlength=count) > 0
        total[seen] = sums[seen]
        return total

    ratio = np.exp(mean(logs))
    spread = np.sqrt(np.maximum(mean(logs**2) - mean(logs) ** 2, 0.0))
    low, high = mean(np.log(np.asarray(stacked.interval_low))), mean(np.log(np.asarray(stacked.interval_high)))
    memory, usable = mean(found.peak_memory_bytes), mean(found.usable_memory_bytes)
    return Predictions(
        step_s=np.exp(mean(np.log(found.step_s))),
        observed_s=np.exp(mean(np.log(batch.observed_s))),
        ratio=ratio,
        low=np.exp(-np.hypot(low, 1.645 * spread)),
        high=np.exp(np.hypot(high, 1.645 * spread)),
        spread=spread,
        memory_bytes=memory,
        usable_bytes=usable,
        fits=mean(found.fits.astype(float)) > 0,
    )


def _possible(batch: Batch, peak: Array, usable: Array) -> Array:
    """Weights by how well the configurations fit, of runs that ran: the estimate of memory is itself uncertain."""
    doubt = np.clip(1 - (peak / usable - 1) / MEMORY_DOUBT, LEAST_BELIEF, 1.0)
    weight = np.where(batch.guessed, batch.weight * doubt, batch.weight)
    total = np.bincount(batch.row, weight, minlength=len(batch.runs))[batch.row]
    return weight / total
