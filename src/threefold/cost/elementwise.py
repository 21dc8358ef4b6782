"""Bytes of the memory-bound operations: norms, activations, dropout, residuals, loss, optimizer.

Counts are in elements read or written by kernels that are fused as far as one pass over the data allows; the constant
``elementwise_passes`` says how far a software stack is from that.
"""

from __future__ import annotations

import numpy as np

from threefold.cost.case import FP8, Array, Case
from threefold.cost.shape import Number

NORM = 2.0
"""Read, write."""
RESIDUAL = 3.0
"""Bias, dropout and residual add: read the branch, read the stream, write."""


def layer_forward_s(case: Case) -> Array:
    """Norms, residual adds, the MLP's activation and rotations of one layer and microbatch, forward."""
    shape, strategies = case.shape, case.strategies
    wide = 2 * (NORM + RESIDUAL) * shape.hidden / case.norm_split
    ffn = _active_ffn(case) / strategies.tp
    activation = (2.0 + shape.gated) * ffn
    heads = 2.0 * (shape.heads + shape.kv_heads) * shape.head_dim / strategies.tp
    narrow = np.where(strategies.precision >= FP8, 1.0, 0.0) * (2 * shape.hidden / case.norm_split + ffn)
    moved = case.tokens * case.element_bytes * (wide + activation + heads + narrow)
    return moved * case.constants.elementwise_passes / case.memory_bytes_per_s


def layer_backward_s(case: Case) -> Array:
    """The same in backward, which reads the saved input beside the gradient: about twice the bytes."""
    return 2.0 * layer_forward_s(case)


def loss_s(case: Case) -> Array:
    """Softmax and cross entropy of the logits, forward and backward."""
    logits = case.tokens * case.shape.vocab / case.strategies.tp
    return logits * case.constants.loss_bytes / case.memory_bytes_per_s


def embedding_s(case: Case) -> Array:
    """Look-up, position, dropout forward; scatter of gradients backward."""
    moved = case.tokens * case.element_bytes * 8.0 * case.shape.hidden / case.norm_split
    return moved * case.constants.elementwise_passes / case.memory_bytes_per_s


def optimizer_s(case: Case, parameters: Number) -> Array:
    """One Adam step over ``parameters`` on this device: reads and writes master, two moments and gradients, writes the
    16-bit copy: about 34 bytes a parameter, at the memory's rate. Offloaded, the states cross PCIe and are updated
    by the host, both of which are bound by PCIe-like rates: gradients out (4 bytes), parameters back (2).
    """
    local = parameters * OPTIMIZER_BYTES / case.memory_bytes_per_s
    host = parameters * 6.0 / case.machine.pcie_bytes_per_s + parameters * OPTIMIZER_BYTES / HOST_BYTES_PER_S
    return np.where(case.strategies.offload_optimizer, host, local)


OPTIMIZER_BYTES = 34.0
"""Read and written for each parameter of an Adam step."""
HOST_BYTES_PER_S = 25e9
"""Memory bandwidth of a server's host that one of eight devices gets: 8 DDR4 channels of 25 GB/s over 8 devices."""


def _active_ffn(case: Case) -> Number:
    shape = case.shape
    routed = shape.experts_per_token * shape.expert_ffn + shape.shared_ffn
    return (1 - shape.moe_share) * shape.ffn + shape.moe_share * routed
