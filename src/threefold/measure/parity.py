"""Does a layout compute what one process computes? Loss, every raw gradient and every parameter are compared.

SGD, not Adam: Adam divides by the gradient's own size and hides constant factors. Gradients are compared before
clipping. Every rank compares its own shard with its slice of the single process's tensors, so nothing is gathered.

How much difference is rounding? In float64 the limit is fixed. For other formats it is measured: the single process
runs in that format and in float64, and the distance between the two is what rounding alone does to this very model.
Loss, gradient norm, gradients and parameters are each judged by their own distance: a gradient's elements may be off by
percents in bfloat16, the loss and the norm, which average over many, by far less, so these two find a wrong factor.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threefold.errors import JobError, Problem
from threefold.job import Job
from threefold.job.spec import Optimizer
from threefold.measure.reference import Reference, run_reference
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel.engine import Engine, StepResult, build_engine, build_job_mesh
from threefold.parallel.mesh import describe
from threefold.parallel.norms import clip_factor
from threefold.parallel.stage import take_shard
from threefold.train.data.order import microbatch_samples
from threefold.train.data.synthetic import SyntheticTokens
from threefold.train.optimizer import ShardedOptimizer

FLOAT64_TOLERANCE = 1e-10
SGD = Optimizer(type="SGD")
DRIFT_MARGINS: Mapping[str, float] = {"float32": 10.0, "bfloat16": 3.0}
"""A layout adds up in another order, which costs about as much as rounding itself (measured over layouts of 4 ranks:
0.6 to 2.1 times as much in float32, 0.7 to 1.25 in bfloat16). This many times as much is a bug."""

_SMALL_TENSOR = 1e-3
"""Errors are relative to the tensor's largest element, or to this share of the model's where the tensor is smaller:
what rounding leaves of a gradient that is zero in theory must not count as a difference."""

DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class ParitySettings:
    """How the comparison is run."""

    steps: int = 2
    learning_rate: float = 0.5
    dtype: str = "float64"
    ignored_fraction: float = 0.4
    only_valid: tuple[int, int] | None = None
    timeout_s: float = 120.0


@dataclass(frozen=True)
class Difference:
    """A tensor (or the loss) that differs: at which step, on which rank, and by how much."""

    kind: str
    name: str
    step: int
    error: float
    rank: int
    place: str

    def __str__(self) -> str:
        what = {"loss": "the loss", "norm": "the gradient norm"}.get(self.kind, f"{self.kind} of {self.name}")
        return f"{what} at step {self.step} on rank {self.rank} ({self.place}): relative error {self.error:.2e}"


@dataclass(frozen=True)
class LayoutResult:
    """The comparison of one layout; errors are the largest over steps, ranks and tensors, relative."""

    layout: str
    loss_error: float
    norm_error: float
    grad_error: float
    param_error: float
    first_difference: str | None
    ok: bool


@dataclass(frozen=True)
class Tolerance:
    """The largest errors of a layout that rounding explains, by the kind of a difference."""

    loss: float
    norm: float
    gradient: float
    value: float

    def explains(self, difference: Difference) -> bool:
        """Whether a difference is no more than rounding."""
        return difference.error <= getattr(self, difference.kind)

    def __str__(self) -> str:
        kinds = {"loss": self.loss, "norm": self.norm, "gradients": self.gradient, "parameters": self.value}
        if len({*kinds.values()}) == 1:
            return f"{self.loss:.1e}"
        return ", ".join(f"{kind} {limit:.1e}" for kind, limit in kinds.items())


EXACT = Tolerance(FLOAT64_TOLERANCE, FLOAT64_TOLERANCE, FLOAT64_TOLERANCE, FLOAT64_TOLERANCE)


@dataclass(frozen=True)
class Drift:
    """What rounding in ``dtype`` does to one process: relative errors against float64."""

    dtype: str
    loss_error: float
    norm_error: float
    grad_error: float
    param_error: float

    @property
    def tolerance(self) -> Tolerance:
        """How far a layout in this format may be from one process in it."""
        # Errors of a single number may cancel by chance; no such number is known better than to its last bit.
        margin, last_bit = DRIFT_MARGINS[self.dtype], torch.finfo(DTYPES[self.dtype]).eps / 2
        return Tolerance(
            loss=margin * max(self.loss_error, last_bit),
            norm=margin * max(self.norm_error, last_bit),
            gradient=margin * self.grad_error,
            value=margin * self.param_error,
        )


@dataclass(frozen=True)
class ParityReport:
    """All layouts against one process."""

    ok: bool
    dtype: str
    tolerance: Tolerance
    layouts: tuple[LayoutResult, ...]
    drift: tuple[Drift, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for ``--json``; what is not finite is None, since JSON has no word for it."""
        return _finite(asdict(self))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def run_parity(
    jobs: Mapping[str, Job],
    settings: ParitySettings,
    pool: WorkerPool | None = None,
    on_result: Callable[[LayoutResult], None] = lambda _: None,
    worker: Callable[..., list[Difference]] | None = None,
) -> ParityReport:
    """Compare each of ``jobs`` (the same job in several layouts, by name) with one process.

    ``on_result`` sees each layout when it is done. ``worker`` replaces the function that runs on the ranks (tests plant
    faults there). Raises WorkerError when a rank fails.
    """
    some_job = next(iter(jobs.values()))
    with ExitStack() as stack:
        if pool is None:
            pool = stack.enter_context(WorkerPool(max(job.world_size for job in jobs.values()), settings.timeout_s))
            pool.start_early()  # the workers start while this process computes
        known = _known_references(some_job, settings)
        _check_finite(known[settings.dtype], settings.dtype)
        drift = tuple(measure_drift(dtype, known[dtype], known["float64"]) for dtype in ("float32", "bfloat16"))
        tolerance = {"float64": EXACT} | {entry.dtype: entry.tolerance for entry in drift}
        references = _References(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="threefold-"))), settings)
        references.keep(some_job, known[settings.dtype])
        results = []
        for name, job in jobs.items():
            arguments = (job, settings, references.of(job))
            found = pool.run(worker or compare_on_rank, job.world_size, *arguments, timeout_s=settings.timeout_s)
            results.append(summarize(name, [entry for part in found for entry in part], tolerance[settings.dtype]))
            on_result(results[-1])
    ok = all(result.ok for result in results)
    return ParityReport(ok, settings.dtype, tolerance[settings.dtype], tuple(results), drift)


