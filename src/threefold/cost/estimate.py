"""What strategies cost: seconds, bytes sent, bytes held. The one entry to the cost model.

``estimate`` judges many strategies of one model on one cluster; ``judge`` takes any case, also one with another model
and other machines in every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from threefold.cost.calibration import Calibration, load_calibration
from threefold.cost.case import Array, Case, Cut, Machine
from threefold.cost.data_parallel import data_parallel_seconds
from threefold.cost.flops import model_flops
from threefold.cost.hardware import Hardware
from threefold.cost.memory import ITEMS, layer_activation_bytes, memory_bytes, worst_stage
from threefold.cost.pipeline import pipeline_seconds
from threefold.cost.shape import shape_of
from threefold.cost.stages import (
    STAGES,
    StageSeconds,
    message_bytes,
    message_s,
    stage_layers,
    stage_seconds,
    virtual_stage_layers,
    virtual_stage_seconds,
)
from threefold.cost.strategies import Strategies
from threefold.cost.volume import communication_bytes

if TYPE_CHECKING:
    from threefold.job.spec import ModelSpec

USABLE_MEMORY = 0.97
"""Share of the device's memory that a process can get; the rest is the driver's."""


@dataclass(frozen=True)
class StageEstimate:
    """One stage's seconds for one microbatch over all its chunks (computation with the exposed tp, cp and ep
    communication), its message to the next stage, and the bytes it keeps for a microbatch.
    """

    forward_s: Array
    input_grad_s: Array
    weight_grad_s: Array
    p2p_s: Array
    activation_bytes: Array
    num_layers: Array


@dataclass(frozen=True)
class Estimates:
    """One value a strategy. Seconds are of one optimizer step; ``step_s_low`` and ``step_s_high`` bound the 90 %
    interval.

    ``exposed_comm_s`` and ``communication_bytes`` are by axis (tp, pp, dp, cp, ep), the bytes out of one device;
    ``memory_bytes`` by item, of the stage that holds the most.
    """

    step_s: Array
    step_s_low: Array
    step_s_high: Array
    tokens_per_s: Array
    model_flops_per_s_per_device: Array
    mfu: Array
    compute_s: Array
    bubble_s: Array
    optimizer_s: Array
    exposed_comm_s: dict[str, Array]
    communication_bytes: dict[str, Array]
    memory_bytes: dict[str, Array]
    peak_memory_bytes: Array
    usable_memory_bytes: Array
    fits: Array
    stages: dict[str, StageEstimate]

    @property
    def bubble_fraction(self) -> Array:
        """Share of the step that the busiest device waits for the pipeline to fill and drain."""
        return self.bubble_s / self.step_s

    @property
    def tflops_per_gpu(self) -> Array:
        """Model FLOP/s of one device, in 10¹²."""
        return self.model_flops_per_s_per_device / 1e12


@dataclass(frozen=True)
class StageCosts:
    """What ``simulate`` needs, one entry a stage in pipeline order; seconds and bytes of one microbatch and chunk."""

    forward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    p2p_s: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    static_bytes: tuple[float, ...]
    gradient_sync_s: float
    optimizer_s: float


def estimate(
    model: ModelSpec,
    sequence_length: int,
    hardware: Hardware,
    strategies: Strategies,
    calibration: Calibration | None = None,
    cut: Cut | None = None,
) -> Estimates:
    """Predict every strategy of ``model`` on ``hardware``; ``calibration`` defaults to a modern stack's constants.

    ``cut`` is for a single strategy whose stages are neither even nor balanced.
    """
    constants = calibration or constants_of(hardware)
    return judge(Case(shape_of(model, sequence_length), Machine.of(hardware), strategies, constants, cut))


def constants_of(hardware: Hardware) -> Calibration:
    """A modern stack's constants on these devices, with what a profile measured in their place."""
    constants = load_calibration(generation=hardware.device.generation)
    if hardware.measured is None:
        return constants
    measured = hardware.measured
    # A process on a CPU has no driver that reserves memory of a device.
    reserved = 0.0 if hardware.device.name == "cpu" else constants.reserved_bytes
    return replace(constants, nvlink_latency_s=measured.latency_s, step_s=measured.step_s, reserved_bytes=reserved)


