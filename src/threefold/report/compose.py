"""What composes with what, asked of the rules themselves: ``docs/compose.md``, and the cells that the tests run.

A row is what changes how states are kept and gradients travel: ZeRO stage, offload, precision and compression. The
rules judge it; a row that they allow is combined with every recompute mode, schedule and kind of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from threefold.errors import JobError, Problem
from threefold.job import parse_job
from threefold.job.spec import SCHEDULES

OFFLOADS: Mapping[str, tuple[str, ...]] = {
    "nothing": (),
    "optimizer": ("offload_optimizer",),
    "parameters": ("offload_param",),
    "both": ("offload_optimizer", "offload_param"),
}
PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}},
    "fp64": {"dtype": "float64"},
}
COMPRESSIONS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "bf16-sums": {"communication_data_type": "bf16"},
    "fp16-sums": {"communication_data_type": "fp16"},
    "powersgd": {"gradient_compression": {"type": "powersgd", "rank": 2, "start_step": 2}},
    "one-bit-adam": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 2}}},
}
LOSSY = ("powersgd", "one-bit-adam")
"""Equal to one process until they start."""

TITLES: Mapping[str, str] = {
    "none": "Gradients as they are",
    "bf16-sums": '`communication_data_type` "bf16"',
    "fp16-sums": '`communication_data_type` "fp16"',
    "powersgd": '`gradient_compression.type` "powersgd"',
    "one-bit-adam": '`optimizer.type` "OneBitAdam"',
}
RECOMPUTES = ("none", "selective", "full")
TENSORS: Mapping[str, Mapping[str, Any]] = {
    "tp1": {"size": 1},
    "tp2": {"size": 2},
    "tp2-sequence": {"size": 2, "sequence_parallel": True},
}
TEST = "tests/parallel/test_compose.py"
MODEL: Mapping[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
}
CHUNKS: Mapping[str, int] = {"interleaved_1f1b": 2, "zb_v": 2}


@dataclass(frozen=True)
class Row:
    """One way to keep states and send gradients."""

    stage: int
    offload: str
    precision: str
    compression: str

    @property
    def test_id(self) -> str:
        """The name of the test that runs it."""
        return f"zero{self.stage}-{self.offload}-{self.precision}-{self.compression}"

    def settings(self) -> dict[str, Any]:
        """As keys of a job."""
        offloads = {name: {"device": "cpu"} for name in OFFLOADS[self.offload]}
        zero = {"stage": self.stage, **offloads}
        return {"zero_optimization": zero, **PRECISIONS[self.precision], **COMPRESSIONS[self.compression]}


@dataclass(frozen=True)
class Cell:
    """A row with the rest of what a job chooses; dp 2 and pp 2 always."""

    row: Row
    recompute: str
    schedule: str
    tensor: str

    def settings(self) -> dict[str, Any]:
        """A whole job."""
        return {
            "model": dict(MODEL),
            "data": {"sequence_length": 8},
            "steps": 6,
            "seed": 3,
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "parallelism": {
                "dp": {"size": 2},
                "pp": {"size": 2, "schedule": self.schedule, "chunks": CHUNKS.get(self.schedule, 1)},
                "tp": dict(TENSORS[self.tensor]),
            },
            "activation_checkpointing": {"mode": self.recompute},
            **self.row.settings(),
        }


def rows(compression: str | None = None) -> Iterator[Row]:
    """Every row, allowed or not; of one ``compression`` only where it is given."""
    chosen = [compression] if compression else list(COMPRESSIONS)
    for name, stage, offload, precision in product(chosen, range(4), OFFLOADS, PRECISIONS):
        yield Row(stage, offload, precision, name)


def cells(row: Row) -> tuple[Cell, ...]:
    """Every combination of a row with recompute, schedule and tensor parallelism."""
    return tuple(Cell(row, *rest) for rest in product(RECOMPUTES, SCHEDULES, TENSORS))


def pairwise_cells(row: Row) -> tuple[Cell, ...]:
    """So many of them that every two settings meet: each schedule with each recompute, with tensors in turn."""
    return tuple(
        Cell(row, recompute, schedule, tuple(TENSORS)[(one + other) % len(TENSORS)])
        for one, schedule in enumerate(SCHEDULES)
        for other, recompute in enumerate(RECOMPUTES)
    )


def refusal(settings: Mapping[str, Any]) -> tuple[Problem, ...]:
    """What the rules object to; nothing where the job is allowed."""
    try:
        parse_job(settings)
    except JobError as error:
        return tuple(error.problems)
    return ()


def judge(row: Row) -> tuple[Problem, ...]:
    """The same for a row: what they object to in each of its cells. Raises ValueError where cells differ."""
    verdicts = {refusal(cell.settings()) for cell in cells(row)}
    if len(verdicts) > 1:
        raise ValueError(f"{row}: recompute, schedule or tensor parallelism decide whether it is allowed")
    return verdicts.pop()


def compose_page() -> str:
    """The text of ``docs/compose.md``."""
    introduction = _INTRODUCTION.format(test=TEST, recomputes=_listed(RECOMPUTES), schedules=_listed(SCHEDULES))
    tables = [f"## {TITLES[compression]}\n\n{_table(compression)}" for compression in COMPRESSIONS]
    return "\n".join([introduction, *tables])


_INTRODUCTION = """# What composes

This page is made from the rules in the code by `make docs`. A **yes** is a combination that trains, and that a test
compares with one process: `test_composes[zeroSTAGE-OFFLOAD-PRECISION-COMPRESSION]` in `{test}`.
A number names the reason for which `threefold check` refuses it before anything starts, with the nearest combination
that works.

Every **yes** holds with activation recompute {recomputes}, with the schedules
{schedules},
and without tensor parallelism, with it, and with sequence parallelism. `make test` runs each **yes** in one of these
combinations, `make test-slow` so often that every two of these settings meet.

Loss, every gradient and every parameter equal those of one process to the rounding of the number format: to 1e-10 in
fp64, else to ten times (fp32) or three times (bf16 and fp16) what the format's rounding does to each of the three in
one process. Sums in bf16 or fp16 add the rounding of that format.
PowerSGD and 1-bit Adam approximate: they are compared until they start, and after that all replicas must stay
equal, bit for bit. Dropout masks belong to samples, so they too are the same in every layout.
"""


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _table(compression: str) -> str:
    reasons: dict[str, int] = {}
    lines = [f"| ZeRO stage | offloaded | {' | '.join(PRECISIONS)} |", f"|---|---|{'---|' * len(PRECISIONS)}"]
    for stage, offload in product(range(4), OFFLOADS):
        verdicts = [judge(Row(stage, offload, precision, compression)) for precision in PRECISIONS]
        lines.append(f"| {stage} | {offload} | {' | '.join(_mark(found, reasons) for found in verdicts)} |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([*lines, *([""] if notes else []), *notes, ""])


def _mark(problems: Sequence[Problem], reasons: dict[str, int]) -> str:
    """``yes``, or the numbers of the reasons, which are numbered as they come."""
    texts = [f"`{problem.key}`: {problem.message}. Fix: {problem.fix}." for problem in problems]
    return ", ".join(str(reasons.setdefault(text, len(reasons) + 1)) for text in texts) or "yes"
