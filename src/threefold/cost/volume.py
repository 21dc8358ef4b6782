"""Bytes that one device of a middle stage sends in one optimizer step, by axis, on the wire of a ring."""

from __future__ import annotations

import numpy as np

from threefold.cost.case import Array, Case
from threefold.cost.data_parallel import device_parameters
from threefold.cost.stages import message_bytes, stage_layers


def communication_bytes(case: Case) -> dict[str, Array]:
    """tp, pp, dp, cp and ep: what leaves the device, (g - 1)/g of each tensor for a scatter or a gather."""
    strategies, shape, m = case.strategies, case.shape, case.strategies.num_microbatches
    layers = stage_layers(case).middle
    hidden = case.tokens * shape.hidden * case.element_bytes
    keys = 2 * strategies.cp * case.tokens * shape.kv_heads * shape.head_dim / strategies.tp * case.element_bytes
    routed = case.tokens * shape.experts_per_token * shape.hidden * case.element_bytes / case.norm_split
    again = case.full_recompute
    return {
        "tp": m * layers * (4 + 2 * again) * 2 * hidden * _share(strategies.tp),
        "pp": m * np.maximum(strategies.chunks, 1) * 2 * message_bytes(case) * (strategies.pp > 1),
        "dp": _replicas(case),
        "cp": m * layers * 3 * keys * _share(strategies.cp),
        "ep": m * layers * shape.moe_share * (4 + 2 * again) * routed * _share(strategies.ep),
    }


def _share(group: Array) -> Array:
    return (group - 1) / group


def _replicas(case: Case) -> Array:
    strategies = case.strategies
    parameters = device_parameters(case)["middle"].total
    gradient, element = case.gradient_bytes, case.element_bytes
    per_step = np.where(strategies.zero_stage == 0, 2.0 * gradient, gradient + element)
    per_microbatch = (2 * element + gradient) * np.where(strategies.pp > 1, 1, strategies.num_microbatches)
    total = np.where(strategies.zero_stage >= 3, per_microbatch, per_step)
    return parameters * total * _share(strategies.dp * strategies.cp)
