"""Measures what the parts of a job's model take on this machine: the very executor runs them, one stage for each.

A rank holds a whole small pipeline by itself: a stage with the embedding, stages of one layer, of two, of none and of
each half of one, and a stage with the head. What the recorder says of their passes is what training takes, gradient
buckets, hooks and the executor's own work among it; the empty stage tells that work apart from the layers'. As many
ranks are busy at once as the job runs on this machine, each for itself: what they share, caches, memory bandwidth and
cores, they share as in training. Tensor-parallel ranks work together.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from threefold.cost.profile import FORMAT, Machine, PartProfile, Profile, Spread, Workload
from threefold.job import Job
from threefold.layout import Layout
from threefold.measure.links import Ranks, blocks, measure_links
from threefold.parallel.activity import NullActivity
from threefold.parallel.batch import LoadSamples
from threefold.parallel.collectives import Group, Traffic
from threefold.parallel.engine import Engine, StepResult, build_engine
from threefold.parallel.mesh import Mesh
from threefold.parallel.recorder import BEGIN, END, Clock, CudaClock, HostClock, Marks, Recorder
from threefold.schedule import Action, Kind, Schedule, lower
from threefold.train.data.synthetic import SyntheticTokens
from threefold.train.optimizer import ShardedOptimizer

STAGE_LAYERS = (0, 1, 0, 2, 0.5, 0.5, 1, 2, 0)
"""Layers of the stages that are measured; the first also has the embedding, the last the head."""
FEW_LAYERS = (0, 1, 0, 2, 0)
"""The same for layers of which a device can hold few."""
MICROBATCHES = 3
LEARNING_RATE = 1e-6
"""Small, so that the numbers that are computed with stay what they are at the start of training."""
_STATE_SHARE = 0.3
_BYTES_OF_STATE = 16

Floats = NDArray[np.float64]
PASSES = (Kind.F, Kind.B, Kind.I, Kind.W)
HALVES = ("attention", "feed_forward")


@dataclass(frozen=True)
class Budget:
    """How long it is measured: about ``seconds``, in rounds of one step with whole and one with split backward."""

    seconds: float = 10.0
    least_rounds: int = 5
    most_rounds: int = 200
    warm_up: int = 2


def measure_profile(
    job: Job, rank: int, num_ranks: int, device: torch.device | None = None, budget: Budget | None = None
) -> Profile:
    """The profile of ``job``'s parts, the same on every rank. All ``num_ranks`` ranks of the machine must call this.

    ``num_ranks`` is a multiple of the job's tp. Needs an initialised process group; the job needs model and data.
    """
    device, budget = device or torch.device("cpu"), budget or Budget()
    workload = Workload.of(job)
    clock = CudaClock(device) if device.type == "cuda" else HostClock()
    ranks = Ranks(rank, num_ranks, device, clock, job.shared_memory and device.type == "cpu")
    layers = stage_layers(job, device)
    bench = _Bench(job, layers, ranks)
    everyone = blocks(ranks, num_ranks)
    assert everyone is not None, "every rank is in the block of all"
    activations = bench.measure_activations()
    rounds = bench.measure_rounds(budget, everyone)
    links, post_s = measure_links(ranks, (job.tp, job.dp, 2 * job.dp if job.pp > 1 else 1))
    times = _Times(_pool(rounds.samples, everyone, device), layers)
    step_s, optimizer_s, gap_s = (float(np.median(values)) for values in _pool(rounds.others, everyone, device))
    parameters = bench.parameters()
    profile = Profile(
        format=FORMAT,
        torch=torch.__version__,
        machine=describe_machine(device, num_ranks),
        workload=workload,
        fingerprint=workload.fingerprint,
        num_rounds=rounds.others.shape[1],
        **{name: times.part(name, activations[name], parameters[name]) for name in stages_of_parts(layers)},
        action_s=float(np.mean([times.empty(kind) for kind in (Kind.F, Kind.B)])) + gap_s,
        post_s=post_s,
        step_s=step_s,
        optimizer_s_per_parameter=optimizer_s / bench.num_updated,
        links=tuple(links),
    )
    return Profile.model_validate_json(_from_first(profile.to_json(), everyone, device))


def stage_layers(job: Job, device: torch.device) -> tuple[float, ...]:
    """Layers of the stages to measure: fewer where the state of more would fill the device."""
    assert job.model is not None, "Workload.of refuses a job without a model"
    ends = 2 * job.model.vocab_size * job.model.hidden_size
    each = (job.model.num_parameters - ends) / job.model.num_hidden_layers
    needed = (max(each, 0) * sum(STAGE_LAYERS) + ends) * _BYTES_OF_STATE / job.tp
    return STAGE_LAYERS if needed <= _STATE_SHARE * device_memory_bytes(device) else FEW_LAYERS


def describe_machine(device: torch.device, num_ranks: int) -> Machine:
    """This machine, as the profile states it."""
    is_gpu = device.type == "cuda"
    memory = device_memory_bytes(device)
    return Machine(
        host=platform.node() or "unknown",
        device=torch.cuda.get_device_name(device) if is_gpu else "cpu",
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        num_ranks=num_ranks,
        memory_bytes=memory if is_gpu else memory / num_ranks,
    )


def device_memory_bytes(device: torch.device) -> float:
    """Memory of the GPU, or of the whole machine."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def lone_mesh(job: Job, ranks: Ranks) -> tuple[Mesh, HeldRecorder]:
    """A mesh in which each block of tp ranks is a job of its own, and its recorder."""
    block = blocks(ranks, job.tp)
    assert block is not None, "the number of ranks is a multiple of tp"
    layout, traffic = Layout(dp=1, pp=1, tp=job.tp), Traffic()
    groups = {"": Group("self", (ranks.rank,), ranks.rank, None, NullActivity(), traffic)}
    if job.tp > 1:
        groups["tp"] = Group("tp", block.ranks, ranks.rank, block.handle, NullActivity(), traffic, block.shared)
    recorder = HeldRecorder(CudaClock(ranks.device) if ranks.device.type == "cuda" else None)
    mesh = Mesh(layout, block.index, ranks.device, groups, NullActivity(), traffic, recorder=recorder)
    recorder.held = lambda: mesh.memory.held["activations"]
    return mesh, recorder


