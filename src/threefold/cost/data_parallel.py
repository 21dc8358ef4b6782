"""Seconds of what data-parallel replicas exchange, and of the optimizer step.

Legend: P parameters of one device (its tp part of its stage), g replicas. ZeRO stage 0 all-reduces the gradients once a
step, 1 and 2 reduce-scatter them and all-gather the new parameters, 3 gathers parameters for forward and again for
backward of every microbatch and reduce-scatters gradients (Rajbhandari et al. 2020; Zhao et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from threefold.cost.case import Array, Case
from threefold.cost.collectives import scatter_s
from threefold.cost.elementwise import optimizer_s
from threefold.cost.shape import Number
from threefold.cost.stages import STAGES, StageLayers, StageSeconds, heads_of, stage_layers


@dataclass(frozen=True)
class DeviceParameters:
    """Parameters that one device of a stage holds before ZeRO: ``dense``, replicated over dp, and ``expert``, over
    dp/ep."""

    dense: Array
    expert: Array

    @property
    def total(self) -> Array:
        """All of them."""
        return self.dense + self.expert


def device_parameters(case: Case, layers: StageLayers | None = None) -> dict[str, DeviceParameters]:
    """Parameters of one device of the first, a middle and the last stage."""
    shape, tp, pp = case.shape, case.strategies.tp, case.strategies.pp
    layers = layers or stage_layers(case)
    dense = (shape.attention_parameters + shape.dense_mlp_parameters) / tp + shape.vector_parameters
    expert = shape.expert_parameters / tp / case.strategies.ep
    embedding, head = shape.embedding_parameters / tp, shape.head_parameters / tp
    # A pipeline keeps a tied embedding on both ends; one device keeps it once.
    both = embedding + head * (1 - np.asarray(shape.tied))
    heads = heads_of(case)
    ends = {
        "first": np.where(heads["first"] > 0, both, embedding),
        "middle": np.where(pp == 1, both, 0.0),
        "last": np.where(pp == 1, both, head * heads["last"]),
    }
    counts = {"first": layers.first, "middle": layers.middle, "last": layers.last}
    return {name: DeviceParameters(dense * counts[name] + ends[name], expert * counts[name]) for name in STAGES}


@dataclass(frozen=True)
class DataParallelSeconds:
    """``gradient_s`` is the exposed exchange of gradients and parameters, ``zero3_s`` that of stage 3."""

    gradient_s: Array
    zero3_s: Array
    optimizer_s: Array


def data_parallel_seconds(case: Case, stages: dict[str, StageSeconds]) -> DataParallelSeconds:
    """The slowest stage's exchange and optimizer step."""
    parameters = device_parameters(case)
    per_stage = [_stage(case, stages[name], parameters[name]) for name in STAGES]
    worst = np.stack([one.gradient_s + one.zero3_s + one.optimizer_s for one in per_stage]).argmax(axis=0)

    def pick(name: str) -> Array:
        return np.take_along_axis(np.stack([getattr(one, name) for one in per_stage]), worst[None], axis=0)[0]

    return DataParallelSeconds(pick("gradient_s"), pick("zero3_s"), pick("optimizer_s"))


def _stage(case: Case, stage: StageSeconds, parameters: DeviceParameters) -> DataParallelSeconds:
    strategies, constants = case.strategies, case.constants
    group = strategies.dp * strategies.cp
    sharded = strategies.zero_stage >= 3
    gradient = _exchange_s(case, parameters, case.gradient_bytes)
    update = np.where(strategies.zero_stage >= 1, _exchange_s(case, parameters, case.element_bytes), gradient)
    backward = stage.input_grad_s + stage.weight_grad_s
    hidden = constants.dp_overlap * backward
    plain = np.maximum(gradient + update - hidden, 0.0)
    states = np.where(strategies.zero_stage >= 1, parameters.total / group, parameters.total)
    return DataParallelSeconds(
        np.where(sharded, 0.0, plain),
        np.where(sharded, _zero3_s(case, stage, parameters), 0.0),
        optimizer_s(case, states),
    )


def _exchange_s(case: Case, parameters: DeviceParameters, element_bytes: Number) -> Array:
    """One reduce-scatter (or all-gather) over the replicas; experts are replicated on dp/ep devices only."""
    strategies = case.strategies
    group = strategies.dp * strategies.cp
    in_node = np.clip(case.in_node("dp") * case.in_node("cp"), 1.0, group)
    dense = scatter_s(case, parameters.dense * element_bytes, group, in_node)
    expert_group = np.maximum(group // strategies.ep, 1)
    expert_in_node = np.clip(in_node / strategies.ep, 1.0, expert_group)
    return dense + scatter_s(case, parameters.expert * element_bytes, expert_group, expert_in_node)


def _zero3_s(case: Case, stage: StageSeconds, parameters: DeviceParameters) -> Array:
    """Two gathers and one scatter a microbatch, hidden behind the computation of the layer before."""
    gather = _exchange_s(case, parameters, case.element_bytes)
    scatter = _exchange_s(case, parameters, case.gradient_bytes)
    hidden = case.constants.fsdp_overlap
    forward = np.maximum(gather - hidden * stage.forward_s, 0.0)
    backward = np.maximum(gather + scatter - hidden * (stage.input_grad_s + stage.weight_grad_s), 0.0)
    loads = parameters.total * case.element_bytes / (case.strategies.dp * case.strategies.cp)
    offloaded = np.where(case.strategies.offload_param, 2 * loads / case.machine.pcie_bytes_per_s, 0.0)
    # In a pipeline the parameters stay whole until the step ends (Llama Team 2024): else every microbatch gathers them.
    times = np.where(case.strategies.pp > 1, 1, case.strategies.num_microbatches)
    return times * (forward + backward + offloaded)
