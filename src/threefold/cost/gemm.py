"""Seconds of matrix multiplications by shape.

C[M, N] = A[M, K] B[K, N] takes 2·M·N·K FLOPs. What keeps it below the device's best rate:

- K: the loop over it has a start and an end during which the multipliers idle, a factor 1 + k0/K.
- M·N: the result is made in tiles by all multiprocessors at once, in waves, of which the last is part empty; on average
  half a wave is lost, as if M·N were larger by that (NVIDIA, "Matrix Multiplication Background": wave quantization).
- Alignment: rows that do not start on whole memory lines of 64 elements are loaded in more pieces.
- Bytes of A, B and C that pass through memory. Tiles load while others multiply, but for the first loads and last
  stores: a share is added rather than the larger of both times taken, which also keeps the estimate smooth.
"""

from __future__ import annotations

import numpy as np

from threefold.cost.case import FP4, FP8, Array, Case
from threefold.cost.shape import Number

WAVE = 108 * 128 * 256
"""Elements of one wave: tiles of 128 × 256 on the 108 multiprocessors of an A100; later chips differ by less than
half."""

EXPOSED_BYTES = 0.35
"""Share of a multiplication's memory traffic that its computation does not hide."""

LINE = 64
"""16-bit elements of a memory line of 128 bytes."""


def gemm_s(
    case: Case, rows: Number, columns: Number, depth: Number, flops_per_s: Array, operand_bytes: Number
) -> Array:
    """One multiplication of [rows, depth] by [depth, columns] at a best rate of ``flops_per_s``.

    ``operand_bytes`` is the width of an element of A and B; C is written in 16 bits (fp32: 32).
    """
    constants = case.constants
    computed = 2.0 * (rows * columns + constants.lost_waves * WAVE) * depth * (1 + constants.gemm_depth / depth)
    moved = operand_bytes * (rows * depth + depth * columns) + case.element_bytes * rows * columns
    return computed / flops_per_s + EXPOSED_BYTES * moved / case.memory_bytes_per_s


def linear_s(
    case: Case, tokens: Number, inputs: Number, outputs: Number, narrow: bool = True
) -> tuple[Array, Array, Array]:
    """A linear layer of ``inputs`` → ``outputs`` features: seconds of forward, input gradient, weight gradient.

    ``narrow``: in the strategy's precision; else in 16 bits also where that is 8 or 4 bits (the head).
    """
    rate = (case.dense_flops_per_s if narrow else case.half_flops_per_s) / _misalignment(case, inputs, outputs)
    width = _operand_bytes(case) if narrow else case.element_bytes
    return (
        gemm_s(case, tokens, outputs, inputs, rate, width),
        gemm_s(case, tokens, inputs, outputs, rate, width),
        gemm_s(case, inputs, outputs, tokens, rate, width),
    )


def _operand_bytes(case: Case) -> Array:
    code = case.strategies.precision
    return np.where(code == FP4, 0.5, np.where(code == FP8, 1.0, case.element_bytes))


def _misalignment(case: Case, inputs: Number, outputs: Number) -> Array:
    """1 for features that are whole lines, more by up to a constant the smaller the power of two is that divides
    them."""
    aligned = np.minimum(_power_of_two(inputs), _power_of_two(outputs)) / LINE
    return 1 + case.constants.misalignment * (1 - aligned)


def _power_of_two(features: Number) -> Array:
    """Largest power of two, at most a line, that divides ``features``; that of the whole number below."""
    whole = np.maximum(np.asarray(features, dtype=float), 1.0).astype(np.int64)
    return np.minimum(whole & -whole, LINE).astype(float)
