"""What cutting stages by measurement gains: a model with a heavy head on 2 stages, the even split against ``auto``.

Run ``python benchmarks/pipeline_balance.py`` on a quiet machine with two cores; it takes about two minutes. It profiles
the model with ``threefold profile``, then trains it with the even split and with the one that the profile suggests, a
step of each in turn in the same processes, one thread each. It prints tokens/s (medians over steps), their ratio, and
what the profile predicted. Exits with 1 where the ratio is below 1.15 or off the prediction by more than 5 points.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from threefold.cost.profile import read_profile
from threefold.job import Job, parse_job
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.plan.balance import balance_job, with_partition

JOB: Mapping[str, Any] = {
    "model": {
        "model_type": "llama",
        "vocab_size": 50257,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
    },
    "data": {"sequence_length": 128},
    "steps": 100,
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 2,
    "parallelism": {"pp": {"size": 2, "schedule": "1f1b", "partition": "auto"}},
    "gradient_clipping": 1.0,
}
LEAST_RATIO, MOST_POINTS_OFF = 1.15, 5.0


def main() -> int:
    """Print the comparison and the verdict."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=9, help="steps of each split, in turn")
    parser.add_argument("--seconds", type=float, default=15.0, help="time for the profile")
    options = parser.parse_args()
    job = parse_job(JOB)
    with tempfile.TemporaryDirectory(prefix="threefold-balance-") as directory:
        (Path(directory) / "job.json").write_text(job.to_json())
        command = [sys.executable, "-m", "threefold", "profile", "job.json", "--seconds", str(options.seconds)]
        subprocess.run(command, cwd=directory, env={"OMP_NUM_THREADS": "1"} | os.environ, check=True)
        chosen = balance_job(job, read_profile(Path(directory) / "profile.json", job))
    print(chosen.words(), flush=True)
    assert chosen.even is not None, "there are more layers than stages"
    jobs = [with_partition(job, partition) for partition in (chosen.even, chosen.partition)]
    with WorkerPool(job.world_size, timeout_s=1800) as pool:
        even, auto = pool.run(alternate, job.world_size, jobs, options.steps)[0]
    return verdict(even, auto, chosen.even_step_s, chosen.step_s)


def alternate(context: WorkerContext, jobs: Sequence[Job], num_steps: int) -> list[list[float]]:
    """Seconds of each job's steps on this rank: one step of each in turn; the first of each warms up."""
    from threefold.measure.parity import replica_samples
    from threefold.parallel.engine import build_engine, build_job_mesh
    from threefold.train.data.synthetic import SyntheticTokens
    from threefold.train.optimizer import ShardedOptimizer

    meshes = [build_job_mesh(job, context.rank) for job in jobs]
    engines = [build_engine(job, mesh) for job, mesh in zip(jobs, meshes, strict=True)]
    optimizers = [ShardedOptimizer(job.optimizer, engine.data) for job, engine in zip(jobs, engines, strict=True)]
    spec, data = jobs[0].model, jobs[0].data
    assert spec is not None and data is not None, "the benchmark's job has both"
    source = SyntheticTokens(spec.vocab_size, data.sequence_length, seed=0)
    samples = replica_samples(jobs[0], 0, 0)
    made = {tuple(numbers): source.batch(numbers) for numbers in samples}
    taken: list[list[float]] = [[] for _ in jobs]
    for _ in range(1 + num_steps):
        for engine, optimizer, seconds in zip(engines, optimizers, taken, strict=True):
            begin = time.perf_counter()
            engine.train_step(samples, lambda numbers: made[tuple(numbers)], lambda _, o=optimizer: o.step(1e-4, 0.999))
            seconds.append(time.perf_counter() - begin)
    return [seconds[1:] for seconds in taken]


def verdict(even: Sequence[float], auto: Sequence[float], even_step_s: float, step_s: float) -> int:
    """Print measured and predicted; 0 where they are as they should be."""
    tokens = JOB["train_batch_size"] * JOB["data"]["sequence_length"]
    for name, seconds, expected in (("even split", even, even_step_s), ("auto", auto, step_s)):
        middle = statistics.median(seconds)
        shown = " ".join(f"{one:.2f}" for one in seconds)
        print(f"{name:10}: {tokens / middle:6.1f} tokens/s; step {middle:.3f} s, predicted {expected:.3f} s ({shown})")
    measured = statistics.median(one / other for one, other in zip(even, auto, strict=True))
    predicted = even_step_s / step_s
    off = 100 * abs(measured - predicted)
    print(f"tokens/s of auto over even: measured {measured:.3f}, predicted {predicted:.3f}, {off:.1f} points apart")
    print(json.dumps({"ratio": measured, "predicted": predicted, "even_s": even, "auto_s": auto}))
    return 0 if measured >= LEAST_RATIO and off <= MOST_POINTS_OFF else 1


if __name__ == "__main__":
    sys.exit(main())
