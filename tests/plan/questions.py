"""Questions that the tests of the planner share, and an answer found without any cleverness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from threefold.cost.estimate import estimate
from threefold.cost.hardware import Hardware, find_device
from threefold.cost.strategies import SCHEDULE_CODES, Strategies
from threefold.job import ModelSpec, parse_job
from threefold.plan.order import ranked
from threefold.plan.question import Question, read_fixed
from threefold.plan.rungs import HOST_MEMORY_BYTES

GB = 1e9


def model_of(**settings: Any) -> ModelSpec:
    model = parse_job({"model": settings, "train_batch_size": 1}).model
    assert model is not None
    return model


def hardware_of(
    name: str = "a100-80gb", nodes: int = 1, devices_per_node: int = 8, memory: float | None = None
) -> Hardware:
    """``memory`` in GB replaces the device's."""
    device = find_device(name)
    if memory is not None:
        device = replace(device, memory_bytes=memory * GB)
    return Hardware(device, nodes, devices_per_node, device.nic_bytes_per_s)


def ask(
    model: ModelSpec | str, hardware: Hardware, global_batch: int, sequence_length: int = 512, **fixed: Any
) -> Question:
    model = model_of(preset=model) if isinstance(model, str) else model
    return Question(model, sequence_length, hardware, global_batch, read_fixed(fixed))


def brute_force(question: Question) -> tuple[Strategies, float]:
    """The best candidate, and its time, when every one that the rules allow is judged."""
    strategies = _candidates(question)
    found = estimate(question.model, question.sequence_length, question.hardware, strategies)
    needed = _resort_needed(question, strategies)
    fits = np.flatnonzero(found.fits & (needed == needed[found.fits].min(initial=9)))
    if not len(fits):
        return strategies.take(fits), np.inf
    best = fits[ranked(strategies.take(fits), found.step_s[fits])[:1]]
    return strategies.take(best), float(found.step_s[best[0]])


VALUES: Mapping[str, Sequence[int]] = {
    "sequence_parallel": (0, 1),
    "zero_stage": range(4),
    "recompute": range(3),
    "offload_optimizer": (0, 1),
    "offload_param": (0, 1),
    "schedule": list(SCHEDULE_CODES.values()),
    "order": range(6),
    "partition": (0, 1),
}


CHUNKS: Mapping[int, Sequence[int]] = {
    SCHEDULE_CODES["interleaved_1f1b"]: range(2, 9),
    SCHEDULE_CODES["zb_v"]: (2,),
}


def _candidates(question: Question) -> Strategies:
    fixed, devices, batch = question.fixed, question.num_devices, question.global_batch
    splits = [
        (tp, pp, devices // (tp * pp), micro_batch)
        for tp, pp, micro_batch in product(range(1, devices + 1), range(1, devices + 1), range(1, batch + 1))
        if devices % (tp * pp) == 0 and batch % (devices // (tp * pp) * micro_batch) == 0
    ]
    values = {name: [fixed[name]] if name in fixed else values for name, values in VALUES.items()}
    pairs = [(code, v) for code in values["schedule"] for v in CHUNKS.get(code, (1,))]
    others = product(*(values[name] for name in values if name != "schedule"))
    settings = [(*other, *pair) for other, pair in product(others, pairs)]
    names = [name for name in VALUES if name != "schedule"] + ["schedule", "chunks"]
    left, right = np.meshgrid(np.arange(len(splits)), np.arange(len(settings)))
    sizes = dict(
        zip(("tp", "pp", "dp", "micro_batch"), np.array(splits, dtype=int).reshape(-1, 4)[left.ravel()].T, strict=True)
    )
    others = dict(zip(names, np.array(settings)[right.ravel()].T, strict=True))
    num_microbatches = batch // sizes["dp"] // sizes["micro_batch"]
    everything = Strategies.build(**sizes, **others, num_microbatches=num_microbatches, precision=question.precision)
    return everything.take(_legal(question, everything))


def _resort_needed(question: Question, all_: Strategies) -> np.ndarray:
    """0 for an ordinary strategy, 1 where ZeRO stage 3 is the last resort, 2 where offloading is."""
    offloads = [name for name in ("offload_optimizer", "offload_param") if name not in question.fixed]
    offloaded = np.any([np.zeros(len(all_)), *(getattr(all_, name) for name in offloads)], axis=0)
    return np.where(offloaded, 2, (all_.zero_stage == 3) & ("zero_stage" not in question.fixed))


def _legal(question: Question, all_: Strategies) -> np.ndarray:
    model, hardware = question.model, question.hardware
    widths = math.gcd(model.num_attention_heads, model.num_key_value_heads, model.intermediate_size)
    offloaded = model.num_parameters * (12.0 * all_.offload_optimizer + 2.0 * all_.offload_param)
    inside = [np.ones_like(all_.tp), all_.pp, all_.pp * all_.dp, all_.dp, all_.dp * all_.pp]
    span = all_.tp * np.choose(np.array([0, 0, 1, 2, 3, 4])[all_.order], inside)
    fullest = -(-model.num_hidden_layers // all_.pp)
    whole = (all_.schedule == SCHEDULE_CODES["zb_v"]) | (fullest % all_.chunks == 0)
    enough = (all_.pp > 1) & (all_.pp * all_.chunks <= model.num_hidden_layers) & (all_.num_microbatches >= all_.pp)
    return (
        ((all_.chunks == 1) | (whole & enough))
        & (widths % all_.tp == 0)
        & (all_.pp <= model.num_hidden_layers)
        & (all_.zero_stage >= np.maximum(all_.offload_optimizer, 3 * all_.offload_param))
        & (offloaded <= HOST_MEMORY_BYTES * hardware.nodes)
        & (~all_.sequence_parallel | (question.sequence_length % all_.tp == 0))
        & ((all_.tp == 1) | (hardware.devices_per_node % span == 0))
    )
