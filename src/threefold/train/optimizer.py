"""The optimizer of a job over this rank's shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from threefold.job.spec import Optimizer
from threefold.parallel.stage import ShardedParameter


def build_optimizer(settings: Optimizer, parameters: Sequence[ShardedParameter]) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019) or SGD, as the job says.

    Weight decay pulls matrices and embeddings towards zero; biases and norm weights, which have one dimension, keep
    their scale. The rule looks at the global shape, so all copies and shards of a parameter are treated alike.
    """
    params = settings.params
    decayed = [entry.parameter for entry in parameters if len(entry.global_shape) >= 2]
    kept = [entry.parameter for entry in parameters if len(entry.global_shape) < 2]
    groups = [
        {"params": decayed, "weight_decay": params.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]] or groups  # a stage without layers has no parameters
    if settings.type == "SGD":
        return torch.optim.SGD(groups, lr=params.lr, momentum=params.momentum, foreach=True)
    return torch.optim.AdamW(groups, lr=params.lr, betas=params.betas, eps=params.eps, foreach=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use ``learning_rate`` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
