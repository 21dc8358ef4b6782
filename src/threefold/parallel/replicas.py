"""Copies of a parameter must be equal: made so at the start, and checked cheaply while training.

Copies drift apart when a gradient is not reduced, is reduced over the wrong ranks, or when hardware corrupts memory;
the loss often hides it for thousands of steps. The check compares 64-bit hashes of the exact bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from threefold.errors import ReplicaError
from threefold.parallel.collectives import Group, all_gather_parts
from threefold.parallel.mesh import Mesh
from threefold.parallel.stage import ShardedParameter

_CHUNK_ELEMENTS = 1 << 20
_INTEGER_OF_BYTES: Mapping[int, torch.dtype] = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def make_replicas_equal(parameters: Iterable[ShardedParameter]) -> None:
    """Copy each parameter from the first rank that holds it to all others that do."""
    with torch.no_grad():
        for entry in parameters:
            entry.copies.broadcast(entry.parameter.data).wait()


def hash_tensor(tensor: Tensor) -> int:
    """A 64-bit hash of the exact bits: sum of element * (2 * index + 1) modulo 2^64.

    Odd weights make it depend on the order, and any change of a single element changes it.
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGER_OF_BYTES[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK_ELEMENTS):
        chunk = bits[start : start + _CHUNK_ELEMENTS].to(torch.int64)
        weights = torch.arange(start, start + chunk.numel(), device=bits.device).mul_(2).add_(1)
        total += (chunk * weights).sum()
    return int(total)


def check_replicas(parameters: Sequence[ShardedParameter], mesh: Mesh, step: int) -> None:
    """Compare the copies of every parameter over the ranks that hold them.

    Raises:
        ReplicaError: on every rank, at the same step; a rank that saw a difference names parameter and ranks.
    """
    difference = _first_difference(parameters)
    found = torch.tensor([1.0 if difference else 0.0], device=mesh.device)
    mesh.world.all_reduce(found, "max").wait()
    if difference:
        raise ReplicaError(f"after step {step}, copies of {difference}. {_ADVICE}")
    if found.item():
        raise ReplicaError(f"after step {step}, other ranks found copies of a parameter that differ. {_ADVICE}")


_ADVICE = (
    "Their gradients were not reduced over the same ranks, or memory was corrupted; the run must not go on from here. "
    "fix: find out with `threefold parity JOB`"
)


def _first_difference(parameters: Sequence[ShardedParameter]) -> str | None:
    groups: dict[int, tuple[Group, list[ShardedParameter]]] = {}
    for entry in parameters:
        groups.setdefault(id(entry.copies), (entry.copies, []))[1].append(entry)
    differences = [_difference_in(group, entries) for group, entries in groups.values()]
    return next((difference for difference in differences if difference), None)


def _difference_in(group: Group, entries: Sequence[ShardedParameter]) -> str | None:
    device = entries[0].parameter.device
    own = torch.tensor([hash_tensor(entry.parameter) for entry in entries], dtype=torch.int64, device=device)
    parts, pending = all_gather_parts(own, group)
    pending.wait()
    equal = parts == parts[0]
    if bool(equal.all()):
        return None
    position, column = (~equal).nonzero()[0].tolist()
    return f"{entries[column].name} differ between rank {group.ranks[0]} and rank {group.ranks[position]}"
