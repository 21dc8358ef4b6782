"""Initial weights that depend on the seed and the parameter's name only.

Every rank can make any parameter, whole, without talking to anybody, and then keep its part: so a layout can't change
the initial model, no two shards are copies of each other, and replicas start equal.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from threefold.job import ModelSpec

InitialValue = Callable[[str, torch.Size], Tensor]
"""Gives the whole (global) initial value, in float32 on the CPU, of the parameter of that name and shape."""


def stream_seed(*words: object) -> int:
    """A 63-bit seed for the random stream named by ``words``; streams of different names are independent."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def decoder_initial_value(spec: ModelSpec, seed: int) -> InitialValue:
    """GPT-2's initialization: normal(0, ``initializer_range``), biases 0, norms 1.

    Layers that write into the residual stream are divided by sqrt(2 L), so that its variance does not grow with the
    number L of layers (Radford et al. 2019, section 2.3).
    """
    residual_std = spec.initializer_range / math.sqrt(2 * spec.num_hidden_layers)

    def initial_value(name: str, shape: torch.Size) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if name.endswith(".bias"):
            return torch.zeros(shape)
        writes_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
        std = residual_std if writes_residual else spec.initializer_range
        generator = torch.Generator().manual_seed(stream_seed(seed, name))
        return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)

    return initial_value
