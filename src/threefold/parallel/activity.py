"""Who is doing what since when: a memory-mapped board with one record a rank, which outlives the ranks.

A rank that is killed or stopped can't tell what it was doing, and its peers only see a connection that is silent or
gone. So each rank notes every action and every wait in a file that all ranks of the machine map into memory. After a
hang or a crash anybody can read the last note of everyone: the watchdog of a rank that waits, or the parent of one that
died.

Torch is not needed here, because a worker notes that it exists before it spends seconds on importing torch.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol

# Header: magic, number of records, rank of the first record.
_HEADER = struct.Struct("=16sII")
_HEADER_BYTES = 64
_MAGIC = b"threefold-act-1"

# A record is four parts. Native byte order, since only processes of one machine share a board.
_VERSION = struct.Struct("=Q")  # even: the note is whole; odd: the owner is writing it
_HEARTBEAT = struct.Struct("=d")  # written by the watchdog thread, alone, so it needs no version
_NOTE = struct.Struct("=BqiiQd24s120s")  # state, step, stage, microbatch, sequence, since_s, action, operation
_OWNER = struct.Struct("=I64s256s")  # pid, place, message: written when a rank starts and when it ends
_HEARTBEAT_AT = _VERSION.size
_NOTE_AT = _HEARTBEAT_AT + _HEARTBEAT.size
_OWNER_AT = _NOTE_AT + _NOTE.size
_CACHE_LINE_BYTES = 64
_RECORD_BYTES = -(-(_OWNER_AT + _OWNER.size) // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES  # no two ranks share a line

_NONE = -1  # a step, stage or microbatch that is not there
_READ_ATTEMPTS = 100


class State(StrEnum):
    """What a rank is doing. The order is the number that is stored; an untouched record (0) is ``ABSENT``."""

    ABSENT = "absent"
    STARTING = "starting"
    COMPUTING = "computing"
    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"


_STATES = tuple(State)
_NUMBER_STARTING, _NUMBER_COMPUTING, _NUMBER_WAITING = (
    _STATES.index(state) for state in (State.STARTING, State.COMPUTING, State.WAITING)
)


STOPPED_AFTER = "stopped after step"
"""How the message of a rank begins that ended before the job's last step."""


@dataclass(frozen=True, slots=True)
class Activity:
    """The last note of one rank.

    ``since_s`` (start of what it does now) and ``heartbeat_s`` (last sign of life) are ``time.monotonic()`` seconds, a
    clock that all processes of a machine share. ``sequence`` counts the waits begun, so ranks that run the same
    collectives can be compared. ``step``, ``stage`` and ``microbatch`` are None where there is none.
    """

    rank: int
    pid: int = 0
    place: str = ""
    state: State = State.ABSENT
    step: int | None = None
    action: str = ""
    stage: int | None = None
    microbatch: int | None = None
    operation: str = ""
    sequence: int = 0
    since_s: float = 0.0
    heartbeat_s: float = 0.0
    message: str = ""

    @property
    def stopped(self) -> bool:
        """Whether this rank ended in order, but before the job's last step, because a rank was asked to."""
        return self.state is State.DONE and self.message.startswith(STOPPED_AFTER)


class ActivityLog(Protocol):
    """What the engines tell about themselves while they run. They call it on every operation, so it must be quick."""

    def begin_step(self, step: int) -> None:
        """Note that optimizer step ``step`` begins; clears the action."""
        ...

    def begin_action(self, action: str, stage: int, microbatch: int) -> None:
        """Note that a schedule action (as text, like ``2F0``) begins; -1 stands for no stage or no microbatch."""
        ...

    def begin_wait(self, operation: str) -> None:
        """Note that this rank waits for others in ``operation``.

        The text names the operation and, in brackets, the (global) ranks that take part: ``all_reduce over tp[2,3]``,
        ``send to rank 5 over pp[1,5]``, ``receive from rank 1 over pp[1,5]``. Who waits for whom is read from it. Ranks
        of one group that wait with different texts are taken for ranks that run different collectives.
        """
        ...

    def end_wait(self) -> None:
        """Note that the wait is over and that the action goes on."""
        ...

    def heartbeat(self) -> None:
        """Note that this process lives; may be called from another thread."""
        ...

    def finish(self, state: Literal["done", "failed"], message: str = "") -> None:
        """Note how this rank ended, and why."""
        ...


