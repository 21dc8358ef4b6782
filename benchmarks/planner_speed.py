"""How many strategies a second the cost model judges, time and memory both, on one core.

    OMP_NUM_THREADS=1 python benchmarks/planner_speed.py [NUMBER]

The target is 50,000 a second.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from threefold.cost.estimate import estimate
from threefold.cost.hardware import Hardware, find_device
from threefold.cost.strategies import SCHEDULE_CODES, Strategies
from threefold.job.presets import presets
from threefold.job.spec import ModelSpec

MODEL = "llama3-405b"
TRIALS = 5


def main() -> None:
    """Judge random strategies of a 405B model on 16,384 H100 and print the best of a few trials."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    model = ModelSpec.model_validate(presets()[MODEL])
    device = find_device("h100")
    hardware = Hardware(device, nodes=2048, devices_per_node=8, inter_node_bytes_per_s=device.nic_bytes_per_s)
    strategies = random_strategies(number)
    seconds = min(timed(model, hardware, strategies) for _ in range(TRIALS))
    print(f"{number:,} strategies of {MODEL} on {hardware.num_devices:,} {device.name}: {seconds:.3f} s")
    print(f"{number / seconds:,.0f} strategies a second")


def random_strategies(number: int) -> Strategies:
    """Powers of two that use all devices, with a global batch of 2,048 where it divides."""
    random = np.random.default_rng(0)
    tp, pp = 2 ** random.integers(0, 5, number), 2 ** random.integers(0, 6, number)
    dp = 16384 // (tp * pp)
    micro_batch = 2 ** random.integers(0, 3, number)
    chunks = np.where(pp > 1, 2 ** random.integers(0, 3, number), 1)
    schedule = np.where(chunks > 1, SCHEDULE_CODES["interleaved_1f1b"], SCHEDULE_CODES["1f1b"])
    return Strategies.build(
        dp=dp,
        tp=tp,
        pp=pp,
        chunks=chunks,
        schedule=schedule,
        micro_batch=micro_batch,
        num_microbatches=np.maximum(2048 // (dp * micro_batch), 1),
        zero_stage=random.integers(0, 4, number),
        recompute=random.integers(0, 3, number),
        sequence_parallel=random.integers(0, 2, number).astype(bool),
    )


def timed(model: ModelSpec, hardware: Hardware, strategies: Strategies) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    estimate(model, 8192, hardware, strategies)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
