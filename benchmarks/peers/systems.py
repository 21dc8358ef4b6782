"""Which systems there are, by mode. Nothing is imported until a worker builds its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MODES: Mapping[str, str] = {
    "dp": "data parallel",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "tp": "tensor parallel",
    "tp_sp": "tensor and sequence parallel",
    "pp": "pipeline",
    "3d": "dp 2 x tp 2 x pp 2",
}
"""What has the peer ``bound`` among the systems of a mode has no losses to check."""


@dataclass(frozen=True)
class System:
    """One row of the table. ``build`` names a function of ``Place`` in this package; ``processes`` None: one a rank."""

    mode: str
    peer: str
    name: str
    build: str
    options: Mapping[str, Any] = field(default_factory=dict)
    processes: int | None = None
    interpreter: str = "own"
    schedule: str | None = None


_REPLICA = System("bound", "bound", "no communication", "bounds:replica")
_SHARD = System("bound", "bound", "no communication", "bounds:shard")
BOUNDS: Mapping[str, System] = {
    **dict.fromkeys(("dp", "zero1", "zero2", "zero3", "3d"), _REPLICA),
    **dict.fromkeys(("tp", "tp_sp"), _SHARD),
    "pp": System("bound", "bound", "no communication, no bubble, stages as cut", "bounds:stage"),
}
"""By mode."""
SINGLE = System("single", "bound", "single process", "bounds:replica", processes=1)


def _deepspeed(mode: str, stage: int) -> System:
    return System(mode, "deepspeed", f"DeepSpeed ZeRO-{stage}", "deepspeeds:zero", {"stage": stage}, None, "deepspeed")


def _torch_pipeline(schedule: str, name: str) -> System:
    options = {"schedule": schedule}
    return System("pp", "pipelining", f"torch pipelining {name}", "torches:pipeline", options, schedule=schedule)


def _threefold(mode: str, name: str, **options: Any) -> System:
    processes = options.pop("processes", None)
    schedule = options.get("schedule") if mode == "pp" else None
    return System(mode, "threefold", f"threefold{name}", "threefolds:train", options, processes, schedule=schedule)


SYSTEMS: Sequence[System] = (
    System("dp", "ddp", "torch DDP", "torches:ddp"),
    _threefold("dp", "", axis="dp"),
    _threefold("dp", ", layers compiled", axis="dp", compiled=True),
    _deepspeed("zero1", 1),
    _threefold("zero1", "", axis="dp", zero=1),
    _deepspeed("zero2", 2),
    System("zero2", "fsdp2", "FSDP2, parameters kept", "torches:fsdp2", {"reshard": False}),
    _threefold("zero2", "", axis="dp", zero=2),
    _deepspeed("zero3", 3),
    System("zero3", "fsdp2", "FSDP2", "torches:fsdp2", {"reshard": True}),
    _threefold("zero3", "", axis="dp", zero=3),
    System("tp", "dtensor", "DTensor", "torches:dtensor", {"sequence_parallel": False}),
    _threefold("tp", "", axis="tp"),
    _threefold("tp", ", layers compiled", axis="tp", compiled=True),
    System("tp_sp", "dtensor", "DTensor", "torches:dtensor", {"sequence_parallel": True}),
    _threefold("tp_sp", "", axis="tp", sequence_parallel=True),
    System("pp", "bound", "no communication, no bubble, perfect balance", "bounds:part"),
    _torch_pipeline("gpipe", "GPipe"),
    _torch_pipeline("1f1b", "1F1B"),
    _torch_pipeline("interleaved_1f1b", "Interleaved1F1B"),
    _torch_pipeline("zb_v", "ZBVZeroBubble"),
    System("pp", "deepspeed", "DeepSpeed pipeline", "deepspeeds:pipeline", {}, None, "deepspeed", schedule="1f1b"),
    *(
        _threefold("pp", f" {name}", axis="pp", schedule=name)
        for name in ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v")
    ),
    *(
        _threefold("pp", f" {name}, partition auto", axis="pp", schedule=name, partition="auto")
        for name in ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v")
    ),
    _threefold("3d", " 1f1b", axis="3d", schedule="1f1b", processes=8),
    _threefold("3d", " 1f1b, ZeRO-1", axis="3d", schedule="1f1b", zero=1, processes=8),
)
PEERS = tuple(dict.fromkeys(system.peer for system in SYSTEMS if system.peer != "bound"))


def systems_of(mode: str, peers: Sequence[str]) -> list[System]:
    """The systems of these peers."""
    return [system for system in SYSTEMS if system.mode == mode and system.peer in {*peers, "bound"}]


def bubble_share(schedule: str | None, ranks: int, microbatches: int) -> float | None:
    """What the schedule alone leaves of the bound: the closed forms for equal stages and equal F, I and W."""
    p, m = ranks, microbatches
    forms = {
        "naive": 1 / p,
        "gpipe": m / (m + p - 1),
        "1f1b": m / (m + p - 1),
        "interleaved_1f1b": m / (m + (p - 1) / 2),
        "zb_h1": 3 * m / (3 * m + p - 1),
    }
    return forms.get(schedule or "")
