"""Hardware as a profile measured it: what the cost model is off by at the profiled point, and the links' own numbers.

The search asks for many layouts, a profile has measured one. So measured seconds over modelled ones, of each part and
pass, correct the model everywhere: at the profiled tp, micro batch and recompute that gives the measurement itself.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from threefold.cost.calibration import Calibration, load_calibration
from threefold.cost.case import Case, Machine
from threefold.cost.elementwise import OPTIMIZER_BYTES
from threefold.cost.hardware import Device, Hardware, Measured, build_hardware
from threefold.cost.layer import PartCost, embedding_cost, head_cost, layer_cost
from threefold.cost.profile import PartProfile, Profile
from threefold.cost.shape import shape_of
from threefold.cost.strategies import PRECISION_CODES, RECOMPUTE_CODES, Strategies
from threefold.job.spec import ClusterSpec, Job

CPU = "cpu"
_HALF_OF_SINGLE = 1.0
"""Peak of half precision over that of single precision on a CPU: only a start, which the factors correct."""


def measured_hardware(job: Job, profile: Profile) -> Hardware:
    """The machines of ``job`` with the costs in ``profile``, which must be of its work.

    A job without a cluster runs on one node of CPUs.
    """
    cluster = job.cluster or ClusterSpec(device=CPU, nodes=1, devices_per_node=job.world_size)
    base = _cpu_hardware(cluster, profile) if cluster.device == CPU else build_hardware(cluster)
    constants = load_calibration(generation=base.device.generation)
    device = replace(
        base.device,
        nvlink_bytes_per_s=_ring_bytes_per_s(profile, base.device) / float(constants.nvlink_efficiency),
        memory_bytes_per_s=_optimizer_bytes_per_s(profile) / float(constants.memory_efficiency),
    )
    hardware = replace(base, device=device)
    return replace(hardware, measured=_measured(hardware, constants, profile))


def _cpu_hardware(cluster: ClusterSpec, profile: Profile) -> Hardware:
    """A node of CPUs: a device is a rank's share of the cores."""
    flops = 6 * profile.layer.parameters * profile.workload.micro_batch * profile.workload.sequence_length
    rate = flops / max(profile.layer.forward_s.median + profile.layer.backward_s.median, 1e-12)
    link = _p2p_bytes_per_s(profile) or rate / 10
    device = Device(
        name=CPU,
        generation=CPU,
        peak_flops_per_s={"fp16": rate * _HALF_OF_SINGLE, "bf16": rate * _HALF_OF_SINGLE, "fp32": rate},
        matmul_flops_per_s=rate,
        memory_bytes=profile.machine.memory_bytes,
        memory_bytes_per_s=rate / 10,
        nvlink_bytes_per_s=link,
        nic_bytes_per_s=link,
        pcie_bytes_per_s=link,
        nvlink_domain=cluster.devices_per_node,
        source=f"profile of {profile.machine.host}",
    )
    return Hardware(device, cluster.nodes, cluster.devices_per_node, link)


def _p2p_bytes_per_s(profile: Profile) -> float | None:
    link = profile.link("p2p", 2)
    return None if link is None else link.bytes_per_s


def _ring_bytes_per_s(profile: Profile, device: Device) -> float:
    """Out of each rank, in the largest all-reduce that was measured: 2 n (g - 1)/g bytes in n/beta seconds."""
    links = [link for link in profile.links if link.operation == "all_reduce"]
    if not links:
        return _p2p_bytes_per_s(profile) or device.nvlink_bytes_per_s
    largest = max(links, key=lambda link: link.ranks)
    return 2 * (largest.ranks - 1) / largest.ranks * largest.bytes_per_s


def _optimizer_bytes_per_s(profile: Profile) -> float:
    return OPTIMIZER_BYTES / max(profile.optimizer_s_per_parameter, 1e-15)


def _measured(hardware: Hardware, constants: Calibration, profile: Profile) -> Measured:
    work = profile.workload
    strategy = Strategies.build(
        tp=work.tp,
        micro_batch=work.micro_batch,
        sequence_parallel=work.sequence_parallel,
        recompute=RECOMPUTE_CODES[work.recompute],
        precision=PRECISION_CODES["fp32" if work.precision == "fp64" else work.precision],
    )
    case = Case(shape_of(work.model, work.sequence_length), Machine.of(hardware), strategy, constants)
    modelled = {"embedding": embedding_cost(case), "layer": layer_cost(case), "head": head_cost(case)}
    latency = profile.link("all_reduce", 2) or profile.link("p2p", 2)
    return Measured(
        factors={name: _factors(getattr(profile, name), cost, work.tp > 1) for name, cost in modelled.items()},
        with_tp=work.tp > 1,
        latency_s=latency.alpha_s if latency else float(constants.nvlink_latency_s),
        step_s=profile.step_s,
    )


def _factors(part: PartProfile, cost: PartCost, with_tp: bool) -> tuple[float, float, float]:
    """Measured over modelled: forward, input gradient, weight gradient; the last two add up to the whole backward."""
    apart = part.input_grad_s.median + part.weight_grad_s.median
    share = part.input_grad_s.median / apart if apart else 0.5
    backward = part.backward_s.median
    forward_s = cost.forward_s + (cost.tp_forward_s if with_tp else 0.0)
    input_s = cost.input_grad_s + (cost.tp_backward_s if with_tp else 0.0)
    pairs = (
        (part.forward_s.median, forward_s),
        # The model counts no weight gradient of an embedding: what was measured is then all of its backward pass.
        (backward * share if cost.weight_grad_s.any() else backward, input_s),
        (backward * (1 - share), cost.weight_grad_s),
    )
    return tuple(seconds / float(np.max(modelled)) if np.any(modelled) else 1.0 for seconds, modelled in pairs)  # pyright: ignore[reportReturnType]
