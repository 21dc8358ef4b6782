"""Which values each setting may take in one layout, and which of them need no look.

What is decided here follows from the layout alone: two values that mean the same, and a value that another is never
worse than. Each is counted with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

from threefold.cost.strategies import (
    ORDER_CODES,
    PARTITION_CODES,
    RECOMPUTE_CODES,
    SCHEDULE_CODES,
    Array,
    Strategies,
)
from threefold.job.messages import divisors
from threefold.job.spec import CHUNKS_OF
from threefold.layout import balanced_sizes, split_layers
from threefold.plan.layouts import Layout
from threefold.plan.locality import locality
from threefold.plan.question import Question, Resort
from threefold.plan.reasons import Reason

ONE_F_ONE_B, GPIPE, NAIVE, INTERLEAVED = (
    SCHEDULE_CODES[name] for name in ("1f1b", "gpipe", "naive", "interleaved_1f1b")
)
OWN: Mapping[int, tuple[int, ...]] = MappingProxyType(
    {code: (CHUNKS_OF[name] or 1,) for name, code in SCHEDULE_CODES.items()}
)
"""The chunks of a schedule that takes only one number of them."""
MOST_CHUNKS = 8
"""More are considered only where they are fixed: each halves what is left of the bubble, and doubles the messages."""
Pair = tuple[int, int]
"""A schedule's code, and the chunks of each device."""


@dataclass(frozen=True)
class Kept:
    """The values of one setting that are worth a look, and how many others were dropped for which reason."""

    values: tuple[int, ...]
    dropped: Counter[Reason]

    @property
    def num_stated(self) -> int:
        """All values, dropped ones too."""
        return len(self.values) + self.dropped.total()


def values_of(question: Question, name: str, values: Sequence[int]) -> tuple[int, ...]:
    """The fixed value of a setting, or all ``values``."""
    return (question.fixed[name],) if name in question.fixed else tuple(values)


def sequence_parallel_values(question: Question) -> tuple[int, ...]:
    """Off and on."""
    return values_of(question, "sequence_parallel", (0, 1))


def offload_values(question: Question, name: str) -> tuple[int, ...]:
    """Off, and as a last resort on; ``name`` says what is offloaded."""
    return values_of(question, name, (0, 1) if question.resort >= Resort.OFFLOAD else (0,))


def recompute_values(question: Question) -> tuple[int, ...]:
    """From none, which is fastest, to full, which holds the least."""
    return values_of(question, "recompute", tuple(RECOMPUTE_CODES.values()))


def zero_values(question: Question) -> tuple[int, ...]:
    """ZeRO stages; the third as a resort."""
    return values_of(question, "zero_stage", range(4 if question.resort >= Resort.ZERO_3 else 3))


def order_values(question: Question, layout: Layout) -> Kept:
    """Axis orders that keep tp inside a node; any, where the question fixes a tp that none keeps there.

    All else that an order decides is how many ranks of the other axes share a node, so of equal ones the first stands
    for all, and one with fewer on every axis is dropped.
    """
    codes = values_of(question, "order", tuple(ORDER_CODES.values()))
    devices = question.hardware.devices_per_node
    local = {code: locality(asdict(layout), code, devices) for code in codes}
    allowed = [code for code in codes if local[code].tp_stays_inside]
    if not allowed and "tp" in question.fixed:
        allowed = list(codes)
    kept: list[int] = []
    dropped = Counter({Reason.NODE: len(codes) - len(allowed)})
    for code in allowed:
        if any(local[other] == local[code] for other in kept):
            dropped[Reason.SAME] += 1
        elif any(local[other].is_better(local[code]) for other in allowed):
            dropped[Reason.DOMINATED] += 1
        else:
            kept.append(code)
    return Kept(tuple(kept), dropped)


def partition_values(question: Question, layout: Layout) -> Kept:
    """Even stages, or stages balanced by counting the embedding and the head as a layer each."""
    codes = values_of(question, "partition", tuple(PARTITION_CODES.values()))
    layers, stages = question.model.num_hidden_layers, layout.pp
    if len(codes) == 1 or stages > layers or balanced_sizes(layers, stages) != even_layers(layers, stages):
        return Kept(codes, Counter())
    return Kept(codes[:1], Counter({Reason.SAME: len(codes) - 1}))


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage of the even partition."""
    return tuple(map(len, split_layers(num_layers, num_stages)))


def schedule_values(question: Question, layout: Layout) -> tuple[tuple[Pair, ...], Counter[Reason]]:
    """Schedules with their chunks. ``naive`` stays beside 1F1B, which is faster, because it holds less."""
    kept: list[Pair] = []
    dropped: Counter[Reason] = Counter()
    pairs = _all_pairs(question, layout)
    for schedule, chunks in pairs:
        reason = _schedule_refusal(question, layout, schedule, first=pairs[0][0])
        if reason is None:
            kept.append((schedule, chunks))
        else:
            dropped[reason] += 1
    return tuple(kept), dropped


def _all_pairs(question: Question, layout: Layout) -> list[Pair]:
    codes = values_of(question, "schedule", (ONE_F_ONE_B, *(c for c in SCHEDULE_CODES.values() if c != ONE_F_ONE_B)))
    pairs = [(code, v) for code in codes for v in (_chunks(question, layout) if code == INTERLEAVED else OWN[code])]
    wanted = question.fixed.get("chunks")
    return [pair for pair in pairs if wanted in (None, pair[1]) and pair != (INTERLEAVED, 1)]


def _chunks(question: Question, layout: Layout) -> tuple[int, ...]:
    """Chunks of whole layers: divisors of the layers of the fullest stage, of which every device has enough."""
    if "chunks" in question.fixed:
        return (question.fixed["chunks"],)
    layers = question.model.num_hidden_layers
    fullest = -(-layers // layout.pp)
    most = layers if "schedule" in question.fixed else MOST_CHUNKS
    return tuple(v for v in divisors(fullest) if 1 < v <= most and v * layout.pp <= layers)


def _schedule_refusal(question: Question, layout: Layout, schedule: int, first: int) -> Reason | None:
    if "schedule" in question.fixed or question.fixed.get("chunks", 1) > 1:
        return None
    if layout.pp == 1 and schedule != first:
        return Reason.SAME
    return Reason.DOMINATED if schedule == GPIPE else None  # 1F1B takes as long and holds no more


def chunks_fit(question: Question, tops: Strategies) -> Array:
    """Whether each chunk has a layer, and there is a pipeline with microbatches enough to pass them round it."""
    enough = tops.chunks * tops.pp <= question.model.num_hidden_layers
    return (tops.num_microbatches >= tops.pp) & enough & (tops.pp > 1)
