"""Seconds of one decoder layer, of the embedding and of the head, for one microbatch on one device.

Backward is split into the gradient of the input and that of the weights, which schedules like ZB-H1 run apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from threefold.cost.attention import SPLIT_KERNELS, attention_s, splits_softmax
from threefold.cost.case import Array, Case
from threefold.cost.collectives import all_reduce_s, all_to_all_s, scatter_s
from threefold.cost.elementwise import embedding_s, layer_backward_s, layer_forward_s, loss_s
from threefold.cost.gemm import linear_s

DIRECTIONS = 3
"""Forward, input gradient, weight gradient."""

LAYER_KERNELS = 25.0
"""Kernels of a layer's forward pass in a stack without fused attention, which ``launch_s`` is the time to start of."""


@dataclass(frozen=True)
class PartCost:
    """Seconds of one part of the model for one microbatch. Communication is what computation leaves exposed, by
    axis."""

    forward_s: Array
    input_grad_s: Array
    weight_grad_s: Array
    tp_forward_s: Array
    tp_backward_s: Array
    cp_s: Array
    ep_s: Array

    @property
    def compute_s(self) -> Array:
        """Forward and backward without communication."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s

    @property
    def total_s(self) -> Array:
        """Everything, forward and backward."""
        return self.compute_s + self.tp_forward_s + self.tp_backward_s + self.cp_s + self.ep_s


def layer_cost(case: Case) -> PartCost:
    """One decoder layer, averaged over dense and expert layers, recompute included in the input gradient."""
    forward, input_grad, weight_grad = _matrices_s(case)
    attention, attention_back = attention_s(case)
    forward = forward + attention + layer_forward_s(case)
    input_grad = input_grad + attention_back + layer_backward_s(case)
    selective = attention + case.constants.selective_share * (forward - attention)
    again = case.full_recompute * forward + case.selective_recompute * selective
    forward, input_grad, weight_grad, again = _at_least_launched(case, forward, input_grad, weight_grad, again)
    tp_forward, tp_backward = _tensor_parallel_s(case)
    cost = PartCost(
        forward, input_grad + again, weight_grad, tp_forward, tp_backward, _context_s(case), _expert_s(case)
    )
    return _as_measured(case, "layer", cost)


def head_cost(case: Case) -> PartCost:
    """Final norm, output matrix and loss."""
    shape = case.shape
    forward, input_grad, weight_grad = linear_s(case, case.tokens, shape.hidden, padded_vocab(case), narrow=False)
    loss, zero = loss_s(case), np.zeros(len(case.strategies))
    # A sum of the input gradient over tp, and two numbers a token for the softmax.
    reduced = _layer_collective_s(case) * case.constants.tp_exposed
    cost = PartCost(forward + loss * 0.4, input_grad + loss * 0.6, weight_grad, zero, reduced, zero, zero)
    return _as_measured(case, "head", cost)


def embedding_cost(case: Case) -> PartCost:
    """Token look-up and its scatter-add."""
    seconds, zero = embedding_s(case), np.zeros(len(case.strategies))
    reduced = _layer_collective_s(case) * case.constants.tp_exposed
    return _as_measured(case, "embedding", PartCost(seconds * 0.4, seconds * 0.6, zero, reduced, zero, zero, zero))


def _as_measured(case: Case, part: str, cost: PartCost) -> PartCost:
    """The cost corrected by a profile, where the machine has one."""
    measured = case.machine.measured
    if measured is None:
        return cost
    forward, input_grad, weight_grad = measured.factors[part]
    tp_forward, tp_backward = (forward, input_grad) if measured.with_tp else (1.0, 1.0)
    return replace(
        cost,
        forward_s=cost.forward_s * forward,
        input_grad_s=cost.input_grad_s * input_grad,
        weight_grad_s=cost.weight_grad_s * weight_grad,
        tp_forward_s=cost.tp_forward_s * tp_forward,
        tp_backward_s=cost.tp_backward_s * tp_backward,
    )


def padded_vocab(case: Case) -> Array:
    """Rows of the output matrix on one device: the vocabulary over tp, padded to whole lines as all stacks do."""
    return 64.0 * np.ceil(case.shape.vocab / case.strategies.tp / 64.0)


def _matrices_s(case: Case) -> tuple[Array, Array, Array]:
    """Queries, keys, values, output and MLP: forward, input gradient, weight gradient."""
    shape, tp, tokens = case.shape, case.strategies.tp, case.tokens
    qkv = linear_s(case, tokens, shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.head_dim / tp)
    out = linear_s(case, tokens, shape.heads * shape.head_dim / tp, shape.hidden)
    ffn = ((1 - shape.moe_share) * shape.ffn + shape.moe_share * shape.shared_ffn) / tp
    ffn = np.maximum(ffn, 1.0)
    up = linear_s(case, tokens, shape.hidden, ffn * (1 + shape.gated))
    down = linear_s(case, tokens, ffn, shape.hidden)
    experts = _expert_matrices_s(case)
    return tuple(sum(parts) for parts in zip(qkv, out, up, down, experts, strict=True))  # pyright: ignore[reportReturnType]


def _expert_matrices_s(case: Case) -> tuple[Array, Array, Array]:
    """Routed experts: E/ep of them on each device, each with its share of the tokens of ep devices."""
    shape, strategies = case.shape, case.strategies
    local = np.maximum(shape.experts / strategies.ep, 1.0)
    each = case.tokens * shape.experts_per_token / local
    width = np.maximum(shape.expert_ffn / strategies.tp, 1.0)
    each = np.maximum(each, 1.0)
    up = linear_s(case, each, shape.hidden, width * (1 + shape.gated))
    down = linear_s(case, each, width, shape.hidden)
    share = shape.moe_share * local
    return tuple(share * (a + b) for a, b in zip(up, down, strict=True))  # pyright: ignore[reportReturnType]


def _at_least_launched(case: Case, *passes: Array) -> tuple[Array, ...]:
    """No pass is faster than the host can start its kernels: forward and recompute once, each backward half of it.

    Where the host waits for every kernel, its time comes on top.
    """
    constants, tp = case.constants, case.strategies.tp
    # Every rank of a collective waits for the last one to start it: more ranks, longer.
    kernels = 1 + SPLIT_KERNELS / LAYER_KERNELS * splits_softmax(case)
    host = constants.launch_s * kernels + 2 * constants.launch_collective_s * np.log2(tp)
    floors = (host, 0.5 * host, 0.5 * host, host * case.full_recompute)
    serial = np.asarray(constants.serial_launch) > 0.5

    def together(seconds: Array, floor: Array) -> Array:
        return np.where(serial, seconds + floor, _smooth_max(seconds, floor))

    return tuple(together(seconds, floor) for seconds, floor in zip(passes, floors, strict=True))


def _smooth_max(a: Array, b: Array) -> Array:
    """(a⁸ + b⁸)^⅛: at most 9 % above the larger, where both are equal, as queues that run dry now and then are."""
    larger = np.maximum(a, b)
    squared = (np.minimum(a, b) / np.maximum(larger, 1e-30)) ** 2
    fourth = squared * squared
    return larger * np.sqrt(np.sqrt(np.sqrt(1 + fourth * fourth)))


def _layer_collective_s(case: Case) -> Array:
    """One all-reduce of the hidden states of a microbatch over tp (a reduce-scatter and an all-gather)."""
    num_bytes = case.tokens * case.shape.hidden * case.element_bytes
    size, in_node = case.strategies.tp, case.in_node("tp")
    whole = all_reduce_s(case, num_bytes, size, in_node)
    return np.where(case.strategies.sequence_parallel, 2 * scatter_s(case, num_bytes, size, in_node), whole)


def _tensor_parallel_s(case: Case) -> tuple[Array, Array]:
    """Two all-reduces forward, two backward, two more where forward is recomputed (Shoeybi et al. 2019); sequence
    parallelism sends the same bytes (Korthikanti et al. 2022) and one all-gather a matrix again in backward.
    """
    once = 2 * _layer_collective_s(case) * case.constants.tp_exposed
    gathered_again = 0.5 * case.strategies.sequence_parallel
    return once, once * (1 + case.full_recompute + gathered_again)


def _context_s(case: Case) -> Array:
    """Keys and values pass round the cp ring: forward, again in backward, their gradients back; the attention core
    hides what it can.
    """
    shape, strategies = case.shape, case.strategies
    num_bytes = 2 * strategies.cp * case.tokens * shape.kv_heads * shape.head_dim / strategies.tp * case.element_bytes
    once = scatter_s(case, num_bytes, strategies.cp, case.in_node("cp"))
    forward, backward = attention_s(case)
    return np.maximum(once - 0.8 * forward, 0.0) + np.maximum(2 * once - 0.8 * backward, 0.0)


def _expert_s(case: Case) -> Array:
    """Tokens to their experts and back, forward and backward: four all-to-alls (Lepikhin et al. 2020)."""
    shape, strategies = case.shape, case.strategies
    num_bytes = case.tokens * shape.experts_per_token * shape.hidden * case.element_bytes / case.norm_split
    in_node = np.clip(case.machine.devices_per_node / strategies.tp, 1.0, strategies.ep)
    passes = (4.0 + 2.0 * case.full_recompute) * case.constants.ep_exposed
    return shape.moe_share * passes * all_to_all_s(case, num_bytes, strategies.ep, in_node)
