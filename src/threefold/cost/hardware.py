"""Devices and machines: what each kind of accelerator can do, from the packaged table with its sources.

Units are SI throughout: FLOP/s, bytes, bytes/s. "Per device" means in one direction, for one device alone.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING

from threefold.errors import JobError, Problem

if TYPE_CHECKING:
    from threefold.job.spec import ClusterSpec

TABLE = "data/hardware.csv"

TYPICAL_EFFICIENCY = 0.82
"""Measured over peak matmul rate where nobody measured it: the median of the table's measured NVIDIA rows."""


@dataclass(frozen=True)
class _Generation:
    """What a family of chips has in common, by public specification.

    ``speedups`` is the peak of a number format over the peak of bf16. ``pcie_bytes_per_s`` is x16 in one direction,
    ``nic_bits_per_s`` the network of one device where the table says that it varies by machine.
    """

    name: str
    pattern: str
    speedups: Mapping[str, float]
    pcie_bytes_per_s: float
    nic_bits_per_s: float
    nvlink_domain: int = 8


def _with_half(**speedups: float) -> Mapping[str, float]:
    return MappingProxyType({"fp16": 1.0, "bf16": 1.0, **speedups})


_GENERATIONS = (
    _Generation("blackwell-ultra", r"^gb300|^b300", _with_half(fp32=0.033, fp8=2.0, fp4=6.0), 63e9, 400e9),
    _Generation("blackwell", r"^gb200|^b200", _with_half(fp32=0.035, fp8=2.0, fp4=4.0), 63e9, 400e9),
    _Generation("hopper", r"^h100|^h200|^h800", _with_half(fp32=0.068, fp8=2.0), 63e9, 400e9),
    _Generation("ada", r"^l40s|^rtx-40", _with_half(fp32=0.25, fp8=2.0), 31.5e9, 100e9),
    _Generation("ampere", r"^a100|^a800|^a10g|^rtx-30", _with_half(fp32=0.0625), 31.5e9, 100e9),
    _Generation("volta", r"^v100|^t4", MappingProxyType({"fp16": 1.0, "fp32": 0.125}), 15.75e9, 100e9),
    _Generation("cdna3", r"^mi3", _with_half(fp32=0.125, fp8=2.0), 63e9, 400e9),
    _Generation("cdna2", r"^mi2", _with_half(fp32=0.125), 31.5e9, 100e9),
)
_NVLINK_RACK = 72

_DECORATION = frozenset(
    ("nvidia", "tesla", "geforce", "amd", "instinct", "sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "hbm3", "hbm3e")
)
"""Words of full names that tell no two devices of the table apart."""

_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "v100": "v100-32gb",
        "a100": "a100-80gb",
        "a800": "a800-80gb",
        "h100-80gb": "h100",
        "h800-80gb": "h800",
        "h100-96gb": "h100-96gb-hbm2e",
        "h200-141gb": "h200",
        "4090": "rtx-4090",
        "rtx4090": "rtx-4090",
        "3090": "rtx-3090",
        "rtx3090": "rtx-3090",
    }
)


@dataclass(frozen=True)
class Device:
    """One kind of accelerator.

    ``peak_flops_per_s`` is the dense peak by number format, ``matmul_flops_per_s`` the largest bf16 (fp16) rate that a
    matrix multiplication was measured at. ``nvlink_bytes_per_s`` is the fast link between devices (PCIe where there is
    no other), within a domain of ``nvlink_domain`` devices; ``nic_bytes_per_s`` the network of one device.
    """

    name: str
    generation: str
    peak_flops_per_s: Mapping[str, float]
    matmul_flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    nic_bytes_per_s: float
    pcie_bytes_per_s: float
    nvlink_domain: int
    source: str


@dataclass(frozen=True)
class Measured:
    """What a profile says against the cost model.

    ``factors`` are measured over modelled seconds of "embedding", "layer" and "head": forward, input gradient, weight
    gradient; they hold for tensor-parallel communication too where ``with_tp``. ``latency_s`` is of an empty
    collective, ``step_s`` what a step takes besides all that is modelled.
    """

    factors: Mapping[str, tuple[float, float, float]]
    with_tp: bool
    latency_s: float
    step_s: float


