"""All communication between ranks goes through ``Group``: counted, named, and a no-op where the group is one rank.

Every operation returns a ``Pending`` at once. ``wait`` says on the activity board what this rank is blocked in, so that
a hang can be named, and turns the backend's failure into a ``WorkerError`` that names rank and collective. On CUDA
``wait`` makes the current stream wait, not the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.errors import WorkerError
from threefold.parallel.activity import ActivityLog
from threefold.parallel.shared import SharedMemory, Transfer

ReduceOp = Literal["sum", "max"]
Launch = Callable[[], "dist.Work | Transfer | None"]

# PyTorch 2.13 gave these two new names and warns about the old ones, which older versions alone have.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Traffic:
    """What one rank has sent: (axis, operation) -> number of calls and payload bytes.

    Payload is the full tensor that enters a collective: the input of an all-reduce, reduce-scatter or all-to-all, the
    output of an all-gather, the message of a send. What the wire carries follows from it and the algorithm.
    """

    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    payload_bytes: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, axis: str, operation: str, tensor: Tensor) -> None:
        """Count one call that carries ``tensor``."""
        key = (axis, operation)
        self.calls[key] = self.calls.get(key, 0) + 1
        self.payload_bytes[key] = self.payload_bytes.get(key, 0) + tensor.numel() * tensor.element_size()

    def snapshot(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(axis, operation) -> calls and payload bytes so far."""
        return {key: (calls, self.payload_bytes[key]) for key, calls in self.calls.items()}

    def clear(self) -> None:
        """Start counting anew."""
        self.calls.clear()
        self.payload_bytes.clear()


class Pending:
    """A collective under way; ``wait`` returns when its result may be used."""

    def __init__(
        self, work: dist.Work | Transfer | None = None, operation: str = "", group: Group | None = None
    ) -> None:
        self._work = work
        self._operation = operation
        self._group = group

    def wait(self) -> None:
        """Block until done; waiting twice is harmless.

        Raises:
            WorkerError: the backend failed, which means that a peer died or that the ranks disagree.
        """
        if self._work is None or self._group is None:
            return
        group, work = self._group, self._work
        self._work = None
        group.activity.begin_wait(self._operation)
        try:
            work.wait()
        except RuntimeError as error:
            raise group.failure(self._operation, error) from error
        finally:
            group.activity.end_wait()


