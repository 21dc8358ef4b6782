"""Every combination that the rules allow equals one process; what they refuse is refused with a fix that works."""

from __future__ import annotations

import itertools
import random
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parallel.ranks import all_equal, replica_samples, run_steps, tokens_of
from threefold.job import Job, parse_job
from threefold.measure.parity import SGD
from threefold.measure.reference import Reference, run_reference
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel.engine import DTYPES, StepResult, build_engine, build_job_mesh
from threefold.parallel.stage import take_shard
from threefold.report.compose import (
    LOSSY,
    TENSORS,
    Cell,
    Row,
    cells,
    compose_page,
    judge,
    pairwise_cells,
    refusal,
    rows,
)
from threefold.train.optimizer import ShardedOptimizer

ALLOWED = [row for row in rows() if not refusal(cells(row)[0].settings())]
LEARNING_RATE, STEPS, SCALE = 0.5, 2, 256.0
SUMS = {"bf16-sums": 2.0**-8, "fp16-sums": 2.0**-11}
"""Relative rounding of a term and of each partial sum; there are at most 4 terms."""


def test_the_page_is_current() -> None:
    assert (Path(__file__).parents[2] / "docs" / "compose.md").read_text() == compose_page(), "run make docs"


def test_every_refusal_says_what_to_do() -> None:
    refused = [row for row in rows() if row not in ALLOWED]
    assert len(refused) + len(ALLOWED) == 4 * 4 * 4 * 5
    assert all(problem.key and problem.fix for row in refused for problem in refusal(cells(row)[0].settings()))


def chosen(row: Row) -> Cell:
    """One cell of each row, spread over recompute modes, schedules and tensor parallelism; tp doubles the ranks."""
    mine = [cell for cell in cells(row) if TENSORS[cell.tensor]["size"] == 1 or row.compression == "none"]
    return random.Random(row.test_id).choice(mine)


@pytest.mark.parametrize("row", ALLOWED, ids=lambda row: row.test_id)
def test_composes(pool: WorkerPool, row: Row) -> None:
    assert_composes(pool, chosen(row))


def test_every_two_settings_meet() -> None:
    chosen_cells = pairwise_cells(ALLOWED[0])
    for one, other in itertools.combinations(("recompute", "schedule", "tensor"), 2):
        met = {(getattr(cell, one), getattr(cell, other)) for cell in chosen_cells}
        assert met == {(getattr(cell, one), getattr(cell, other)) for cell in cells(ALLOWED[0])}


@pytest.mark.slow
@pytest.mark.parametrize("row", ALLOWED, ids=lambda row: row.test_id)
def test_composes_with_all(pool: WorkerPool, row: Row) -> None:
    assert judge(row) == ()
    for cell in pairwise_cells(row):
        assert_composes(pool, cell)


def assert_composes(pool: WorkerPool, cell: Cell) -> None:
    job = parse_job(cell.settings())
    expected, tolerance = reference_of(cell.row.precision), tolerance_of(cell.row)
    for rank, errors in enumerate(pool.run(errors_on_rank, job.world_size, job, expected)):
        assert all(errors[kind] <= tolerance[kind] for kind in errors), f"rank {rank} of {cell}: {errors}, {tolerance}"
    if cell.row.compression in LOSSY:
        runs = pool.run(run_steps, job.world_size, job, 4)  # which compares replicas, bit for bit
        assert all_equal([run.losses for run in runs]) and runs[0].losses[3] == runs[0].losses[3]


@cache
def reference_of(precision: str) -> Reference:
    job = parse_job(cells(Row(0, "nothing", precision, "none"))[0].settings())
    return run_reference(job, tokens_of(job, ignored_fraction=0.4), STEPS, LEARNING_RATE, DTYPES[precision])


@cache
def rounding_of(precision: str) -> dict[str, float]:
    """The largest relative errors that the format makes in one process, by kind."""
    rounded, exact = reference_of(precision), reference_of("fp64")

    def worst(kind: str) -> float:
        return max(
            relative(value, pair[1][name], largest(pair[1]))
            for pair in zip(getattr(rounded, kind), getattr(exact, kind), strict=True)
            for name, value in pair[0].items()
        )

    loss = max(abs(one / other - 1) for one, other in zip(rounded.losses, exact.losses, strict=True))
    # Errors of a single number may cancel by chance.
    loss = max(loss, torch.finfo(DTYPES[precision]).eps / 2)
    return {"loss": loss, "gradient": worst("gradients"), "parameter": worst("parameters")}


MARGINS = {"fp32": 10.0, "bf16": 3.0, "fp16": 3.0}


def tolerance_of(row: Row) -> dict[str, float]:
    sums = 8 * SUMS.get(row.compression, 0.0)
    if row.precision == "fp64":
        return dict.fromkeys(("loss", "gradient", "parameter"), 1e-10 + sums)
    return {kind: MARGINS[row.precision] * error + sums for kind, error in rounding_of(row.precision).items()}


def largest(tensors: dict[str, Tensor]) -> float:
    return max(float(value.abs().max()) for value in tensors.values())


def relative(value: Tensor, expected: Tensor, scale: float) -> float:
    return float((value.double() - expected.double()).abs().max()) / scale if value.numel() else 0.0


def errors_on_rank(context: WorkerContext, job: Job, expected: Reference) -> dict[str, float]:
    """The largest relative errors of loss, gradients and parameters in some steps of SGD.

    PowerSGD and 1-bit Adam have not started by then.
    """
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    scale = SCALE if job.fp16.enabled else 1.0
    optimizer = ShardedOptimizer(SGD, engine.data)
    errors = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0}

    def note(kind: str, error: float) -> None:
        errors[kind] = max(errors[kind], error)

    for step in range(STEPS):

        def update(result: StepResult, step: int = step) -> None:
            whole = expected.gradients[step]
            note("loss", abs(result.loss / expected.losses[step] - 1))
            for piece in engine.data.gradient_pieces():
                flat = take_shard(whole[piece.entry.name], piece.entry.shard).flatten()
                part = flat[piece.start : piece.start + piece.values.numel()]
                note("gradient", relative(piece.values / scale, part, largest(whole)))
            optimizer.step(LEARNING_RATE, 1 / scale)

        samples = replica_samples(job, engine.mesh.coord.dp, step)
        engine.train_step(samples, tokens_of(job, ignored_fraction=0.4).batch, update, loss_scale=scale)
        values = expected.parameters[step]
        with engine.data.whole_parameters():
            for entry in engine.parameters:
                part = take_shard(values[entry.name], entry.shard)
                note("parameter", relative(entry.parameter.detach(), part, largest(values)))
    engine.check_replicas(STEPS)
    return errors
