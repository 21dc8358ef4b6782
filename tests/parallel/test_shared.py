"""Collectives through shared memory give what gloo gives, in any overlap, and notice a peer that died."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.jobs import GPT2, small_job
from threefold.errors import WorkerError
from threefold.measure.parity import ParitySettings, run_parity
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel import shared as module
from threefold.parallel import shared_files
from threefold.parallel.shared import CHUNK_BYTES, NUM_SLOTS, SharedMemory, open_shared_memory

SIZES = (0, 1, 24, 1000, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 24, 5 * CHUNK_BYTES // 4 + 240)


def opened(context: WorkerContext) -> SharedMemory | None:
    world = dist.group.WORLD
    assert world is not None
    return open_shared_memory(world, range(context.world_size), context.rank)


def memory(context: WorkerContext) -> SharedMemory:
    shared = opened(context)
    assert shared is not None
    return shared


def values(context: WorkerContext, numel: int, dtype: torch.dtype) -> Tensor:
    return (
        torch.randn(numel, generator=torch.Generator().manual_seed(numel + context.rank)).mul(100).round().to(dtype)
    )  # sums are exact


def compare(context: WorkerContext, dtype: torch.dtype) -> None:
    shared, ranks = memory(context), context.world_size
    for numel in SIZES:
        own = values(context, numel, dtype)
        for op, reduce_op in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
            expected, found = own.clone(), own.clone()
            dist.all_reduce(expected, reduce_op)
            shared.all_reduce(found, op).wait()
            torch.testing.assert_close(found, expected)
        gathered, expected = torch.empty(ranks * numel, dtype=dtype), torch.empty(ranks * numel, dtype=dtype)
        dist.all_gather(list(expected.chunk(ranks)) if numel else [expected] * ranks, own)
        shared.all_gather(gathered, own).wait()
        assert torch.equal(gathered, expected)
        part = torch.empty(numel, dtype=dtype)
        shared.reduce_scatter(part, gathered.clone().mul_(context.rank + 1)).wait()
        torch.testing.assert_close(part, expected.view(ranks, -1)[context.rank] * sum(range(1, ranks + 1)))


def begin_many(context: WorkerContext, late: int, numel: int, kind: str) -> None:
    """More exchanges than there are slots, begun before the first is waited for, while one rank is late with some."""
    shared, ranks, count = memory(context), context.world_size, 3 * NUM_SLOTS
    own = [torch.full((numel * ranks,), float((context.rank + 1) * 10**number % 9973)) for number in range(count)]
    everyones = [[float((rank + 1) * 10**number % 9973) for rank in range(ranks)] for number in range(count)]
    parts = [torch.empty(numel) for _ in range(count)]
    wholes = [torch.empty(numel * ranks * ranks) for _ in range(count)]
    pending = []
    for number, tensor in enumerate(own):
        if context.rank == late and number in (NUM_SLOTS, 2 * NUM_SLOTS + 1):
            time.sleep(0.3)
        match kind:
            case "all_reduce":
                pending.append(shared.all_reduce(tensor))
            case "reduce_scatter":
                pending.append(shared.reduce_scatter(parts[number], tensor))
            case _:
                pending.append(shared.all_gather(wholes[number], tensor))
    for transfer in pending if context.rank % 2 else reversed(pending):
        transfer.wait()
    for number in range(count):
        match kind:
            case "all_reduce":
                assert own[number].unique().tolist() == [sum(everyones[number])], number
            case "reduce_scatter":
                assert parts[number].unique().tolist() == [sum(everyones[number])], number
            case _:
                assert wholes[number].view(ranks, -1)[:, 0].tolist() == everyones[number], number


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("numel", [10, CHUNK_BYTES // 4])
def test_a_rank_that_is_late_gets_what_the_others_get(pool: WorkerPool, ranks: int, kind: str, numel: int) -> None:
    for late in range(ranks):
        pool.run(begin_many, ranks, late, numel, kind)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_as_gloo(pool: WorkerPool, ranks: int, dtype: torch.dtype) -> None:
    pool.run(compare, ranks, dtype)


def overlap(context: WorkerContext) -> list[Tensor]:
    shared, found = memory(context), []
    tensors = [values(context, numel, torch.float32) for numel in (*SIZES, *SIZES)]
    begun = [shared.all_reduce(tensor) for tensor in tensors]
    time.sleep(0.05 * context.rank)
    for transfer in reversed(begun):
        transfer.wait()
    found += tensors
    return [tensor.clone() for tensor in found]


@pytest.mark.parametrize("ranks", [2, 4])
def test_many_at_once_are_the_same_bits_everywhere(pool: WorkerPool, ranks: int) -> None:
    first, *others = pool.run(overlap, ranks)
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))


def version(context: WorkerContext) -> tuple[int, int]:
    shared, tensor = memory(context), torch.zeros(8)
    before = tensor._version
    shared.all_gather(tensor, torch.ones(8 // context.world_size)).wait()
    return before, tensor._version


def test_autograd_does_not_see_it(pool: WorkerPool) -> None:
    for before, after in pool.run(version, 2):
        assert before == after


def die(context: WorkerContext) -> str:
    shared = memory(context)
    if context.rank == 1:
        os._exit(1)
    try:
        for _ in range(100):
            shared.all_reduce(torch.ones(4)).wait()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_dead_peer_is_noticed() -> None:
    with WorkerPool(2) as own, pytest.raises(WorkerError, match="rank 1"):
        own.run(die, 2, timeout_s=30)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "sockets"])
@pytest.mark.parametrize(
    ("dp", "tp", "pp", "zero", "sequence_parallel"), [(4, 1, 1, 2, False), (2, 2, 1, 3, True), (2, 2, 2, 0, False)]
)
def test_parity_of_jobs_with_and_without_it(
    pool: WorkerPool, dp: int, tp: int, pp: int, zero: int, sequence_parallel: bool, shared: bool
) -> None:
    """Buckets and messages of all sizes, more ranks than cores, tied embeddings over stages; and so over sockets."""
    job = small_job(
        GPT2,
        parallelism={
            "dp": {"size": dp},
            "tp": {"size": tp, "sequence_parallel": sequence_parallel},
            "pp": {"size": pp, "schedule": "1f1b"},
        },
        zero_optimization={"stage": zero, "reduce_bucket_size": 3000},
        cluster={"device": "cpu", "nodes": 1, "devices_per_node": dp * tp * pp, "shared_memory": shared},
        gradient_clipping=0.05,
    )
    report = run_parity({"shared": job}, ParitySettings(steps=2), pool)
    assert report.ok, report.layouts


def at(context: WorkerContext, place: str) -> bool:
    """Whether ``place`` serves for shared memory."""
    shared_files.PLACE, kept = Path(place), shared_files.PLACE
    try:
        return opened(context) is not None
    finally:
        shared_files.PLACE = kept


def test_nothing_is_left_behind(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(at, 2, str(tmp_path)) == [True, True]
    assert list(tmp_path.iterdir()) == []


def full_at(context: WorkerContext, free: int) -> bool:
    """Whether a group of all ranks gets shared memory when that much is free."""
    usage = shutil.disk_usage(shared_files.PLACE)
    kept, module.shutil.disk_usage = shutil.disk_usage, lambda _: usage._replace(free=free)
    try:
        return opened(context) is not None
    finally:
        module.shutil.disk_usage = kept


def test_at_most_half_of_what_is_free_is_taken(pool: WorkerPool) -> None:
    needed = 2 * CHUNK_BYTES * NUM_SLOTS
    assert pool.run(full_at, 2, 2 * needed) == [True, True]
    assert pool.run(full_at, 2, 2 * needed - 1) == [False, False]


def with_few_files(context: WorkerContext, free: int) -> bool:
    """Whether a group of all ranks gets shared memory when rank 1 may open only so many files more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if context.rank == 1:
        used = sum(1 for _ in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, limits[1]))
    try:
        return opened(context) is not None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_go_without_where_one_has_no_files_left(pool: WorkerPool, ranks: int) -> None:
    assert pool.run(with_few_files, ranks, 100) == [True] * ranks
    assert pool.run(with_few_files, ranks, 3) == [False] * ranks


def test_what_killed_ranks_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_files, "PLACE", tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    own, orphaned, living = (shared_files.directory_of(pid, 1) for pid in (os.getpid(), gone.pid, os.getppid()))
    other = tmp_path / "threefold-thesis"
    for directory in (own, orphaned, living, other):
        directory.mkdir()
        (directory / "slots0").write_text("")
    shared_files.sweep()
    assert sorted(tmp_path.iterdir()) == sorted([living, other])


def test_large_groups_stay_with_the_backend(pool: WorkerPool) -> None:
    assert pool.run(of_at_most, 2, 2) == [True, True]
    assert pool.run(of_at_most, 2, 1) == [False, False]


def of_at_most(context: WorkerContext, most_ranks: int) -> bool:
    """Whether a group of all ranks gets shared memory when so many may."""
    module.MOST_RANKS, kept = most_ranks, module.MOST_RANKS
    try:
        return opened(context) is not None
    finally:
        module.MOST_RANKS = kept


def test_without_room_the_backend_goes_on(pool: WorkerPool) -> None:
    """A place that is no directory stands for a machine that has no room; rank 0 alone sees that."""
    assert pool.run(at, 2, "/proc/version") == [False, False]
