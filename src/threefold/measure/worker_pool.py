"""A pool of worker processes that run one function on many ranks, again and again, in a fresh process group each time.

Starting a process that has torch costs seconds, a process group milliseconds. Parity runs dozens of layouts and the
test suite hundreds, so both keep the processes. Workers are forked from a server that has imported torch once. They
talk over loopback only and meet over a file.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from threefold.errors import WorkerError
from threefold.parallel.activity import ActivityBoard, ActivityLog, ActivityWriter

_GRACE_S = 5.0
"""How long the others may take to notice that a rank failed."""


@dataclass(frozen=True)
class WorkerContext:
    """What a function on a worker is told about its place."""

    rank: int
    world_size: int
    activity: ActivityLog


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    directory: Path
    timeout_s: float


class WorkerPool:
    """``size`` processes; ``run(function, world_size, *args)`` calls ``function(context, *args)`` on each rank.

    The function must be importable by name, and arguments and results picklable. Use as a context manager.
    """

    def __init__(self, size: int, timeout_s: float = 120.0) -> None:
        self.size, self.timeout_s = size, timeout_s
        self._workers: list[tuple[ForkServerProcess, Connection]] = []
        self._starting: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """The results in the order of ranks.

        Raises:
            WorkerError: a rank raised (its traceback is the message), died, or all were not done after ``timeout_s``
                (the message names what each is blocked in).
        """
        if world_size > self.size:
            raise ValueError(f"{world_size} ranks on a pool of {self.size} workers")
        self._wait_for_start()
        self._start()
        limit_s = timeout_s or self.timeout_s
        with tempfile.TemporaryDirectory(prefix="threefold-") as directory:
            ActivityBoard.create(Path(directory) / "board", world_size).close()
            for rank, (_, connection) in enumerate(self._workers[:world_size]):
                call = _Call(function, args, rank, world_size, Path(directory), limit_s)
                connection.send_bytes(pickle.dumps(call))
            return self._collect(world_size, time.monotonic() + limit_s, Path(directory) / "board")

    def start_early(self) -> None:
        """Begin to start the processes, and return at once."""
        self._starting = threading.Thread(target=self._start)
        self._starting.start()

    def close(self) -> None:
        """End all processes."""
        self._wait_for_start()
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
            process.close()
        self._workers = []

    def _wait_for_start(self) -> None:
        if self._starting is not None:
            self._starting.join()
            self._starting = None

    def _start(self) -> None:
        if self._workers:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["threefold.measure.worker_pool", "threefold.parallel.engine", "torch._dynamo"])
        for _ in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))

    def _collect(self, world_size: int, deadline: float, board: Path) -> list[Any]:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers[:world_size])}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[index]
                ok, value = _receive(connection, self._workers[rank][0])  # type: ignore[arg-type]
                (results if ok else failures)[rank] = value
                if not ok:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if not waiting and not failures:
            return [results[rank] for rank in range(world_size)]
        message = _failure_message(failures, sorted(waiting.values()), board)
        self.close()  # a worker that still waits in a collective can't be used again
        raise WorkerError(message)


def _receive(connection: Connection, process: ForkServerProcess) -> tuple[bool, Any]:
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        process.join(_GRACE_S)
        return False, f"the process died with exit code {process.exitcode}"


def _failure_message(failures: dict[int, str], waiting: list[int], board: Path) -> str:
    from threefold.train.watchdog import diagnose

    # A rank whose peer failed fails too; the first one to tell is the cause more often than not, so it comes first.
    lines = [f"rank {rank}: {text}" for rank, text in failures.items()]
    if waiting:
        activities = ActivityBoard.open(board).read_all()
        lines.append(f"ranks {waiting} did not finish. {diagnose(activities, time.monotonic(), 0.0).text}")
    return "\n".join(lines)


def _serve(connection: Connection) -> None:
    import torch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    gc.freeze()  # what the server imported lives for ever; to look at it after each call would take longer than that
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            reply = (True, _run(call))
        except BaseException:
            reply = (False, traceback.format_exc())
        # Modules and hooks refer to each other, and so keep process groups alive, each with half a dozen threads.
        gc.collect()
        with contextlib.suppress(OSError):
            connection.send_bytes(pickle.dumps(reply))


def _run(call: _Call) -> Any:
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    from threefold.train.watchdog import Watchdog

    activity = ActivityWriter(ActivityBoard.open(call.directory / "board"), call.rank, f"rank {call.rank}")
    store = FileStore(str(call.directory / "store"), call.world_size)
    timeout = timedelta(seconds=2 * call.timeout_s)
    dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.world_size, timeout=timeout)
    try:
        # The caller keeps the time; the watchdog only shows that this process lives.
        with Watchdog(activity, 2 * call.timeout_s, lambda _: None):
            return call.function(WorkerContext(call.rank, call.world_size, activity), *call.args)
    finally:
        dist.destroy_process_group()
