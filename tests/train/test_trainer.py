"""The training loop on real ranks: the same numbers on every rank and in every layout, and one end for all."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from tests.jobs import GPT2, LLAMA, small_job
from tests.parallel.fakes import data_parallel, silent_group, silent_mesh
from tests.parallel.ranks import RankRun, all_equal, whole_parameters
from threefold.errors import ReplicaError, WorkerError
from threefold.job import Job, relayout
from threefold.job.spec import Optimizer, OptimizerParams
from threefold.layout import Layout
from threefold.measure.layouts import parse_layout
from threefold.measure.reference import build_plain_model, mean_loss
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel.activity import NullActivity
from threefold.parallel.batch import LoadSamples
from threefold.parallel.buckets import ShardingPolicy
from threefold.parallel.dropout import CurrentSamples
from threefold.parallel.engine import Engine, StepResult, build_engine, build_job_mesh
from threefold.parallel.replicas import hash_tensor
from threefold.train.data.source import IGNORED
from threefold.train.data.synthetic import SyntheticTokens
from threefold.train.learning_rate import learning_rate_schedule
from threefold.train.metrics import METRICS_FILE, MetricsWriter
from threefold.train.optimizer import ShardedOptimizer
from threefold.train.trainer import Sources, StopRequest, Trainer, TrainSummary, once_each

VALIDATION_SEED = 77
Line = dict[str, Any]


@dataclass(frozen=True)
class Stop:
    """Ask rank ``rank`` to stop when its step ``step`` (from 1) begins."""

    rank: int
    step: int


@dataclass
class Trained:
    """What one rank saw of a run, and what it wrote."""

    summary: TrainSummary | None = None
    error: str = ""
    checked: list[int] = field(default_factory=list)
    evaluated: int = 0
    run: RankRun = field(default_factory=RankRun)
    lines: list[Line] = field(default_factory=list)

    @property
    def steps(self) -> list[Line]:
        return [line for line in self.lines if "loss" in line]

    @property
    def evaluations(self) -> list[Line]:
        return [line for line in self.lines if "eval_loss" in line]


class StopAtStep(NullActivity):
    """Asks its own process to stop when a step begins."""

    def __init__(self, request: StopRequest, step: int) -> None:
        self.request, self.step = request, step

    def begin_step(self, step: int) -> None:
        self.request.wanted = self.request.wanted or step == self.step


def train(context: WorkerContext, job: Job, run_dir: Path, stop: Stop | None = None) -> Trained:
    """Run a trainer as the job says. Training tokens are ignored unevenly."""
    assert job.model is not None and job.data is not None
    request = StopRequest()
    activity = StopAtStep(request, stop.step) if stop and stop.rank == context.rank else context.activity
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=activity))
    size = (job.model.vocab_size, job.data.sequence_length)
    sources = Sources(
        SyntheticTokens(*size, job.seed, 0.4),
        SyntheticTokens(*size, VALIDATION_SEED, 0.6),
    )
    trained = Trained()
    note_calls(engine, trained)
    metrics = metrics_writer(run_dir, job) if context.rank == 0 else None
    try:
        trained.summary = Trainer(job, engine, sources, metrics, request).run()
    except WorkerError as error:
        trained.error = f"{type(error).__name__}: {error}"
    if metrics is not None:
        metrics.close()
        trained.lines = [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]
    trained.run.note_parameters(engine)
    trained.run.hashes = {entry.name: hash_tensor(entry.parameter) for entry in engine.parameters}
    return trained


def note_calls(engine: Engine, trained: Trained) -> None:
    check, evaluate = engine.check_replicas, engine.evaluate

    def check_replicas(step: int) -> None:
        trained.checked.append(step)
        check(step)

    def counted_evaluate(samples: Sequence[Sequence[int]], load: LoadSamples) -> StepResult:
        trained.evaluated += 1
        return evaluate(samples, load)

    engine.check_replicas = check_replicas
    engine.evaluate = counted_evaluate


def metrics_writer(run_dir: Path, job: Job) -> MetricsWriter:
    run_dir.mkdir(parents=True, exist_ok=True)
    console = Console(file=io.StringIO())
    return MetricsWriter(run_dir, job.steps or 0, tensorboard=False, live=False, console=console)


def run(pool: WorkerPool, job: Job, run_dir: Path, layout: str = "", stop: Stop | None = None) -> list[Trained]:
    job = relayout(job, **parse_layout(layout)) if layout else job
    place = run_dir / (layout or "alone")
    return pool.run(train, job.world_size, job, place, stop)


def without_times(lines: list[Line]) -> list[Line]:
    return [{key: value for key, value in line.items() if key not in ("tokens_per_s", "step_s")} for line in lines]


def test_b111_every_rank_knows_the_loss_and_one_writes_it(pool: WorkerPool, tmp_path: Path) -> None:
    ranks = run(pool, small_job(), tmp_path, "dp=2,pp=2")
    assert all_equal([rank.summary for rank in ranks])
    assert ranks[0].summary is not None
    assert ranks[0].summary.steps == 4
    assert not ranks[0].summary.stopped
    assert [line["step"] for line in ranks[0].steps] == [1, 2, 3, 4]
    assert [line["tokens"] for line in ranks[0].steps] == [96, 192, 288, 384]
    assert ranks[0].steps[-1]["loss"] == ranks[0].summary.loss
    assert all(line["tokens_per_s"] > 0 and line["step_s"] > 0 for line in ranks[0].steps)
    assert not any(rank.lines for rank in ranks[1:])


@pytest.mark.parametrize("keys", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_b113_evaluation_has_the_contract_of_training(pool: WorkerPool, tmp_path: Path, keys: dict[str, Any]) -> None:
    """With a learning rate of nothing, the held-out loss is that of the initial model, in plain PyTorch."""
    optimizer = {"type": "SGD", "params": {"lr": 1e-300}}
    job = small_job(keys, dtype="float64", optimizer=optimizer, evaluation={"every": 2, "batches": 3}, steps=3)
    assert job.model is not None and job.data is not None
    source = SyntheticTokens(job.model.vocab_size, job.data.sequence_length, VALIDATION_SEED, 0.6)
    numbers = range(3 * job.train_batch_size)
    num_valid = int((source.batch(numbers)[1] != -100).sum())
    expected = float(mean_loss(build_plain_model(job, CurrentSamples(), torch.float64), source, numbers).detach())
    for layout in ("dp=1", "pp=2", "dp=2", "dp=2,tp=2,pp=2,sequence_parallel=true"):
        evaluations = run(pool, job, tmp_path, layout)[0].evaluations
        assert [line["step"] for line in evaluations] == [2, 3]
        for line in evaluations:
            assert line["eval_tokens"] == num_valid
            assert line["eval_loss"] == pytest.approx(expected, rel=1e-12)


def test_evaluation_changes_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    keys = GPT2 | {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    job = small_job(keys, dp=2, pp=2, optimizer={"type": "AdamW", "params": {"lr": 0.01}}, evaluation={"every": 0})
    without = run(pool, job, tmp_path / "without")
    evaluated = run(
        pool, job.model_copy(update={"evaluation": job.evaluation.model_copy(update={"every": 1})}), tmp_path
    )
    assert [rank.run.hashes for rank in evaluated] == [rank.run.hashes for rank in without]
    assert without_times(evaluated[0].steps) == without_times(without[0].steps)
    assert [rank.evaluated for rank in evaluated] == [4 * 8] * 4
    losses = [line["eval_loss"] for line in evaluated[0].evaluations]
    assert len(losses) == len(set(losses)) == 4


def test_b120_the_learning_rate_does_not_depend_on_the_layout(pool: WorkerPool, tmp_path: Path) -> None:
    scheduler = {"type": "cosine", "warmup_steps": 2, "batch_scaling": "sqrt", "reference_batch_size": 2}
    job = small_job(scheduler=scheduler, steps=6)
    rates = {}
    for layout in ("dp=1", "dp=2,accumulation=1", "dp=4", "tp=2", "pp=2,accumulation=2"):
        rates[layout] = [line["learning_rate"] for line in run(pool, job, tmp_path, layout)[0].steps]
    assert all_equal(list(rates.values()))
    assert rates["dp=1"][:2] == pytest.approx([0.1, 0.2])  # 0.1 * sqrt(8 / 2), reached in two steps
    assert rates["dp=1"] == [learning_rate_schedule(job)(step) for step in range(6)]


def test_b120_the_rate_of_a_step_is_the_one_that_it_uses(pool: WorkerPool, tmp_path: Path) -> None:
    """Two steps of SGD at 0.05 and 0.1 by hand, in one process."""
    job = small_job(dtype="float64", scheduler={"warmup_steps": 2}, steps=2)
    trained = run(pool, job, tmp_path, "dp=2")
    model = build_plain_model(job, CurrentSamples(), torch.float64)
    source = SyntheticTokens(61, 12, job.seed, 0.4)
    for step, rate in enumerate((0.05, 0.1)):
        mean_loss(model, source, range(8 * step, 8 * step + 8)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= rate * parameter.grad
                parameter.grad = None
    assert_same_model(trained, model)


def assert_same_model(trained: list[Trained], model: nn.Module) -> None:
    for name, value in whole_parameters([rank.run for rank in trained]).items():
        torch.testing.assert_close(value, model.get_parameter(name).detach(), rtol=1e-9, atol=1e-11, msg=name)


# The optimizer


@pytest.mark.parametrize("keys", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_training_is_that_of_pytorch_in_one_process(
    pool: WorkerPool, tmp_path: Path, keys: dict[str, Any], kind: str
) -> None:
    params: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    params |= {"betas": [0.8, 0.9], "eps": 1e-6} if kind == "AdamW" else {"momentum": 0.9}
    job = small_job(keys, dtype="float64", gradient_clipping=0.4, optimizer={"type": kind, "params": params}, steps=5)
    losses, model = train_plainly(job)
    for layout in ("dp=2,tp=2,pp=2", "pp=2,tp=2,sequence_parallel=true"):
        trained = run(pool, job, tmp_path, layout)
        assert [line["loss"] for line in trained[0].steps] == pytest.approx(losses, rel=1e-9)
        assert_same_model(trained, model)


def train_plainly(job: Job) -> tuple[list[float], nn.Module]:
    model, params = build_plain_model(job, CurrentSamples(), torch.float64), job.optimizer.params
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": params.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = (
        torch.optim.AdamW(groups, lr=params.lr, betas=params.betas, eps=params.eps)
        if job.optimizer.type == "AdamW"
        else torch.optim.SGD(groups, lr=params.lr, momentum=params.momentum)
    )
    source, losses = SyntheticTokens(61, 12, job.seed, 0.4), []
    for step in range(job.steps or 0):
        optimizer.zero_grad()
        loss = mean_loss(model, source, range(8 * step, 8 * step + 8))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), job.gradient_clipping)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_weight_decay_spares_biases_and_norms(kind: Any) -> None:
    params = OptimizerParams(lr=0.1, weight_decay=0.5)
    engine = build_engine(small_job(), silent_mesh(Layout(), 0))
    before = {entry.name: entry.parameter.detach().clone() + 1 for entry in engine.parameters}
    for entry in engine.parameters:
        entry.parameter.data += 1
    engine.data.begin_step()  # all gradients are zero
    ShardedOptimizer(Optimizer(type=kind, params=params), engine.data).step(learning_rate=0.1)
    for entry in engine.parameters:
        decays = entry.name.endswith("weight") and "norm" not in entry.name
        torch.testing.assert_close(entry.parameter.detach(), before[entry.name] * (0.95 if decays else 1.0))


def test_a_stage_without_parameters_has_an_optimizer() -> None:
    for kind in ("AdamW", "SGD"):
        nothing = data_parallel([], silent_group(), ShardingPolicy(100))
        ShardedOptimizer(Optimizer.model_validate({"type": kind}), nothing).step(0.1)


# How a run ends


@pytest.mark.parametrize("stop", [Stop(rank=3, step=2), Stop(rank=0, step=1), Stop(rank=5, step=4)])
def test_a_wish_of_one_rank_stops_all_after_the_same_step(pool: WorkerPool, tmp_path: Path, stop: Stop) -> None:
    ranks = run(pool, small_job(evaluation={"every": 1}), tmp_path, "dp=2,tp=2,pp=2", stop=stop)
    assert all_equal([rank.summary for rank in ranks])
    assert ranks[0].summary is not None
    assert ranks[0].summary.steps == stop.step
    assert ranks[0].summary.stopped == (stop.step < 4)
    assert [line["step"] for line in ranks[0].steps] == list(range(1, stop.step + 1))
    for coord in range(2):  # all have done the step
        assert all_equal([rank.run.hashes for number, rank in enumerate(ranks) if number % 4 == 2 * coord])


def test_divergence_ends_every_rank_with_advice(pool: WorkerPool, tmp_path: Path) -> None:
    job = small_job(LLAMA, optimizer={"type": "SGD", "params": {"lr": 1e30}}, steps=10)
    ranks = run(pool, job, tmp_path, "dp=2,pp=2")
    assert all_equal([rank.error for rank in ranks])
    message = ranks[0].error
    assert message.startswith("WorkerError: step ")
    assert "training has diverged" in message
    assert "fix: lower optimizer.params.lr (now 1e+30)" in message
    for rank in ranks:  # what the last step would have made of them, they are not
        assert all(value.isfinite().all() for value in rank.run.parameters.values())


def test_fp16_logs_its_scale_and_the_steps_that_it_skips(pool: WorkerPool, tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}
    steps = run(pool, small_job(fp16=fp16, steps=3), tmp_path, "pp=2")[0].steps
    assert [line["loss_scale"] for line in steps] == [2.0**30, 2.0**29, 2.0**28]
    assert [line["skipped"] for line in steps] == [True] * 3
    assert [line["grad_norm"] for line in steps] == [None] * 3
    fine = run(pool, small_job(fp16=fp16 | {"initial_scale_power": 4}, steps=2), tmp_path / "fine", "pp=2")[0].steps
    assert [(line["loss_scale"], line["skipped"]) for line in fine] == [(16.0, False)] * 2
    plain = run(pool, small_job(steps=1), tmp_path / "plain")[0].steps
    assert not {"loss_scale", "skipped"} & plain[0].keys()


@pytest.mark.parametrize(("every", "expected"), [(3, [3, 6, 7]), (0, []), (7, [7]), (100, [7])])
def test_replicas_are_checked_every_so_many_steps_and_at_the_end(
    pool: WorkerPool, tmp_path: Path, every: int, expected: list[int]
) -> None:
    job = small_job(
        GPT2 | {"num_hidden_layers": 1}, dp=2, steps=7, replica_check={"every": every}, logging={"every": 3}
    )
    ranks = run(pool, job, tmp_path)
    assert [rank.checked for rank in ranks] == [expected] * 2
    assert [line["step"] for line in ranks[0].steps] == [1, 3, 6, 7]  # the first and the last always
    assert [line["tokens"] for line in ranks[0].steps] == [96, 3 * 96, 6 * 96, 7 * 96]


def test_a_replica_that_drifts_ends_the_run(pool: WorkerPool, tmp_path: Path) -> None:
    job = small_job(dp=2, steps=6, replica_check={"every": 2})
    errors = pool.run(train_with_a_spoilt_replica, 2, job, tmp_path)
    for error in errors:
        assert error.startswith("ReplicaError: after step 4, copies of layers.1.mlp_norm.weight differ between rank 0")


def train_with_a_spoilt_replica(context: WorkerContext, job: Job, run_dir: Path) -> str:
    """One element of one replica changes in step 3."""
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    honest = engine.train_step

    def train_step(*args: Any, **kwargs: Any) -> Any:
        result = honest(*args, **kwargs)
        if args[0][0].start // job.train_batch_size == 2 and context.rank == 1:
            entry = next(entry for entry in engine.parameters if entry.name == "layers.1.mlp_norm.weight")
            entry.parameter.detach()[5] += 1e-6
        return result

    engine.train_step = train_step
    source = SyntheticTokens(61, 12, job.seed)
    try:
        Trainer(job, engine, Sources(source), None).run()
    except ReplicaError as error:
        return f"ReplicaError: {error}"
    return "it went on"


def test_held_out_tokens_none_of_which_counts_have_no_loss() -> None:
    job = small_job(evaluation={"every": 1, "batches": 2}, steps=1)
    engine = build_engine(job, silent_mesh(Layout(), 0))
    noted: list[tuple[int, float, int]] = []

    class Metrics(MetricsWriter):
        def __init__(self) -> None: ...

        def step(self, metrics: object) -> None: ...

        def evaluation(self, step: int, loss: float, tokens: int) -> None:
            noted.append((step, loss, tokens))

    nothing = SyntheticTokens(61, 12, 0, only_valid=(10**6, 0))
    Trainer(job, engine, Sources(SyntheticTokens(61, 12, 0), nothing), Metrics()).run()
    assert [(step, loss != loss, tokens) for step, loss, tokens in noted] == [(1, True, 0)]


def test_held_out_samples_count_once_each() -> None:
    """Five held-out samples in batches of four: the last batch holds one, the other three of it are not counted."""
    source = SyntheticTokens(61, 12, seed=1, num_samples=5)
    _, labels = once_each(source)(range(4, 8))
    assert (labels[0] != IGNORED).all()
    assert (labels[1:] == IGNORED).all()
