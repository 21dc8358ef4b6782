"""Starts the ranks of one machine through torch's elastic multiprocessing.

Kept apart from the launcher, because importing torch takes seconds and a rank asks the launcher to tie its life to its
parent's before it spends them.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext, start_processes

# Elastic would install its own handlers, which raise wherever the launcher happens to be. It handles the signals that
# stop a job itself, and leaves to elastic one that nobody sends.
_ELASTIC_SIGNALS = "SIGQUIT"

# For a killed rank to be gone: its memory is freed first. Only a broken driver takes longer, and would take for ever.
_LAST_WAIT_S = 30.0


def stdout_log(log_dir: Path, rank: int) -> Path:
    """Where a rank's standard output goes (not rank 0's, which is the terminal's)."""
    return log_dir / f"rank{rank}.stdout.log"


def stderr_log(log_dir: Path, rank: int) -> Path:
    """Where a rank's warnings and tracebacks go."""
    return log_dir / f"rank{rank}.stderr.log"


class RankLogs(LogsSpecs):
    """Rank 0 prints to the terminal; every other stream has its own file, named after the rank."""

    def __init__(self, log_dir: Path) -> None:
        super().__init__(str(log_dir))
        self._log_dir = log_dir

    @property
    def root_log_dir(self) -> str:
        """The folder of all logs."""
        return str(self._log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of each rank; an empty name means that the stream is inherited."""
        return LogsDest(
            stdouts={rank: "" if rank == 0 else str(stdout_log(self._log_dir, rank)) for rank in envs},
            stderrs={rank: str(stderr_log(self._log_dir, rank)) for rank in envs},
            error_files=dict.fromkeys(envs, ""),
        )


class Workers:
    """The processes of all ranks of this machine."""

    def __init__(self, context: SubprocessContext) -> None:
        self._context = context

    @classmethod
    def start(cls, command: Sequence[str], environments: Sequence[Mapping[str, str]], log_dir: Path) -> Workers:
        """Start ``command`` once for each environment, which is added to this process's own."""
        # Elastic warns about each signal that it sends when it closes; the launcher says what happened itself.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _ELASTIC_SIGNALS
        context = start_processes(
            name="rank",
            entrypoint=command[0],
            args={rank: tuple(command[1:]) for rank in range(len(environments))},
            envs={rank: dict(environment) for rank, environment in enumerate(environments)},
            logs_specs=RankLogs(log_dir),
        )
        if not isinstance(context, SubprocessContext):
            raise TypeError(f"torch started a {type(context).__name__} for a command")
        return cls(context)

    def pids(self) -> dict[int, int]:
        """Process number of each rank."""
        return self._context.pids()

    def exit_codes(self) -> dict[int, int]:
        """Exit status of each rank that has ended; negative is the signal that killed it."""
        codes = {rank: handler.proc.poll() for rank, handler in self._context.subprocess_handlers.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to every rank that still runs."""
        for handler in self._context.subprocess_handlers.values():
            handler.proc.send_signal(signum)  # does nothing once the process has ended

    def close(self, kill_after_s: float) -> None:
        """End every rank that still runs: SIGTERM, then SIGKILL, which also ends a process that is stopped."""
        self._context.close(signal.SIGTERM, timeout=max(1, round(kill_after_s)))
        deadline = time.monotonic() + _LAST_WAIT_S
        for handler in self._context.subprocess_handlers.values():
            with suppress(subprocess.TimeoutExpired):
                handler.proc.wait(max(0.0, deadline - time.monotonic()))
            for name in ("_stdout", "_stderr"):  # elastic leaves the logs of a rank that ended by itself open
                log = getattr(handler, name, None)
                if log is not None:
                    log.close()
