"""Backward passes in two: I gives the gradient of the input alone, W adds those of the weights, and nothing is lost."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.jobs import GPT2, LLAMA
from tests.parallel.custom import VOCAB, WIDTH, gated_model, half_frozen_model, repeated_model, tied_model
from tests.parallel.fakes import silent_mesh
from threefold.job import ModelSpec
from threefold.layout import Layout, Style, StyleRule
from threefold.models.decoder import Decoder
from threefold.parallel.counters import MemoryCounter
from threefold.parallel.deferred import DeferredGradients, WeightTask, run_weight_tasks
from threefold.parallel.engine import tensor_parallel_plan
from threefold.parallel.stage import (
    Stage,
    TensorParallelPlan,
    build_stage,
    defer_plain_linears,
    recompute_modules,
)

REPLICATED = TensorParallelPlan({"*": StyleRule(Style.REPLICATED)})
MIXED = TensorParallelPlan(
    {
        "0": StyleRule(Style.VOCAB),
        "*.gate": StyleRule(Style.COLUMN),
        "*.value": StyleRule(Style.COLUMN),
        "*.out": StyleRule(Style.ROW),
        "*.one": StyleRule(Style.COLUMN),
        "*.two": StyleRule(Style.ROW),
        "5": StyleRule(Style.VOCAB),
        "*": StyleRule(Style.REPLICATED),
    }
)
MODELS = {"gated": gated_model, "half frozen": half_frozen_model, "tied": tied_model, "repeated": repeated_model}


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


class Convolved(nn.Module):
    """No linear layer and no embedding of ours: a convolution, a bare parameter, and a linear layer with a hook."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.hooked = nn.Linear(WIDTH, WIDTH)
        self.hooked.register_forward_hook(double)

    def forward(self, x_BSD: Tensor) -> Tensor:
        mixed_BSD = self.conv(x_BSD.transpose(1, 2)).transpose(1, 2)
        return torch.tanh(self.hooked(mixed_BSD * self.scale))


def convolved_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), Convolved(), nn.Linear(WIDTH, VOCAB)).double()


def stage_of(model: nn.Module, plan: TensorParallelPlan) -> Stage:
    count = len(list(model._modules))
    stage = build_stage(model, [range(count)], silent_mesh(Layout(), 0), plan)
    defer_plain_linears(stage, silent_mesh(Layout(), 0).tp)
    return stage


def decoder_stage(keys: dict[str, Any], mode: str = "none") -> Stage:
    torch.manual_seed(6)
    spec = ModelSpec.model_validate(keys)
    plan = tensor_parallel_plan(spec, False)
    stage = build_stage(Decoder(spec).double(), [range(4)], silent_mesh(Layout(), 0), plan)
    stage.recompute_layers = mode == "full"
    if mode == "selective":
        recompute_modules(stage, "attention.core")
    return stage


def gradients(stage: Stage) -> dict[str, Tensor]:
    found = {e.name: e.parameter.grad.clone() for e in stage.sharded if e.parameter.grad is not None}
    stage.zero_grad()
    return found


def forward(stage: Stage) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    y = stage(torch.randint(VOCAB, (2, 4)))
    return y, torch.randn_like(y)


def assert_split_equals_whole(stage: Stage) -> None:
    """Two microbatches, of which the first waits until the second is through."""
    for _ in range(2):
        stage.backward(*forward(stage))
    whole = gradients(stage)
    waiting = [stage.backward_input(*forward(stage)) for _ in range(2)]
    for tasks in waiting:
        assert tasks
        stage.backward_weights(tasks)
        assert not tasks
    split = gradients(stage)
    assert split.keys() == whole.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("plan", [REPLICATED, MIXED], ids=["replicated", "mixed"])
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_i_and_w_give_the_gradients_of_b(build: Callable[[], nn.Module], plan: TensorParallelPlan) -> None:
    assert_split_equals_whole(stage_of(build(), plan))


def test_modules_that_cannot_wait_get_their_gradients_in_i() -> None:
    stage = stage_of(convolved_model(), REPLICATED)
    assert_split_equals_whole(stage)
    tasks = stage.backward_input(*forward(stage))
    early = {entry.name for entry in stage.sharded if entry.parameter.grad is not None}
    assert early == {"0.weight", "1.scale", "1.conv.weight", "1.conv.bias", "1.hooked.weight", "1.hooked.bias"}
    assert {id(task.parameter) for task in tasks} == {id(entry.parameter) for entry in stage.sharded[-2:]}


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("keys", [GPT2, LLAMA, LLAMA | {"tie_word_embeddings": True}], ids=["gpt2", "llama", "tied"])
def test_the_decoder_with_recompute(keys: dict[str, Any], mode: str) -> None:
    assert_split_equals_whole(decoder_stage(keys, mode))