def _known_references(job: Job, settings: ParitySettings) -> dict[str, Reference]:
    """One process in each number format. All steps where layouts are judged by them; one is enough to show drift."""
    every = ("float64", settings.dtype)
    return {dtype: _reference(job, settings, dtype, settings.steps if dtype in every else 1) for dtype in DTYPES}


def _reference(job: Job, settings: ParitySettings, dtype: str, steps: int) -> Reference:
    return run_reference(job, synthetic_source(job, settings), steps, settings.learning_rate, DTYPES[dtype])


def _check_finite(reference: Reference, dtype: str) -> None:
    """Nothing can be compared with a single process that has diverged."""
    broken = [loss for loss in (*reference.losses, *reference.norms) if not math.isfinite(loss)]
    if broken:
        message = f"one plain process in {dtype} gives {broken[0]}, so there is nothing to compare with"
        raise JobError(
            [Problem("model", message, "lower model.initializer_range, or use --steps 1 or --dtype float64")]
        )


class _References:
    """Files with what one process computes, one for each batch size that a layout states."""

    def __init__(self, directory: Path, settings: ParitySettings) -> None:
        self.directory, self.settings = directory, settings
        self.paths: dict[int, Path] = {}

    def keep(self, job: Job, reference: Reference) -> None:
        """Write down what is known for a job's batch size."""
        self.paths[job.train_batch_size] = self.directory / f"{job.train_batch_size}.pt"
        torch.save(asdict(reference), self.paths[job.train_batch_size])

    def of(self, job: Job) -> Path:
        """The file for a job's batch size."""
        if job.train_batch_size not in self.paths:
            self.keep(job, _reference(job, self.settings, self.settings.dtype, self.settings.steps))
        return self.paths[job.train_batch_size]


def synthetic_source(job: Job, settings: ParitySettings) -> SyntheticTokens:
    """Random tokens; an uneven share of the labels is ignored, since even shares hide wrong averages."""
    assert job.model is not None and job.data is not None, "parity needs a model and a sequence length"
    return SyntheticTokens(
        job.model.vocab_size, job.data.sequence_length, job.seed, settings.ignored_fraction, settings.only_valid
    )


def compare_on_rank(context: WorkerContext, job: Job, settings: ParitySettings, path: Path) -> list[Difference]:
    """Run the layout on this rank and compare; returns every comparison, in the order of steps and of the model."""
    reference = Reference(**torch.load(path, mmap=True))
    mesh = build_job_mesh(job, context.rank, activity=context.activity)
    engine = build_engine(job, mesh, DTYPES[settings.dtype])
    source = synthetic_source(job, settings)
    optimizer = ShardedOptimizer(SGD, engine.data)
    place = describe(mesh.coord)
    found: list[Difference] = []
    for step in range(settings.steps):
        context.activity.begin_step(step)

        def update(result: StepResult, step: int = step) -> None:
            found.extend(_compare_step(engine, reference, step, result, context.rank, place))
            optimizer.step(settings.learning_rate, clip_factor(result.grad_norm, job.gradient_clipping))

        engine.train_step(replica_samples(job, mesh.coord.dp, step), source.batch, update)
        with engine.data.whole_parameters():
            errors = list(_value_errors(engine, reference.parameters[step]))
        found.extend(Difference("value", name, step, error, context.rank, place) for name, error in errors)
    engine.check_replicas(settings.steps)
    return found


