"""All candidates of a question, as arrays: the tops of ladders, and which rungs below them are legal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from threefold.cost.strategies import Array, Strategies
from threefold.plan.layouts import Layout, layouts, refusal
from threefold.plan.options import (
    NAIVE,
    chunks_fit,
    order_values,
    partition_values,
    schedule_values,
    sequence_parallel_values,
    zero_values,
)
from threefold.plan.question import Question
from threefold.plan.reasons import Reason
from threefold.plan.rungs import (
    Rung,
    has_rung,
    ladder,
    offload_fits_hosts,
    offload_is_sharded,
    repeats_lower_stage,
)


@dataclass(frozen=True)
class Space:
    """``tops`` are N strategies with nothing saved; ``legal[i, j]`` says whether rung j exists below top i.

    ``layout`` numbers the layout (dp, tp, pp, cp, ep) of each top; tops of one ``family`` differ in nothing but ZeRO
    stage and sequence parallelism. ``rejected`` counts the candidates that are no longer in the space; with the legal
    ones they add up to ``searched``.
    """

    tops: Strategies
    layout: Array
    family: Array
    rungs: tuple[Rung, ...]
    legal: Array
    searched: int
    rejected: Mapping[Reason, int]


def build_space(question: Question) -> Space:
    """Every combination of layout, batch split and settings, judged by rules alone."""
    builder = _Builder(question)
    for layout in layouts(question):
        builder.add(layout)
    return builder.build()


class _Builder:
    """Gathers the legal tops of one layout after the other, and counts what is left out."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.rungs = ladder(question)
        self.per_schedule = sum(1 for rung in self.rungs if not rung.one_by_one)
        self.parts: list[Strategies] = []
        self.layout: list[Array] = []
        self.family: list[Array] = []
        self.num_families = 0
        self.rejected: Counter[Reason] = Counter()
        self.searched = 0

    def add(self, layout: Layout) -> None:
        """One layout with all its settings."""
        question = self.question
        orders, partitions = order_values(question, layout), partition_values(question, layout)
        pairs, dropped_pairs = schedule_values(question, layout)
        micro_batches = layout.micro_batches(question)
        switches, stages = sequence_parallel_values(question), zero_values(question)
        one = max(len(micro_batches), 1) * len(switches) * len(stages) * self.per_schedule
        num_pairs = len(pairs) + dropped_pairs.total()
        total = one * orders.num_stated * partitions.num_stated * num_pairs
        self.searched += total
        reason = refusal(layout, question)
        if reason is not None:
            self.rejected[reason] += total
            return
        self._reject(orders.dropped, one * partitions.num_stated * num_pairs)
        self._reject(partitions.dropped, one * len(orders.values) * num_pairs)
        self._reject(dropped_pairs, one * len(orders.values) * len(partitions.values))
        kept = [pair for pair in pairs if not self._is_a_rung(pair[0])]
        families = np.array(
            [(b, o, p, *k) for b in micro_batches for o in orders.values for p in partitions.values for k in kept]
        )
        self._add_tops(layout, families, switches, stages)

    def _is_a_rung(self, schedule: int) -> bool:
        return schedule == NAIVE and any(rung.one_by_one for rung in self.rungs)

    def _reject(self, dropped: Counter[Reason], each: int) -> None:
        for reason, count in dropped.items():
            self.rejected[reason] += count * each

    def _add_tops(self, layout: Layout, families: Array, switches: Sequence[int], stages: Sequence[int]) -> None:
        """``families`` are rows of micro batch, order, partition, schedule and chunks."""
        axes = np.arange(len(families)), np.array(switches), np.array(stages)
        family, sequence_parallel, zero_stage = (grid.ravel() for grid in np.meshgrid(*axes, indexing="ij"))
        micro_batch, order, partition, schedule, chunks = families.reshape(-1, 5)[family].T
        tops = Strategies.build(
            dp=layout.dp, tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep,
            micro_batch=micro_batch, num_microbatches=self.question.global_batch // layout.dp // micro_batch,
            order=order, partition=partition, schedule=schedule, chunks=chunks,
            sequence_parallel=sequence_parallel, zero_stage=zero_stage, precision=self.question.precision,
        )  # fmt: skip
        legal = self._legal_tops(layout, tops)
        self.parts.append(tops.take(legal))
        self.layout.append(np.full(int(legal.sum()), len(self.layout)))
        self.family.append(self.num_families + family[legal])
        self.num_families += len(families)

    def _legal_tops(self, layout: Layout, tops: Strategies) -> Array:
        """Drop the tops that are illegal, or the same as another, with all their rungs."""
        fixed, length = self.question.fixed, self.question.sequence_length
        parallel = tops.sequence_parallel
        chunked = tops.chunks > 1
        alone = (layout.tp == 1) and "sequence_parallel" not in fixed
        refusals = (
            (Reason.SEQUENCE, parallel & (length // layout.cp % layout.tp != 0)),
            (Reason.SAME, parallel & alone),
            (Reason.INTERLEAVING, chunked & ~chunks_fit(self.question, tops)),
        )
        legal = np.ones(len(tops), dtype=bool)
        for reason, wrong in refusals:
            self.rejected[reason] += int(self._num_rungs(tops)[legal & wrong].sum())
            legal &= ~wrong
        return legal

    def _num_rungs(self, tops: Strategies) -> Array:
        return np.sum([has_rung(tops, rung) for rung in self.rungs], axis=0)

    def build(self) -> Space:
        """The space of all layouts added."""
        tops = _joined(self.parts)
        legal = np.stack([self._legal_rungs(tops, rung) for rung in self.rungs], axis=1)
        nothing = np.zeros(0, dtype=np.int64)
        layout, family = np.concatenate([nothing, *self.layout]), np.concatenate([nothing, *self.family])
        return Space(tops, layout, family, self.rungs, legal, self.searched, self.rejected)

    def _legal_rungs(self, tops: Strategies, rung: Rung) -> Array:
        legal = has_rung(tops, rung)
        on_hosts = np.full(len(tops), offload_fits_hosts(self.question, rung))
        checks = (
            (Reason.OFFLOAD, offload_is_sharded(tops, rung)),
            (Reason.HOST_MEMORY, on_hosts),
            (Reason.SAME, ~repeats_lower_stage(self.question, tops, rung)),
        )
        for reason, holds in checks:
            self.rejected[reason] += int((legal & ~holds).sum())
            legal = legal & holds
        return legal


def _joined(parts: Sequence[Strategies]) -> Strategies:
    if not parts:
        return Strategies.build().take(np.zeros(1, dtype=bool))
    return Strategies(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Strategies)))
