"""Parameters and gradients of one rank in flat buckets, and which part of each bucket this rank keeps.

A bucket is what travels in one collective. Its parameters are views into one flat tensor, so values are gathered in
place; its gradients accumulate in another, so they are reduced in place. ZeRO (Rajbhandari et al. 2020) cuts the flat
tensors into one equal shard for each rank of the bucket's group (the last one padded) and drops, step by step, what a
rank need not keep:

    stage 1   optimizer state (and the fp32 master copy): the shard only
    stage 2   and gradients: summed into the shard after each backward pass, the whole bucket lives for a moment
    stage 3   and parameters: the whole bucket is gathered before a block uses it and freed after

Stages 2 and 3 apply to buckets that are reduced over dp alone. The few that are reduced over more ranks (partial
gradients of norms under sequence parallelism, an embedding that two stages share) are sharded over all of those, but as
in stage 1: gathering them would need ranks that are at another place of the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from threefold.layout import GradientCompression, fill_buckets
from threefold.parallel.collectives import Group, Pending
from threefold.parallel.counters import MemoryCounter
from threefold.parallel.stage import ShardedParameter, Stage, rank_parameters


@dataclass(frozen=True)
class ShardingPolicy:
    """How data parallelism stores things: ``stage`` is ZeRO's, ``accumulate`` the format of gradients and masters.

    ``bucket_elements`` limits a bucket; offloading keeps the optimizer's (and the stage 3 parameters') tensors in host
    memory. ``communicate`` is the number format in which gradients are summed over ranks. With ``compression`` what it
    compresses is in buckets of its own.
    """

    bucket_elements: int
    stage: int = 0
    overlap: bool = True
    accumulate: torch.dtype = torch.float32
    communicate: torch.dtype | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    compression: GradientCompression | None = None

    def compresses(self, entry: ShardedParameter) -> bool:
        """Whether the gradient of ``entry`` is compressed."""
        return self.compression is not None and self.compression.compresses(entry.parameter.shape)

    def kind(self, entry: ShardedParameter) -> tuple[bool, bool]:
        """What shares buckets, in their order: what is compressed comes first.

        Where copies of a parameter sum their gradients apart (tensor parallelism replicates it), a bucket of such
        alone is compressed alike everywhere; beside shards, which differ, copies would drift apart.
        """
        compressed = self.compresses(entry)
        return not compressed, compressed and entry.copies is not entry.sum_over


@dataclass(frozen=True)
class Piece:
    """The elements of one parameter that lie in a rank's shard.

    ``values[i]`` belongs to element ``start + i`` of the parameter's (local, flattened) tensor.
    """

    entry: ShardedParameter
    start: int
    values: Tensor


class Bucket:
    """Parameters that travel together. ``stages`` are those of this rank that use them."""

    def __init__(
        self,
        entries: Sequence[ShardedParameter],
        group: Group,
        policy: ShardingPolicy,
        *,
        over_dp: bool,
        stages: tuple[int, ...] = (0,),
        compressible: bool = False,
        memory: MemoryCounter | None = None,
    ) -> None:
        self.stages, self.compressible = stages, compressible
        self.memory = memory or MemoryCounter()
        self.entries, self.group, self.over_dp = tuple(entries), group, over_dp
        self.shards_optimizer = policy.stage >= 1
        self.shards_gradients = policy.stage >= 2 and over_dp
        self.shards_parameters = policy.stage >= 3 and over_dp
        sizes = [entry.parameter.numel() for entry in entries]
        self.starts = (0, *accumulate(sizes))
        num_shards = group.size if self.shards_optimizer else 1
        self.shard_size = -(-self.starts[-1] // num_shards)
        self.padded_size = self.shard_size * num_shards
        self.shard_start = self.shard_size * group.index if self.shards_optimizer else 0
        self._adopt_parameters(policy)
        self._make_gradients(policy)

    # Parameters

    def _adopt_parameters(self, policy: ShardingPolicy) -> None:
        first = self.entries[0].parameter
        self.device, self.dtype = first.device, first.dtype
        self.whole = torch.zeros(self.padded_size, dtype=self.dtype, device=self.device)
        for entry, start in zip(self.entries, self.starts, strict=False):
            parameter = entry.parameter
            view = self.whole[start : start + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
        own = self.whole[self.shard_start : self.shard_start + self.shard_size]
        self.present, self.arrival = True, Pending()
        self.shard = own
        if self.shards_parameters:
            self.shard = _host(own) if policy.offload_parameters else own.clone()
        # Without half precision and offload the optimizer updates the parameters themselves: there is no second copy.
        same = self.dtype == policy.accumulate and not policy.offload_optimizer
        master = self.shard if same else self.shard.to(policy.accumulate, copy=True)
        self.master = nn.Parameter(_host(master) if policy.offload_optimizer else master, requires_grad=False)
        self.has_copy = not same
        self._count_parameters(policy)
        if self.shards_parameters:
            self.free()

    def _count_parameters(self, policy: ShardingPolicy) -> None:
        self.memory.is_no_activation(self.whole)
        self.memory.add("parameters", _num_bytes(self.whole))
        if self.shards_parameters:
            self.memory.add("parameters", _num_bytes(self.shard), on_host=policy.offload_parameters)
        if self.has_copy:
            self.memory.add("optimizer", _num_bytes(self.master), on_host=policy.offload_optimizer)

    def gather(self) -> Pending:
        """Start to bring the whole bucket here, unless it is here or on its way."""
        if self.present:
            return self.arrival
        self.present = True
        self.whole.untyped_storage().resize_(self.padded_size * self.whole.element_size())
        self.memory.add("parameters", _num_bytes(self.whole))
        # The tensors that autograd saved are views of this storage, and get back the very values that they had.
        keep_version = torch.autograd._unsafe_preserve_version_counter  # pyright: ignore[reportPrivateImportUsage]
        with torch.no_grad(), keep_version(self.whole):
            self.arrival = self.group.all_gather_into(self.whole, self.shard.to(self.device, non_blocking=True))
        return self.arrival

    def free(self) -> None:
        """Drop all but the shard; only under stage 3."""
        if self.shards_parameters and self.present:
            self.arrival.wait()
            self.memory.add("parameters", -_num_bytes(self.whole))
            self.whole.untyped_storage().resize_(0)
            self.present = False

    def publish(self) -> Pending:
        """After the optimizer has updated the master: write the values back, and start to gather them where whole."""
        with torch.no_grad():
            if self.has_copy:
                self.shard.copy_(self.master, non_blocking=True)
            if self.shards_optimizer and not self.shards_parameters:
                return self.group.all_gather_into(self.whole, self.shard)
        return Pending()

    # Gradients

    def _make_gradients(self, policy: ShardingPolicy) -> None:
        size = self.shard_size if self.shards_gradients else self.padded_size
        self.grads = torch.zeros(size, dtype=policy.accumulate, device=self.device)
        self.memory.add("gradients", _num_bytes(self.grads))
        self.communicate = policy.communicate or policy.accumulate
        self.moment: Tensor | None = None
        self.pending: Pending | None = None
        self.received: Tensor | None = None
        self.wire_bytes = 0
        # With one number format autograd adds into the bucket itself.
        self.in_place = not self.shards_gradients and self.dtype == policy.accumulate
        self.missing = len(self.entries)
        self.taken: set[int] = set()

    @property
    def grad_shard(self) -> Tensor:
        """This rank's part of the reduced gradient."""
        if self.shards_gradients:
            return self.grads
        return self.grads[self.shard_start : self.shard_start + self.shard_size]

    def begin_step(self) -> None:
        """Zero the gradients."""
        self.grads.zero_()
        for index, entry in enumerate(self.entries):
            entry.parameter.grad = self._view(self.grads, index) if self.in_place else None

    def take_gradient(self, index: int) -> None:
        """Move what autograd has left in ``grad`` into the bucket, in the format that gradients accumulate in."""
        self.missing -= 1
        parameter = self.entries[index].parameter
        if self.in_place or parameter.grad is None:  # autograd calls the hook for a gradient that waits, too
            return
        if self.shards_gradients and index not in self.taken:
            self.taken.add(index)
            self._view(self._target(), index).copy_(parameter.grad)
        else:
            self._view(self._target(), index).add_(parameter.grad)
        parameter.grad = None

    def _target(self) -> Tensor:
        if not self.shards_gradients:
            return self.grads
        if self.moment is None:
            self.moment = torch.empty(self.padded_size, dtype=self.grads.dtype, device=self.device)
            self.memory.add("gradients", _num_bytes(self.moment))
        return self.moment

    def reduce(self) -> None:
        """Start to sum the gradients over the group, as far as this rank needs the sum."""
        if self.shards_gradients:
            self._reduce_moment()
            return
        wire = self.grads if self.communicate == self.grads.dtype else self.grads.to(self.communicate)
        if not self.shards_optimizer:
            self.pending = self.group.all_reduce(wire)
            self.received = wire
            return
        self.received = wire[self.shard_start : self.shard_start + self.shard_size]
        self.pending = self.group.reduce_scatter_into(self.received, wire)

    def _reduce_moment(self) -> None:
        self.finish_reduce()  # of the microbatch before
        moment = self._target()
        for index in range(len(self.entries)):
            if index not in self.taken:
                self._view(moment, index).zero_()
        moment[self.starts[-1] :].zero_()
        self.taken.clear()
        self.moment = None
        self.wire_bytes = _num_bytes(moment)  # of the gradients until they have travelled
        moment = moment.to(self.communicate)
        self.received = moment.new_empty(self.shard_size)
        self.pending = self.group.reduce_scatter_into(self.received, moment)

    def finish_reduce(self) -> None:
        """Wait for the sum and put it where the optimizer finds it."""
        if self.pending is None or self.received is None:
            return
        self.pending.wait()
        if self.shards_gradients:
            self.memory.add("gradients", -self.wire_bytes)
            self.grads.add_(self.received)
        elif self.received.dtype != self.grads.dtype:
            target = self.grads if not self.shards_optimizer else self.grad_shard
            target.copy_(self.received)
        self.pending, self.received = None, None

    # Both, by parameter

    def _view(self, flat: Tensor, index: int) -> Tensor:
        start, stop = self.starts[index : index + 2]
        return flat[start:stop].view(self.entries[index].parameter.shape)

    def pieces(self, shard: Tensor) -> Iterator[Piece]:
        """Cut a tensor of this rank's shard into the parts of the parameters that it holds."""
        for index, entry in enumerate(self.entries):
            start = max(self.starts[index], self.shard_start)
            stop = min(self.starts[index + 1], self.shard_start + self.shard_size)
            if start < stop:
                values = shard[start - self.shard_start : stop - self.shard_start]
                yield Piece(entry, start - self.starts[index], values)

    @property
    def counts_in_norm(self) -> bool:
        """Whether this rank's shard is counted: shards differ from rank to rank, whole copies count once."""
        return self.shards_optimizer or self.group.index == 0