def replica_samples(job: Job, dp_coord: int, step: int) -> list[range]:
    """The sample numbers of each microbatch of one replica."""
    return [
        microbatch_samples(step, job.train_batch_size, job.micro_batch, job.num_microbatches, dp_coord, index)
        for index in range(job.num_microbatches)
    ]


def _compare_step(
    engine: Engine, reference: Reference, step: int, result: StepResult, rank: int, place: str
) -> Iterator[Difference]:
    yield Difference("loss", "loss", step, _relative(result.loss, reference.losses[step]), rank, place)
    for name, error in _gradient_errors(engine, reference.gradients[step]):
        yield Difference("gradient", name, step, error, rank, place)
    yield Difference("norm", "norm", step, _relative(result.grad_norm, reference.norms[step]), rank, place)


def _gradient_errors(engine: Engine, whole: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
    """The error of each gradient that this rank keeps, or of the part of it that it keeps."""
    scales = _scales(whole)
    pieces = {piece.entry.name: piece for piece in engine.data.gradient_pieces()}
    for entry in engine.parameters:
        piece = pieces.get(entry.name)
        if piece is None:  # other replicas keep all of it
            continue
        expected = take_shard(whole[entry.name], entry.shard).flatten()
        part = expected[piece.start : piece.start + piece.values.numel()]
        yield entry.name, _largest_error(piece.values, part, scales[entry.name])


def _value_errors(engine: Engine, whole: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
    """The error of each parameter as the model reads it."""
    scales = _scales(whole)
    for entry in engine.parameters:
        expected = take_shard(whole[entry.name], entry.shard)
        yield entry.name, _largest_error(entry.parameter.detach(), expected, scales[entry.name])


def _scales(whole: Mapping[str, Tensor]) -> dict[str, float]:
    """What errors are relative to."""
    largest = {name: float(tensor.abs().max()) for name, tensor in whole.items()}
    return {name: max(value, _SMALL_TENSOR * max(largest.values())) for name, value in largest.items()}


def _largest_error(value: Tensor | None, expected: Tensor, scale: float) -> float:
    if value is None or value.shape != expected.shape:
        return float("inf")
    error = float((value.double() - expected.double()).abs().max()) if value.numel() else 0.0
    if error == 0.0:
        return 0.0
    return error / scale if scale > 0 and error == error else float("inf")


def _relative(value: float, expected: float) -> float:
    if value == expected or (value != value and expected != expected):
        return 0.0
    error = abs(value - expected) / abs(expected) if expected else float("inf")
    return error if error == error else float("inf")


def measure_drift(dtype: str, rounded: Reference, exact: Reference) -> Drift:
    """How far one process in ``dtype`` is from one process in float64, over the steps that it ran."""

    def worst(kind: str) -> float:
        return max(_worst_error(*pair) for pair in zip(getattr(rounded, kind), getattr(exact, kind), strict=False))

    def worst_number(kind: str) -> float:
        return max(_relative(*pair) for pair in zip(getattr(rounded, kind), getattr(exact, kind), strict=False))

    return Drift(dtype, worst_number("losses"), worst_number("norms"), worst("gradients"), worst("parameters"))


def _worst_error(rounded: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    scales = _scales(exact)
    return max(_largest_error(rounded[name], tensor, scales[name]) for name, tensor in exact.items())


def summarize(layout: str, found: Sequence[Difference], tolerance: Tolerance) -> LayoutResult:
    """The verdict on one layout; ``found`` holds every comparison of every rank."""

    def worst(kind: str) -> float:
        return max((entry.error for entry in found if entry.kind == kind), default=0.0)

    # In the order of what happens in a step. sorted() keeps the model's order within a kind.
    happens = ("loss", "gradient", "norm", "value")
    differences = [entry for entry in found if not tolerance.explains(entry)]
    differences.sort(key=lambda entry: (entry.step, happens.index(entry.kind)))
    first = str(differences[0]) if differences else None
    return LayoutResult(
        layout, worst("loss"), worst("norm"), worst("gradient"), worst("value"), first, ok=not differences
    )


def bytes_needed(job: Job, dtype: str) -> int:
    """What comparing ``job`` with one process takes at least: its parameters and gradients, and those of all ranks."""
    assert job.model is not None, "the caller looks"
    return 2 * DTYPES[dtype].itemsize * job.model.num_parameters * (1 + job.dp)


def free_bytes() -> int | None:
    """Memory that this machine has free for programs; None where it does not tell."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    found = re.search(r"^MemAvailable: +(\d+) kB", path.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
