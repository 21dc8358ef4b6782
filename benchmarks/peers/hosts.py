"""The processes of one system, seen from the one that drives them all."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from benchmarks.peers.systems import System
from benchmarks.peers.work import Work
from threefold.train.launcher import MALLOC_TUNABLES

ROOT = Path(__file__).parents[2]


class PeerError(Exception):
    """A system can't be built, or its processes failed."""


class Host:
    """Starts the processes of ``system``; ``ask`` sends all of them a command and waits for the answers."""

    def __init__(self, system: System, work: Work, ranks: int, python: Mapping[str, str], timeout_s: float) -> None:
        self.system, self.timeout_s = system, timeout_s
        self.place = tempfile.TemporaryDirectory(prefix="peers-")
        if system.interpreter not in python:
            raise PeerError(f"no interpreter with {system.interpreter}: state --{system.interpreter}-python")
        processes = system.processes or ranks
        self.workers = [self._start(rank, processes, work, python[system.interpreter]) for rank in range(processes)]

    def _start(self, rank: int, ranks: int, work: Work, python: str) -> subprocess.Popen[bytes]:
        call = {
            "rank": rank,
            "ranks": ranks,
            "store": str(Path(self.place.name) / "store"),
            "build": self.system.build,
            "options": dict(self.system.options),
            "work": work.to_dict(),
        }
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "DS_ACCELERATOR": "cpu",
            # What a launcher says, for systems that look it up.
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        if self.system.peer in ("threefold", "bound"):  # as threefold starts its ranks; the bound is to be a bound
            environment["GLIBC_TUNABLES"] = MALLOC_TUNABLES
        with (Path(self.place.name) / f"rank{rank}.log").open("wb") as log:
            return subprocess.Popen(
                [python, "-m", "benchmarks.peers.worker", json.dumps(call)],
                cwd=self.place.name,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self) -> None:
        """Wait until the system is built."""
        self._answers()

    def losses(self, steps: int) -> list[float]:
        """The losses of the next steps: the mean over the ranks that have one."""
        found = [answer["losses"] for answer in self.ask(f"losses {steps}")]
        return [_mean([loss for loss in each if loss is not None]) for each in zip(*found, strict=True)]

    def seconds(self, steps: int) -> float:
        """Seconds a step, of the slowest rank."""
        return max(answer["seconds"] for answer in self.ask(f"turn {steps}"))

    def cpu_seconds(self) -> float:
        """CPU time that the processes have used."""
        return sum(_cpu_seconds(Path(f"/proc/{worker.pid}/stat")) for worker in self.workers)

    def ask(self, command: str) -> list[dict[str, Any]]:
        """What every rank answers. Raises PeerError."""
        for worker in self.workers:
            assert worker.stdin is not None
            try:
                worker.stdin.write(f"{command}\n".encode())
                worker.stdin.flush()
            except BrokenPipeError:
                raise PeerError(f"a process died\n{self._log()}") from None
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        deadline, answers = time.monotonic() + self.timeout_s, []
        for rank, worker in enumerate(self.workers):
            assert worker.stdout is not None
            if not select.select([worker.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise PeerError(f"rank {rank} did not answer within {self.timeout_s:g} s\n{self._log()}")
            line = worker.stdout.readline()
            if not line:
                raise PeerError(f"rank {rank} died with exit code {worker.wait()}\n{self._log()}")
            answer = json.loads(line)
            if "error" in answer:
                raise PeerError(f"{answer['error']}\n{self._log()}")
            answers.append(answer)
        return answers

    def _log(self) -> str:
        logs = (path.read_text(errors="replace") for path in sorted(Path(self.place.name).glob("rank*.log")))
        return "\n".join(log[-3000:] for log in logs)

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            if worker.stdin is not None:
                with suppress(BrokenPipeError):  # it died with a command unread
                    worker.stdin.close()
        for worker in self.workers:
            try:
                worker.wait(2.0)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()
        self.place.cleanup()


def _cpu_seconds(path: Path) -> float:
    if not path.exists():
        return 0.0
    user, system = path.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def machine_cpu_seconds() -> float:
    """CPU time that all programs, and the host of a virtual machine, have used; 0 where Linux does not tell."""
    path = Path("/proc/stat")
    if not path.exists():
        return 0.0
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, path.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def free_memory_share() -> float:
    """The part of the machine's memory that programs can still have; 1 where Linux does not tell."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return 1.0
    lines = (line.split() for line in path.read_text().splitlines())
    kibibytes = {words[0]: int(words[1]) for words in lines}
    return kibibytes["MemAvailable:"] / kibibytes["MemTotal:"]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def interpreters(deepspeed_python: str | None) -> dict[str, str]:
    """The Python of each kind of system."""
    return {"own": sys.executable} | ({"deepspeed": deepspeed_python} if deepspeed_python else {})
