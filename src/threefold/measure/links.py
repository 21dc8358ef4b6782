"""Alpha and beta of the links among the ranks of a machine: seconds of an operation = alpha + bytes / beta.

Every operation goes through ``Group``, as in training, so that its alpha holds what Python and the backend add. All
groups of one size communicate at once, as they do in a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from threefold.cost.profile import LinkProfile, Operation
from threefold.parallel.activity import NullActivity
from threefold.parallel.collectives import Group, Traffic
from threefold.parallel.recorder import Clock
from threefold.parallel.shared import open_shared_memory

SIZES = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Payload bytes that are tried."""
REPEATS = 9
_ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Ranks:
    """This rank among all that measure, the device and clock that it measures with, and how its job exchanges."""

    rank: int
    num_ranks: int
    device: torch.device
    clock: Clock
    shared_memory: bool = False


def blocks(ranks: Ranks, size: int) -> Group | None:
    """This rank's group among neighbouring blocks of ``size`` ranks; None for one that is left over. Collective."""
    mine = None
    for start in range(0, ranks.num_ranks - size + 1, size):
        members = tuple(range(start, start + size))
        whole = size == ranks.num_ranks
        handle = None if size == 1 else dist.group.WORLD if whole else dist.new_group(list(members))
        if ranks.rank in members:
            handle = handle if isinstance(handle, dist.ProcessGroup) else None
            index = members.index(ranks.rank)
            shared = open_shared_memory(handle, members, index) if handle and ranks.shared_memory else None
            mine = Group("link", members, ranks.rank, handle, NullActivity(), Traffic(), shared)
    return mine


def measure_links(ranks: Ranks, group_sizes: Sequence[int]) -> tuple[list[LinkProfile], float]:
    """Messages between two ranks and collectives over each of ``group_sizes``; and seconds to start a message.

    What rank 0 measured; other ranks get their own. All ranks must call this.
    """
    found, post_s = [], 0.0
    if ranks.num_ranks >= 2:
        pair = blocks(ranks, 2)
        if pair is not None:
            found.append(_fitted("p2p", 2, [(size, _ping_pong(ranks, pair, size)) for size in SIZES]))
            post_s = _post_seconds(ranks, pair)
    for size in sorted({size for size in group_sizes if 1 < size <= ranks.num_ranks}):
        group = blocks(ranks, size)
        if group is not None:
            found += _collectives(ranks, group)
    return found, post_s


def _collectives(ranks: Ranks, group: Group) -> Iterator[LinkProfile]:
    for operation, run in _OPERATIONS:
        times = []
        for num_bytes in SIZES:
            count = -(-num_bytes // _ELEMENT_BYTES // group.size) * group.size
            whole = torch.zeros(count, device=ranks.device)
            part = torch.zeros(count // group.size, device=ranks.device)
            times.append((count * _ELEMENT_BYTES, _median_s(ranks, partial(run, group, whole, part))))
        yield _fitted(operation, group.size, times)


_OPERATIONS: tuple[tuple[Operation, Callable[[Group, Tensor, Tensor], None]], ...] = (
    ("all_reduce", lambda group, whole, part: group.all_reduce(whole).wait()),
    ("all_gather", lambda group, whole, part: group.all_gather_into(whole, part).wait()),
    ("reduce_scatter", lambda group, whole, part: group.reduce_scatter_into(part, whole).wait()),
)


def _ping_pong(ranks: Ranks, pair: Group, num_bytes: int) -> float:
    """One way of a message that goes there and back."""
    tensor = torch.zeros(num_bytes // _ELEMENT_BYTES, device=ranks.device)
    peer = 1 - pair.index

    def there_and_back() -> None:
        if pair.index == 0:
            pair.send(tensor, peer).wait()
            pair.receive(tensor, peer).wait()
        else:
            pair.receive(tensor, peer).wait()
            pair.send(tensor, peer).wait()

    return _median_s(ranks, there_and_back) / 2


def _post_seconds(ranks: Ranks, pair: Group) -> float:
    """Seconds until a send or a receive has been started; it is done later."""
    tensors = [torch.zeros(1 << 14, device=ranks.device) for _ in range(REPEATS)]
    peer, marks = 1 - pair.index, 2 * REPEATS
    ranks.clock.resize(marks)
    pending = []
    for index, tensor in enumerate(tensors):
        ranks.clock.mark(2 * index)
        pending.append(pair.send(tensor, peer) if pair.index == 0 else pair.receive(tensor, peer))
        ranks.clock.mark(2 * index + 1)
    for entry in pending:
        entry.wait()
    times = ranks.clock.read()
    return float(np.median(times[1::2] - times[::2]))


def _median_s(ranks: Ranks, run: Callable[[], None]) -> float:
    """The median of repeats; the first two warm up. No repeat waits for the device: it is read at the end."""
    for _ in range(2):
        run()
    ranks.clock.resize(REPEATS + 1)
    ranks.clock.mark(0)
    for repeat in range(REPEATS):
        run()
        ranks.clock.mark(repeat + 1)
    return float(np.median(np.diff(ranks.clock.read())))


def _fitted(operation: Operation, num_ranks: int, times: Sequence[tuple[int, float]]) -> LinkProfile:
    alpha_s, bytes_per_s = fit_link(times)
    return LinkProfile(operation=operation, ranks=num_ranks, alpha_s=alpha_s, bytes_per_s=bytes_per_s)


def fit_link(times: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Alpha (seconds) and beta (bytes/s) from (bytes, seconds), by least squares of the relative errors.

    Absolute errors would leave alpha to chance: the largest message takes a thousand times as long as the smallest.
    """
    sizes, seconds = (np.array(values, dtype=float) for values in zip(*times, strict=True))
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    (alpha_s, s_per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)
    if alpha_s < 0:  # a link without start-up: all of it is bandwidth
        alpha_s, s_per_byte = 0.0, float((rows[:, 1] @ np.ones(len(sizes))) / (rows[:, 1] @ rows[:, 1]))
    return float(alpha_s), 1 / max(float(s_per_byte), 1e-15)
