"""Constants that are fitted, not derived: how much of what a device can do a software stack gets out of it.

They depend on the generation of the software, some on the generation of the device, and on nothing else: never on one
run or on one source of runs. ``data/calibration.json`` is written by ``scripts/fit_cost_model.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from threefold.cost.shape import Number

TABLE = "data/calibration.json"
DEFAULT_SOFTWARE = "modern"


@dataclass(frozen=True)
class Calibration:
    """The constants for one software generation, or an array of each for many runs.

    ``software`` is a label only. Shares and factors have no unit.
    """

    software: str = DEFAULT_SOFTWARE
    # Compute
    matmul_efficiency: Number = 0.92
    """Rate of a large matrix multiplication in training over the largest measured one."""
    gemm_depth: Number = 150.0
    """Inner dimension K at which start and end of the inner loop take as long as the multiplication itself."""
    lost_waves: Number = 0.5
    """Waves of tiles that a matrix multiplication loses to its last, part-empty one."""
    misalignment: Number = 0.5
    """Slow-down of matrix multiplications whose features no power of two divides; none where 64 does."""
    fp8_gain: Number = 0.80
    """Share of the peak gain of 8-bit matrix multiplications that is left after casts and scaling."""
    fp4_gain: Number = 0.60
    """The same for 4-bit ones."""
    flash: Number = 1.0
    """1 where the attention scores never leave the chip (FlashAttention), 0 where they go through memory."""
    attention_efficiency: Number = 0.55
    """Rate of the fused attention kernel over the largest measured matrix multiplication, forward."""
    attention_backward: Number = 0.80
    """The backward kernel's rate over the forward one's; it recomputes the scores."""
    causal_skip: Number = 0.9
    """Share of the masked half of the scores that the attention kernel skips."""
    selective_share: Number = 0.0
    """Share of a layer's forward pass that selective recompute repeats besides the attention core: 0 in Megatron;
    PyTorch's policy keeps only every second matrix multiplication."""
    score_bytes: Number = 30.0
    """Bytes moved for each attention score, forward and backward, without a fused kernel."""
    loss_bytes: Number = 20.0
    """Bytes moved for each logit, forward and backward: five passes in fp32 where softmax and cross entropy are
    fused."""
    memory_efficiency: Number = 0.80
    """Share of the memory bandwidth that memory-bound kernels reach."""
    elementwise_passes: Number = 1.0
    """Bytes of norms, activations, dropout and residuals over those of perfectly fused kernels."""
    # Host
    launch_s: Number = 250e-6
    """Time in which the host starts the kernels of one layer's forward pass; backward takes as long again."""
    serial_launch: Number = 0.0
    """1 where the host waits for each kernel before it starts the next (CUDA_LAUNCH_BLOCKING=1)."""
    launch_collective_s: Number = 40e-6
    """The same for one collective."""
    step_s: Number = 5e-3
    """Time of a step that nothing else explains: data loading, logging, gradient norm, loss."""
    # Links
    nvlink_efficiency: Number = 0.75
    """Share of the fast link's rate that large collectives reach."""
    nic_efficiency: Number = 0.80
    """The same for the network between nodes."""
    nvlink_latency_s: Number = 10e-6
    """Time of an empty collective inside a node."""
    nic_latency_s: Number = 20e-6
    """Time of one step of a ring between nodes."""
    tp_exposed: Number = 1.0
    """Share of the tensor-parallel collectives that computation does not hide."""
    ep_exposed: Number = 1.0
    """The same of expert parallelism's all-to-alls."""
    split_messages: Number = 0.0
    """1 where tp ranks send a part each of a message between stages also without sequence parallelism."""
    pp_exposed: Number = 1.0
    """Share of the messages between stages that computation does not hide in the steady state."""
    dp_overlap: Number = 0.0
    """Share of one microbatch's backward pass that can hide the gradients' collectives."""
    fsdp_overlap: Number = 0.9
    """Share of the computation that can hide ZeRO stage 3's gathers and scatters."""
    jitter: Number = 0.0
    """Relative slow-down for every doubling of the number of nodes: the slowest device sets the pace."""
    # Memory
    gradient_bytes: Number = 4.0
    """Bytes of a gradient with bf16: 4 where they are accumulated in fp32, else 2. With fp16 they are fp16."""
    gradient_copy_bytes: Number = 0.0
    """Bytes of a second copy of each gradient that is held beside (bf16 beside fp32)."""
    message_copies: Number = 0.0
    """Copies of what a stage sends that are kept for each microbatch in flight."""
    master_sharded: Number = 0.0
    """1 where the fp32 master weights are the parameters themselves, sharded (FSDP): no 16-bit copy is kept."""
    eager: Number = 0.0
    """1 where norms, rotations and gates run as separate PyTorch operations that each keep their inputs, or a share."""
    logit_bytes: Number = 10.0
    """Bytes held for each logit at the peak: in 16 bits, in fp32 and its gradient, unless fused in place."""
    reserved_bytes: Number = 2.5e9
    """Held by the driver, the libraries and the communicators."""
    fragmentation: Number = 0.05
    """Share of the allocated memory that the allocator wastes."""
    # The stated 90 % interval, as factors on the step time
    interval_low: Number = 0.80
    interval_high: Number = 1.25


_NUMBERS = tuple(field.name for field in fields(Calibration) if field.name != "software")


def software_names() -> tuple[str, ...]:
    """The software generations with constants of their own."""
    return tuple(_table()["software"])


@lru_cache(maxsize=64)
def load_calibration(software: str = DEFAULT_SOFTWARE, generation: str = "") -> Calibration:
    """The packaged constants for ``software`` on devices of ``generation`` ("hopper"); unknown ones get defaults."""
    return calibration_from(_table(), software, generation)


def calibration_from(table: Mapping[str, Any], software: str, generation: str = "") -> Calibration:
    """Constants of a table like ``calibration.json``: defaults, then the software's, then those of both."""
    values: dict[str, float] = dict(table.get("defaults", {}))
    values |= table.get("generations", {}).get(generation, {})
    values |= table.get("software", {}).get(software, {})
    values |= table.get("software_on_generation", {}).get(f"{software} {generation}", {})
    return Calibration(software=software, **values)


def stack_calibrations(calibrations: Sequence[Calibration]) -> Calibration:
    """One calibration with an array of each constant: element i is that of the i-th."""
    kinds = {id(one): one for one in calibrations}
    place = {key: index for index, key in enumerate(kinds)}
    chosen = np.array([place[id(one)] for one in calibrations], dtype=np.int64)
    arrays = {name: np.array([getattr(one, name) for one in kinds.values()], dtype=float)[chosen] for name in _NUMBERS}
    return replace(Calibration(), **arrays)


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    return json.loads(files("threefold.cost").joinpath(TABLE).read_text(encoding="utf-8"))
