"""From what a play did to its timeline: the other ends of transfers, the end of the step, and memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from threefold.schedule import Kind, Schedule
from threefold.schedule.actions import COMPUTE
from threefold.simulate.costs import PerStage, StepCosts
from threefold.simulate.events import CODES, Floats, Ints, Mask, sum_by
from threefold.simulate.timeline import MemoryCurve, Timeline

# A receive: its kind, and which stage has it, seen from the stage that sends.
_OTHER_ENDS = ((Kind.SEND_F, Kind.RECV_F, 1), (Kind.SEND_B, Kind.RECV_B, -1))


@dataclass(frozen=True)
class _Columns:
    """Columns of events: ``what`` is [rank, code, stage, microbatch] × events, ``times_s`` [start, end] × events."""

    what: Ints
    times_s: Floats

    def where(self, mask: Mask) -> _Columns:
        return _Columns(self.what[:, mask], self.times_s[:, mask])

    @staticmethod
    def joined(parts: Sequence[_Columns]) -> _Columns:
        return _Columns(
            np.concatenate([part.what for part in parts], axis=1),
            np.concatenate([part.times_s for part in parts], axis=1),
        )


def build_timeline(
    schedule: Schedule,
    costs: StepCosts,
    done: Sequence[tuple[int, int, float, float]],
    *,
    blocking: bool,
    step_together: bool,
) -> Timeline:
    """The timeline of (code, cell, start, end) of every computation and send, in the order in which each rank did them.

    ``cell`` is stage × num_microbatches + microbatch.
    """
    rank_of = np.array([schedule.stage_rank(stage) for stage in range(schedule.num_stages)])
    played = _columns(schedule, rank_of, done)
    parts = [played, *_receives(played, rank_of)]
    if not schedule.is_forward_only:
        busy = parts if blocking else [played.where(_is_of(played, COMPUTE))]
        parts.append(_ending(rank_of, costs, _last_end_s(schedule.num_ranks, busy), step_together))
    whole = _Columns.joined(parts)
    # What takes no time goes before what begins with it. The sort is stable: else, first stays first.
    order = np.lexsort((whole.times_s[1], whole.times_s[0], whole.what[0]))
    return Timeline(
        schedule.name,
        schedule.num_ranks,
        schedule.num_stages,
        schedule.num_microbatches,
        *whole.what[:, order],
        *whole.times_s[:, order],
        blocking=blocking,
        memory=_memory(schedule, costs, played, rank_of),
        placement=schedule.placement,
    )


def _columns(schedule: Schedule, rank_of: Ints, done: Sequence[tuple[int, int, float, float]]) -> _Columns:
    table = np.array(done, dtype=np.float64).reshape(-1, 4)
    code, cell = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
    stage, microbatch = np.divmod(cell, schedule.num_microbatches)
    return _Columns(np.stack([rank_of[stage], code, stage, microbatch]), table[:, 2:].T)


def _is_of(columns: _Columns, kinds: Collection[Kind]) -> Mask:
    return np.isin(columns.what[1], [CODES[kind] for kind in kinds])


def _receives(played: _Columns, rank_of: Ints) -> list[_Columns]:
    """The receive of every send."""
    found = []
    for send, receive, direction in _OTHER_ENDS:
        sends = played.where(_is_of(played, (send,)))
        stage = sends.what[2] + direction
        what = np.stack([rank_of[stage], np.full_like(stage, CODES[receive]), stage, sends.what[3]])
        found.append(_Columns(what, sends.times_s))
    return found


def _last_end_s(num_ranks: int, parts: Sequence[_Columns]) -> Floats:
    """When each rank has done the last of ``parts``."""
    last_s = np.zeros(num_ranks)
    for part in parts:
        np.maximum.at(last_s, part.what[0], part.times_s[1])
    return last_s


def _ending(rank_of: Ints, costs: StepCosts, last_s: Floats, step_together: bool) -> _Columns:
    """SYNC and STEP of every rank."""
    num_ranks = len(last_s)
    synced_s = last_s + _by_rank(costs.sync_s, rank_of, num_ranks)
    begin_s = np.full(num_ranks, synced_s.max()) if step_together else synced_s
    rank, nothing = np.arange(num_ranks), np.full(num_ranks, -1)

    def every(kind: Kind, start_s: Floats, end_s: Floats) -> _Columns:
        code = np.full(num_ranks, CODES[kind])
        return _Columns(np.stack([rank, code, nothing, nothing]), np.stack([start_s, end_s]))

    sync = every(Kind.SYNC, last_s, synced_s)
    step = every(Kind.STEP, begin_s, begin_s + _by_rank(costs.step_s, rank_of, num_ranks))
    return _Columns.joined([sync, step])


def _by_rank(values: PerStage, rank_of: Ints, num_ranks: int) -> Floats:
    """The sum over the stages of each rank."""
    return sum_by(rank_of, np.array(values, dtype=np.float64), num_ranks)


def _memory(schedule: Schedule, costs: StepCosts, played: _Columns, rank_of: Ints) -> tuple[MemoryCurve, ...]:
    """What each rank holds: activations from the start of F to the end of B or W, and what is always there.

    The order is the rank's own, so that what ends and what starts at one time are never held together.
    """
    held = np.array(costs.activation_bytes, dtype=np.float64)
    always = _by_rank(costs.static_bytes, rank_of, schedule.num_ranks)
    forward = _is_of(played, (Kind.F,))
    last = forward if schedule.is_forward_only else _is_of(played, (Kind.B, Kind.W))
    return tuple(
        _curve(float(always[rank]), held, played, forward & mine, last & mine)
        for rank in range(schedule.num_ranks)
        for mine in (played.what[0] == rank,)
    )


def _curve(always: float, held: Floats, played: _Columns, takes: Mask, frees: Mask) -> MemoryCurve:
    place = np.concatenate([2 * np.flatnonzero(takes), 2 * np.flatnonzero(frees) + 1])
    times_s = np.concatenate([played.times_s[0, takes], played.times_s[1, frees]])
    change = np.concatenate([held[played.what[2, takes]], -held[played.what[2, frees]]])
    order = np.argsort(place)
    held_bytes = always + np.concatenate([[0.0], np.cumsum(change[order])])
    return MemoryCurve(np.concatenate([[0.0], times_s[order]]), held_bytes)
