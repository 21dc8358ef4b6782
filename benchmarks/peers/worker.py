"""One rank of one system: builds it and does what the lines on its standard input say, until there are no more.

``losses N`` answers the losses of N steps, ``turn N`` the seconds a step of N steps in a row that
begin with a barrier. An answer is one line of JSON on standard output; whatever else is printed goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from datetime import timedelta
from typing import Any, TextIO

TIMEOUT = timedelta(seconds=300)


def main() -> None:
    """Serve one system."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    try:
        _serve(json.loads(sys.argv[1]), answers)
    except Exception as error:
        import traceback

        traceback.print_exc()
        lines = str(error).strip().splitlines() or [repr(error)]
        _answer(answers, {"error": f"{type(error).__name__}: {lines[0]}"})
        answers.flush()
        os._exit(1)  # others may wait in a collective for ever
    os._exit(0)


def _serve(call: dict[str, Any], answers: TextIO) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    from benchmarks.peers.common import Place
    from benchmarks.peers.work import Work

    torch.set_num_threads(1)
    rank, ranks = call["rank"], call["ranks"]
    dist.init_process_group("gloo", store=FileStore(call["store"], ranks), rank=rank, world_size=ranks, timeout=TIMEOUT)
    module, _, function = call["build"].partition(":")
    build = getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)
    step = build(Place(rank, ranks, Work(**call["work"])), **call["options"])
    _answer(answers, {"ready": True})
    for line in sys.stdin:
        command, count = line.split()
        if command == "losses":
            _answer(answers, {"losses": [step() for _ in range(int(count))]})
        else:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(int(count)):
                step()
            _answer(answers, {"seconds": (time.perf_counter() - begin) / int(count)})


def _answer(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
