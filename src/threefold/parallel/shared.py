"""Collectives through shared memory, for the CPU ranks of one machine: no socket, no thread, few copies.

Each rank of a group owns some slots that all others can read. To exchange a chunk it writes a slot and puts a byte into
a FIFO of every other rank ("ready"); who has read the slot answers likewise ("free"). Waiting for a byte sleeps in the
kernel, so that more ranks than cores are no trouble, and the end of a process ends its FIFOs, so that a dead peer is
noticed. What a launch can put into slots travels while the caller computes; the rest moves in ``wait``.

Sums are the same bits on every rank. On gloo's loopback sockets the same exchanges take 2 to 20 times as long.
"""

from __future__ import annotations

import errno
import os
import resource
import secrets
import select
import shutil
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.parallel.shared_files import PARENT_VARIABLE, directory_of

CHUNK_BYTES, NUM_SLOTS = 512 * 1024, 4
MOST_RANKS = 16
"""Of a group: each of its ranks holds four files for every other one, and a process may often open only 1,024."""
_FILES_LEFT = 32
"""Files that a process must still be able to open besides those of shared memory."""

Combine = Callable[[Tensor, Tensor], Tensor]
"""Adds (or takes the maximum of) the second tensor into the first."""

COMBINE: Mapping[str, Combine] = MappingProxyType(
    {"sum": lambda a, b: a.add_(b), "max": lambda a, b: torch.maximum(a, b, out=a)}
)


@dataclass
class Transfer:
    """One exchange of ``count`` chunks; ``wait`` returns when its result may be used.

    ``write(index, slot)`` fills this rank's slot with a chunk, ``read(index, slots)`` takes it from those of all ranks.
    ``depends`` says that it sends what the exchange before it received.
    """

    owner: SharedMemory
    count: int
    write: Callable[[int, Tensor], None]
    read: Callable[[int, Sequence[Tensor]], None]
    depends: bool = False
    num_written: int = 0
    num_read: int = field(default=0)

    def wait(self) -> None:
        """Finish this exchange, and those begun before it. Raises RuntimeError when a peer died."""
        while self.num_read < self.count:
            self.owner.advance()


