"""Known models by name, from ``presets.json``: the published shapes, in Hugging Face's names.

Llama 3 shapes are those before long-context rope scaling, which threefold does not apply; dropout is 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A published model: its settings, and where they and its number of parameters were published.

    ``published`` is that number as text, exact or rounded: ``6738415616``, ``175B``; ``published_active`` is the number
    that one token meets, of a mixture of experts.
    """

    published: str
    source: str
    model: Mapping[str, Any]
    published_active: str | None = None


@cache
def preset_table() -> Mapping[str, Preset]:
    """Preset name -> what was published."""
    table = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
    return {name: Preset(**entry) for name, entry in table.items()}


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Preset name -> model settings."""
    return {name: preset.model for name, preset in preset_table().items()}
