"""Models and machines of the cost tests."""

from __future__ import annotations

from threefold.cost.hardware import Hardware, find_device
from threefold.job.presets import presets
from threefold.job.spec import ModelSpec


def model(preset: str, **changes: object) -> ModelSpec:
    return ModelSpec.model_validate({**presets()[preset], **changes})


def machines(device: str = "a100-80gb", nodes: int = 1, devices_per_node: int = 8) -> Hardware:
    found = find_device(device)
    return Hardware(found, nodes, devices_per_node, found.nic_bytes_per_s)