class SharedMemory:
    """The exchanges of one group, in the order in which they are begun, which must be the same on all ranks."""

    def __init__(self, directory: Path, index: int, size: int) -> None:
        """``directory``, the same for all ranks, has what ``_reserve`` makes. All ranks must open it, step by step."""
        self.directory, self.index, self.size = directory, index, size
        self.others = [(index + step) % size for step in range(1, size)]
        self._slots: list[list[Tensor]] = []
        self._ready_in: list[int] = []
        self._free_in: list[int] = []
        self._ready_out: list[int] = []
        self._free_out: list[int] = []
        self._open: deque[Transfer] = deque()
        self._num_written = self._num_read = self._num_freed = 0
        fds = (self._ready_in, self._free_in, self._ready_out, self._free_out)
        self.close = weakref.finalize(self, lambda: [os.close(fd) for each in fds for fd in each])

    def open_slots_and_readers(self) -> None:
        """The first step. Raises OSError or RuntimeError."""
        _spare_files(4 * len(self.others))
        num_bytes = CHUNK_BYTES * NUM_SLOTS
        files = [
            torch.from_file(str(self.directory / f"slots{rank}"), shared=True, size=num_bytes, dtype=torch.uint8)
            for rank in range(self.size)
        ]
        self._slots = [
            [file[start : start + CHUNK_BYTES] for file in files] for start in range(0, num_bytes, CHUNK_BYTES)
        ]
        for token, fds in (("ready", self._ready_in), ("free", self._free_in)):
            fds += [_open_reader(self.directory / f"{token}{other}to{self.index}") for other in self.others]

    def open_writers(self) -> None:
        """The second: a FIFO can be opened for writing once it has a reader. Raises OSError."""
        for token, fds in (("ready", self._ready_out), ("free", self._free_out)):
            fds += [os.open(self.directory / f"{token}{self.index}to{other}", os.O_WRONLY) for other in self.others]

    # What is exchanged. All tensors are contiguous. ``data``: autograd does not see what arrives, as with a backend.

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Transfer:
        """Replace ``tensor`` by the sum (or maximum) over the ranks."""
        flat, combine = tensor.data.view(-1), COMBINE[op]
        if self.size > 2 and tensor.nbytes * (self.size - 1) > CHUNK_BYTES:
            return self._reduce_parts(flat, combine)
        pieces = flat.split(CHUNK_BYTES // flat.element_size()) if flat.numel() else ()

        def write(index: int, slot: Tensor) -> None:
            _fill(slot, pieces[index])

        def read(index: int, slots: Sequence[Tensor]) -> None:
            piece = pieces[index]
            if self.size == 2:  # in either order it is the same
                combine(piece, _values(slots[self.others[0]], piece))
                return
            # In one order on all ranks. Its own part a rank has here: in its slot there may be a later chunk already,
            # since a slot is written again once the others have read it.
            parts = [piece if rank == self.index else _values(slot, piece) for rank, slot in enumerate(slots)]
            total = parts[0].clone()
            for part in parts[1:]:
                combine(total, part)
            piece.copy_(total)

        return self._begin(len(pieces), write, read)

    def _reduce_parts(self, flat: Tensor, combine: Combine) -> Transfer:
        """Each rank reduces a part, then all gather: a rank reads every element twice, not once from each rank."""
        length = -(-flat.numel() // self.size)
        parts = [flat[rank * length : (rank + 1) * length] for rank in range(self.size)]
        self._exchange_parts(parts, parts[self.index], combine)
        return self._gather(parts, parts[self.index], depends=True)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Transfer:
        """Every rank's ``tensor``, one after the other, into ``output``."""
        parts = list(output.data.view(self.size, -1))
        own = parts[self.index]
        if own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor.data.view(-1))
        return self._gather(parts, own)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Transfer:
        """The sum over the ranks of this rank's part of ``tensor``, which may be where ``output`` is."""
        return self._exchange_parts(list(tensor.data.view(self.size, -1)), output.data.view(-1), COMBINE["sum"])

    def _gather(self, parts: Sequence[Tensor], own: Tensor, depends: bool = False) -> Transfer:
        room = CHUNK_BYTES // own.element_size()

        def write(index: int, slot: Tensor) -> None:
            _fill(slot, _piece(own, index, room))

        def read(index: int, slots: Sequence[Tensor]) -> None:
            for other in self.others:
                piece = _piece(parts[other], index, room)
                piece.copy_(_values(slots[other], piece))

        return self._begin(-(-parts[0].numel() // room), write, read, depends)

    def _exchange_parts(self, parts: Sequence[Tensor], output: Tensor, combine: Combine) -> Transfer:
        """Give every rank its part, and combine what the others have for this one. A slot has room for all readers."""
        room = CHUNK_BYTES // output.element_size() // (self.size - 1)
        own = parts[self.index]

        def place(slot: Tensor, writer: int, reader: int, like: Tensor) -> Tensor:
            number = (reader - writer) % self.size - 1
            return _values(slot[number * room * like.element_size() :], like)

        def write(index: int, slot: Tensor) -> None:
            for other in self.others:
                piece = _piece(parts[other], index, room)
                place(slot, self.index, other, piece).copy_(piece)

        def read(index: int, slots: Sequence[Tensor]) -> None:
            target, mine = _piece(output, index, room), _piece(own, index, room)
            if target.data_ptr() != mine.data_ptr():
                target.copy_(mine)
            for other in self.others:
                combine(target, place(slots[other], other, self.index, target))

        return self._begin(-(-parts[0].numel() // room), write, read)

    # How

    def _begin(
        self,
        count: int,
        write: Callable[[int, Tensor], None],
        read: Callable[[int, Sequence[Tensor]], None],
        depends: bool = False,
    ) -> Transfer:
        transfer = Transfer(self, count, write, read, depends)
        if count:
            self._open.append(transfer)
            self._write_ahead()
        return transfer

    def advance(self) -> None:
        """Receive one chunk of the oldest open exchange."""
        transfer = self._open[0]
        if transfer.num_written == transfer.num_read:
            self._wait_for_slot()
            self._write(transfer)
        for fd in self._ready_in:
            _take(fd)
        transfer.read(transfer.num_read, self._slots[self._num_read % NUM_SLOTS])
        transfer.num_read += 1
        self._num_read += 1
        _put(self._free_out)
        if transfer.num_read == transfer.count:
            self._open.popleft()
        self._write_ahead()

    def _write_ahead(self) -> None:
        """Write what there is room for, in order."""
        for place, transfer in enumerate(self._open):
            if transfer.depends and place > 0:
                return
            while transfer.num_written < transfer.count:
                if not self._has_slot():
                    return
                self._write(transfer)

    def _write(self, transfer: Transfer) -> None:
        transfer.write(transfer.num_written, self._slots[self._num_written % NUM_SLOTS][self.index])
        transfer.num_written += 1
        self._num_written += 1
        _put(self._ready_out)

    def _has_slot(self) -> bool:
        """Whether everybody has read what is in the slot to be written next."""
        return self._num_written < NUM_SLOTS + self._num_freed or self._collect_freed()

    def _collect_freed(self) -> bool:
        if not all(select.select([fd], [], [], 0)[0] for fd in self._free_in):
            return False
        self._wait_for_slot()
        return True

    def _wait_for_slot(self) -> None:
        if self._num_written >= NUM_SLOTS + self._num_freed:
            for fd in self._free_in:
                _take(fd)
            self._num_freed += 1


def _piece(part: Tensor, index: int, room: int) -> Tensor:
    return part[index * room : (index + 1) * room]


def _values(slot: Tensor, like: Tensor) -> Tensor:
    """The beginning of a slot, as a tensor like that one."""
    return slot[: like.nbytes].view(like.dtype)


def _fill(slot: Tensor, values: Tensor) -> None:
    _values(slot, values).copy_(values)


def _open_reader(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else it would wait for a writer
    os.set_blocking(fd, True)
    return fd


def _take(fd: int) -> None:
    if not os.read(fd, 1):
        raise RuntimeError("a process of the group has ended")


def _put(fds: Sequence[int]) -> None:
    for fd in fds:
        # Who has closed its memory needs nothing more; if its process died, the next read shows that.
        with suppress(BrokenPipeError):
            os.write(fd, b"\0")


def open_shared_memory(handle: dist.ProcessGroup, ranks: Sequence[int], index: int) -> SharedMemory | None:
    """Shared memory of these ranks, or None where they can't have it. All of them must call this.

    They can't where they are not all on one machine, are more than ``MOST_RANKS``, would take more than half of the
    shared memory that is free, or too many of the files that a process may open.
    """
    if len(ranks) > MOST_RANKS:
        return None

    def everywhere(step: Callable[[], None]) -> bool:
        """Whether a step succeeds on all ranks; nobody goes on before that is known."""
        done = torch.tensor([int(_succeeds(step))])
        dist.all_reduce(done, dist.ReduceOp.MIN, group=handle)
        return bool(int(done))

    parent = int(os.environ.get(PARENT_VARIABLE, os.getpid()))
    name = torch.tensor([parent, secrets.randbits(62)])
    dist.broadcast(name, ranks[0], group=handle)
    directory = directory_of(int(name[0]), int(name[1]))
    memory = SharedMemory(directory, index, len(ranks))
    steps = (
        lambda: _reserve(directory, len(ranks)) if index == 0 else None,
        memory.open_slots_and_readers,  # another machine, or another container, does not see them
        memory.open_writers,
    )
    try:
        if all(everywhere(step) for step in steps):
            return memory
        memory.close()
        return None
    finally:
        if index == 0:  # everybody has opened everything: nothing is left behind, however the processes end
            shutil.rmtree(directory, ignore_errors=True)


def _succeeds(step: Callable[[], None]) -> bool:
    try:
        step()
    except (OSError, RuntimeError):
        return False
    return True


def _spare_files(needed: int) -> None:
    """Raise OSError where this process could hardly open a file more after ``needed`` others."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (
        limit != resource.RLIM_INFINITY
        and sum(1 for _ in Path("/proc/self/fd").iterdir()) + needed + _FILES_LEFT > limit
    ):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _reserve(directory: Path, size: int) -> None:
    """Make the slots and FIFOs of all ranks. Raises OSError where the machine has no room for them.

    Containers often have 64 MB of shared memory; writing to more than there is would kill the process, this or another.
    """
    if 2 * size * CHUNK_BYTES * NUM_SLOTS > shutil.disk_usage(directory.parent).free:  # other programs need some too
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    directory.mkdir()
    for rank in range(size):
        with (directory / f"slots{rank}").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, CHUNK_BYTES * NUM_SLOTS)
    for one, other in permutations(range(size), 2):
        for token in ("ready", "free"):
            os.mkfifo(directory / f"{token}{one}to{other}")
