"""Clipping by the true global gradient norm, which the data-parallel engine sums under every layout."""

from __future__ import annotations

_EPSILON = 1e-6
"""As in ``torch.nn.utils.clip_grad_norm_``, so that clipping equals a single process that uses it."""


def clip_factor(norm: float, limit: float) -> float:
    """What to multiply gradients by so that their norm is at most ``limit``; 1 where it already is, or limit is 0."""
    return min(1.0, limit / (norm + _EPSILON)) if limit > 0 else 1.0
