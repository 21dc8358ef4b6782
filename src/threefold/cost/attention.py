"""Seconds of the attention core: scores, softmax and the weighted sum of values of one layer.

Forward takes 4·B·S²·H·K FLOPs (two multiplications), backward twice that; a kernel that skips what the causal mask
hides does half. Without a fused kernel the B·H·S² scores pass through memory several times: written, masked and
normalised, dropped, read. A fused kernel (Dao et al. 2022, 2023) keeps them on the chip and recomputes them in
backward (5/2 of the forward's FLOPs).

Stacks without one (Megatron-LM) scale, mask and normalise the scores in one kernel, which takes rows in fours: where
micro batch × heads of a device is no multiple of four they fall back to separate operations of PyTorch, in fp32
(FusedScaleMaskSoftmax.is_kernel_available, megatron/model/fused_softmax.py). Their multiplications, of all heads at
once, use the tensor cores only where rows start on 16 bytes (NVIDIA, "Matrix Multiplication Background", tensor core
requirements): heads whose width is no multiple of eight 16-bit numbers run on the fp32 units, an order of magnitude
slower. BigScience met both (tr11-176B-ml/chronicles-prequel.md, "NHEADs comparison" and "Another round of NHEADS"): a
model of width 13,824 takes 107 s with 96 heads and 147 s with 128.
"""

from __future__ import annotations

import numpy as np

from threefold.cost.case import Array, Case

FUSED_ROWS = 4
"""Rows that a block of the kernel for scale, mask and softmax takes."""

SPLIT_FORWARD_BYTES = 32.0
"""Bytes moved for a score besides the one kernel's 4, where softmax is split: to fp32 (6), scale (8), mask (8), softmax
(8), to 16 bits (6)."""
SPLIT_BACKWARD_BYTES = 34.0
"""The same for the gradients of these five, besides the one kernel's 6: 6 + 8 + 8 + 6, and 12 of softmax, which reads
two tensors."""
SPLIT_KERNELS = 4.0
"""Kernels that this starts besides, in each direction."""

TENSOR_CORE_HEAD = 8
"""16-bit numbers of the 16 bytes on which rows must start."""


def attention_s(case: Case) -> tuple[Array, Array]:
    """Seconds of forward and of backward, one layer and microbatch on one device."""
    fused = _fused_s(case)
    plain = _plain_s(case)
    flash = np.asarray(case.constants.flash) > 0.5
    return np.where(flash, fused[0], plain[0]), np.where(flash, fused[1], plain[1])


def splits_softmax(case: Case) -> Array:
    """1 where scale, mask and softmax of the scores run as separate operations. The kernel's longest row has grown with
    what people train on, and is no limit here."""
    rows = case.strategies.micro_batch * case.shape.heads / case.strategies.tp
    odd = (np.mod(rows, FUSED_ROWS) > 0) | (np.mod(case.shape.sequence, FUSED_ROWS) > 0)
    return (odd & (np.asarray(case.constants.flash) <= 0.5)).astype(float)


def _scores(case: Case) -> Array:
    """B·H·S² of one device."""
    shape, strategies = case.shape, case.strategies
    return strategies.micro_batch * (shape.heads / strategies.tp) * shape.sequence**2 / strategies.cp


def _fused_s(case: Case) -> tuple[Array, Array]:
    flops = 4.0 * _scores(case) * case.shape.head_dim * (1 - 0.5 * case.constants.causal_skip)
    # Heads narrower than 128 leave the multipliers waiting for the exponentials.
    narrow = np.minimum(1.0, (case.shape.head_dim / 128.0) ** 0.2)
    best = case.constants.attention_efficiency * case.matmul_flops_per_s * narrow
    return flops / best, 2.5 * flops / (best * case.constants.attention_backward)


def _plain_s(case: Case) -> tuple[Array, Array]:
    shape, scores, constants = case.shape, _scores(case), case.constants
    # The multiplications of all heads run as one, so that no waves are lost between them.
    multiplied = 4.0 * scores * shape.head_dim
    aligned = multiplied * (1 + constants.gemm_depth / shape.head_dim) / case.half_flops_per_s
    # The fp32 units are so slow that the start of the inner loop does not count.
    flops = np.where(np.mod(shape.head_dim, TENSOR_CORE_HEAD) > 0, multiplied / case.single_flops_per_s, aligned)
    # Of the bytes of scores, the forward pass moves two fifths: write, softmax in place, dropout, read.
    split = splits_softmax(case)
    forward = 0.4 * constants.score_bytes + split * SPLIT_FORWARD_BYTES
    backward = 0.6 * constants.score_bytes + split * SPLIT_BACKWARD_BYTES
    moved = scores / case.memory_bytes_per_s
    return flops + forward * moved, 2 * flops + backward * moved