class NullActivity:
    """The `ActivityLog` of a process that has no board: notes nothing."""

    def begin_step(self, step: int) -> None:
        """Do nothing."""

    def begin_action(self, action: str, stage: int, microbatch: int) -> None:
        """Do nothing."""

    def begin_wait(self, operation: str) -> None:
        """Do nothing."""

    def end_wait(self) -> None:
        """Do nothing."""

    def heartbeat(self) -> None:
        """Do nothing."""

    def finish(self, state: Literal["done", "failed"], message: str = "") -> None:
        """Do nothing."""


class ActivityBoard:
    """The notes of all ranks of one machine, mapped from a file."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        magic, self.num_ranks, self.first_rank = _HEADER.unpack_from(memory)
        if magic.rstrip(b"\0") != _MAGIC or len(memory) < _board_bytes(self.num_ranks):
            raise ValueError(f"{path} is not an activity board")
        self.path = path
        self.memory = memory

    @classmethod
    def create(cls, path: str | Path, world_size: int, first_rank: int = 0) -> ActivityBoard:
        """Make an empty board in place of any older one, for ``world_size`` ranks from ``first_rank`` on."""
        Path(path).unlink(missing_ok=True)
        return cls.join(path, world_size, first_rank)

    @classmethod
    def join(cls, path: str | Path, world_size: int, first_rank: int = 0) -> ActivityBoard:
        """Open the board, and make it if it is not there yet.

        Ranks that nobody coordinates (under torchrun) all join at once: each writes the same header, and nobody wipes
        a note.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if os.fstat(descriptor).st_size < _board_bytes(world_size):
                os.ftruncate(descriptor, _board_bytes(world_size))
            os.pwrite(descriptor, _HEADER.pack(_MAGIC, world_size, first_rank), 0)
            return cls(Path(path), mmap.mmap(descriptor, _board_bytes(world_size)))
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: str | Path) -> ActivityBoard:
        """Open a board that exists. Raises ``OSError`` or ``ValueError`` where there is none."""
        with Path(path).open("r+b") as file:
            return cls(Path(path), mmap.mmap(file.fileno(), 0))

    @property
    def ranks(self) -> range:
        """The (global) ranks that have a record here."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    def offset(self, rank: int) -> int:
        """The place of a rank's record in the file."""
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} has no record on this board, which holds ranks {self.ranks}")
        return _HEADER_BYTES + (rank - self.first_rank) * _RECORD_BYTES

    def read(self, rank: int) -> Activity:
        """The last note of a rank; whole even while the rank is writing the next one."""
        return _parse(rank, self._whole_record(self.offset(rank)))

    def read_all(self) -> tuple[Activity, ...]:
        """The last note of every rank, in the order of ranks."""
        return tuple(self.read(rank) for rank in self.ranks)

    def close(self) -> None:
        """Unmap the file; the notes stay in it."""
        self.memory.close()

    def _whole_record(self, offset: int) -> bytes:
        """Read between two equal, even versions (a sequence lock): no writer was at work meanwhile."""
        record = b""
        for _ in range(_READ_ATTEMPTS):
            (before,) = _VERSION.unpack_from(self.memory, offset)
            record = self.memory[offset : offset + _RECORD_BYTES]
            (after,) = _VERSION.unpack_from(self.memory, offset)
            if before == after and before % 2 == 0:
                return record
            time.sleep(1e-5)
        # The owner was killed or stopped in the middle of a note. Half a note says more than none.
        return record