@pytest.mark.parametrize("keys", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_i_leaves_all_matrices_to_w(keys: dict[str, Any]) -> None:
    """Norms alone, and biases that are added after a sum over ranks, have a gradient after I."""
    stage = decoder_stage(keys)
    stage.backward_input(*forward(stage))
    early = {entry.name for entry in stage.sharded if entry.parameter.grad is not None}
    allowed = ("norm.weight", "norm.bias", "out.bias", "down.bias", "positions.weight")
    assert early and all(name.endswith(allowed) for name in early), early


def test_i_computes_no_weight_gradient() -> None:
    """The products of W are not just thrown away in I, which multiplies as much as a forward pass."""
    stage = decoder_stage(GPT2)
    y, gradient = forward(stage)
    whole = matrix_flops(lambda: stage.backward(y, gradient))
    y, gradient = forward(stage)
    tasks: list[WeightTask] = []
    assert matrix_flops(lambda: tasks.extend(stage.backward_input(y, gradient))) == whole / 2
    assert matrix_flops(lambda: stage.backward_weights(tasks)) == whole / 2


def matrix_flops(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_flop_counts()["Global"][torch.ops.aten.mm]


def test_the_gradient_of_the_input_is_there_after_i() -> None:
    stage = stage_of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double(), REPLICATED)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    y = stage(x)
    tasks = stage.backward_input(y, torch.ones_like(y))
    assert x.grad is not None
    expected = torch.ones(5, 2, dtype=torch.float64) @ stage.sharded[2].parameter @ stage.sharded[0].parameter
    torch.testing.assert_close(x.grad, expected)
    assert all(entry.parameter.grad is None for entry in stage.sharded)
    assert len(tasks) == 4


def test_a_linear_layer_of_one_sample_without_a_batch() -> None:
    stage = stage_of(nn.Sequential(nn.Linear(3, 2)).double(), REPLICATED)
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    tasks = stage.backward_input(stage(x), torch.tensor([1.0, 10.0], dtype=torch.float64))
    stage.backward_weights(tasks)
    expected = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]], dtype=torch.float64)
    assert torch.equal(gradients(stage)["0.weight"], expected)


# Memory


def test_i_frees_what_w_does_not_need() -> None:
    memory = MemoryCounter(measured_steps=1)
    deferred = DeferredGradients(memory)
    weight = nn.Parameter(torch.zeros(3, 2))
    x, gradient = torch.ones(5, 2), torch.ones(5, 3)
    alive = [weakref.ref(x), weakref.ref(gradient)]
    with deferred.collect() as tasks:
        deferred.add(weight, lambda grad, x: lambda: grad.t() @ x, gradient, x)
    del x, gradient
    assert memory.held["activations"] == 4 * (5 * 2 + 5 * 3)
    assert all(ref() is not None for ref in alive)
    run_weight_tasks(tasks)
    assert weight.grad is not None and torch.equal(weight.grad, torch.full((3, 2), 5.0))
    assert memory.held["activations"] == 0
    assert all(ref() is None for ref in alive)


# The queue


def test_tasks_run_in_order_and_each_begins_while_the_one_before_is_under_way() -> None:
    events: list[str] = []

    def task(name: str) -> WeightTask:
        def start() -> Callable[[], None]:
            events.append(f"{name} begins")
            return lambda: events.append(f"{name} ends")

        return WeightTask(torch.zeros(1), start)

    run_weight_tasks([task("a"), task("b"), task("c")])
    assert events == ["a begins", "b begins", "a ends", "c begins", "b ends", "c ends"]
    run_weight_tasks([])


def test_hooks_of_a_parameter_are_called_in_w() -> None:
    stage = stage_of(nn.Sequential(nn.Linear(3, 2, bias=False)).double(), REPLICATED)
    weight, seen = stage.sharded[0].parameter, []
    weight.register_hook(lambda grad: seen.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    tasks = stage.backward_input(stage(torch.ones(1, 3, dtype=torch.float64)), torch.ones(1, 2, dtype=torch.float64))
    seen.clear()
    stage.backward_weights(tasks)
    assert seen == ["gradient", "accumulated"]


def test_collecting_ends_when_backward_fails() -> None:
    deferred = DeferredGradients()
    with pytest.raises(RuntimeError, match="planted"), deferred.collect():
        assert deferred.collecting
        raise RuntimeError("planted")
    assert not deferred.collecting
