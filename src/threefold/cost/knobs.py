"""Which constants are fitted, and what is believed of them before any run is seen.

A prior is a physical default with the width that experience allows. The priors were chosen with all published runs in
view, so leaving a source out tests the fitted constants, not the priors and not the form of the model.
Software generations that share kernels share the constants of those kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from threefold.cost.completion import DEEPSPEED, DEEPSPEED_SERIAL, EAGER, FSDP, FSDP2, MEGATRON, MODERN
from threefold.cost.fitting import Knob

BOTH_DEEPSPEED = f"{DEEPSPEED}|{DEEPSPEED_SERIAL}"
UNFUSED_KERNELS = f"{MEGATRON}|{BOTH_DEEPSPEED}"
FUSED_KERNELS = f"{MODERN}|{EAGER}"
BOTH_FSDP = f"{FSDP}|{FSDP2}"

# What a generation is, not how fast: never fitted. FSDP stacks come with and without torch.compile and a fused loss.
_UNFUSED: Mapping[str, float] = MappingProxyType({"flash": 0.0, "split_messages": 1.0, "message_copies": 1.0})
BASE: Mapping[str, Any] = MappingProxyType(
    {
        "defaults": {},
        "generations": {},
        "software": {
            MODERN: {"logit_bytes": 8.0},
            MEGATRON: {**_UNFUSED},
            DEEPSPEED: {**_UNFUSED, "gradient_copy_bytes": 2.0},
            DEEPSPEED_SERIAL: {**_UNFUSED, "gradient_copy_bytes": 2.0, "serial_launch": 1.0},
            FSDP: {"master_sharded": 1.0, "logit_bytes": 6.0, "eager": 0.5},
            # Its recipes compute the loss in separate operations: logits in 16 and 32 bits, and the gradient of both.
            FSDP2: {"master_sharded": 1.0, "logit_bytes": 10.0, "eager": 0.5},
            EAGER: {"eager": 1.0},
        },
        "software_on_generation": {},
    }
)


def _any(name: str, prior: float, sigma: float, most: float = 1e12) -> Knob:
    return Knob("defaults", "", name, prior, sigma, most=most)


def _device(generation: str, name: str, prior: float, sigma: float, most: float = 1e12) -> Knob:
    return Knob("generations", generation, name, prior, sigma, most=most)


def _software(software: str, name: str, prior: float, sigma: float, most: float = 1e12) -> Knob:
    return Knob("software", software, name, prior, sigma, most=most)


KNOBS: tuple[Knob, ...] = (
    # Chips since Hopper draw more power at full rate than they may: in training they reach less of their best.
    _device("ampere", "matmul_efficiency", 0.93, 0.08, most=1.05),
    _device("hopper", "matmul_efficiency", 0.78, 0.10, most=1.05),
    _device("blackwell", "matmul_efficiency", 0.62, 0.10, most=1.05),
    _device("blackwell-ultra", "matmul_efficiency", 0.65, 0.10, most=1.05),
    _any("gemm_depth", 110.0, 0.30),
    _any("lost_waves", 0.30, 0.30),
    _any("misalignment", 0.50, 0.30),
    _any("memory_efficiency", 0.85, 0.08, most=1.0),
    _any("fp8_gain", 1.15, 0.10, most=1.25),
    _any("fp4_gain", 0.8, 0.30, most=1.25),
    _software(UNFUSED_KERNELS, "elementwise_passes", 1.15, 0.30),
    _software(BOTH_FSDP, "elementwise_passes", 1.6, 0.30),
    _software(FUSED_KERNELS, "elementwise_passes", 1.0, 0.30),
    _software(UNFUSED_KERNELS, "score_bytes", 27.0, 0.30),
    _software(UNFUSED_KERNELS, "loss_bytes", 50.0, 0.30),
    _software(BOTH_FSDP, "selective_share", 0.5, 0.30, most=1.0),
    # FlashAttention 2 reaches most of its share on Ampere; Hopper needs newer kernels, which FSDP stacks of 2023 lack.
    _device("ampere", "attention_efficiency", 0.60, 0.20),
    _device("hopper", "attention_efficiency", 0.50, 0.20),
    Knob("software_on_generation", f"{FSDP} hopper|{FSDP2} hopper", "attention_efficiency", 0.40, 0.20),
    _device("blackwell", "attention_efficiency", 0.55, 0.20),
    _device("blackwell-ultra", "attention_efficiency", 0.55, 0.20),
    # About 25 operations of 30-40 µs each, Python and autograd included, in eager PyTorch of 2021; newer stacks fuse.
    _software(MEGATRON, "launch_s", 800e-6, 0.20),
    _software(DEEPSPEED, "launch_s", 1000e-6, 0.20),
    # Waiting for each of about 60 kernels adds 10-20 µs to it, and messages wait for each other, both ways.
    _software(DEEPSPEED_SERIAL, "launch_s", 1900e-6, 0.20),
    _software(DEEPSPEED_SERIAL, "pp_exposed", 2.0, 0.20, most=4.0),
    _software(BOTH_FSDP, "launch_s", 500e-6, 0.30),
    _software(FUSED_KERNELS, "launch_s", 250e-6, 0.30),
    _any("launch_collective_s", 40e-6, 0.50),
    _software(MEGATRON, "step_s", 5e-3, 0.70),
    _software(BOTH_DEEPSPEED, "step_s", 5e-3, 0.70),
    _any("nvlink_efficiency", 0.80, 0.15, most=1.0),
    _any("nic_efficiency", 0.76, 0.15, most=1.0),
    _any("nvlink_latency_s", 10e-6, 0.50),
    _any("jitter", 0.002, 0.50, most=0.02),
    _software(FUSED_KERNELS, "tp_exposed", 0.6, 0.30, most=1.0),
    _software(FUSED_KERNELS, "pp_exposed", 0.3, 0.50, most=1.0),
    # Newer stacks hide part of the all-to-alls behind the other half of a batch, or behind shared experts.
    _software(FUSED_KERNELS, "ep_exposed", 0.7, 0.30, most=1.0),
    _software(f"{MEGATRON}|{DEEPSPEED}", "pp_exposed", 1.0, 0.20, most=1.2),
    _software(BOTH_FSDP, "fsdp_overlap", 0.9, 0.20, most=1.0),
    _software(FUSED_KERNELS, "dp_overlap", 0.5, 0.50, most=1.0),
)

MEMORY_KNOBS: tuple[Knob, ...] = (
    _software(FUSED_KERNELS, "reserved_bytes", 1.5e9, 0.40),
    _software(MEGATRON, "reserved_bytes", 2.5e9, 0.40),
    # DeepSpeed holds whole buckets of gradients and of gathered parameters besides.
    _software(BOTH_DEEPSPEED, "reserved_bytes", 5.5e9, 0.40),
    _software(BOTH_FSDP, "reserved_bytes", 1.5e9, 0.40),
    _software(MODERN, "fragmentation", 0.03, 0.40),
    # Operations that are not fused ask for memory in many sizes, and leave gaps.
    _software(EAGER, "fragmentation", 0.12, 0.40),
    _software(MEGATRON, "fragmentation", 0.05, 0.40),
    _software(BOTH_DEEPSPEED, "fragmentation", 0.12, 0.40),
    _software(BOTH_FSDP, "fragmentation", 0.03, 0.40),
    _software(UNFUSED_KERNELS, "message_copies", 1.0, 0.30),
)
"""The same for memory. These do not touch the step time, but for what a run leaves unsaid."""
