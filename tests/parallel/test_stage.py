"""Which rank holds what, without a process: the stages and shards of all ranks make up the model, nothing is lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from tests.jobs import GPT2, LLAMA, small_job
from tests.parallel.custom import gated_model, tied_model
from tests.parallel.fakes import silent_mesh
from threefold.cost.traffic import local_parameters
from threefold.job import Job, ModelSpec
from threefold.layout import DECODER_STYLES, Layout, Style, StyleRule, split_layers
from threefold.models.decoder import Decoder
from threefold.parallel.engine import build_engine
from threefold.parallel.stage import (
    ShardedParameter,
    Stage,
    TensorParallelPlan,
    build_stage,
    model_parts,
    rank_parameters,
    select_parts,
    tied_stages,
)

SEVEN = {"num_hidden_layers": 7}
PARTITIONS = [(7,), (4, 3), (1, 6), (0, 7), (7, 0), (2, 3, 2), (1, 5, 1), (3, 0, 4), (0, 7, 0), (1, 2, 1, 3)]


def stage_of(keys: dict[str, Any], partition: tuple[int, ...], pp_coord: int) -> Stage:
    spec = ModelSpec.model_validate(keys)
    with torch.device("meta"):
        model = Decoder(spec)
    layers = split_layers(spec.num_hidden_layers, len(partition), partition)
    ties = list(tied_stages(model, layers).values())
    mesh = silent_mesh(Layout(pp=len(partition)), pp_coord, ties)
    plan = TensorParallelPlan(DECODER_STYLES, (32, 32, 32) if spec.model_type == "gpt2" else (32, 16, 16))
    return build_stage(model, layers, mesh, plan, initial_value=lambda name, shape: torch.zeros(shape))


def counts(entry: ShardedParameter) -> bool:
    """Whether the whole of it counts in the norm on this rank."""
    return entry.owns_norm and entry.sum_over.index == 0


@pytest.mark.parametrize("keys", [GPT2, LLAMA, GPT2 | {"tie_word_embeddings": False}], ids=["tied", "llama", "untied"])
@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_b051_b055_stages_add_up_to_the_model(keys: dict[str, Any], partition: tuple[int, ...]) -> None:
    spec = ModelSpec.model_validate(keys | SEVEN)
    stages = [stage_of(keys | SEVEN, partition, coord) for coord in range(len(partition))]
    owned = Counter(entry.name for stage in stages for entry in stage.sharded if counts(entry))
    assert owned == Counter(dict.fromkeys(spec.parameter_shapes(), 1))
    elements = sum(entry.parameter.numel() for stage in stages for entry in stage.sharded if counts(entry))
    assert elements == spec.num_parameters
    held = Counter(entry.name for stage in stages for entry in stage.sharded)
    twice = {name for name, count in held.items() if count > 1}
    assert twice == ({"embed.tokens.weight"} if spec.tie_word_embeddings and len(partition) > 1 else set())
    for stage in stages:
        local = sum(parameter.numel() for parameter in stage.parameters())
        assert local == sum(entry.parameter.numel() for entry in stage.sharded)


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_the_parts_of_all_stages_are_those_of_the_model_in_order(partition: tuple[int, ...]) -> None:
    stages = [stage_of(GPT2 | SEVEN, partition, coord) for coord in range(len(partition))]
    names = [name for stage in stages for name in stage.part_names]
    assert names == ["embed", *(f"layers.{index}" for index in range(7)), "final_norm", "head"]


@pytest.mark.parametrize("keys", [GPT2, LLAMA], ids=["tied", "untied"])
@pytest.mark.parametrize("partition", [(1, 6), (2, 3, 2), (3, 0, 4)], ids=str)
@pytest.mark.parametrize("tp", [1, 4])
def test_b055_estimated_parameters_are_those_that_a_rank_holds(
    keys: dict[str, Any], partition: tuple[int, ...], tp: int
) -> None:
    pp = len(partition)
    job = small_job(keys | SEVEN, pp=pp, tp=tp, parallelism={"pp": {"partition": partition}})
    for rank in range(job.world_size):
        entries = entries_of(job, rank).values()
        coord = Layout(pp=pp, tp=tp).coord(rank)
        assert sum(entry.parameter.numel() for entry in entries) == local_parameters(job, coord.pp)


def test_find() -> None:
    stage = stage_of(GPT2 | SEVEN, (4, 3), 0)
    found = stage.find("layers.3.mlp.up.weight")
    assert found is not None
    assert found.global_shape == (128, 32)
    assert stage.find("layers.4.mlp.up.weight") is None


# Who must be equal to whom, and whose gradients add up


def entries_of(job: Job, rank: int) -> dict[str, ShardedParameter]:
    assert job.model is not None
    ties = [(0, job.pp - 1)] if job.model.tie_word_embeddings and job.pp > 1 else []
    mesh = silent_mesh(Layout(dp=job.dp, pp=job.pp, tp=job.tp), rank, ties)
    return {entry.name: entry for entry in build_engine(job, mesh).parameters}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_b004_groups_of_each_kind_of_parameter(sequence_parallel: bool) -> None:
    parallelism = {"tp": {"size": 2, "sequence_parallel": sequence_parallel}}
    entries = entries_of(small_job(dp=2, tp=2, pp=2, parallelism=parallelism), rank=0)
    partial = "dp+tp" if sequence_parallel else "dp"
    expected = {
        "embed.tokens.weight": ("tied pp 0+1", "tied pp 0+1"),
        "embed.positions.weight": ("dp+tp", partial),
        "layers.0.attention_norm.bias": ("dp+tp", partial),
        "layers.0.attention.qkv.weight": ("dp", "dp"),
        "layers.0.attention.out.weight": ("dp", "dp"),
        "layers.0.attention.out.bias": ("dp+tp", partial),
        "layers.1.mlp.up.bias": ("dp", "dp"),
    }
    assert {name: (entries[name].copies.axis, entries[name].sum_over.axis) for name in expected} == expected


def test_modules_inside_of_a_split_block_have_partial_gradients() -> None:
    styles = {"*": StyleRule(Style.REPLICATED)}
    for inside, axis in (((), "dp"), (("*.group_norm",), "dp+tp")):
        mesh = silent_mesh(Layout(dp=2, tp=2), 0)
        stage = build_stage(gated_model(), [range(6)], mesh, TensorParallelPlan(styles, inside=inside))
        found = stage.find("1.group_norm.weight"), stage.find("1.before.weight")
        assert [entry.sum_over.axis for entry in found if entry] == [axis, "dp"]


# Cutting


def parts_of(*names: str) -> list[tuple[str, nn.Module]]:
    return [(name, nn.Identity()) for name in names]


@pytest.mark.parametrize(
    ("names", "sizes", "expected"),
    [
        ("embed layers.0 layers.1 norm head", (1, 1), ["embed layers.0", "layers.1 norm head"]),
        ("0 1 2 3", (3, 1), ["0 1 2", "3"]),
        ("embed layers.0 head", (0, 1), ["embed", "layers.0 head"]),
        ("embed layers.0 head", (1, 0), ["embed layers.0", "head"]),
        ("down.0 bridge down.1 up.0 head", (1, 2), ["down.0 bridge", "down.1 up.0 head"]),
        ("down.0 bridge down.1 up.0 head", (0, 3), ["", "down.0 bridge down.1 up.0 head"]),
        ("embed block head", (0,), ["embed block head"]),
    ],
)
def test_select_parts_loses_nothing(names: str, sizes: tuple[int, ...], expected: list[str]) -> None:
    layers, last = split_layers(sum(sizes), len(sizes), sizes), len(sizes) - 1
    chosen = [
        select_parts(parts_of(*names.split()), held, is_first=stage == 0, is_last=stage == last)
        for stage, held in enumerate(layers)
    ]
    assert [" ".join(name for name, _ in parts) for parts in chosen] == expected


@pytest.mark.parametrize(
    "layers", [[range(3), range(3, 5)], [range(4), range(3, 6)], [range(3, 6), range(3)], [range(7)]]
)
def test_b049_b051_layers_that_are_lost_doubled_or_not_there(layers: list[range]) -> None:
    mesh = silent_mesh(Layout(pp=len(layers)), 0)
    with pytest.raises(ValueError, match=r"the stages hold layers \[.*\], but the model has 6"):
        build_stage(gated_model(), layers, mesh, TensorParallelPlan({"*": StyleRule(Style.REPLICATED)}))


def test_a_module_that_stands_twice_in_a_sequential_is_two_parts() -> None:
    shared = nn.Linear(2, 2)
    parts = model_parts(nn.Sequential(shared, nn.ReLU(), shared))
    assert [(name, module is shared) for name, module in parts] == [("0", True), ("1", False), ("2", True)]


def test_a_model_that_cannot_be_cut() -> None:
    with pytest.raises(TypeError, match=r"Linear must have a method parts\(\) or be an nn.Sequential"):
        build_stage(nn.Linear(2, 2), [range(0)], silent_mesh(Layout(), 0), TensorParallelPlan({}))


def test_b032_ties_are_found_whatever_the_names() -> None:
    ties = tied_stages(tied_model(), split_layers(6, 3))
    assert ties == {"0.weight": (0, 2), "1.one.weight": (0, 2), "1.two.weight": (0, 2)}
    assert set(tied_stages(tied_model(), split_layers(6, 3, (1, 2, 3)))) == {
        "0.weight",
        "1.one.weight",
        "1.two.weight",
        "2.two.weight",
    }
    assert tied_stages(tied_model(), [range(6)]) == {}


def test_b032_stages_list_what_they_share_in_the_same_order() -> None:
    layers = split_layers(6, 3, (2, 1, 3))
    ties = tied_stages(tied_model(), layers)
    plan = TensorParallelPlan({"0": StyleRule(Style.VOCAB), "5": StyleRule(Style.VOCAB), "*": StyleRule(Style.COLUMN)})
    shared = []
    for coord in range(3):
        stage = build_stage(tied_model(), layers, silent_mesh(Layout(pp=3), coord, list(ties.values())), plan)
        shared.append([entry.name for entry in rank_parameters([stage]) if entry.name in ties])
    assert shared == [["0.weight", "1.one.weight", "1.two.weight"], ["2.two.weight"], list(ties)]


def test_a_parameter_shared_by_stages_must_be_split_over_tp() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    mesh = silent_mesh(Layout(pp=2, tp=2), 0, [(0, 1)])
    with pytest.raises(TypeError, match=r"0\.weight: .* used on pipeline ranks \(0, 1\) must be split over tp"):
        build_stage(model, [range(1), range(1, 2)], mesh, TensorParallelPlan({"*": StyleRule(Style.REPLICATED)}))


def test_a_model_with_real_values_keeps_them_and_its_dtype() -> None:
    model = gated_model()
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    plan = TensorParallelPlan({"*": StyleRule(Style.REPLICATED)})
    stage = build_stage(model, [range(6)], silent_mesh(Layout(), 0), plan)
    assert {entry.name for entry in stage.sharded} == set(values)
    for entry in stage.sharded:
        assert torch.equal(entry.parameter, values[entry.name])
    other = build_stage(gated_model(), [range(6)], silent_mesh(Layout(), 0), plan, dtype=torch.float32)
    assert {entry.parameter.dtype for entry in other.sharded} == {torch.float32}