class Group:
    """The ranks that one axis (or a union of axes) connects, seen from one of them.

    ``ranks`` are global, sorted; ``index`` is this rank's position among them. ``handle`` is None for a group of one.
    """

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        rank: int,
        handle: dist.ProcessGroup | None,
        activity: ActivityLog,
        traffic: Traffic,
        shared: SharedMemory | None = None,
    ) -> None:
        self.axis, self.shared = axis, shared
        self.ranks = tuple(ranks)
        self.rank = rank
        self.index = self.ranks.index(rank)
        self.handle = handle
        self.activity = activity
        self.traffic = traffic
        self._label = f"over {axis}[{','.join(map(str, self.ranks))}]"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def alone(self) -> Group:
        """A group of this rank only."""
        return Group("self", (self.rank,), self.rank, None, self.activity, self.traffic)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Pending:
        """Replace ``tensor`` on every rank by the sum (or maximum) over the group, in place."""
        if self.handle is None:
            return Pending()
        reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        self.traffic.add(self.axis, "all_reduce", tensor)
        if self.shared and tensor.is_contiguous():
            shared = self.shared
            return self._start("all_reduce", lambda: shared.all_reduce(tensor, op))
        return self._start("all_reduce", lambda: dist.all_reduce(tensor, reduce_op, group=self.handle, async_op=True))

    def broadcast(self, tensor: Tensor) -> Pending:
        """Copy the first rank's ``tensor`` to all others, in place."""
        if self.handle is None:
            return Pending()
        self.traffic.add(self.axis, "broadcast", tensor)
        source = self.ranks[0]
        return self._start("broadcast", lambda: dist.broadcast(tensor, source, group=self.handle, async_op=True))

    def all_gather_into(self, output: Tensor, tensor: Tensor) -> Pending:
        """Concatenate every rank's ``tensor`` along the first dim into ``output``."""
        if self.handle is None:
            output.copy_(tensor)
            return Pending()
        self.traffic.add(self.axis, "all_gather", output)
        if self.shared and output.is_contiguous() and tensor.is_contiguous():
            shared = self.shared
            return self._start("all_gather", lambda: shared.all_gather(output, tensor))
        return self._start("all_gather", lambda: _ALL_GATHER(output, tensor, group=self.handle, async_op=True))

    def reduce_scatter_into(self, output: Tensor, tensor: Tensor) -> Pending:
        """Sum ``tensor`` over the group and keep this rank's part along the first dim in ``output``."""
        if self.handle is None:
            output.copy_(tensor)
            return Pending()
        self.traffic.add(self.axis, "reduce_scatter", tensor)
        if self.shared and output.is_contiguous() and tensor.is_contiguous():
            shared = self.shared
            return self._start("reduce_scatter", lambda: shared.reduce_scatter(output, tensor))
        return self._start("reduce_scatter", lambda: _REDUCE_SCATTER(output, tensor, group=self.handle, async_op=True))

    def all_to_all_into(self, output: Tensor, tensor: Tensor) -> Pending:
        """Send part r of ``tensor``'s first dim to rank r of the group; ``output`` gets every rank's part for this."""
        if self.handle is None:
            output.copy_(tensor)
            return Pending()
        self.traffic.add(self.axis, "all_to_all", tensor)
        return self._start(
            "all_to_all", lambda: dist.all_to_all_single(output, tensor, group=self.handle, async_op=True)
        )

    def send(self, tensor: Tensor, to_index: int) -> Pending:
        """Send to the rank at ``to_index`` of this group; ``tensor`` must stay untouched until ``wait`` returns."""
        peer = self.ranks[to_index]
        self.traffic.add(self.axis, "send", tensor)
        return self._start(f"send to rank {peer}", lambda: dist.isend(tensor, peer, group=self.handle))

    def receive(self, buffer: Tensor, from_index: int) -> Pending:
        """Receive into ``buffer`` from the rank at ``from_index`` of this group."""
        peer = self.ranks[from_index]
        return self._start(f"receive from rank {peer}", lambda: dist.irecv(buffer, peer, group=self.handle))

    def failure(self, operation: str, error: Exception) -> WorkerError:
        """The error to raise when the backend failed in ``operation``."""
        reason = str(error).strip().splitlines()[0]
        return WorkerError(f"rank {self.rank} failed in {operation}: a peer died or left it ({reason})")

    def _start(self, name: str, launch: Launch) -> Pending:
        operation = f"{name} {self._label}"
        try:
            return Pending(launch(), operation, self)
        except RuntimeError as error:
            raise self.failure(operation, error) from error


def all_gather_parts(part: Tensor, group: Group) -> tuple[Tensor, Pending]:
    """Start gathering every rank's ``part``; ``join_parts`` makes one tensor of the result once it has arrived.

    Returns ``[ranks, *part.shape]`` and its handle.
    """
    if group.size == 1:
        return part.unsqueeze(0), Pending()
    gathered = part.new_empty((group.size * part.shape[0], *part.shape[1:]))
    pending = group.all_gather_into(gathered, part.contiguous())
    return gathered.unflatten(0, (group.size, -1)), pending


def join_parts(parts: Tensor, dim: int) -> Tensor:
    """``[ranks, ...]`` as gathered -> one tensor whose ``dim`` holds the ranks' parts one after the other."""
    return torch.movedim(parts, 0, dim).flatten(dim, dim + 1)


def reduce_scatter_dim(tensor: Tensor, dim: int, group: Group) -> tuple[Tensor, Pending]:
    """Start summing over the group and keeping this rank's part of ``dim``; returns the part and its handle.

    The size of ``dim`` must be a multiple of the group's size.
    """
    if group.size == 1:
        return tensor, Pending()
    parts = tensor.unflatten(dim, (group.size, -1)).movedim(dim, 0).contiguous()
    part = parts.new_empty(parts.shape[1:])
    return part, group.reduce_scatter_into(part, parts.flatten(0, 1))