class HeldRecorder(Recorder):
    """Notes, while ``watching``, how many bytes of activations are held at the end of each action."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.watching = False
        self.seen: list[int] = []
        self.held: Callable[[], int] = lambda: 0

    def end(self) -> None:
        """The action is over."""
        super().end()
        if self.watching:
            self.seen.append(self.held())


def measuring_job(job: Job, layers: Sequence[float], directory: Path) -> Job:
    """``job`` as one rank's pipeline of ``layers``, without replicas; its schedule is a file in ``directory``."""
    assert job.model is not None, "Workload.of refuses a job without a model"
    path = directory / "schedule.txt"
    path.write_text(round_schedule(len(layers), split=True).to_text())
    pipeline = job.parallelism.pp.model_copy(
        update={"size": 1, "chunks": len(layers), "partition": tuple(layers), "schedule_file": str(path)}
    )
    replicas = job.parallelism.dp.model_copy(update={"size": 1})
    # What travels between replicas is measured by itself; where the optimizer runs is not.
    zero = job.zero_optimization.model_copy(
        update={"stage": min(job.zero_optimization.stage, 1), "offload_param": None}
    )
    return job.model_copy(
        update={
            "model": job.model.model_copy(update={"num_hidden_layers": round(sum(layers))}),
            "parallelism": job.parallelism.model_copy(update={"pp": pipeline, "dp": replicas}),
            "zero_optimization": zero,
            "gradient_accumulation_steps": MICROBATCHES,
            "train_batch_size": MICROBATCHES * job.micro_batch,
            "gradient_compression": type(job.gradient_compression)(),
        }
    )


def round_schedule(num_stages: int, *, split: bool) -> Schedule:
    """Every microbatch forward and back through all stages of one rank; ``split``: I of all stages, then their W."""
    row: list[Action] = []
    for microbatch in range(MICROBATCHES):
        row += [Action(Kind.F, stage, microbatch) for stage in range(num_stages)]
        for kind in (Kind.I, Kind.W) if split else (Kind.B,):
            row += [Action(kind, stage, microbatch) for stage in reversed(range(num_stages))]
    return Schedule("profile", 1, num_stages, MICROBATCHES, (tuple(row),))