def judge(case: Case) -> Estimates:
    """Predict a case."""
    strategies = case.strategies
    stages = stage_seconds(case)
    pipeline = pipeline_seconds(case, stages)
    replicas = data_parallel_seconds(case, stages)
    slow = 1 + np.asarray(case.constants.jitter) * np.log2(np.maximum(_nodes(case), 1.0))
    step = (pipeline.total_s + replicas.gradient_s + replicas.zero3_s + replicas.optimizer_s) * slow
    step = step + case.constants.step_s
    memory = worst_stage(memory_bytes(case))
    peak = sum(memory.values(), start=np.zeros(1))
    usable = np.broadcast_to(USABLE_MEMORY * np.asarray(case.machine.memory_bytes), peak.shape)
    exposed = _exposed(case, stages, pipeline.slowest)
    exposed |= {"pp": pipeline.message_s, "dp": replicas.gradient_s + replicas.zero3_s}
    flops = model_flops(case) / step / strategies.num_devices
    return Estimates(
        step_s=step,
        step_s_low=step * case.constants.interval_low,
        step_s_high=step * case.constants.interval_high,
        tokens_per_s=strategies.global_batch * case.shape.sequence / step,
        model_flops_per_s_per_device=flops,
        mfu=flops / case.machine.peak_flops_per_s,
        compute_s=pipeline.busy_s - sum(exposed[axis] for axis in ("tp", "cp", "ep")),
        bubble_s=pipeline.bubble_s,
        optimizer_s=replicas.optimizer_s,
        exposed_comm_s=exposed,
        communication_bytes=communication_bytes(case),
        memory_bytes={item: memory[item] for item in ITEMS},
        peak_memory_bytes=peak,
        usable_memory_bytes=usable,
        fits=peak <= usable,
        stages=_stage_estimates(case, stages),
    )


def stage_costs(
    model: ModelSpec,
    sequence_length: int,
    hardware: Hardware,
    strategy: Strategies,
    calibration: Calibration | None = None,
    *,
    rank_of: Sequence[int] | None = None,
    cut: Cut | None = None,
) -> StageCosts:
    """The costs of the single strategy in ``strategy``, one entry for each of its pp × chunks stages.

    ``rank_of`` says which device holds which stage; by default they go round the devices. What a device holds besides
    activations is spread evenly over its stages.
    """
    if len(strategy) != 1:
        raise ValueError(f"stage_costs takes one strategy, not {len(strategy)}")
    constants = calibration or constants_of(hardware)
    case = Case(shape_of(model, sequence_length), Machine.of(hardware), strategy, constants, cut)
    found = judge(case)
    held = memory_bytes(case)
    pp, chunks = int(strategy.pp[0]), int(strategy.chunks[0])
    names = _names(pp)
    static = {
        name: float(sum(float(held[name][item][0]) for item in ITEMS if item != "activations")) for name in STAGES
    }
    stages, layers = virtual_stage_seconds(case), virtual_stage_layers(case)
    outside = [float((stage.total_s - stage.compute_s)[0]) for stage in stages]
    each = float(_kept_bytes(case)[0])
    ranks = rank_of or [stage % pp for stage in range(pp * chunks)]
    return StageCosts(
        forward_s=tuple(float(s.forward_s[0]) + o / 3 for s, o in zip(stages, outside, strict=True)),
        input_grad_s=tuple(float(s.input_grad_s[0]) + o * 2 / 3 for s, o in zip(stages, outside, strict=True)),
        weight_grad_s=tuple(float(stage.weight_grad_s[0]) for stage in stages),
        p2p_s=(float(message_s(case)[0]),) * len(stages),
        activation_bytes=tuple(each * count for count in layers),
        static_bytes=tuple(static[names[rank]] / chunks for rank in ranks),
        gradient_sync_s=float(found.exposed_comm_s["dp"][0]),
        optimizer_s=float(found.optimizer_s[0]),
    )


def _names(stages: int) -> tuple[str, ...]:
    if stages == 1:
        return ("first",)
    return ("first", *(["middle"] * (stages - 2)), "last")


def _nodes(case: Case) -> Array:
    return np.ceil(case.strategies.num_devices / case.machine.devices_per_node)


def _exposed(case: Case, stages: dict[str, StageSeconds], slowest: Array) -> dict[str, Array]:
    def of(name: str) -> Array:
        values = np.stack([getattr(stages[stage], name) for stage in STAGES])
        return case.strategies.num_microbatches * np.take_along_axis(values, slowest[None], axis=0)[0]

    return {"tp": of("tp_s"), "cp": of("cp_s"), "ep": of("ep_s")}


def _kept_bytes(case: Case) -> Array:
    """What a layer keeps of one microbatch."""
    return np.where(case.full_recompute > 0, message_bytes(case), layer_activation_bytes(case))


def _stage_estimates(case: Case, stages: dict[str, StageSeconds]) -> dict[str, StageEstimate]:
    layers = stage_layers(case)
    counts = {"first": layers.first, "middle": layers.middle, "last": layers.last}
    message = message_s(case)
    each = _kept_bytes(case)

    def one(name: str) -> StageEstimate:
        stage = stages[name]
        outside = stage.total_s - stage.compute_s
        return StageEstimate(
            forward_s=stage.forward_s + outside / 3,
            input_grad_s=stage.input_grad_s + outside * 2 / 3,
            weight_grad_s=stage.weight_grad_s,
            p2p_s=message,
            activation_bytes=each * counts[name],
            num_layers=counts[name],
        )

    return {name: one(name) for name in STAGES}
