"""Meshes and groups without processes, for what needs no communication, or only the order in which it would happen."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from threefold.layout import AXES, Layout, Shard
from threefold.parallel.activity import NullActivity
from threefold.parallel.buckets import ShardingPolicy
from threefold.parallel.collectives import Group, Pending, ReduceOp, Traffic
from threefold.parallel.data import DataParallel
from threefold.parallel.mesh import Mesh, group_name, tied_name, tied_ranks
from threefold.parallel.stage import ShardedParameter, Stage


def silent_group(size: int = 1, index: int = 0, axis: str = "tp") -> Group:
    """A group that knows its size and sends nothing."""
    return Group(axis, tuple(range(size)), index, None, NullActivity(), Traffic())


def silent_mesh(layout: Layout, rank: int, tied: Collection[tuple[int, ...]] = ()) -> Mesh:
    """One rank's mesh with the right groups, none of which can send."""
    traffic = Traffic()
    groups = {}
    for axes in (("dp",), ("pp",), ("tp",), ("dp", "tp"), AXES):
        name = group_name(layout, axes)
        ranks = layout.group(axes, rank) if name else (rank,)
        groups[name] = Group(name or "self", ranks, rank, None, NullActivity(), traffic)
    for pp_ranks in tied:
        for ranks in tied_ranks(layout, pp_ranks):
            if rank in ranks:
                name = tied_name(pp_ranks)
                groups[name] = Group(name, ranks, rank, None, NullActivity(), traffic)
    return Mesh(layout, rank, torch.device("cpu"), groups, NullActivity(), traffic)


class RecordedPending(Pending):
    def __init__(self, events: list[str], name: str) -> None:
        super().__init__()
        self.events, self.name = events, name

    def wait(self) -> None:
        self.events.append(f"{self.name} waited for")


class RecordingGroup(Group):
    """Notes when each collective starts and when it is waited for; the values stay what they are."""

    def __init__(self, events: list[str], size: int = 2, axis: str = "tp") -> None:
        super().__init__(axis, tuple(range(size)), 0, None, NullActivity(), Traffic())
        self.events = events

    def _note(self, name: str) -> Pending:
        self.events.append(f"{name} started")
        return RecordedPending(self.events, name)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Pending:
        return self._note("all_reduce")

    def all_gather_into(self, output: Tensor, tensor: Tensor) -> Pending:
        output.copy_(torch.cat([tensor] * self.size))
        return self._note("all_gather")

    def reduce_scatter_into(self, output: Tensor, tensor: Tensor) -> Pending:
        output.copy_(tensor.chunk(self.size)[0])
        return self._note("reduce_scatter")


def whole_parameter(name: str, shape: tuple[int, ...], sum_over: Group, *, trained: bool = True) -> ShardedParameter:
    """An entry for a parameter that is not split."""
    parameter = nn.Parameter(torch.randn(shape), requires_grad=trained)
    return ShardedParameter(name, parameter, Shard(None, (), shape[0]), shape, sum_over, sum_over, owns_norm=True)


def stage_of_entries(entries: Sequence[ShardedParameter], index: int = 0) -> Stage:
    """A stage that is nothing but parameters, each of which is a part of its own."""
    stage = Stage([], is_first=True, is_last=True, index=index)
    stage.sharded = tuple(entries)
    stage.part_of = {entry.name: part for part, entry in enumerate(entries)}
    return stage


def data_parallel(entries: Sequence[ShardedParameter], dp: Group, policy: ShardingPolicy) -> DataParallel:
    """The engine over some parameters of one stage."""
    return DataParallel([stage_of_entries(entries)], dp, policy)
