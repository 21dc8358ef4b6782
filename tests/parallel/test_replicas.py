"""Copies of a parameter stay equal to the last bit, and a copy that does not is found and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.jobs import GPT2, LLAMA, small_job
from tests.parallel.custom import GATED_STYLES, Case, build_custom_engine, gated_model
from tests.parallel.fakes import silent_mesh
from tests.parallel.ranks import RankRun, all_equal, initial_parameters, run_steps
from threefold.errors import ReplicaError
from threefold.job import Job, relayout
from threefold.layout import Layout
from threefold.measure.layouts import parse_layout
from threefold.measure.parity import SGD
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel.engine import build_engine, build_job_mesh, build_layout
from threefold.parallel.replicas import hash_tensor, make_replicas_equal
from threefold.parallel.stage import TensorParallelPlan
from threefold.train.data.synthetic import SyntheticTokens
from threefold.train.optimizer import ShardedOptimizer

ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
EMBEDDING = "embed.tokens.weight"


def replicated(run: RankRun) -> dict[str, int]:
    return {name: value for name, value in run.hashes.items() if run.shards[name].dim is None}


@pytest.mark.parametrize("keys", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_b035_b037_b038_replicated_parameters_are_equal_on_all_tp_ranks(
    pool: WorkerPool, keys: dict[str, Any], sequence_parallel: bool
) -> None:
    job = small_job(keys | {"num_hidden_layers": 2}, optimizer=ADAMW, gradient_clipping=0.5)
    job = relayout(job, dp=2, tp=2, sequence_parallel=sequence_parallel)
    runs = pool.run(run_steps, 4, job, 10)
    names = set(replicated(runs[0]))
    assert {"layers.0.attention_norm.weight", "layers.1.mlp_norm.weight", "final_norm.weight"} <= names
    assert keys is LLAMA or {"layers.1.mlp.down.bias", "embed.positions.weight"} <= names
    assert all_equal([replicated(run) for run in runs])
    for coord in range(2):
        assert all_equal([run.hashes for rank, run in enumerate(runs) if build_layout(job).coord(rank).tp == coord])
    assert runs[0].hashes != runs[1].hashes


@pytest.mark.parametrize("keys", [GPT2, LLAMA | {"tie_word_embeddings": True}], ids=["gpt2", "llama"])
def test_b027_b029_b033_tied_copies_are_equal_after_20_steps(pool: WorkerPool, keys: dict[str, Any]) -> None:
    job = small_job(keys | {"num_hidden_layers": 2}, optimizer=ADAMW, gradient_clipping=0.5)
    job = relayout(job, dp=2, pp=2)
    runs = pool.run(run_steps, 4, job, 20)
    initial = pool.run(initial_parameters, 4, job)[0].parameters[EMBEDDING]
    assert all_equal([run.hashes[EMBEDDING] for run in runs])
    assert not torch.equal(runs[0].parameters[EMBEDDING], initial)


@pytest.mark.parametrize("tp", [2, 4])
def test_b040_sequence_parallelism_does_not_shift_loss_or_norm(pool: WorkerPool, tp: int) -> None:
    job = relayout(small_job(optimizer=ADAMW, gradient_clipping=0.5), tp=tp)
    off = pool.run(run_steps, tp, job, 3)[0]
    on = pool.run(run_steps, tp, relayout(job, tp=tp, sequence_parallel=True), 3)[0]
    assert on.losses == pytest.approx(off.losses, rel=1e-6)
    assert on.norms == pytest.approx(off.norms, rel=1e-6)


# A copy that differs


@pytest.mark.parametrize(
    ("layout", "name", "culprit", "ranks"),
    [
        ("dp=4", "layers.2.mlp.up.weight", 2, (0, 2)),
        ("dp=2,tp=2", "layers.1.attention.qkv.weight", 3, (1, 3)),
        ("dp=2,tp=2", "layers.3.mlp_norm.bias", 1, (0, 1)),
        ("dp=2,pp=2", EMBEDDING, 3, (0, 3)),
        ("dp=2,pp=2", "layers.0.attention.out.bias", 2, (0, 2)),
    ],
)
def test_one_flipped_bit_is_found_and_named_and_ends_every_rank(
    pool: WorkerPool, layout: str, name: str, culprit: int, ranks: tuple[int, int]
) -> None:
    job = relayout(small_job(), **parse_layout(layout))
    messages = pool.run(check_after_a_flipped_bit, 4, job, name, culprit)
    named = f"after step 7, copies of {name} differ between rank {ranks[0]} and rank {ranks[1]}. "
    assert all(message.startswith("after step 7, ") for message in messages)
    assert messages[culprit].startswith(named)
    assert messages[ranks[0]].startswith(named)
    others = [message for message in messages if not message.startswith(named)]
    assert all("other ranks found copies of a parameter that differ" in message for message in others)
    assert all("fix: " in message for message in messages)


def check_after_a_flipped_bit(context: WorkerContext, job: Job, name: str, culprit: int) -> str:
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    engine.check_replicas(6)
    if context.rank == culprit:
        entry = next(entry for entry in engine.parameters if entry.name == name)
        entry.parameter.detach().view(-1).view(torch.int32)[-1] ^= 1
    try:
        engine.check_replicas(7)
    except ReplicaError as error:
        return str(error)
    return "nothing was found"


def test_b037_a_norm_inside_of_a_split_block_that_nobody_declared_is_found(pool: WorkerPool) -> None:
    """Each rank's gradient of it is a part of the true one, so the copies drift apart; parity fails as well."""
    case = Case(gated_model, TensorParallelPlan(GATED_STYLES), Layout(tp=2))
    for message in pool.run(check_after_a_step, 2, case):
        assert "copies of 1.group_norm.weight differ between rank 0 and rank 1" in message