@dataclass(frozen=True)
class Rounds:
    """``samples[pass, stage]`` are the seconds of all rounds.

    ``others`` has a sample a round of: what a step takes besides, of the optimizer, and between two actions.
    """

    samples: Floats
    others: Floats


class _Bench:
    """The engine that is measured on this rank."""

    def __init__(self, job: Job, layers: Sequence[float], ranks: Ranks) -> None:
        self.ranks, self.layers = ranks, tuple(layers)
        self.mesh, self.recorder = lone_mesh(job, ranks)
        with tempfile.TemporaryDirectory(prefix="threefold-") as directory:
            measured = measuring_job(job, layers, Path(directory))
            self.engine: Engine = build_engine(measured, self.mesh)
        self.optimizer = ShardedOptimizer(measured.optimizer, self.engine.data)
        # Clipping scales all gradients once more; that it does so is the usual case.
        self.factor = 0.999 if job.gradient_clipping else 1.0
        self.samples = [range(i * job.micro_batch, (i + 1) * job.micro_batch) for i in range(MICROBATCHES)]
        self.load = _cached_samples(measured, self.samples)
        self.schedules = {split: lower(round_schedule(len(layers), split=split)) for split in (False, True)}
        self.mesh.memory.measured_steps = 1

    @property
    def num_updated(self) -> int:
        """Numbers that the optimizer updates."""
        return sum(master.numel() for master in self.engine.data.masters)

    def parameters(self) -> dict[str, int]:
        """Parameters of each part on this rank; a tied head counts its own."""
        counts = [sum(p.numel() for p in stage.parameters()) for stage in self.engine.stages]
        return {name: counts[stage] for name, stage in stages_of_parts(self.layers).items()}

    def measure_activations(self) -> dict[str, int]:
        """Bytes that each part keeps for a microbatch; the first step of the engine, which counts them."""
        self.recorder.watching = True
        self._step(split=False)
        self.recorder.watching = False
        held = np.diff([0, *self.recorder.seen[: len(self.layers)]]).astype(float)
        found = {name: held[stage] for name, stage in stages_of_parts(self.layers).items()}
        found["layer"] = _of_count(held, self.layers, 2).mean() - _of_count(held, self.layers, 1).mean()
        return {name: max(0, round(value)) for name, value in found.items()}

    def measure_rounds(self, budget: Budget, everyone: Group) -> Rounds:
        """Steps of both kinds in turn, after warm-up, as many rounds as the budget allows on the slowest rank."""
        for _ in range(budget.warm_up):
            self._round()
        begin = time.perf_counter()
        self._round()
        spent = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=self.mesh.device)
        everyone.all_reduce(spent, "max").wait()
        count = int(np.clip(budget.seconds / max(float(spent), 1e-9), budget.least_rounds, budget.most_rounds))
        samples, others = zip(*(self._round() for _ in range(count)), strict=True)
        return Rounds(np.concatenate(samples, axis=2), np.array(others).T)

    def _round(self) -> tuple[Floats, tuple[float, float, float]]:
        """A step with split backward passes and one with whole ones, which the forward passes are taken from."""
        samples = np.zeros((len(PASSES), len(self.layers), MICROBATCHES))
        self._timed_step(samples, split=True)
        marks = self._timed_step(samples, split=False)
        return samples, self._others(marks)

    def _step(self, split: bool) -> None:
        self.engine.schedule = self.schedules[split]
        self.engine.train_step(self.samples, self.load, self._update)

    def _update(self, result: StepResult) -> None:
        self.optimizer.step(LEARNING_RATE, self.factor)

    def _timed_step(self, samples: Floats, split: bool) -> Marks:
        """Fill in the seconds of the passes."""
        self._step(split)
        marks = self.recorder.read()
        for action, times in zip(self.schedules[split].rows[0], marks.times_s, strict=True):
            if action.kind in PASSES:
                samples[PASSES.index(action.kind), action.stage, action.microbatch] = times[END] - times[BEGIN]
        return marks

    def _others(self, marks: Marks) -> tuple[float, float, float]:
        zeroing_s = self._zeroing_s()
        row = self.schedules[False].rows[0]
        num_passes = sum(action.kind in PASSES for action in row)
        passes, others = marks.times_s[:num_passes], marks.times_s[num_passes:]  # SYNC and STEP come last
        seconds = passes[:, END] - passes[:, BEGIN]
        gap_s = (passes[-1, END] - passes[0, BEGIN] - seconds.sum()) / num_passes
        before_s = passes[0, BEGIN] - marks.begin_s
        update_s = float((others[:, END] - others[:, BEGIN]).sum())
        return max(0.0, before_s - zeroing_s), update_s + zeroing_s, max(0.0, gap_s)

    def _zeroing_s(self) -> float:
        """What a step begins with; nobody marks it."""
        clock = self.ranks.clock
        clock.resize(2)
        clock.mark(0)
        self.engine.data.begin_step()
        clock.mark(1)
        return float(np.diff(clock.read())[0])


