"""Published runs: rows of a CSV file as typed values, an empty cell as None. Nothing is guessed here.

The columns are those of ``data/published_runs.csv``; only ``gpu`` and ``n_gpus`` must be there. ``status`` OOM marks
a run that did not fit. A column ``software`` may name the software generation.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from threefold.errors import DataError, Problem

_COUNTS = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq_len",
    "n_gpus",
    "tp",
    "pp",
    "vpp",
    "dp",
    "cp",
    "ep",
    "zero_stage",
    "micro_batch",
    "global_batch",
)
_REALS = (
    "params_B",
    "tflops_per_gpu",
    "mfu_pct",
    "iter_time_s",
    "iter_time_derived_s",
    "tokens_per_s_per_gpu",
    "memory_GB",
)
_TEXTS = (
    "source",
    "model_name",
    "gpu",
    "precision",
    "recompute",
    "schedule",
    "tflops_kind",
    "note",
    "arch_kind",
    "status",
    "software",
)
_REQUIRED = ("gpu", "n_gpus")
_MAY_BE_ZERO = ("zero_stage",)
_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "recompute": ("none", "selective", "full"),
        "sequence_parallel": ("true", "false"),
        "arch_kind": ("dense", "moe", "hybrid", "hybrid/moe"),
        "status": ("ok", "OOM"),
    }
)
_MOST_PROBLEMS = 20


@dataclass(frozen=True)
class Run:
    """One row. ``line`` is its line in the file; numbers that the source does not state are None."""

    line: int
    text: Mapping[str, str]
    number: Mapping[str, float | None]
    sequence_parallel: bool | None = None

    @property
    def source(self) -> str:
        """The row's source, as the file has it."""
        return self.text["source"] or "(no source)"

    @property
    def origin(self) -> str:
        """What counts as one source: the repository (owner/name) or the paper that ``source`` starts with."""
        return origin_of(self.source)

    @property
    def is_oom(self) -> bool:
        """Whether the run did not fit into memory."""
        return self.text["status"].lower() == "oom"

    def __getitem__(self, name: str) -> float | None:
        return self.number[name]


def origin_of(source: str) -> str:
    """``owner/name`` of a repository, or a paper's first words with its year; NVIDIA's two repositories are one source,
    for the second continues the tables of the first.
    """
    first = source.split(" ")[0]
    if "/" in first:
        return "NVIDIA NeMo and Megatron-Bridge" if first.lower().startswith("nvidia") else first
    words = source.split(" ")
    year = next((index for index, word in enumerate(words) if word.isdigit() and len(word) == 4), len(words) - 1)
    return " ".join(words[: year + 1])


@dataclass
class _Reader:
    """Collects every problem of a file, so that all are reported at once."""

    path: Path
    problems: list[Problem] = field(default_factory=list)

    def complain(self, line: int, column: str, message: str, fix: str) -> None:
        self.problems.append(Problem(f"{self.path}:{line}: column {column}", message, fix))

    def number(self, line: int, name: str, text: str, whole: bool) -> float | None:
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            self.complain(line, name, f"{text!r} is no number", "write a number or leave the cell empty")
            return None
        least_ok = value >= 0 if name in _MAY_BE_ZERO else value > 0
        if not least_ok or value > 1e15 or (whole and value != int(value)):
            kind = "a whole number" if whole else "a number"
            bound = "0 or more" if name in _MAY_BE_ZERO else "above 0"
            self.complain(line, name, f"{text} is not {kind} {bound}", "correct it or leave the cell empty")
            return None
        return value


def read_runs(path: Path) -> list[Run]:
    """All rows of ``path``. Raises DataError with line and column of every wrong cell (the first 20 of them)."""
    reader = _Reader(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, strict=True)
            _check_columns(reader, rows.fieldnames)
            runs = [_run(reader, rows.line_num, row) for row in rows] if not reader.problems else []
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror}); give a CSV file of runs") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a CSV file in UTF-8 ({error})") from error
    if not runs and not reader.problems:
        reader.complain(2, "gpu", "the file has no rows", "add one row for each run")
    if reader.problems:
        raise DataError(_message(reader.problems))
    return runs


def _message(problems: list[Problem]) -> str:
    shown = [str(problem) for problem in problems[:_MOST_PROBLEMS]]
    hidden = len(problems) - len(shown)
    return "\n".join(shown + ([f"... and {hidden} more"] if hidden else []))


def _check_columns(reader: _Reader, names: Iterable[str] | None) -> None:
    known = {*_COUNTS, *_REALS, *_TEXTS, "sequence_parallel"}
    given = list(names or [])
    for name in _REQUIRED:
        if name not in given:
            reader.complain(1, name, "the column is missing", f"the first line names the columns; add {name}")
    for name in given:
        if given.count(name) > 1:
            reader.complain(1, str(name), "the column is there twice", "remove one of them")
            return
    unknown = [name for name in given if name not in known]
    if unknown and len(unknown) == len(given):
        reader.complain(1, unknown[0], "no column of runs is called so", f"use {', '.join(sorted(known))}")


def _run(reader: _Reader, line: int, row: Mapping[str | None, Any]) -> Run:
    if None in row:
        reader.complain(line, "(last)", "the row has more cells than the first line has columns", "quote commas")
    cells = {name: (row.get(name) or "").strip() for name in (*_COUNTS, *_REALS, *_TEXTS, "sequence_parallel")}
    for name in _REQUIRED:
        if not cells[name]:
            reader.complain(line, name, "the cell is empty", f"every run needs {name}")
    for name, choices in _CHOICES.items():
        if cells[name] and cells[name].lower() not in {choice.lower() for choice in choices}:
            reader.complain(line, name, f"{cells[name]!r} is not known", f"use {', '.join(choices)} or leave it empty")
    numbers = {name: reader.number(line, name, cells[name], whole=name in _COUNTS) for name in (*_COUNTS, *_REALS)}
    sequence_parallel = {"true": True, "false": False}.get(cells["sequence_parallel"].lower())
    return Run(line, {name: cells[name] for name in _TEXTS}, numbers, sequence_parallel)
