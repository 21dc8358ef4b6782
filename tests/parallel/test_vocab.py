"""Cross entropy and log-sum-exp over a split vocabulary, against PyTorch's over the whole one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tests.jobs import GPT2, LLAMA, small_job
from tests.parallel.fakes import silent_group
from tests.parallel.ranks import replica_samples, tokens_of
from threefold.job import Job
from threefold.layout import Layout, Style, StyleRule, shard
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel.collectives import Group
from threefold.parallel.engine import build_engine, build_job_mesh
from threefold.parallel.mesh import build_mesh
from threefold.parallel.stage import take_shard
from threefold.parallel.vocab import IGNORED, VocabPart, cross_entropy_sum, logsumexp
from threefold.train.optimizer import ShardedOptimizer

B, S = 2, 3
VOCABULARIES = (1, 5, 8, 61, 50257)
JUNK = 1e30
"""What the columns of padding hold: they must not count, whatever they are."""


def vocab_part(vocab_size: int, group: Group) -> VocabPart:
    return VocabPart.of_shard(
        shard(StyleRule(Style.VOCAB), "weight", (vocab_size, 1), group.size, group.index), vocab_size, group
    )


def own_columns(logits_BSV: Tensor, part: VocabPart, padding: float) -> Tensor:
    local = logits_BSV.new_full((*logits_BSV.shape[:-1], part.local_width), padding)
    local[..., : part.length] = logits_BSV[..., part.start : part.start + part.length]
    return local


def labels_of(vocab_size: int, ignored: str) -> Tensor:
    labels = torch.randint(0, vocab_size, (B, S))
    labels[0, 0], labels[1, 1] = 0, vocab_size - 1
    if ignored != "none":
        labels[0, 1:] = IGNORED
    if ignored == "all":
        labels[:] = IGNORED
    return labels


def cases() -> Iterator[tuple[Tensor, Tensor]]:
    """(dense logits, labels)."""
    torch.manual_seed(0)
    for vocab_size in VOCABULARIES:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for scale in (1.0, 1e4):
                for ignored in ("none", "some", "all"):
                    logits = (scale * torch.randn(B, S, vocab_size, dtype=torch.float64)).to(dtype)
                    yield logits, labels_of(vocab_size, ignored)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_b044_b045_cross_entropy_is_pytorchs(pool: WorkerPool, tp: int) -> None:
    assert pool.run(compare_cross_entropy, tp) == [len(VOCABULARIES) * 18] * tp


def compare_cross_entropy(context: WorkerContext) -> int:
    group = build_mesh(Layout(tp=context.world_size), context.rank, activity=context.activity).tp
    count = 0
    for logits, labels in cases():
        compare(logits, labels, vocab_part(logits.shape[-1], group))
        count += 1
    return count


def compare(logits: Tensor, labels: Tensor, part: VocabPart) -> None:
    local = own_columns(logits, part, JUNK).requires_grad_()
    dense = logits.to(torch.promote_types(logits.dtype, torch.float32)).requires_grad_()
    loss = cross_entropy_sum(local, labels, part)
    expected = F.cross_entropy(dense.flatten(0, 1), labels.flatten(), reduction="sum")
    (0.37 * loss).backward()
    (0.37 * expected).backward()
    assert local.grad is not None and dense.grad is not None
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(local.grad, own_columns(dense.grad, part, 0.0).to(logits.dtype))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_b041_a_z_loss_beside_the_cross_entropy(pool: WorkerPool, tp: int) -> None:
    pool.run(compare_z_loss, tp)


def compare_z_loss(context: WorkerContext) -> None:
    group = build_mesh(Layout(tp=context.world_size), context.rank, activity=context.activity).tp
    torch.manual_seed(1)
    for vocab_size in (5, 61):
        logits = 50 * torch.randn(B, S, vocab_size, dtype=torch.float64)
        labels, part = labels_of(vocab_size, "some"), vocab_part(vocab_size, group)
        local, dense = own_columns(logits, part, JUNK).requires_grad_(), logits.clone().requires_grad_()
        loss = cross_entropy_sum(local, labels, part) + 0.01 * logsumexp(local, part).square().sum()
        expected = F.cross_entropy(dense.flatten(0, 1), labels.flatten(), reduction="sum")
        expected = expected + 0.01 * dense.logsumexp(-1).square().sum()
        loss.backward()
        expected.backward()
        assert local.grad is not None and dense.grad is not None
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(local.grad, own_columns(dense.grad, part, 0.0))


def test_b041_gradients_are_those_of_finite_differences() -> None:
    part = vocab_part(7, silent_group())
    logits = torch.randn(B, S, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0, 6, IGNORED], [3, 3, 1]])
    assert torch.autograd.gradcheck(lambda x: logsumexp(x, part), logits)
    assert torch.autograd.gradcheck(lambda x: cross_entropy_sum(x, labels, part), logits)


@pytest.mark.parametrize("loss", [lambda x, part: cross_entropy_sum(x, torch.zeros(B, S).long(), part), logsumexp])
@pytest.mark.parametrize("width", [61, 30, 32])
def test_b042_logits_of_another_width_are_refused(loss: Callable[[Tensor, VocabPart], Tensor], width: int) -> None:
    message = f"returned {width} logits a token, but each of 2 ranks must hold 31 .* give the head the style 'vocab'"
    with pytest.raises(ValueError, match=message):
        loss(torch.zeros(B, S, width), vocab_part(61, silent_group(2, 1)))


@pytest.mark.parametrize("label", [-1, 5, -101])
def test_labels_outside_the_vocabulary(label: int) -> None:
    labels = torch.tensor([[0, IGNORED, label]])
    with pytest.raises(ValueError, match=f"label {label} is outside the vocabulary of 5"):
        cross_entropy_sum(torch.zeros(1, 3, 5), labels, vocab_part(5, silent_group()))


@pytest.mark.parametrize(("vocab_size", "tp"), [(151669, 4), (61, 4), (5, 4), (8, 2)])
def test_b047_b048_a_real_weight_is_cut_padded_and_put_together_again(vocab_size: int, tp: int) -> None:
    weight = torch.randn(vocab_size, 2)
    parts = [shard(StyleRule(Style.VOCAB), "weight", weight.shape, tp, coord) for coord in range(tp)]
    locals_ = [take_shard(weight, part) for part in parts]
    assert {local.shape[0] for local in locals_} == {-(-vocab_size // tp)}
    padding = torch.cat(
        [local[local.shape[0] - part.num_padding :] for local, part in zip(locals_, parts, strict=True)]
    )
    assert padding.shape[0] == tp * -(-vocab_size // tp) - vocab_size
    assert not padding.any()
    assert torch.equal(torch.cat(locals_)[:vocab_size], weight)


@pytest.mark.parametrize("keys", [GPT2, LLAMA], ids=["tied", "untied"])
def test_b044_rows_of_padding_stay_zero(pool: WorkerPool, keys: dict) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}}
    job = small_job(keys | {"vocab_size": 61}, tp=4, optimizer=optimizer)
    assert pool.run(train_and_sum_padding, 4, job) == [(0.0, 0)] * 3 + [(0.0, 3 if keys is GPT2 else 6)]


def train_and_sum_padding(context: WorkerContext, job: Job) -> tuple[float, int]:
    """Sum of the absolute values and gradients of padding after three steps, and the number of padded rows."""
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    optimizer, source = ShardedOptimizer(job.optimizer, engine.data), tokens_of(job)
    padding = [(entry.parameter, entry.shard.num_padding) for entry in engine.parameters if entry.shard.num_padding]
    total = 0.0
    for step in range(3):
        engine.train_step(replica_samples(job, 0, step), source.batch, lambda _: None)
        optimizer.step(0.1)
        for parameter, rows in padding:
            assert parameter.grad is not None and parameter.grad[:-rows].any()
            total += float((parameter.detach()[-rows:].abs() + parameter.grad[-rows:].abs()).sum())
    return total, sum(rows for _, rows in padding)