def stages_of_parts(layers: Sequence[float]) -> dict[str, int]:
    """A stage that holds nothing but a part, for each part that is measured."""
    halves = [stage for stage, count in enumerate(layers) if count == 0.5]
    whole = {"embedding": 0, "layer": layers.index(1), "head": len(layers) - 1}
    return whole | dict(zip(HALVES, halves, strict=False))


def _of_count(values: Floats, layers: Sequence[float], count: int) -> Floats:
    """The values of stages between the ends that have ``count`` layers."""
    return values[[stage for stage in range(1, len(layers) - 1) if layers[stage] == count]]


class _Times:
    """Spreads of parts from samples of stages: [pass, stage, sample]."""

    def __init__(self, samples: Floats, layers: Sequence[float]) -> None:
        self.samples, self.layers = samples, tuple(layers)

    def part(self, name: str, activation_bytes: int, parameters: int) -> PartProfile:
        """The profile of a part."""
        return PartProfile(
            forward_s=self.spread(Kind.F, name),
            backward_s=self.spread(Kind.B, name),
            input_grad_s=self.spread(Kind.I, name),
            weight_grad_s=self.spread(Kind.W, name),
            activation_bytes=activation_bytes,
            parameters=parameters,
        )

    def empty(self, kind: Kind) -> float:
        """Seconds of the stage that holds nothing."""
        return float(np.median(_of_count(self.samples[PASSES.index(kind)], self.layers, 0)))

    def spread(self, kind: Kind, name: str) -> Spread:
        """The seconds of a part, without the executor's."""
        own = self.samples[PASSES.index(kind)] - self.empty(kind)
        if name != "layer":
            return _spread(own[stages_of_parts(self.layers)[name]])
        # A stage of two layers says twice as much about one.
        pairs = [np.repeat(_of_count(own, self.layers, count).ravel() / count, count) for count in (1, 2)]
        return _spread(np.concatenate(pairs))


def _spread(values: Floats) -> Spread:
    low, median, high = (max(0.0, float(value)) for value in np.quantile(values, (0.25, 0.5, 0.75)))
    return Spread(median=median, low=low, high=high)


def _cached_samples(job: Job, samples: Sequence[range]) -> LoadSamples:
    """Made-up tokens, kept: reading files is not what is measured."""
    assert job.model is not None and job.data is not None, "Workload.of refuses a job without them"
    source = SyntheticTokens(job.model.vocab_size, job.data.sequence_length, job.seed)
    made = {tuple(numbers): source.batch(numbers) for numbers in samples}
    return lambda numbers: made[tuple(numbers)]


def _pool(values: Floats, everyone: Group, device: torch.device) -> Floats:
    """The samples of all ranks: the last dim of ``values`` grows by the number of ranks."""
    mine = torch.from_numpy(np.ascontiguousarray(values)).to(device).flatten()
    gathered = mine.new_empty(everyone.size * mine.numel())
    everyone.all_gather_into(gathered, mine).wait()
    return np.concatenate([part.reshape(values.shape) for part in np.split(gathered.cpu().numpy(), everyone.size)], -1)


def _from_first(text: str, everyone: Group, device: torch.device) -> str:
    """Rank 0's text on every rank."""
    length = torch.tensor([len(text.encode())], dtype=torch.int64, device=device)
    everyone.broadcast(length).wait()
    tensor = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if everyone.index == 0:
        tensor.copy_(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))
    everyone.broadcast(tensor).wait()
    # The first rank has sent before the others have received, and must not leave before they have.
    everyone.all_reduce(length).wait()
    return bytes(tensor.tolist()).decode()
