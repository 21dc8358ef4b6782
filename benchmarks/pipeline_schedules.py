"""Pipeline schedules on two ranks of one thread each: measured step and bubble beside the simulated ones.

Run ``OMP_NUM_THREADS=1 python benchmarks/pipeline_schedules.py`` on an idle machine; it takes two to three minutes.
Everything happens in one invocation: the model's parts are profiled, again while other processes disturb it, every
schedule is simulated with that profile, and then one step of each schedule is run in turn, again and again, so that
all of them see the same machine. Numbers are medians over the steps in which other processes took less than a tenth
of the machine, and over all steps where those are too few.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from threefold.cost.parts import model_costs
from threefold.cost.profile import Profile
from threefold.job import Job, parse_job
from threefold.layout import split_layers
from threefold.measure.timeline import measured_timeline
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.plan.balance import play_partition
from threefold.schedule import job_schedule
from threefold.simulate import Cause, Timeline
from threefold.train.recorded import RecordedStep

if TYPE_CHECKING:
    from threefold.parallel.collectives import Group

SCHEDULES: Mapping[str, int] = {"1f1b": 1, "gpipe": 1, "interleaved_1f1b": 2, "zb_h1": 1, "zb_v": 2}
"""Chunks by name."""
ZERO_BUBBLE = ("zb_h1", "zb_v")
STEP_ERROR, BUBBLE_ERROR = 0.10, 0.03
MOST_OTHERS, FEWEST_STEPS, PROFILES = 0.10, 7, 4
MODEL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 704,
}
SEQUENCE, MICRO_BATCH = 128, 4


@dataclass
class Measured:
    """Steps of one schedule."""

    seconds: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    """The share of the machine that other processes took."""
    recorded: list[RecordedStep] = field(default_factory=list)

    @property
    def quiet(self) -> Measured:
        """The steps that count."""
        chosen = [index for index, share in enumerate(self.others) if share < MOST_OTHERS]
        if len(chosen) < FEWEST_STEPS:
            return self
        parts = (self.seconds, self.others, self.recorded)
        return Measured(*([part[index] for index in chosen] for part in parts))  # type: ignore[arg-type]

    @property
    def timelines(self) -> list[Timeline]:
        return [measured_timeline(step.schedule, step.ranks) for step in self.recorded]


def machine_seconds() -> float:
    """CPU seconds that all processes of the machine have taken, those of other machines on the same host included."""
    user, nice, system, _idle, _wait, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def job_of(schedule: str, microbatches: int) -> Job:
    return parse_job(
        {
            "model": MODEL,
            "data": {"sequence_length": SEQUENCE},
            "cluster": {"device": "cpu", "nodes": 1, "devices_per_node": 2},
            "steps": 1000,
            "train_batch_size": MICRO_BATCH * microbatches,
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "parallelism": {
                "pp": {"size": 2, "schedule": schedule, "chunks": SCHEDULES[schedule], "partition": "even"}
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        }
    )


def run_rank(
    context: WorkerContext, jobs: Mapping[str, Job], seconds: float, profile_seconds: float
) -> tuple[str, dict[str, Measured]]:
    """What a rank does: profile, then a step of each schedule in turn until ``seconds`` have passed."""
    import torch

    from threefold.parallel.engine import build_engine, build_job_mesh
    from threefold.train.data.synthetic import SyntheticTokens
    from threefold.train.recording import StepRecords
    from threefold.train.trainer import Sources, Trainer

    job = next(iter(jobs.values()))
    world = build_job_mesh(job, context.rank, activity=context.activity).world
    profile = quiet_profile(context, job, world, profile_seconds)
    trainers, records = {}, {}
    for name, job in jobs.items():
        mesh = build_job_mesh(job, context.rank, activity=context.activity)
        engine = build_engine(job, mesh)
        source = SyntheticTokens(MODEL["vocab_size"], SEQUENCE, seed=0)
        trainers[name] = Trainer(job, engine, Sources(source), None)
        records[name] = StepRecords(mesh, engine.schedule)
    found = {name: Measured() for name in jobs}
    begin, step = time.perf_counter(), 0
    while True:
        go_on = torch.tensor([float(step < 4 or time.perf_counter() - begin < seconds)])
        world.broadcast(go_on).wait()
        if not go_on:
            break
        for name, trainer in trainers.items():
            before = others_s(world)
            start = time.perf_counter()
            trainer._train_step(step)
            others = share_of(others_s(world) - before, start)
            recorded = records[name].gather(step)
            if step >= 2:  # the first two warm up
                found[name].seconds.append(trainer.step_seconds[-1])
                found[name].others.append(others)
                found[name].recorded += [recorded] if recorded else []
        step += 1
    for entry in records.values():
        entry.finish()
    return profile.to_json(), found


def quiet_profile(context: WorkerContext, job: Job, world: Group, seconds: float) -> Profile:
    """A profile that other processes did not disturb, or else the last of some."""
    import torch

    from threefold.measure.profile import Budget, measure_profile

    for attempt in range(1, PROFILES + 1):
        before, start = others_s(world), time.perf_counter()
        profile = measure_profile(job, context.rank, context.world_size, budget=Budget(seconds))
        share = torch.tensor([share_of(others_s(world) - before, start)])
        world.broadcast(share).wait()  # all ranks decide alike
        if context.rank == 0:
            print(f"profile {attempt}: other processes took {float(share):.1%} of the machine", file=sys.stderr)
        if share < MOST_OTHERS or attempt == PROFILES:
            return profile
    raise AssertionError("the last attempt returns")


def others_s(world: Group) -> float:
    """CPU seconds that processes other than the ranks have taken."""
    import torch

    own = torch.tensor([time.process_time()], dtype=torch.float64)
    world.all_reduce(own).wait()
    return machine_seconds() - float(own)


def share_of(cpu_s: float, start: float) -> float:
    """CPU seconds as a share of what the machine had since ``start``."""
    return cpu_s / ((time.perf_counter() - start) * (os.cpu_count() or 1))


def simulated(job: Job, profile: Profile) -> Timeline:
    assert job.model is not None
    schedule = job_schedule(job)
    layers = split_layers(job.model.num_hidden_layers, schedule.num_stages, job.parallelism.pp.partition)
    return play_partition(model_costs(job, profile), [len(stage) for stage in layers], schedule)


def summarize(job: Job, steps: Measured, played: Timeline) -> dict[str, Any]:
    measured = steps.quiet
    timelines = measured.timelines
    step_s, bubble = np.median(measured.seconds), np.median([timeline.bubble_fraction for timeline in timelines])
    idle = {cause.value: np.median([timeline.idle_s[cause].mean() for timeline in timelines]) for cause in Cause}
    return {
        "step_s": float(step_s),
        "quartiles_s": np.quantile(measured.seconds, (0.25, 0.75)).tolist(),
        "simulated_step_s": played.makespan_s,
        "step_error": float(played.makespan_s / step_s - 1),
        "bubble": float(bubble),
        "simulated_bubble": played.bubble_fraction,
        "bubble_error": float(played.bubble_fraction - bubble),
        "tokens_per_s": float(job.train_batch_size * SEQUENCE / step_s),
        "steps": len(measured.seconds),
        "of_steps": len(steps.seconds),
        "others": float(np.median(measured.others)),
        "measured": {
            "compute_s": float(np.median([timeline.compute_s.mean() for timeline in timelines])),
            "optimizer_s": float(np.median([timeline.step_s.mean() for timeline in timelines])),
            **{f"{cause}_s": float(seconds) for cause, seconds in idle.items()},
        },
        "simulated": {
            "compute_s": float(played.compute_s.mean()),
            "optimizer_s": float(played.step_s.mean()),
            **{f"{cause.value}_s": float(seconds.mean()) for cause, seconds in played.idle_s.items()},
        },
    }


def show(rows: Mapping[str, Mapping[str, Any]]) -> None:
    print(
        f"{'schedule':18} {'step ms':>8} {'simulated':>10} {'error':>7} {'bubble':>7} {'simulated':>10} {'error':>7} "
        f"{'tokens/s':>9} {'steps':>8} {'others':>7}"
    )
    for name, row in rows.items():
        print(
            f"{name:18} {row['step_s'] * 1e3:8.1f} {row['simulated_step_s'] * 1e3:10.1f} {row['step_error']:+7.1%} "
            f"{row['bubble']:7.3f} {row['simulated_bubble']:10.3f} {row['bubble_error']:+7.3f} "
            f"{row['tokens_per_s']:9,.0f} {row['steps']:>3} of {row['of_steps']:<3}{row['others']:6.1%}"
        )
    print(
        f"\n{'milliseconds of a rank':29} "
        + " ".join(f"{name[:-2]:>10}" for name in next(iter(rows.values()))["measured"])
    )
    for name, row in rows.items():
        for words in ("measured", "simulated"):
            print(f"{name:18} {words:10} " + " ".join(f"{value * 1e3:10.2f}" for value in row[words].values()))


def verdicts(rows: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    lines = []
    for name, row in rows.items():
        good = abs(row["step_error"]) <= STEP_ERROR and abs(row["bubble_error"]) <= BUBBLE_ERROR
        lines.append(f"{'ok  ' if good else 'MISS'} {name}: step within 10 %, bubble within 0.03 of the simulation")
    best = max(
        (name for name in ZERO_BUBBLE if name in rows), key=lambda name: rows[name]["tokens_per_s"], default=None
    )
    if best is not None and "1f1b" in rows:
        gain = rows[best]["tokens_per_s"] / rows["1f1b"]["tokens_per_s"] - 1
        lines.append(f"{'ok  ' if gain > 0 else 'MISS'} {best} trains {gain:+.1%} tokens/s against 1f1b")
    return lines


def main() -> None:
    """Measure, simulate, and print both; exits with 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=100.0, help="for all steps together")
    parser.add_argument("--profile-seconds", type=float, default=15.0)
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="names, separated by commas")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    jobs = {name: job_of(name, options.microbatches) for name in options.schedules.split(",")}
    with WorkerPool(2, timeout_s=600.0) as pool:
        text, measured = pool.run(run_rank, 2, jobs, options.seconds, options.profile_seconds)[0]
    profile = Profile.model_validate_json(text)
    rows = {name: summarize(job, measured[name], simulated(job, profile)) for name, job in jobs.items()}
    print(f"2 ranks × 1 thread, {options.microbatches} microbatches\n")
    show(rows)
    lines = verdicts(rows)
    print("", *lines, sep="\n")
    if options.json:
        options.json.write_text(json.dumps({"profile": json.loads(text), "schedules": rows}, indent=1) + "\n")
    sys.exit(any(line.startswith("MISS") for line in lines))


if __name__ == "__main__":
    main()
