"""The table, and the file of results."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.compare import BUSY, Result
from benchmarks.peers.systems import MODES
from benchmarks.peers.work import Work

RESULTS = Path(__file__).parents[1] / "RESULTS.md"
PREAMBLE = (
    "Written by `python -m benchmarks.peers --write`; its `--help` says how systems are compared. Shares are medians "
    "over rounds of the bound's time over the system's in the same round. Rounds in which other programs used more "
    f"than {100 * BUSY:.0f} % of the machine count only where fewer than two are quiet. The bound and threefold run "
    "with the allocator settings that `threefold train` gives its CPU ranks, peers as their own launchers start them."
)
HEADINGS = (
    "mode",
    "system",
    "step (s)",
    "tokens/s",
    "share of bound",
    "min-max",
    "bubble alone",
    "to best threefold",
    "others",
)


def table(results: Sequence[Result]) -> str:
    """Markdown: one row a system.

    "to best threefold" is tokens/s over those of threefold's best system of that mode, "others" the part of the machine
    that other programs used meanwhile.
    """
    rows = [HEADINGS, tuple("---" if index < 2 else "---:" for index in range(len(HEADINGS)))]
    for result in results:
        mode = MODES.get(result.system.mode, "bound")
        if not result.seconds or result.error:
            rows.append((mode, result.system.name, result.error or "not timed", *[""] * (len(HEADINGS) - 3)))
            continue
        shares = result.shares
        rows.append(
            (
                mode,
                result.system.name,
                f"{result.step_s:.3f}",
                f"{result.tokens_per_s:.0f}",
                f"{statistics.median(shares):.3f}",
                f"{min(shares):.3f}-{max(shares):.3f}",
                f"{result.bubble:.3f}" if result.bubble else "",
                _to_threefold(result, results),
                f"{100 * result.disturbance:.0f} %" if result.others else "",
            )
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _to_threefold(result: Result, results: Sequence[Result]) -> str:
    own = [
        other
        for other in results
        if other.system.mode == result.system.mode and other.system.peer == "threefold" and other.seconds
    ]
    if not own or result.system.peer == "bound":
        return ""
    best = min(own, key=lambda other: other.step_s)
    rounds = [number for number in result.quiet if number in best.quiet] or result.quiet
    ratios = [best.seconds[number] / result.seconds[number] for number in rounds if number < len(best.seconds)]
    return f"{statistics.median(ratios):.3f}"


def write_results(options: argparse.Namespace, work: Work, results: Sequence[Result]) -> None:
    """Put the results of a mode, its bound first, into ``RESULTS.md``: in place of those of the same size and ranks."""
    sections = _sections(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    mode = results[-1].system.mode
    ranks = results[-1].system.processes or options.ranks
    title = f"{MODES[mode]}, {options.size}, {ranks} ranks"
    sections[title] = f"{_circumstances(options, work, results)}\n\n{table(results)}"
    text = "".join(f"\n## {title}\n\n{section}\n" for title, section in sections.items())
    RESULTS.write_text(f"# Results\n\n{PREAMBLE}\n{text}", encoding="utf-8")


def _sections(text: str) -> dict[str, str]:
    parts = (part.partition("\n") for part in text.split("\n## ")[1:])
    return {title.strip(): body.strip() for title, _, body in parts}


def _circumstances(options: argparse.Namespace, work: Work, results: Sequence[Result]) -> str:
    import torch

    busy = max((result.disturbance for result in results), default=0.0)
    quiet = "" if busy <= BUSY else " **Other programs were running; see the last column.**"
    return (
        f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}: {_processor()}, {os.cpu_count()} cores; "
        f"Python {platform.python_version()}, PyTorch {torch.__version__} over gloo, one thread a process; "
        f"{work.layers} layers, hidden size {work.hidden}, {work.heads} heads, vocabulary {work.vocab}, sequence "
        f"{work.sequence}; a step is {work.microbatches} microbatches of {work.micro_batch} over all replicas, fp32, "
        f"AdamW; {options.rounds} rounds of {options.steps} steps.{quiet}"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
