"""What is asked: a model, machines and a batch, and what the user has already decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType

from threefold.cost.hardware import Hardware
from threefold.cost.strategies import (
    ORDER_CODES,
    PARTITION_CODES,
    PRECISION_CODES,
    RECOMPUTE_CODES,
    SCHEDULE_CODES,
)
from threefold.errors import JobError, Problem
from threefold.job import ModelSpec
from threefold.job.messages import choices, nearest_word

Fixed = Mapping[str, int]
"""Field of ``Strategies`` -> the value it must have, in the codes of ``cost.strategies``."""

SIZES = ("dp", "tp", "pp", "cp", "ep", "chunks", "micro_batch", "num_microbatches")
SWITCHES: Mapping[str, int] = MappingProxyType({"false": 0, "true": 1, "off": 0, "on": 1, "0": 0, "1": 1})
WORDS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "zero_stage": {str(stage): stage for stage in range(4)},
        "recompute": RECOMPUTE_CODES,
        "schedule": SCHEDULE_CODES,
        "order": ORDER_CODES,
        "partition": PARTITION_CODES,
        "precision": PRECISION_CODES,
        "sequence_parallel": SWITCHES,
        "offload_optimizer": SWITCHES,
        "offload_param": SWITCHES,
    }
)
"""Fields whose values are words, and the code of each word."""
ALIASES: Mapping[str, str] = MappingProxyType(
    {"zero": "zero_stage", "accumulation": "num_microbatches", "gradient_accumulation_steps": "num_microbatches"}
)
LARGEST = 10**9


class Resort(IntEnum):
    """What the search may take to, each only when nothing fits without it.

    How fast these are hangs on how well transfers hide behind computation, which is what a prediction knows least
    about. So models are split by tp and pp first.
    """

    ORDINARY = 0
    ZERO_3 = 1
    OFFLOAD = 2


@dataclass(frozen=True)
class Question:
    """``global_batch`` is in sequences of ``sequence_length`` tokens; ``fixed`` is what the search must not change."""

    model: ModelSpec
    sequence_length: int
    hardware: Hardware
    global_batch: int
    fixed: Fixed = field(default_factory=lambda: MappingProxyType({}))
    resort: Resort = Resort.ORDINARY

    @property
    def num_devices(self) -> int:
        """Devices, all of which a plan uses."""
        return self.hardware.num_devices

    @property
    def precision(self) -> int:
        """Code of the number format: as fixed, else bf16, or fp16 on devices that have no bf16."""
        has_bf16 = "bf16" in self.hardware.device.peak_flops_per_s
        return self.fixed.get("precision", PRECISION_CODES["bf16" if has_bf16 else "fp16"])


def read_fixed(settings: Mapping[str, object]) -> Fixed:
    """Check what the user has decided, ``{"tp": 8, "schedule": "1f1b"}``, and turn words into codes.

    Raises JobError with all problems.
    """
    problems: list[Problem] = []
    fixed: dict[str, int] = {}
    for name, value in settings.items():
        known = ALIASES.get(name, name)
        code = _code(known, str(value).strip().lower())
        if code is None:
            problems.append(_refusal(name, known, value))
        elif fixed.setdefault(known, code) != code:
            problems.append(Problem(f"--fix {name}", f"{known} is fixed to two values", "state one of them"))
    if problems:
        raise JobError(problems)
    return MappingProxyType(fixed)


def split_fixes(texts: Sequence[str]) -> tuple[dict[str, object], list[Problem]]:
    """``["tp=8", "zero=1"]`` as a mapping, and what could not be read."""
    settings: dict[str, object] = {}
    problems = []
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name or not value.strip():
            problems.append(Problem("--fix", f"{text!r} is not NAME=VALUE", "write it like --fix tp=8"))
        elif name in settings and settings[name] != value:
            problems.append(Problem(f"--fix {name}", "is given twice", "state one of them"))
        else:
            settings[name] = value
    return settings, problems


def _code(name: str, text: str) -> int | None:
    if name in SIZES:
        return int(text) if text.isascii() and text.isdigit() and 1 <= int(text) <= LARGEST else None
    return WORDS.get(name, {}).get(text.replace(" ", ""))


def _refusal(name: str, known: str, value: object) -> Problem:
    key = f"--fix {name}"
    if known in SIZES:
        return Problem(key, f"{value!r} is no whole number of 1 or more", f"write it like --fix {name}=2")
    if known in WORDS:
        return Problem(key, f"{value!r} is not one of its values", f"use {choices(WORDS[known])}")
    names = [*SIZES, *WORDS, *ALIASES]
    near = nearest_word(name, names)
    return Problem(key, "is nothing that can be fixed", f"use {near or ', '.join(names)}")
