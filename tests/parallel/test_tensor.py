"""Tensor parallel layers against the plain ones, their order of work, and models that threefold does not know."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.parallel.custom import (
    GATED_STYLES,
    TIED_STYLES,
    Case,
    compare_custom,
    gated_model,
    half_frozen_model,
    repeated_model,
)
from tests.parallel.fakes import RecordingGroup, silent_group, silent_mesh
from threefold.layout import Layout, Style, StyleRule, shard
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel import tensor as tensor_module
from threefold.parallel.collectives import Group
from threefold.parallel.mesh import build_mesh
from threefold.parallel.stage import TensorParallelPlan, build_stage, take_shard
from threefold.parallel.tensor import ColumnLinear, RowLinear, SequenceSlice, VocabEmbedding

B, S, D, F_OUT, V = 3, 8, 8, 12, 11


def test_layers_equal_the_plain_ones(pool: WorkerPool) -> None:
    pool.run(compare_layers, 2)
    pool.run(compare_layers, 4)


def compare_layers(context: WorkerContext) -> None:
    group = build_mesh(Layout(tp=context.world_size), context.rank, activity=context.activity).tp
    for sequence_parallel in (False, True):
        for bias in (False, True):
            compare_column(group, sequence_parallel, bias)
            compare_row(group, sequence_parallel, bias)
        compare_vocab(group, sequence_parallel)
    compare_positions(group)
    compare_column(group, sequence_parallel=False, bias=True, shape=(6,))
    compare_row(group, sequence_parallel=False, bias=True, shape=(6,))


def compare_column(group: Group, sequence_parallel: bool, bias: bool, shape: tuple[int, ...] = (B, S)) -> None:
    dense, x, y_grad = dense_case(nn.Linear(D, F_OUT, bias=bias), (*shape, D), F_OUT)
    layer = ColumnLinear(local_part(dense, Style.COLUMN, group), group, sequence_parallel)
    local_x = own_part(x, 1, group) if sequence_parallel else x
    y, grads = run_local(layer, local_x, own_part(y_grad, -1, group))
    dense_y, dense_grads = run_local(dense, x, y_grad)
    close(y, own_part(dense_y, -1, group))
    close(grads["x"], own_part(dense_grads["x"], 1, group) if sequence_parallel else dense_grads["x"])
    for name in ("weight", "bias")[: 1 + bias]:
        close(grads[name], own_part(dense_grads[name], 0, group))


def compare_row(group: Group, sequence_parallel: bool, bias: bool, shape: tuple[int, ...] = (B, S)) -> None:
    dense, x, y_grad = dense_case(nn.Linear(F_OUT, D, bias=bias), (*shape, F_OUT), D)
    layer = RowLinear(local_part(dense, Style.ROW, group), group, sequence_parallel)
    y, grads = run_local(layer, own_part(x, -1, group), own_part(y_grad, 1, group) if sequence_parallel else y_grad)
    dense_y, dense_grads = run_local(dense, x, y_grad)
    close(y, own_part(dense_y, 1, group) if sequence_parallel else dense_y)
    close(grads["x"], own_part(dense_grads["x"], -1, group))
    close(grads["weight"], own_part(dense_grads["weight"], 1, group))
    if bias:
        close(summed(grads["bias"], group) if sequence_parallel else grads["bias"], dense_grads["bias"])


def compare_vocab(group: Group, sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    dense = nn.Embedding(V, D).double()
    ids, y_grad = torch.randint(0, V, (B, S)), torch.randn(B, S, D, dtype=torch.float64)
    part = shard(StyleRule(Style.VOCAB), "weight", dense.weight.shape, group.size, group.index)
    local = nn.Embedding(V, D)
    local.weight = nn.Parameter(take_shard(dense.weight.detach(), part))
    y = VocabEmbedding(local, part, group, sequence_parallel)(ids)
    y.backward(own_part(y_grad, 1, group) if sequence_parallel else y_grad)
    dense_y = dense(ids)
    dense_y.backward(y_grad)
    close(y, own_part(dense_y, 1, group) if sequence_parallel else dense_y)
    assert dense.weight.grad is not None and local.weight.grad is not None
    close(local.weight.grad, take_shard(dense.weight.grad, part))


def compare_positions(group: Group) -> None:
    torch.manual_seed(0)
    dense = nn.Embedding(S, D).double()
    for ids in (torch.arange(S), torch.randint(0, S, (B, S))):
        y_grad = torch.randn(*ids.shape, D, dtype=torch.float64)
        dense.weight.grad = None
        dense(ids).backward(y_grad)
        assert dense.weight.grad is not None
        expected = dense.weight.grad.clone()
        dense.weight.grad = None
        y = SequenceSlice(dense, group)(ids)
        close(y, own_part(F.embedding(ids, dense.weight), -2, group))
        y.backward(own_part(y_grad, -2, group))
        close(summed(dense.weight.grad, group), expected)


def dense_case(linear: nn.Linear, x_shape: tuple[int, ...], out: int) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None).double()
    x = torch.randn(x_shape, dtype=torch.float64)
    return linear, x, torch.randn((*x_shape[:-1], out), dtype=torch.float64)


def local_part(dense: nn.Linear, style: Style, group: Group) -> nn.Linear:
    local = nn.Linear(1, 1, bias=dense.bias is not None)
    for name, parameter in dense.named_parameters():
        kind = "bias" if name == "bias" else "weight"
        part = shard(StyleRule(style), kind, parameter.shape, group.size, group.index)
        setattr(local, name, nn.Parameter(take_shard(parameter.detach(), part)))
    return local


def run_local(layer: nn.Module, x: Tensor, y_grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(y_grad)
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()} | {"x": x.grad}
    return y.detach(), {name: grad for name, grad in grads.items() if grad is not None}


def own_part(x: Tensor, dim: int, group: Group) -> Tensor:
    return x.chunk(group.size, dim)[group.index]


def summed(x: Tensor | None, group: Group) -> Tensor:
    assert x is not None
    total = x.clone()
    group.all_reduce(total).wait()
    return total


def close(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


# The order of work


@pytest.mark.parametrize(
    ("sequence_parallel", "expected"),
    [
        (False, ["all_reduce started", "weight gradient", "all_reduce waited for"]),
        (
            True,
            [
                "all_gather started",
                "reduce_scatter started",
                "all_gather waited for",
                "weight gradient",
                "reduce_scatter waited for",
            ],
        ),
    ],
)
def test_the_input_gradient_travels_while_the_weight_gradient_is_computed(
    sequence_parallel: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = recorded_weight_gradients(monkeypatch)
    layer = ColumnLinear(nn.Linear(D, F_OUT), RecordingGroup(events), sequence_parallel)
    y = layer(torch.randn(B, S, D, requires_grad=True))
    events.clear()
    y.sum().backward()
    assert events == expected


def recorded_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []
    honest = tensor_module._weight_gradient

    def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
        events.append("weight gradient")
        return honest(grad, x)

    monkeypatch.setattr(tensor_module, "_weight_gradient", weight_gradient)
    return events


@pytest.mark.parametrize(
    ("layer", "frozen", "expected"),
    [
        (ColumnLinear, "weight", ["all_reduce started", "all_reduce waited for"]),
        (ColumnLinear, "x", ["weight gradient"]),
        (RowLinear, "weight", []),
        (RowLinear, "x", ["weight gradient"]),
    ],
)
def test_what_needs_no_gradient_costs_nothing(
    layer: type[ColumnLinear | RowLinear], frozen: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = recorded_weight_gradients(monkeypatch)
    linear = nn.Linear(D, F_OUT, bias=False).requires_grad_(frozen != "weight")
    y = layer(linear, RecordingGroup(events), False)(torch.randn(B, S, D, requires_grad=frozen != "x"))
    events.clear()
    y.sum().backward()
    assert events == expected


@pytest.mark.parametrize("layer", [ColumnLinear, RowLinear])
def test_second_derivatives_are_refused_instead_of_wrong(layer: type[ColumnLinear | RowLinear]) -> None:
    """They would have to communicate as well."""
    x = torch.randn(B, S, D, requires_grad=True)
    y = layer(nn.Linear(D, F_OUT), silent_group(), False)(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# Whole models


CUSTOM_LAYOUTS = [Layout(tp=2, dp=2), Layout(pp=2, tp=2), Layout(pp=3), Layout(dp=2, pp=2, tp=2)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_b009_b037_a_model_with_replicated_modules_in_its_blocks(pool: WorkerPool, sequence_parallel: bool) -> None:
    plan = TensorParallelPlan(GATED_STYLES, sequence_parallel=sequence_parallel, inside=("*.group_norm",))
    for layout in CUSTOM_LAYOUTS[: 2 if sequence_parallel else 4]:
        compared = pool.run(compare_custom, layout.world_size, Case(gated_model, plan, layout))
        assert {name for names in compared for name in names} == set(dict(gated_model().named_parameters()))


def test_a_stage_without_parts_passes_on_what_it_gets(pool: WorkerPool) -> None:
    plan = TensorParallelPlan(GATED_STYLES)
    pool.run(compare_custom, 3, Case(gated_model, plan, Layout(pp=3), partition=(2, 0, 4)))


def test_frozen_parameters_stay_frozen(pool: WorkerPool) -> None:
    plan = TensorParallelPlan(GATED_STYLES, inside=("*.group_norm",))
    pool.run(compare_custom, 4, Case(half_frozen_model, plan, Layout(tp=2, pp=2), partition=(2, 4)))
    pool.run(compare_custom, 4, Case(half_frozen_model, plan, Layout(dp=2, tp=2)))


def test_a_module_that_stands_in_a_model_three_times(pool: WorkerPool) -> None:
    pool.run(compare_custom, 4, Case(repeated_model, TensorParallelPlan(TIED_STYLES), Layout(tp=2, dp=2)))


# What can't be split is refused


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("module", "style"),
    [
        (nn.LayerNorm(8), Style.COLUMN),
        (nn.Embedding(8, 8), Style.ROW),
        (Scaled(8, 8), Style.COLUMN),
        (Scaled(8, 8), Style.ROW),
        (nn.Embedding(8, 8, padding_idx=0), Style.VOCAB),
        (nn.Embedding(8, 8, max_norm=1.0), Style.VOCAB),
        (nn.Conv1d(8, 8, 1), Style.COLUMN),
    ],
)
def test_a_module_without_the_parallel_form_of_its_style(module: nn.Module, style: Style) -> None:
    plan = TensorParallelPlan({"0": StyleRule(style)})
    with pytest.raises(TypeError, match=rf"0: .* has no {style.value}-parallel form"):
        build_stage(nn.Sequential(module), [range(1)], silent_mesh(Layout(tp=2), 0), plan)


def test_a_module_without_a_style_is_not_taken_for_replicated() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(KeyError, match="no tensor-parallel style for module '1'"):
        build_stage(model, [range(2)], silent_mesh(Layout(), 0), TensorParallelPlan({"0": StyleRule(Style.COLUMN)}))


def test_uses_of_a_parameter_in_two_styles() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    plan = TensorParallelPlan({"0": StyleRule(Style.VOCAB), "1": StyleRule(Style.COLUMN)})
    with pytest.raises(TypeError, match=r"1\.weight is tied to 0\.weight, but their styles are column and vocab"):
        build_stage(model, [range(2)], silent_mesh(Layout(tp=2), 1), plan)


def test_token_ids_outside_the_vocabulary() -> None:
    embedding = nn.Embedding(V, D)
    part = shard(StyleRule(Style.VOCAB), "weight", (V, D), 1, 0)
    for ids in ([0, V], [-1, 2]):
        with pytest.raises(ValueError, match=f"token ids run from .* the vocabulary has {V}"):
            VocabEmbedding(embedding, part, silent_group(), False)(torch.tensor([ids]))
