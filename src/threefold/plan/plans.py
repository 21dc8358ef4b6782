"""A plan: one strategy with all that is predicted of it; and the answer to a question, which is a list of plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from threefold.cost.case import Cut
from threefold.cost.estimate import Estimates, estimate
from threefold.cost.measured import CPU
from threefold.cost.strategies import (
    ORDER_CODES,
    PARTITION_CODES,
    PRECISION_CODES,
    RECOMPUTE_CODES,
    SCHEDULE_CODES,
    Strategies,
)
from threefold.plan.question import Question
from threefold.simulate import Timeline

_WORDS: Mapping[str, Mapping[str, int]] = {
    "recompute": RECOMPUTE_CODES,
    "schedule": SCHEDULE_CODES,
    "order": ORDER_CODES,
    "partition": PARTITION_CODES,
    "precision": PRECISION_CODES,
}
_SWITCHES = ("sequence_parallel", "offload_optimizer", "offload_param")


Word = int | bool | str | list[float]
"""A setting as a job file states it."""


@dataclass(frozen=True)
class Plan:
    """One strategy and its prediction; times are of one optimizer step, bytes of the device that holds the most.

    ``cut`` are the stages of a job as it stands, where they are neither even nor balanced.
    ``exposed_comm_s`` and ``communication_bytes`` are by axis, ``memory_bytes`` by item. ``timeline`` is the played
    schedule, where it was played. ``reasons`` say why, in words.
    """

    strategy: Strategies
    step_s: float
    step_s_low: float
    step_s_high: float
    tokens_per_s: float
    tflops_per_gpu: float
    mfu: float | None
    compute_s: float
    bubble_s: float
    optimizer_s: float
    bubble_fraction: float
    peak_memory_bytes: float
    usable_memory_bytes: float
    memory_bytes: Mapping[str, float]
    exposed_comm_s: Mapping[str, float]
    communication_bytes: Mapping[str, float]
    fits: bool
    cut: Cut | None = None
    timeline: Timeline | None = field(default=None, repr=False)
    reasons: tuple[str, ...] = ()

    def size(self, name: str) -> int:
        """The value of one field of the strategy, as its code."""
        return int(getattr(self.strategy, name)[0])

    @property
    def parallelism(self) -> dict[str, Word]:
        """The strategy in words: ``{"dp": 4, "tp": 8, ..., "schedule": "1f1b"}``."""
        return {item.name: self._word(item.name) for item in fields(Strategies)}

    def _word(self, name: str) -> Word:
        if name == "partition" and self.cut is not None:
            return list(self.cut.sizes)
        if name in _WORDS:
            return next(word for word, code in _WORDS[name].items() if code == self.size(name))
        return bool(self.size(name)) if name in _SWITCHES else self.size(name)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {
            "parallelism": self.parallelism,
            **{name: getattr(self, name) for name in _NUMBERS},
            "memory_bytes": dict(self.memory_bytes),
            "bubble_fraction": self.bubble_fraction,
            "exposed_comm_s": dict(self.exposed_comm_s),
            "communication_bytes": dict(self.communication_bytes),
            "reasons": list(self.reasons),
        }


_NUMBERS = (
    "step_s",
    "step_s_low",
    "step_s_high",
    "tokens_per_s",
    "tflops_per_gpu",
    "mfu",
    "peak_memory_bytes",
)
_ARRAYS = (*_NUMBERS, "compute_s", "bubble_s", "optimizer_s", "bubble_fraction", "usable_memory_bytes")
_TABLES = ("memory_bytes", "exposed_comm_s", "communication_bytes")


@dataclass(frozen=True)
class PlanResult:
    """The answer: plans from the best to the worst, each of another layout; and what became of all candidates.

    ``searched`` = the plans + the sum of ``rejected``; ``feasible`` were judged and fit the memory.
    """

    question: Question
    plans: tuple[Plan, ...]
    searched: int
    feasible: int
    seconds: float
    rejected: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """The answer as JSON."""
        return {
            "searched": self.searched,
            "feasible": self.feasible,
            "seconds": self.seconds,
            "plans": [plan.to_dict() for plan in self.plans],
            "rejected": dict(self.rejected),
        }


def predict(question: Question, strategies: Strategies, cut: Cut | None = None) -> list[Plan]:
    """A plan for each of ``strategies``, without reasons; ``cut`` is that of a single one."""
    if not len(strategies):
        return []
    found = estimate(question.model, question.sequence_length, question.hardware, strategies, cut=cut)
    plans = [replace(_plan(strategies.take([index]), found, index), cut=cut) for index in range(len(strategies))]
    # Nobody states the peak of a CPU, and a profile knows only what the layers of one job reached.
    return [replace(plan, mfu=None) for plan in plans] if question.hardware.device.name == CPU else plans


def _plan(strategy: Strategies, found: Estimates, index: int) -> Plan:
    predicted: dict[str, Any] = {name: float(getattr(found, name)[index]) for name in _ARRAYS}
    predicted |= {name: _pick(getattr(found, name), index) for name in _TABLES}
    return Plan(strategy=strategy, fits=bool(found.fits[index]), **predicted)


def _pick(table: Mapping[str, Sequence[float]], index: int) -> Mapping[str, float]:
    return {name: float(values[index]) for name, values in table.items()}
