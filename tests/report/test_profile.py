"""A profile as a person reads it."""

from __future__ import annotations

import io

from rich.console import Console

from tests.cost.profiles import small_profile
from tests.jobs import LLAMA, small_job
from threefold.report.profile import print_profile


def text_of(**seconds: float) -> str:
    out = io.StringIO()
    print_profile(small_profile(small_job(LLAMA, pp=2), **seconds), Console(file=out))
    return out.getvalue()


def test_parts_links_and_overheads_are_told() -> None:
    lines = text_of(layer_s=0.3, head_s=0.0006).splitlines()
    assert lines[0].startswith("imaginary: cpu, two busy ranks with one thread each; micro batch 1 × 12 tokens")
    layer = next(line for line in lines if line.startswith("layer"))
    assert layer.split()[1:5] == ["100", "ms", "±", "20%"]
    assert "200 µs ± 20%" in next(line for line in lines if line.startswith("head"))
    assert next(line for line in lines if line.startswith("embedding")).split()[1] == "0"
    assert next(line for line in lines if line.startswith("p2p")).split() == ["p2p", "2", "100", "µs", "1", "GB/s"]
    assert "100 µs to a pass and 10 µs to start a message" in " ".join(lines)
    assert "the optimizer takes 10.0 ms for a million parameters" in " ".join(lines)


def test_nothing_is_coloured_where_nobody_looks() -> None:
    assert "\x1b" not in text_of()
