"""Bytes that a device holds at the peak of a step, itemised, for each stage; the worst stage decides.

Legend: B micro batch, S sequence, D hidden, t tensor-parallel degree, L layers of the device. Activations of a layer
follow Korthikanti et al. 2022, eq. 1-4: B·S·D·(10 + 24/t) + 5·a·B·S²/t in 16-bit, everything over t with sequence
parallelism, the score term gone with fused attention or selective recompute, 2·B·S·D with full recompute.
States follow Rajbhandari et al. 2020: 2 + 2 + 12 bytes a parameter in mixed precision with Adam.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from threefold.cost.case import BF16, FP8, FP32, Array, Case
from threefold.cost.data_parallel import DeviceParameters, device_parameters
from threefold.cost.shape import Number
from threefold.cost.stages import STAGES, heads_of, message_bytes, stage_layers
from threefold.cost.strategies import SCHEDULE_CODES

ITEMS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "fragmentation")


def memory_bytes(case: Case) -> dict[str, dict[str, Array]]:
    """Stage -> item -> bytes of one device."""
    layers = stage_layers(case)
    parameters = device_parameters(case, layers)
    counts = {"first": layers.first, "middle": layers.middle, "last": layers.last}
    each = layer_activation_bytes(case)
    return {name: _stage(case, name, counts[name], parameters[name], each) for name in STAGES}


def worst_stage(stages: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    """The items of the stage that holds the most."""
    totals = np.stack([sum(stages[name].values(), start=np.zeros(1)) for name in STAGES])
    worst = totals.argmax(axis=0)[None]
    return {
        item: np.take_along_axis(np.stack([stages[name][item] for name in STAGES]), worst, axis=0)[0] for item in ITEMS
    }


def _stage(case: Case, name: str, layers: Array, parameters: DeviceParameters, each: Array) -> dict[str, Array]:
    states = _states(case, layers, parameters)
    activations = _activations(case, each, in_flight(case, name), layers)
    logits = _logits(case) * heads_of(case)[name]
    buffers = _buffers(case)
    allocated = sum(states.values(), start=np.zeros(1)) + activations + logits + buffers
    fragmentation = case.constants.fragmentation * allocated + case.constants.reserved_bytes
    return {
        **states,
        "activations": activations,
        "logits": logits,
        "buffers": buffers,
        "fragmentation": np.broadcast_to(fragmentation, allocated.shape),
    }


def _states(case: Case, layers: Array, parameters: DeviceParameters) -> dict[str, Array]:
    """Parameters, gradients and optimizer states after ZeRO's sharding and offloading."""
    strategies, constants = case.strategies, case.constants
    full_precision = strategies.precision == FP32
    fsdp = (np.asarray(constants.master_sharded) > 0.5) & (strategies.zero_stage >= 3)
    parameter_bytes = np.where(full_precision | fsdp, 4.0, 2.0)
    copies = np.where(strategies.precision >= BF16, constants.gradient_copy_bytes, 0.0)
    gradient_bytes = np.where(full_precision | fsdp, 4.0, case.gradient_bytes + copies)
    optimizer_bytes = np.where(full_precision | fsdp, 8.0, 12.0)

    def kept(per_parameter: Array, stage: int) -> Array:
        sharded = strategies.zero_stage >= stage
        group = strategies.dp * strategies.cp
        dense = parameters.dense / np.where(sharded, group, 1)
        expert = parameters.expert / np.where(sharded, np.maximum(group // strategies.ep, 1), 1)
        return (dense + expert) * per_parameter

    # Stage 3 holds two whole layers besides its shard, the one at work and the one being gathered. In a pipeline FSDP
    # keeps all of them between microbatches, and their gradients in fp32; threefold gathers for each microbatch.
    kept_whole = fsdp & (strategies.pp > 1)
    gathered = np.where(kept_whole, parameters.total, 2 * parameters.total / np.maximum(layers, 1))
    whole = np.where((strategies.zero_stage >= 3) & (strategies.dp * strategies.cp > 1), gathered, 0.0)
    return {
        "parameters": np.where(strategies.offload_param, 0.0, kept(parameter_bytes, 3)) + 2.0 * whole,
        "gradients": kept(gradient_bytes, 2) + np.where(kept_whole, 4.0, 1.0) * whole,
        "optimizer": np.where(strategies.offload_optimizer, 0.0, kept(optimizer_bytes, 1)),
    }


def in_flight(case: Case, name: str) -> Array:
    """Microbatches whose activations a device of the stage holds at the peak; parts of one count as parts.

    1F1B keeps min(m, p - r) microbatches on rank r, GPipe all m, naive one; ZB-H1 and ZB-V min(m, p) on every rank;
    interleaved 1F1B min(m·v, 2 (p - r - 1) + (v - 1) g + 1) chunks of L/v layers, with rounds of g microbatches
    (Narayanan et al. 2021, where g = p). The schedules themselves say the same, to a chunk.
    """
    strategies = case.strategies
    m, p, v = strategies.num_microbatches, strategies.pp, np.maximum(strategies.chunks, 1)
    rank = {"first": np.zeros_like(p), "middle": np.minimum(1, p - 1), "last": p - 1}[name]
    one_each = np.minimum(m, p - rank)
    rounds = -(-m // np.maximum(m // p, 1))
    chunks = np.minimum(m * v, 2 * (p - rank - 1) + (v - 1) * rounds + 1) / v
    codes = SCHEDULE_CODES
    return np.select(
        [
            strategies.schedule == codes["naive"],
            strategies.schedule == codes["gpipe"],
            (strategies.schedule == codes["interleaved_1f1b"]) & (p > 1),
            (strategies.schedule == codes["zb_h1"]) | (strategies.schedule == codes["zb_v"]),
        ],
        [np.ones_like(one_each), m, chunks, np.minimum(m, p)],
        default=one_each,
    )


def layer_activation_bytes(case: Case) -> Array:
    """Activations of one layer and microbatch that backward needs, without full recompute."""
    shape, strategies, tp = case.shape, case.strategies, case.strategies.tp
    element = case.element_bytes
    # What a matrix multiplication reads again in backward is kept as it read it: 8-bit ones keep one byte.
    operand = np.where(strategies.precision >= FP8, 1.0, element)
    wide = (2 * element + 2 * operand + 2 * shape.dropout) * shape.hidden / case.norm_split
    heads = element * (shape.heads + 2 * shape.kv_heads) + operand * shape.heads
    ffn = (1 - shape.moe_share) * shape.ffn + shape.moe_share * (
        shape.shared_ffn + shape.experts_per_token * shape.expert_ffn
    )
    routed = shape.moe_share * shape.experts_per_token * shape.hidden * 2 / case.norm_split * element
    inner = (element * (1 + shape.gated) + operand) * ffn
    split = heads * shape.head_dim / tp + inner / tp + routed
    flash = np.asarray(case.constants.flash) > 0.5
    scores = strategies.micro_batch * shape.heads / tp * shape.sequence**2 / strategies.cp
    eager = case.constants.eager * shape.gated * _eager_bytes(case, ffn)
    kept_scores = np.where(flash | (strategies.recompute > 0), 0.0, scores * (2 * element + shape.dropout))
    return case.tokens * (wide + split + eager) + kept_scores


def _eager_bytes(case: Case, ffn: Number) -> Array:
    """Bytes a token that unfused operations of a Llama layer keep besides: each norm its input in fp32 and the
    normalised product (4 + 2 bytes of D), rotations fp32 copies of queries and keys, the gate silu(x) beside x.
    """
    shape, strategies = case.shape, case.strategies
    norms = 2 * (4.0 + 2.0) * shape.hidden / case.norm_split
    rotations = 4.0 * (shape.heads + shape.kv_heads) * shape.head_dim / strategies.tp
    return norms + rotations + case.element_bytes * ffn / strategies.tp


def _activations(case: Case, each: Array, microbatches: Array, layers: Array) -> Array:
    """``each`` layer's activations for the microbatches in flight; under full recompute only each layer's input, and
    all of the one layer that is being recomputed.
    """
    strategies, constants = case.strategies, case.constants
    inputs = case.tokens * case.shape.hidden * case.element_bytes / case.norm_split
    full = case.full_recompute
    part = each * (1 - case.selective_recompute * constants.selective_share)
    held = microbatches * (layers * np.where(full > 0, inputs, part) + constants.message_copies * inputs)
    flash = np.asarray(constants.flash) > 0.5
    scores = strategies.micro_batch * case.shape.heads / strategies.tp * case.shape.sequence**2 / strategies.cp
    recomputed = np.where(flash | (strategies.recompute == 0), 0.0, scores * 5.0)
    return held + full * each + recomputed


def _logits(case: Case) -> Array:
    """B·S·V/t logits in every form that is held at once."""
    return case.tokens * case.shape.vocab / case.strategies.tp * case.constants.logit_bytes


def _buffers(case: Case) -> Array:
    """Messages between stages and the workspace of matrix multiplications and collectives."""
    return 4 * message_bytes(case) * (case.strategies.pp > 1) + 256e6