def _num_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _host(tensor: Tensor) -> Tensor:
    """A copy in host memory, page-locked where there is a GPU to copy from it."""
    copy = tensor.detach().to("cpu", copy=True)
    return copy.pin_memory() if tensor.device.type == "cuda" else copy


def build_buckets(
    stages: Sequence[Stage], dp: Group, policy: ShardingPolicy, memory: MemoryCounter | None = None
) -> tuple[Bucket, ...]:
    """Fill buckets in reverse order, apart for each group to sum over; those that reduce over dp come first.

    A bucket over dp never spans two of the rank's ``stages``, whose gradients are complete at different times; what
    several of them use has buckets of its own. Under stage 3 it never spans two parts of the model either, since a
    part's parameters are gathered and freed together. Only buckets over dp start to travel during backward: two
    communicators whose order differs between ranks could lock each other up on CUDA.
    """
    users, places = _uses(stages)
    trained = [entry for entry in reversed(rank_parameters(stages)) if entry.parameter.requires_grad]
    groups = {id(entry.sum_over): entry.sum_over for entry in trained}
    buckets = []
    # Sorted by name, which is the same order on every rank whatever parameters it holds.
    for group in sorted(groups.values(), key=lambda group: (group is not dp, group.axis)):
        mine = [entry for entry in trained if entry.sum_over is group]

        def apart(entry: ShardedParameter, over_dp: bool = group is dp) -> tuple[object, ...]:
            by_part = places[entry.name] if policy.stage >= 3 else ()
            return (users[entry.name], by_part) if over_dp else ()

        for kind in sorted({policy.kind(entry) for entry in mine}):
            alike = [entry for entry in mine if policy.kind(entry) == kind]
            for _, run in groupby(alike, key=apart):
                run = list(run)
                used_by = tuple(sorted({stage for entry in run for stage in users[entry.name]}))
                for indices in fill_buckets([entry.parameter.numel() for entry in run], policy.bucket_elements):
                    entries = [run[index] for index in indices]
                    bucket = Bucket(
                        entries,
                        group,
                        policy,
                        over_dp=group is dp,
                        stages=used_by,
                        compressible=not kind[0],
                        memory=memory,
                    )
                    buckets.append(bucket)
    return tuple(buckets)


def _uses(stages: Sequence[Stage]) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, int]]]:
    """By a parameter's name: the stages that use it, and the first of their parts that does."""
    users: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[int, int]] = {}
    for stage in stages:
        for entry in stage.sharded:
            users[entry.name] = (*users.get(entry.name, ()), stage.index)
            places.setdefault(entry.name, (stage.index, stage.part_of[entry.name]))
    return users, places
