"""FLOPs that a model needs, by the formula that papers count with."""

from __future__ import annotations

from threefold.cost.case import Array, Case
from threefold.cost.shape import Number, Shape


def forward_flops_per_token(shape: Shape) -> Number:
    """Two for each parameter of a matrix that the token visits, and 4·S·H·K a layer for scores and weighted sum.

    The causal mask is not taken off, as in Narayanan et al. 2021, eq. 3, and the MFU of Chowdhery et al. 2022.
    """
    matrices = shape.layers * (shape.attention_parameters + shape.active_mlp_parameters) + shape.head_parameters
    return 2 * matrices + 4 * shape.layers * shape.sequence * shape.heads * shape.head_dim


def model_flops(case: Case) -> Array:
    """Of one optimizer step over all devices: backward is twice forward, recompute does not count."""
    return 3 * forward_flops_per_token(case.shape) * case.strategies.global_batch * case.shape.sequence
