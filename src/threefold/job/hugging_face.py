"""Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from threefold.job.messages import Findings
from threefold.job.presets import presets


def resolve_model(settings: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """x."""
    m = settings.get("model")
    if isinstance(m, Mapping) and m.get("preset") in presets():
        return {**settings, "model": {**presets()[m["preset"]], **m}}
    return dict(settings)
