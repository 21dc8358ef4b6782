"""A rank without torch, for tests of the launcher: ``dummy_rank.py BEHAVIOUR RUN_DIR TIMEOUT_S``.

Every rank keeps notes on the board, as real ranks do. Rank 1 misbehaves in the way that BEHAVIOUR names; the others
wait for it in a collective that never ends.
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from threefold.parallel.activity import STOPPED_AFTER, ActivityWriter
from threefold.train.launcher import BOARD_VARIABLE, die_with_parent
from threefold.train.watchdog import Watchdog, end_process

OPERATION = "all_reduce over dp[0,1,2]"


def main(behaviour: str, run_dir: Path, timeout_s: float) -> int:
    die_with_parent()
    rank = int(os.environ["RANK"])
    writer = ActivityWriter(os.environ[BOARD_VARIABLE], rank, f"dp {rank}, pp 0, tp 0")
    with Watchdog(writer, timeout_s, end_process(run_dir, rank)):
        writer.begin_step(12)
        writer.begin_action("0B1", 0, 1)
        status = act(behaviour, rank, writer)
    if status == 0:
        writer.finish("done", f"{STOPPED_AFTER} 12" if behaviour == "finish early" else "")
    return status


def pages_of_a_tensor_that_is_made_again() -> int:
    """How many pages the kernel had to give for a tensor of 40 MB after others like it were freed."""
    import torch

    for _ in range(3):
        torch.ones(10_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(10_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def act(behaviour: str, rank: int, writer: ActivityWriter) -> int:
    match behaviour:
        case "finish":
            print(f"hello from rank {rank}")
        case "finish early":
            pass
        case "report environment":
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
            print(*(os.environ[name] for name in names), file=sys.stderr)
        case "report pages":
            print(pages_of_a_tensor_that_is_made_again(), file=sys.stderr)
        case "finish step on signal":
            wait_for_signal()
            writer.begin_step(13)
        case "ignore signal":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            sleep_forever()
        case "die while starting on signal":
            sleep_forever()
        case _ if rank != 1:
            return wait_for_peer(behaviour, writer)
        case "killed" | "killed, peers lose it":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped" | "all stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise" | "raise, peers lose it":
            raise RuntimeError("the loss is not a number")
        case "noted failure":
            writer.finish("failed", "WorkerError: labels do not match")
            return 1
        case "sleep":
            sleep_forever()
    return 0


def wait_for_peer(behaviour: str, writer: ActivityWriter) -> int:
    writer.begin_wait(OPERATION)
    if behaviour == "all stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if behaviour.endswith("peers lose it"):
        time.sleep(0.3)
        raise ConnectionError("Connection closed by peer [127.0.0.1]:1234")
    sleep_forever()


def wait_for_signal() -> None:
    received = []
    signal.signal(signal.SIGINT, lambda *_: received.append(1))
    print("ready", flush=True)
    while not received:
        time.sleep(0.02)
    time.sleep(0.2)


def sleep_forever() -> NoReturn:
    print("ready", flush=True)
    while True:
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
