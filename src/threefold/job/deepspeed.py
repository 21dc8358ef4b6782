"""DeepSpeed's config files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from threefold.job.messages import Findings


def translate_settings(settings: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """x."""
    return dict(settings)