@dataclass(frozen=True)
class Hardware:
    """``nodes`` × ``devices_per_node`` devices of one kind; a node is what the fast links connect.

    ``measured`` corrects the cost model, where there is a profile.
    """

    device: Device
    nodes: int
    devices_per_node: int
    inter_node_bytes_per_s: float
    measured: Measured | None = None

    @property
    def num_devices(self) -> int:
        """Devices in all nodes together."""
        return self.nodes * self.devices_per_node


def device_names() -> tuple[str, ...]:
    """The names that ``find_device`` knows, aliases left out, in the order of the table."""
    return tuple(_devices())


def find_device(name: str) -> Device:
    """The device called ``name``: any spelling of it that differs in case, blanks, dashes and the maker's words only.

    Raises JobError naming ``cluster.device`` with the nearest names.
    """
    known = _devices()
    key = _key(name)
    key = _ALIASES.get(key, key)
    if key in known:
        return known[key]
    near = difflib.get_close_matches(key, [*known, *_ALIASES], n=3, cutoff=0.4)
    fix = f"use {' or '.join(near)}" if near else f"use one of {', '.join(known)}"
    raise JobError([Problem("cluster.device", f"no device is known as {name!r}", fix)])


def build_hardware(cluster: ClusterSpec) -> Hardware:
    """The machines of a job. ``inter_node`` is the network of one node, shared by its devices.

    Raises JobError for a device that the table lacks.
    """
    device = find_device(cluster.device)
    per_device = device.nic_bytes_per_s
    if cluster.inter_node is not None:
        per_device = parse_link_bytes_per_s(cluster.inter_node) / cluster.devices_per_node
    return Hardware(device, cluster.nodes, cluster.devices_per_node, per_device)


def parse_link_bytes_per_s(text: str) -> float:
    """``8x200Gb/s`` or ``25GB/s`` in bytes/s: Gb counts bits, GB bytes. Raises JobError naming the key."""
    match = re.fullmatch(r"(?:(\d+)x)?(\d+(?:\.\d+)?)G([bB])/s", text.replace(" ", ""))
    if match is None or float(match[2]) == 0:
        fix = "write LINKSxSPEED like 8x200Gb/s (bits) or 25GB/s (bytes)"
        raise JobError([Problem("cluster.inter_node", f"{text!r} is no network speed", fix)])
    unit = 1e9 if match[3] == "B" else 1e9 / 8
    return int(match[1] or 1) * float(match[2]) * unit


def _key(name: str) -> str:
    words = re.split(r"[\s_()-]+", name.strip().lower())
    return "-".join(word for word in words if word and word not in _DECORATION)


@lru_cache(maxsize=1)
def _devices() -> Mapping[str, Device]:
    text = files("threefold.cost").joinpath(TABLE).read_text(encoding="utf-8")
    return MappingProxyType({device.name: device for device in _read(csv.DictReader(text.splitlines()))})


def _read(rows: csv.DictReader[str]) -> Iterator[Device]:
    for row in rows:
        name = _key(row["name"].split(" (")[0])
        generation = next(known for known in _GENERATIONS if re.search(known.pattern, name))
        peak = float(row["peak_bf16_dense_TFLOPs"] or 835) * 1e12
        measured = float(row["measured_max_matmul_bf16_TFLOPs"] or 0) * 1e12
        nic = float(row["nic_Gbps_per_gpu_typical"] or 0) * 1e9 or generation.nic_bits_per_s
        yield Device(
            name=name,
            generation=generation.name,
            peak_flops_per_s=MappingProxyType({kind: peak * factor for kind, factor in generation.speedups.items()}),
            matmul_flops_per_s=measured or TYPICAL_EFFICIENCY * peak,
            memory_bytes=float(row["memory_GB"])
            * 2**30,  # makers write GB and build GiB: an "80 GB" A100 reports 81,920 MiB
            memory_bytes_per_s=float(row["memory_bandwidth_GBps"]) * 1e9,
            nvlink_bytes_per_s=float(row["nvlink_per_gpu_unidir_GBps"]) * 1e9,
            nic_bytes_per_s=nic / 8,
            pcie_bytes_per_s=generation.pcie_bytes_per_s,
            nvlink_domain=_NVLINK_RACK if name.startswith("gb") else generation.nvlink_domain,
            source=row["source"],
        )
