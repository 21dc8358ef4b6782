"""The honest error: each source predicted with constants fitted to the others, and intervals that come from that.

A source is a whole repository or paper. The interval is conformal: the residuals |log(measured / predicted)| of runs
that the constants never saw say how wide 90 % is. It has the same width on both sides, for the next source may be as
fast as the last one was slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from threefold.cost.case import Array
from threefold.cost.completion import DEEPSPEED, DEEPSPEED_SERIAL, EAGER, FSDP, FSDP2, MEGATRON, MODERN
from threefold.cost.fitting import constants_of, fit, memory_errors
from threefold.cost.knobs import BASE, KNOBS, MEMORY_KNOBS
from threefold.cost.predict import Batch, Predictions, predict

KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"unfused": (MEGATRON, DEEPSPEED, DEEPSPEED_SERIAL), "fused": (MODERN, EAGER), "fsdp": (FSDP, FSDP2)}
)
"""Software generations that share their kernels, and so an interval."""

LEAST_SOURCES = 3
"""Sources below which a kind's interval is that of all: one source says nothing of how sources differ."""


def origins(batch: Batch) -> Array:
    """The source of each run."""
    return np.array([run.origin for run in batch.runs])


def softwares(batch: Batch) -> Array:
    """The software generation of each run; empty where it could not be completed."""
    names = np.full(len(batch.runs), "", dtype=object)
    for row, one in zip(batch.row, batch.configurations, strict=True):
        names[row] = one.software
    return names.astype(str)


def fit_all(batch: Batch, used: Array) -> dict[str, Any]:
    """Constants of memory, then of time, fitted to the runs where ``used`` is true."""
    errors = memory_errors(batch)
    table: dict[str, Any] = dict(BASE)
    measured = np.isfinite(errors(predict(batch, constants_of(table)))) & used
    table = fit(batch, table, MEMORY_KNOBS, measured, errors)
    timed = np.isfinite(batch_times(batch)) & used
    return fit(batch, table, KNOBS, timed)


def batch_times(batch: Batch) -> Array:
    """Measured seconds of each run, NaN where there is none."""
    seconds = np.full(len(batch.runs), np.nan)
    seconds[batch.row] = batch.observed_s
    return seconds


def leave_one_out(batch: Batch) -> Predictions:
    """Every source predicted with constants fitted without it; intervals too come from the other sources only."""
    sources = origins(batch)
    held_out: Predictions | None = None
    for source in dict.fromkeys(sources):
        fitted = fit_all(batch, sources != source)
        held_out = _merge(held_out, predict(batch, constants_of(fitted)), sources == source)
    if held_out is None:
        raise ValueError("no runs to leave out")
    low, high = held_out.low.copy(), held_out.high.copy()
    for source in dict.fromkeys(sources):
        bounds = interval_table(batch, held_out, sources != source)
        mine = sources == source
        low[mine], high[mine] = _bounds_of(batch, held_out, bounds, mine)
    return replace(held_out, low=low, high=high)


def _merge(first: Predictions | None, second: Predictions, where: Array) -> Predictions:
    if first is None:
        return second
    merged = {
        field.name: np.where(where, getattr(second, field.name), getattr(first, field.name))
        for field in fields(Predictions)
    }
    return Predictions(**merged)


def interval_table(batch: Batch, held_out: Predictions, used: Array) -> dict[str, dict[str, float]]:
    """Software generation ("" for any) -> factors that bound 90 % of measured over predicted."""
    names, sources = softwares(batch), origins(batch)
    known = used & np.isfinite(held_out.ratio)
    table = {"": _interval(held_out, known, sources)}
    for members in KINDS.values():
        chosen = known & np.isin(names, members)
        if len(set(sources[chosen])) >= LEAST_SOURCES:
            table |= dict.fromkeys(members, _interval(held_out, chosen, sources))
    return table


def _interval(held_out: Predictions, members: Array, sources: Array) -> dict[str, float]:
    # What a run leaves unsaid widens its interval by itself; here is the rest.
    residual = np.abs(np.log(held_out.ratio[members]))
    counts = {source: np.sum(members & (sources == source)) for source in set(sources[members])}
    # Between counting runs, which one big table would decide, and counting sources, of which there are few.
    weight = np.array([counts[source] ** -0.125 for source in sources[members]])
    width = float(weighted_quantile(residual, weight, np.array([0.9]))[0])
    return {"interval_low": float(np.exp(-width)), "interval_high": float(np.exp(width))}


def weighted_quantile(values: Array, weights: Array, shares: Array) -> Array:
    """The values below which ``shares`` of the weight lies, interpolated."""
    order = np.argsort(values)
    ranked, weight = values[order], weights[order]
    position = (np.cumsum(weight) - 0.5 * weight) / weight.sum()
    return np.interp(shares, position, ranked)


def _bounds_of(
    batch: Batch, held_out: Predictions, table: Mapping[str, Mapping[str, float]], mine: Array
) -> tuple[Array, Array]:
    bounds = [table.get(name, table[""]) for name in softwares(batch)[mine]]
    spread = 1.645 * held_out.spread[mine]
    low = np.log([bound["interval_low"] for bound in bounds])
    high = np.log([bound["interval_high"] for bound in bounds])
    return np.exp(-np.hypot(low, spread)), np.exp(np.hypot(high, spread))


def with_intervals(table: Mapping[str, Any], intervals: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """``table`` with the interval of each software generation, and that of all as the default."""
    software = {name: {**constants, **intervals.get(name, {})} for name, constants in dict(table["software"]).items()}
    return {**table, "defaults": {**table["defaults"], **intervals[""]}, "software": software}
