"""The true global gradient norm, under every layout.

Each element of the model counts exactly once: shards on the rank that holds them, copies on one of their holders. The
squares are summed in float64, and the sum is the same number on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from threefold.parallel.mesh import Mesh
from threefold.parallel.stage import ShardedParameter

_EPSILON = 1e-6
"""As in ``torch.nn.utils.clip_grad_norm_``, so that clipping equals a single process that uses it."""


def local_squared_norm(parameters: Iterable[ShardedParameter], mesh: Mesh) -> Tensor:
    """This rank's share of the squared norm, a float64 scalar.

    After reduction all replicas hold the same gradients, so only the first one counts.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    if mesh.coord.dp != 0:
        return total
    owned = [entry.parameter.grad for entry in parameters if entry.owns_norm and entry.parameter.grad is not None]
    if owned:
        norms = torch._foreach_norm(owned)  # pyright: ignore[reportPrivateImportUsage]
        total += torch.stack(norms).double().square().sum()
    return total


def clip_factor(norm: float, limit: float) -> float:
    """What to multiply gradients by so that their norm is at most ``limit``; 1 where it already is, or limit is 0."""
    return min(1.0, limit / (norm + _EPSILON)) if limit > 0 else 1.0