class ActivityWriter:
    """The `ActivityLog` of one rank, kept on a board. Only the thread that trains may call it, `heartbeat` excepted.

    Measured cost of a call: 0.1 to 0.4 microseconds (CPython 3.11, one core of an x86-64 server).
    """

    def __init__(self, board: ActivityBoard | str | Path, rank: int, place: str) -> None:
        self.board = board if isinstance(board, ActivityBoard) else ActivityBoard.open(board)
        self.rank = rank
        self.place = place
        self._memory = self.board.memory
        self._version_at = self.board.offset(rank)
        self._note_at = self._version_at + _NOTE_AT
        self._version = 0
        self._state = _NUMBER_STARTING
        self._step = self._stage = self._microbatch = _NONE
        self._sequence = 0
        self._action = self._operation = b""
        self.heartbeat()
        self._write_owner("")

    def begin_step(self, step: int) -> None:
        """Note that optimizer step ``step`` begins; clears the action."""
        self._state = _NUMBER_COMPUTING
        self._step = step
        self._stage = self._microbatch = _NONE
        self._action = self._operation = b""
        self._write_note()

    def begin_action(self, action: str, stage: int, microbatch: int) -> None:
        """Note that a schedule action (as text, like ``2F0``) begins; -1 stands for no stage or no microbatch."""
        self._state = _NUMBER_COMPUTING
        self._action = action.encode()
        self._stage = stage
        self._microbatch = microbatch
        self._operation = b""
        self._write_note()

    def begin_wait(self, operation: str) -> None:
        """Note that this rank waits for others in ``operation``; `ActivityLog` says how to write it."""
        self._state = _NUMBER_WAITING
        self._sequence += 1
        self._operation = operation.encode()
        self._write_note()

    def end_wait(self) -> None:
        """Note that the wait is over and that the action goes on."""
        self._state = _NUMBER_COMPUTING
        self._operation = b""
        self._write_note()

    def heartbeat(self) -> None:
        """Note that this process lives; may be called from another thread."""
        _HEARTBEAT.pack_into(self._memory, self._version_at + _HEARTBEAT_AT, time.monotonic())

    def finish(self, state: Literal["done", "failed"], message: str = "") -> None:
        """Note how this rank ended, and why. What it did last stays readable."""
        self._state = _STATES.index(State(state))
        self.heartbeat()
        self._write_owner(message)

    def _write_owner(self, message: str) -> None:
        with self._writing():
            _OWNER.pack_into(
                self._memory, self._version_at + _OWNER_AT, os.getpid(), self.place.encode(), message.encode()
            )
        self._write_note()

    def _write_note(self) -> None:
        # Spelled out instead of `with self._writing()`: this runs several times in every action.
        memory, version_at, version = self._memory, self._version_at, self._version + 1
        _VERSION.pack_into(memory, version_at, version)
        _NOTE.pack_into(
            memory,
            self._note_at,
            self._state,
            self._step,
            self._stage,
            self._microbatch,
            self._sequence,
            time.monotonic(),
            self._action,
            self._operation,
        )
        _VERSION.pack_into(memory, version_at, version + 1)
        self._version = version + 1

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Mark the record as being written (odd version) meanwhile."""
        _VERSION.pack_into(self._memory, self._version_at, self._version + 1)
        yield
        self._version += 2
        _VERSION.pack_into(self._memory, self._version_at, self._version)


def _board_bytes(num_ranks: int) -> int:
    return _HEADER_BYTES + num_ranks * _RECORD_BYTES


def _parse(rank: int, record: bytes) -> Activity:
    state, step, stage, microbatch, sequence, since_s, action, operation = _NOTE.unpack_from(record, _NOTE_AT)
    (heartbeat_s,) = _HEARTBEAT.unpack_from(record, _HEARTBEAT_AT)
    pid, place, message = _OWNER.unpack_from(record, _OWNER_AT)
    if pid == 0:
        return Activity(rank)
    return Activity(
        rank=rank,
        pid=pid,
        place=_text(place),
        state=_STATES[min(state, len(_STATES) - 1)],
        step=_number(step),
        action=_text(action),
        stage=_number(stage),
        microbatch=_number(microbatch),
        operation=_text(operation),
        sequence=sequence,
        since_s=since_s,
        heartbeat_s=heartbeat_s,
        message=_text(message),
    )


def _number(stored: int) -> int | None:
    return None if stored < 0 else stored


def _text(stored: bytes) -> str:
    # "ignore": a text that was cut at its last byte may end in half a character.
    return stored.rstrip(b"\0").decode(errors="ignore")
