"""Known models by name, from ``presets.json``: the published shapes, in Hugging Face's names.

Llama 3 shapes are those before long-context rope scaling, which threefold does not apply; dropout is 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Preset name -> model settings."""
    return json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
