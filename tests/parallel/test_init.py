"""Initial weights and dropout masks are functions of the seed and of names, never of the layout."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.jobs import GPT2, LLAMA, small_job
from tests.parallel.fakes import silent_group
from tests.parallel.ranks import initial_parameters, whole_parameters
from threefold.job import relayout
from threefold.measure.layouts import parse_layout
from threefold.measure.reference import build_plain_model
from threefold.measure.worker_pool import WorkerPool
from threefold.parallel.collectives import Group
from threefold.parallel.dropout import CurrentSamples, SampleDropout, split_dim_of

LAYOUTS = [
    "dp=2",
    "tp=4",
    "pp=4",
    "tp=2,pp=2,sequence_parallel=true",
    "dp=2,tp=2,order=dp>pp>tp",
    "pp=3,partition=1+2+1",
]


@pytest.mark.parametrize("keys", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_b116_the_initial_model_is_the_same_in_every_layout(pool: WorkerPool, keys: dict[str, Any]) -> None:
    job = small_job(keys)
    expected = dict(build_plain_model(job, CurrentSamples(), torch.float32).named_parameters())
    for layout in LAYOUTS:
        laid_out = relayout(job, **parse_layout(layout))
        whole = whole_parameters(pool.run(initial_parameters, laid_out.world_size, laid_out))
        assert set(whole) == set(expected)
        for name, value in whole.items():
            assert torch.equal(value, expected[name]), f"{name} in {layout}"


def test_b116_another_seed_gives_another_model(pool: WorkerPool) -> None:
    first, second = (pool.run(initial_parameters, 1, small_job(seed=seed))[0].parameters for seed in (3, 4))
    for name, value in first.items():
        constant = "norm" in name or name.endswith("bias")
        assert torch.equal(value, second[name]) == constant, name


@pytest.mark.parametrize("keys", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_b118_no_two_shards_are_copies(pool: WorkerPool, keys: dict[str, Any]) -> None:
    runs = pool.run(initial_parameters, 4, small_job(keys, tp=4))
    split = [name for name, part in runs[0].shards.items() if part.dim is not None and not name.endswith("bias")]
    assert len(split) == 4 * 4 + (1 if keys is GPT2 else 2)
    for name in split:
        for one, other in combinations(runs, 2):
            assert not torch.equal(one.parameters[name], other.parameters[name]), name
    rows = torch.cat([run.parameters["layers.0.attention.qkv.weight"] for run in runs])
    assert len(rows.unique(dim=0)) == len(rows)


# Dropout

P, SEED, NAME = 0.3, 11, "layers.0.mlp_dropout"
SHAPE = (2, 8, 8, 6)


def dropped(
    x: Tensor,
    group: Group,
    split_dim: int | None,
    samples: tuple[int, ...] = (4, 5),
    name: str = NAME,
    seed: int = SEED,
) -> Tensor:
    module = SampleDropout(P, name, seed, CurrentSamples(samples), group, split_dim)
    return module(x)


def masks(size: int, split_dim: int | None) -> list[Tensor]:
    """What each of ``size`` tp ranks keeps of ones."""
    groups = [silent_group(size, index) for index in range(size)]
    if split_dim is None:
        return [dropped(torch.ones(SHAPE), group, None) for group in groups]
    parts = torch.ones(SHAPE).chunk(size, split_dim)
    return [dropped(part, group, split_dim) for part, group in zip(parts, groups, strict=True)]


@pytest.mark.parametrize("tp", [2, 4])
def test_b119_masks_are_equal_on_replicated_activations(tp: int) -> None:
    (alone,) = masks(1, None)
    assert all(torch.equal(mask, alone) for mask in masks(tp, None))


@pytest.mark.parametrize("split_dim", [1, 2])
@pytest.mark.parametrize("tp", [2, 4])
def test_b119_masks_of_parts_differ_and_make_up_the_whole(tp: int, split_dim: int) -> None:
    (alone,) = masks(1, None)
    parts = masks(tp, split_dim)
    assert torch.equal(torch.cat(parts, split_dim), alone)
    assert not any(torch.equal(one, other) for one, other in combinations(parts, 2))


def test_b119_masks_differ_across_samples_names_and_seeds_and_repeat_otherwise() -> None:
    x, group = torch.ones(SHAPE), silent_group()
    base = dropped(x, group, None)
    assert torch.equal(dropped(x, group, None), base)
    assert torch.equal(dropped(x, group, None, samples=(5, 4)), base.flip(0))
    assert not torch.equal(base[0], base[1])
    assert not torch.equal(dropped(x, group, None, samples=(6, 7)), base)
    assert not torch.equal(dropped(x, group, None, name="layers.1.mlp_dropout"), base)
    assert not torch.equal(dropped(x, group, None, seed=SEED + 1), base)


def test_dropout_keeps_the_mean_and_drops_its_share() -> None:
    x = torch.ones(2, 200, 200)
    y = dropped(x, silent_group(), None)
    assert y.unique().tolist() == pytest.approx([0.0, 1 / (1 - P)])
    assert (y == 0).float().mean().item() == pytest.approx(P, abs=0.01)
    assert y.mean().item() == pytest.approx(1.0, abs=0.01)


def test_dropout_is_off_in_evaluation_and_at_zero() -> None:
    x = torch.randn(SHAPE)
    module = SampleDropout(P, NAME, SEED, CurrentSamples((1, 2)), silent_group(), None)
    assert module.eval()(x) is x
    assert not torch.equal(module.train()(x), x)
    assert SampleDropout(0.0, NAME, SEED, CurrentSamples(), silent_group(), None)(x) is x


def test_dropout_without_the_samples_of_its_rows() -> None:
    with pytest.raises(ValueError, match=f"{NAME}: 2 rows but 1 sample numbers"):
        dropped(torch.ones(SHAPE), silent_group(), None, samples=(4,))


def test_gradients_pass_where_values_do() -> None:
    x = torch.ones(SHAPE, requires_grad=True)
    y = dropped(x, silent_group(), None)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize(
    ("name", "sequence_parallel", "dim"),
    [
        ("layers.3.attention.core.dropout", False, 1),
        ("layers.3.attention.core.dropout", True, 1),
        ("layers.3.mlp_dropout", False, None),
        ("layers.3.mlp_dropout", True, 1),
        ("embed.dropout", True, 1),
    ],
)
def test_what_is_split_at_a_dropout(name: str, sequence_parallel: bool, dim: int | None) -> None:
    assert split_dim_of(name, sequence_parallel) == dim