def check_after_a_step(context: WorkerContext, case: Case) -> str:
    engine = build_custom_engine(context, case)
    optimizer = ShardedOptimizer(SGD, engine.data)
    source = SyntheticTokens(13, 4, seed=0)
    engine.train_step([range(4), range(4, 8)], source.batch, lambda _: optimizer.step(0.1))
    try:
        engine.check_replicas(1)
    except ReplicaError as error:
        return str(error)
    return "nothing was found"


@pytest.mark.parametrize("layout", ["dp=2,tp=2", "dp=2,pp=2", "tp=2,pp=2,sequence_parallel=true"])
def test_different_starts_are_made_equal(pool: WorkerPool, layout: str) -> None:
    job = relayout(small_job(), **parse_layout(layout))
    for found_before, first_kept in pool.run(spoil_and_repair, 4, job):
        assert found_before
        assert first_kept


def spoil_and_repair(context: WorkerContext, job: Job) -> tuple[bool, bool]:
    """Whether the spoilt copies were found, and whether the first holder of each parameter kept its own values."""
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    with torch.no_grad():
        for entry in engine.parameters:
            entry.parameter.add_(context.rank)
    kept = {entry.name: entry.parameter.detach().clone() for entry in engine.parameters}
    found = False
    try:
        engine.check_replicas(0)
    except ReplicaError:
        found = True
    make_replicas_equal(engine.parameters)
    engine.check_replicas(1)
    first = [entry for entry in engine.parameters if entry.copies.index == 0]
    return found, all(torch.equal(entry.parameter, kept[entry.name]) for entry in first)


# The hash


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_any_flipped_bit_changes_the_hash(dtype: torch.dtype) -> None:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    tensor = torch.randn(37, dtype=torch.float64).to(dtype)
    original = hash_tensor(tensor)
    for element in (0, 17, 36):
        for bit in range(8 * dtype.itemsize):
            flipped = tensor.clone()
            sign_bit = bit == 8 * dtype.itemsize - 1
            flipped.view(bits)[element] ^= -(1 << bit) if sign_bit else 1 << bit
            assert hash_tensor(flipped) != original, (element, bit)


def test_the_hash_depends_on_order_but_not_on_memory() -> None:
    tensor = torch.randn(6, 4)
    assert hash_tensor(tensor) != hash_tensor(tensor.flip(0))
    assert hash_tensor(tensor) == hash_tensor(tensor.t().contiguous().t())
    assert hash_tensor(tensor) == hash_tensor(tensor.view(4, 6))
    assert hash_tensor(torch.zeros(3)) != hash_tensor(-torch.zeros(3))
    assert hash_tensor(torch.tensor([float("nan")])) == hash_tensor(torch.tensor([float("nan")]))


def test_the_hash_of_nothing_and_of_much() -> None:
    assert hash_tensor(torch.zeros(0)) == 0
    large = torch.ones((1 << 20) + 3)
    changed = large.clone()
    changed[-1] = 2.0
    assert hash_tensor(large) != hash_tensor(changed)
    assert hash_tensor(large) == hash_tensor(large.clone())


def test_a_model_without_copies() -> None:
    engine = build_engine(small_job(), silent_mesh(Layout(), 0))
    assert all(entry.copies.size == 1 for entry in engine.parameters)
    engine.check_replicas(3)
