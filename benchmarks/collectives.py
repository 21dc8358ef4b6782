"""gloo's collectives beside the same sums and gathers made of its sends and receives, or of shared memory.

Run ``OMP_NUM_THREADS=1 python benchmarks/collectives.py`` on a quiet machine; it takes about two minutes. For every
operation and size all candidates run in turn, round after round. Sizes are those of the whole tensor: the input of an
all-reduce or reduce-scatter, the output of an all-gather. Columns: microseconds of a call (median over rounds), the
CPU time of all threads of a rank for it, which computing loses where a core has one rank, and gloo's time over it
(median of the ratios within a round). All results are checked against gloo's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel.shared import SharedMemory, open_shared_memory

KIB = 1024
SIZES = (4 * KIB, 32 * KIB, 256 * KIB, 512 * KIB, 2048 * KIB, 8192 * KIB, 65536 * KIB)
BYTES_A_TURN = 32 * 1024 * KIB

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Call = Callable[[], Tensor]
"""Does the operation once and returns the result."""


class Rank:
    """One rank's buffers and neighbours for tensors of ``numel`` elements."""

    def __init__(self, rank: int, ranks: int, numel: int, shared: SharedMemory | None) -> None:
        self.rank, self.ranks = rank, ranks
        self.data = torch.arange(numel, dtype=torch.float32).remainder_(97.0).add_(rank)
        self.whole, self.spare = torch.zeros(numel), torch.zeros(numel)
        self.part = torch.zeros(numel // ranks)
        self.inbox = torch.zeros(numel)
        self.right, self.left = (rank + 1) % ranks, (rank - 1) % ranks
        self.shared = shared

    def cut(self, tensor: Tensor, index: int) -> Tensor:
        """Part ``index`` of a whole tensor."""
        size = tensor.numel() // self.ranks
        index %= self.ranks
        return tensor[index * size : (index + 1) * size]

    # gloo's own

    def gloo_all_reduce(self) -> Tensor:
        self.whole.copy_(self.data)
        dist.all_reduce(self.whole)
        return self.whole

    def gloo_all_gather(self) -> Tensor:
        _gather(self.whole, self.cut(self.data, 0))
        return self.whole

    def gloo_reduce_scatter(self) -> Tensor:
        _scatter(self.part, self.data)
        return self.part

    # A ring of sends

    def _exchange(self, out: Tensor, to: int, inbox: Tensor, source: int) -> None:
        receiving = dist.irecv(inbox, source)
        sending = dist.isend(out, to)
        assert receiving is not None and sending is not None
        receiving.wait()
        sending.wait()

    def _ring_reduce(self, whole: Tensor) -> None:
        """Afterwards part ``rank`` of ``whole`` holds the sum."""
        inbox = self.cut(self.inbox, 0)
        for step in range(self.ranks - 1):
            self._exchange(self.cut(whole, self.rank - step - 1), self.right, inbox, self.left)
            self.cut(whole, self.rank - step - 2).add_(inbox)

    def _ring_gather(self, whole: Tensor) -> None:
        """Part ``rank`` of ``whole`` is this rank's; afterwards all parts are there."""
        for step in range(self.ranks - 1):
            there, here = self.cut(whole, self.rank - step), self.cut(whole, self.rank - step - 1)
            self._exchange(there, self.right, here, self.left)

    def ring_all_reduce(self) -> Tensor:
        self.whole.copy_(self.data)
        self._ring_reduce(self.whole)
        self._ring_gather(self.whole)
        return self.whole

    def ring_all_gather(self) -> Tensor:
        self.cut(self.whole, self.rank).copy_(self.cut(self.data, 0))
        self._ring_gather(self.whole)
        return self.whole

    def ring_reduce_scatter(self) -> Tensor:
        if self.ranks > 2:
            self.whole.copy_(self.data)
            self._ring_reduce(self.whole)
            self.part.copy_(self.cut(self.whole, self.rank))
            return self.part
        self._exchange(self.cut(self.data, self.right), self.right, self.part, self.left)  # no copy: one step
        return self.part.add_(self.cut(self.data, self.rank))

    # Everybody to everybody at once

    def _from_all(self, out: Callable[[int], Tensor], inbox: Callable[[int], Tensor]) -> None:
        others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        receiving = [dist.irecv(inbox(other), other) for other in others]
        sending = [dist.isend(out(other), other) for other in others]
        for work in (*receiving, *sending):
            assert work is not None
            work.wait()

    def direct_all_gather(self) -> Tensor:
        mine = self.cut(self.data, 0)
        self._from_all(lambda _: mine, lambda other: self.cut(self.whole, other))
        self.cut(self.whole, self.rank).copy_(mine)
        return self.whole

    def direct_reduce_scatter(self) -> Tensor:
        self._from_all(lambda other: self.cut(self.data, other), lambda other: self.cut(self.inbox, other))
        self.part.copy_(self.cut(self.data, self.rank))
        for step in range(1, self.ranks):
            self.part.add_(self.cut(self.inbox, self.rank + step))
        return self.part

    def direct_all_reduce(self) -> Tensor:
        """Reduce-scatter, then all-gather, each in one step."""
        self.whole.copy_(self.data)
        self._from_all(lambda other: self.cut(self.whole, other), lambda other: self.cut(self.inbox, other))
        mine = self.cut(self.whole, self.rank)
        for step in range(1, self.ranks):
            mine.add_(self.cut(self.inbox, self.rank + step))
        self._from_all(lambda _: mine, lambda other: self.cut(self.whole, other))
        return self.whole

    def swap_all_reduce(self) -> Tensor:
        """Two ranks exchange whole tensors: one step, twice the bytes."""
        self.whole.copy_(self.data)
        self._exchange(self.data, self.right, self.inbox, self.left)
        return self.whole.add_(self.inbox)

    def doubling_all_reduce(self) -> Tensor:
        """Recursive halving, then doubling (Thakur et al. 2005); ranks are a power of two."""
        self.whole.copy_(self.data)
        low, high, spans = 0, self.whole.numel(), []
        distance = self.ranks // 2
        while distance:
            peer, middle = self.rank ^ distance, (low + high) // 2
            keep, give = ((low, middle), (middle, high)) if self.rank < peer else ((middle, high), (low, middle))
            self._exchange(self.whole[slice(*give)], peer, self.inbox[slice(*keep)], peer)
            self.whole[slice(*keep)].add_(self.inbox[slice(*keep)])
            spans.append((peer, keep, give))
            low, high, distance = *keep, distance // 2
        for peer, keep, give in reversed(spans):
            self._exchange(self.whole[slice(*keep)], peer, self.whole[slice(*give)], peer)
        return self.whole

    # Shared memory, for ranks of one machine

    def shared_all_reduce(self) -> Tensor:
        assert self.shared is not None
        self.whole.copy_(self.data)
        self.shared.all_reduce(self.whole).wait()
        return self.whole

    def shared_all_gather(self) -> Tensor:
        assert self.shared is not None
        self.shared.all_gather(self.whole, self.cut(self.data, 0)).wait()
        return self.whole

    def shared_reduce_scatter(self) -> Tensor:
        assert self.shared is not None
        self.shared.reduce_scatter(self.part, self.data).wait()
        return self.part


OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")


def candidates(operation: str, ranks: int, shared: bool) -> list[str]:
    """Their names, gloo's own first."""
    names = ["gloo", "ring", "direct"]
    if operation == "all_reduce":
        names += (["swap"] if ranks == 2 else []) + (["doubling"] if ranks & (ranks - 1) == 0 and ranks > 2 else [])
    return names + (["shared"] if shared else [])


def measure(
    context: WorkerContext, sizes: Sequence[int], rounds: int, repeats: int | None = None
) -> Mapping[tuple[str, int, str], list[tuple[float, float]]]:
    """(operation, bytes, candidate) -> (seconds, CPU seconds) of a call, by round."""
    found: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    world = dist.group.WORLD
    assert world is not None
    shared = open_shared_memory(world, range(context.world_size), context.rank)
    for num_bytes in sizes:
        rank = Rank(context.rank, context.world_size, num_bytes // 4, shared)
        calls_a_turn = repeats or max(3, min(200, BYTES_A_TURN // num_bytes))
        for operation in OPERATIONS:
            names = candidates(operation, context.world_size, shared is not None)
            calls: dict[str, Call] = {name: getattr(rank, f"{name}_{operation}") for name in names}
            _check(calls, operation)
            for _ in range(rounds):
                for name, call in calls.items():
                    found.setdefault((operation, num_bytes, name), []).append(_time(call, calls_a_turn))
    return found


def _check(calls: Mapping[str, Call], operation: str) -> None:
    expected = calls["gloo"]().clone()
    for name, call in calls.items():
        for _ in range(3):
            torch.testing.assert_close(call(), expected, msg=f"{name} {operation} differs")
            dist.barrier()


def _time(call: Call, repeats: int) -> tuple[float, float]:
    call()
    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats, (time.process_time() - used) / repeats


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    options = parser.parse_args()
    with WorkerPool(options.ranks) as pool:
        results = pool.run(measure, options.ranks, options.sizes, options.rounds, timeout_s=600)
    _print(results[0], options.sizes, options.ranks)


def _print(found: Mapping[tuple[str, int, str], list[tuple[float, float]]], sizes: Sequence[int], ranks: int) -> None:
    print(
        "| operation | KiB | candidate | us | CPU us | gloo's time over it |\n| --- | ---: | --- | ---: | ---: | ---: |"
    )
    for operation in OPERATIONS:
        for num_bytes in sizes:
            gloo = found[operation, num_bytes, "gloo"]
            for name in candidates(operation, ranks, (operation, num_bytes, "shared") in found):
                turns = found[operation, num_bytes, name]
                row: list[Any] = [
                    operation,
                    num_bytes // KIB,
                    name,
                    f"{1e6 * statistics.median(turn[0] for turn in turns):.0f}",
                    f"{1e6 * statistics.median(turn[1] for turn in turns):.0f}",
                    f"{statistics.median(own[0] / turn[0] for own, turn in zip(gloo, turns, strict=True)):.2f}",
                ]
                print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
