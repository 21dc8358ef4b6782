"""What is to be judged: a shape, machines, strategies and constants, all broadcast against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from threefold.cost.calibration import Calibration
from threefold.cost.hardware import Hardware, Measured
from threefold.cost.shape import Number, Shape
from threefold.cost.strategies import ORDER_CODES, PRECISION_CODES, RECOMPUTE_CODES, Strategies

Array = NDArray[Any]
FP32, FP16, BF16, FP8, FP4 = (PRECISION_CODES[name] for name in ("fp32", "fp16", "bf16", "fp8", "fp4"))


@dataclass(frozen=True)
class Machine:
    """The rates of ``Hardware`` as scalars or arrays. ``speedup`` is by precision code, over bf16; others in SI
    units."""

    matmul_flops_per_s: Number
    peak_flops_per_s: Number
    speedup: Array
    memory_bytes: Number
    memory_bytes_per_s: Number
    nvlink_bytes_per_s: Number
    nic_bytes_per_s: Number
    pcie_bytes_per_s: Number
    devices_per_node: Number
    nodes: Number
    measured: Measured | None = None

    @classmethod
    def of(cls, hardware: Hardware) -> Machine:
        """The machines of one cluster."""
        device = hardware.device
        peak = device.peak_flops_per_s
        half = peak.get("bf16", peak["fp16"])
        return cls(
            matmul_flops_per_s=device.matmul_flops_per_s,
            peak_flops_per_s=half,
            speedup=np.array([[peak.get(name, half) / half] for name in PRECISION_CODES]),
            memory_bytes=device.memory_bytes,
            memory_bytes_per_s=device.memory_bytes_per_s,
            nvlink_bytes_per_s=device.nvlink_bytes_per_s,
            nic_bytes_per_s=hardware.inter_node_bytes_per_s,
            pcie_bytes_per_s=device.pcie_bytes_per_s,
            devices_per_node=float(hardware.devices_per_node),
            nodes=float(hardware.nodes),
            measured=hardware.measured,
        )


@dataclass(frozen=True)
class Cut:
    """How a pipeline's layers are cut: ``sizes`` of its pp × chunks stages in pipeline order, on which ``devices``.

    Half a layer counts as half of what a layer costs.
    """

    sizes: tuple[float, ...]
    devices: tuple[int, ...]

    @property
    def device_layers(self) -> tuple[float, ...]:
        """Layers of each device, over all its stages."""
        totals = [0.0] * (1 + max(self.devices))
        for size, device in zip(self.sizes, self.devices, strict=True):
            totals[device] += size
        return tuple(totals)


@dataclass(frozen=True)
class Case:
    """Shape, machine, strategies and constants; everything it derives has one value a strategy.

    ``cut`` is for a case of one strategy, in place of the strategy's own partition.
    """

    shape: Shape
    machine: Machine
    strategies: Strategies
    constants: Calibration
    cut: Cut | None = None

    @cached_property
    def tokens(self) -> Array:
        """Of one microbatch on one device: B·S/cp."""
        return self.strategies.micro_batch * self.shape.sequence / self.strategies.cp

    @cached_property
    def element_bytes(self) -> Array:
        """Of activations and parameters in the computation: 4 for fp32, else 2 (8-bit formats keep 16-bit ones)."""
        return np.where(self.strategies.precision == FP32, 4.0, 2.0)

    @cached_property
    def gradient_bytes(self) -> Array:
        """Bytes of a gradient that is reduced: 4 with fp32, the width of fp16 with fp16, else the stack's."""
        code = self.strategies.precision
        return np.where(code == FP32, 4.0, np.where(code == FP16, 2.0, self.constants.gradient_bytes))

    @cached_property
    def norm_split(self) -> Array:
        """Over how many devices norms, dropout and residuals are split: tp under sequence parallelism, else 1."""
        return np.where(self.strategies.sequence_parallel, self.strategies.tp, 1)

    @cached_property
    def full_recompute(self) -> Array:
        """1 where the whole forward pass is recomputed."""
        return (self.strategies.recompute == RECOMPUTE_CODES["full"]).astype(float)

    @cached_property
    def selective_recompute(self) -> Array:
        """1 where only the attention core is recomputed."""
        return (self.strategies.recompute == RECOMPUTE_CODES["selective"]).astype(float)

    @cached_property
    def matmul_flops_per_s(self) -> Array:
        """The largest measured rate, in the 16-bit (fp32: that) format."""
        return self.machine.matmul_flops_per_s * self._speedup(np.minimum(self.strategies.precision, BF16))

    @cached_property
    def half_flops_per_s(self) -> Array:
        """What a large matrix multiplication reaches in training, in the 16-bit (fp32: that) format."""
        return self.constants.matmul_efficiency * self.matmul_flops_per_s

    @cached_property
    def single_flops_per_s(self) -> Array:
        """The same on the fp32 units, without tensor cores."""
        fp32 = np.full(len(self.strategies), FP32)
        return self.constants.matmul_efficiency * self.machine.matmul_flops_per_s * self._speedup(fp32)

    @cached_property
    def dense_flops_per_s(self) -> Array:
        """The same in the precision of the layers' matrices; 8 and 4 bits gain less than their peak promises."""
        code = self.strategies.precision
        peak_gain = self._speedup(code)
        share = np.where(code == FP8, self.constants.fp8_gain, np.where(code == FP4, self.constants.fp4_gain, 1.0))
        gain = np.where(code >= FP8, np.maximum(1.0, 1 + (peak_gain - 1) * share), peak_gain)
        return self.constants.matmul_efficiency * self.machine.matmul_flops_per_s * gain

    @property
    def memory_bytes_per_s(self) -> Number:
        """What memory-bound kernels reach."""
        return self.constants.memory_efficiency * self.machine.memory_bytes_per_s

    def in_node(self, axis: str) -> Array:
        """How many ranks of ``axis`` ("tp", "cp", "pp", "dp") that differ in nothing else share a node."""
        return self._in_node[axis]

    @cached_property
    def _in_node(self) -> Mapping[str, Array]:
        strides = self._strides()
        sizes = {axis: getattr(self.strategies, axis) for axis in strides}
        return {
            axis: np.clip(self.machine.devices_per_node / stride, 1.0, sizes[axis]) for axis, stride in strides.items()
        }

    def _strides(self) -> dict[str, Array]:
        """Distance of neighbours on each axis: the product of the axes inside it."""
        strategies = self.strategies
        strides = {axis: np.ones(len(strategies)) for axis in ("tp", "cp", "pp", "dp")}
        present = np.flatnonzero(np.bincount(strategies.order, minlength=len(ORDER_CODES)))
        for order, code in ORDER_CODES.items():
            if code not in present:
                continue
            inside = np.ones(len(strategies))
            # Context parallelism has no place of its own in the order: it follows tp.
            for axis in order.replace("tp", "tp,cp").split(","):
                strides[axis] = np.where(strategies.order == code, inside, strides[axis])
                inside = inside * getattr(strategies, axis)
        return strides

    def _speedup(self, code: Array) -> Array:
        if self.machine.speedup.shape[1] == 1:
            return self.machine.speedup[code, 0]
        return self.machine.speedup[code, np.arange(len(code))]
