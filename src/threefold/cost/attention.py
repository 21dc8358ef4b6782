"""Seconds of the attention core: scores, softmax and the weighted sum of values of one layer.

Forward takes 4·B·S²·H·K FLOPs (two multiplications), backward twice that; a kernel that skips what the causal mask
hides does half. Without a fused kernel the B·H·S² scores pass through memory several times: written, masked and
normalised, dropped, read. A fused kernel (Dao et al. 2022, 2023) keeps them on the chip and recomputes them in
backward (5/2 of the forward's FLOPs).
"""

from __future__ import annotations

import numpy as np

from threefold.cost.case import Array, Case


def attention_s(case: Case) -> tuple[Array, Array]:
    """Seconds of forward and of backward, one layer and microbatch on one device."""
    fused = _fused_s(case)
    plain = _plain_s(case)
    flash = np.asarray(case.constants.flash) > 0.5
    return np.where(flash, fused[0], plain[0]), np.where(flash, fused[1], plain[1])


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
    shape, scores, best = case.shape, _scores(case), case.half_flops_per_s
    # The multiplications of all heads run as one, so that no waves are lost between them.
    flops = 4.0 * scores * shape.head_dim * (1 + case.constants.gemm_depth / shape.head_dim) / best
    # Of the bytes of scores, the forward pass moves two fifths: write, softmax in place, dropout, read.
    moved = scores * case.constants.score_bytes / case.memory_bytes_per_s
    return flops + 0.4 * moved, 2 * flops + 0.6 * moved
