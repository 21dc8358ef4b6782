"""``summary.json``: how a run ended, and what every rank has counted: bytes held and bytes sent."""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from threefold.parallel.collectives import Group
from threefold.parallel.mesh import Mesh

SUMMARY_FILE = "summary.json"
_FORMAT = 1

Counts = Mapping[tuple[str, str], tuple[int, int]]
"""(group, operation) -> calls and payload bytes."""
Sent = tuple[tuple[str, str, int, int], ...]
"""Group, operation, calls and payload bytes."""


@dataclass(frozen=True)
class TrainSummary:
    """How a run ended: steps done, last loss, whether it was stopped before its end, and the last step's traffic.

    ``tokens_per_s`` is the median over steps; 0 where no step was done. What each rank counts alone is not compared.
    """

    steps: int
    loss: float
    stopped: bool
    tokens: int = 0
    tokens_per_s: float = field(default=0.0, compare=False)
    last_step: Sent = field(default=(), compare=False)


def difference(after: Counts, before: Counts) -> Sent:
    """What was sent between two snapshots."""
    found = []
    for (group, operation), (calls, size) in sorted(after.items()):
        old_calls, old_size = before.get((group, operation), (0, 0))
        if calls > old_calls:
            found.append((group, operation, calls - old_calls, size - old_size))
    return tuple(found)


def median(values: Collection[float]) -> float:
    """The median; 0 of nothing."""
    return statistics.median(values) if values else 0.0


def rank_report(mesh: Mesh, summary: TrainSummary) -> dict[str, Any]:
    """What this rank has counted."""
    memory = mesh.memory
    peak = {"bytes": memory.peak.total, "step": memory.peak.step, "action": memory.peak.action}
    return {
        "rank": mesh.rank,
        **asdict(mesh.coord),
        "memory": {"held": memory.held, "host": memory.host, "peak": {**peak, "held": dict(memory.peak.held)}},
        "traffic": {"last_step": _rows(summary.last_step), "run": _rows(difference(mesh.traffic.snapshot(), {}))},
    }


def _rows(sent: Sent) -> list[dict[str, Any]]:
    return [dict(zip(("group", "operation", "calls", "bytes"), row, strict=True)) for row in sent]


def gather_reports(mesh: Mesh, summary: TrainSummary) -> list[dict[str, Any]]:
    """Every rank's report; all ranks must call it."""
    return _gather_json(rank_report(mesh, summary), mesh.world, mesh.device)


def _gather_json(value: Any, group: Group, device: torch.device) -> list[Any]:
    """Each rank's ``value``, as text of one length."""
    text = json.dumps(value).encode()
    longest = torch.tensor([len(text)], dtype=torch.int64, device=device)
    group.all_reduce(longest, "max").wait()
    padded = torch.tensor(list(text.ljust(int(longest), b" ")), dtype=torch.uint8, device=device)
    gathered = padded.new_empty(group.size * padded.numel())
    group.all_gather_into(gathered, padded).wait()
    return [json.loads(bytes(part.tolist())) for part in gathered.cpu().chunk(group.size)]


def write_summary(run_dir: Path, summary: TrainSummary, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Write the file; a loss that is not finite is null."""
    ended = {
        "format": _FORMAT,
        "steps": summary.steps,
        "stopped": summary.stopped,
        "loss": summary.loss if summary.loss == summary.loss and abs(summary.loss) != float("inf") else None,
        "tokens": summary.tokens,
        "tokens_per_s": round(summary.tokens_per_s, 1),
    }
    text = json.dumps({**ended, "ranks": list(ranks)}, indent=1, allow_nan=False)
    (run_dir / SUMMARY_FILE).write_text(text + "\n")
