"""Why ranks idle: every gap between the events that occupy a rank is put down to one cause, or split between two."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from threefold.schedule import Kind
from threefold.schedule.actions import COMPUTE, RECEIVES, SENDS
from threefold.simulate.events import CODES, Floats, Ints, Mask, sum_by

if TYPE_CHECKING:
    from threefold.simulate.timeline import Timeline


class Cause(StrEnum):
    """Why a rank computes nothing."""

    WARM_UP = "warm_up"
    """The first microbatch has not reached it."""
    STAGE = "stage"
    """Another rank still computes what it needs: the bubble in the middle of a step, or uneven stages."""
    TRANSFER = "transfer"
    """What it needs is on its way (or, where transfers block, the rank is sending or receiving)."""
    SYNC = "sync"
    """Gradients are reduced over the replicas."""
    COOL_DOWN = "cool_down"
    """It has nothing left to do, and other ranks have."""
    HOST = "host"
    """It could go on: its own process does something else, such as loading data or posting a transfer (measured)."""


BUBBLE = (Cause.WARM_UP, Cause.STAGE, Cause.COOL_DOWN)
"""What the schedule and uneven stages cause."""
COMMUNICATION = (Cause.TRANSFER, Cause.SYNC)
"""What communication causes."""


def idle_by_cause(timeline: Timeline) -> Mapping[Cause, Floats]:
    """Idle seconds of each rank by cause.

    A gap before an action is TRANSFER as far as the action's input is on its way, and HOST from when nothing of another
    rank is missing. The rest is WARM_UP before a rank's first computation, COOL_DOWN before its optimizer step and
    after its last event, and STAGE elsewhere.
    """
    lane = np.flatnonzero(timeline.in_lane)
    rank, start_s, end_s = timeline.rank[lane], timeline.start_s[lane], timeline.end_s[lane]
    gap_start_s = _previous_end_s(rank, end_s)
    begin_s, done_s = _input_times_s(timeline, lane)
    on_its_way_s = np.maximum(np.minimum(start_s, done_s) - np.maximum(gap_start_s, begin_s), 0.0)
    there_s = np.maximum(gap_start_s, _all_there_s(timeline, lane, done_s))
    host_s = np.maximum(start_s - there_s, 0.0)
    rest_s = np.maximum(start_s - gap_start_s, 0.0) - on_its_way_s - host_s

    def total(seconds: Floats) -> Floats:
        return sum_by(rank, seconds, timeline.num_ranks)

    ending = timeline.has_kind((Kind.STEP,))[lane]
    syncing = timeline.has_kind((Kind.SYNC,))[lane]
    warming = _before_first_computation(timeline, lane) & ~ending & ~syncing
    last_end_s = np.zeros(timeline.num_ranks)
    np.maximum.at(last_end_s, rank, end_s)
    in_transfers_s = timeline.seconds_of(SENDS | RECEIVES) if timeline.blocking else 0.0
    return {
        Cause.WARM_UP: total(rest_s * warming),
        Cause.STAGE: total(rest_s * ~(warming | ending | syncing)),
        Cause.TRANSFER: total(on_its_way_s) + in_transfers_s,
        Cause.SYNC: total(rest_s * syncing) + timeline.seconds_of((Kind.SYNC,)),
        Cause.COOL_DOWN: total(rest_s * ending) + timeline.makespan_s - last_end_s,
        Cause.HOST: total(host_s),
    }


def _previous_end_s(rank: Ints, end_s: Floats) -> Floats:
    """The end of the event before each on the same rank; 0 for a rank's first."""
    previous = np.zeros_like(end_s)
    previous[1:] = np.where(rank[1:] == rank[:-1], end_s[:-1], 0.0)
    return previous


def _before_first_computation(timeline: Timeline, lane: Ints) -> Mask:
    """Which events of the lane have no computation of their rank before them."""
    rank, computes = timeline.rank[lane], timeline.has_kind(COMPUTE)[lane]
    before = np.cumsum(computes) - computes
    first = np.searchsorted(rank, np.arange(timeline.num_ranks))
    at_first = before[np.minimum(first, len(lane) - 1)] if len(lane) else np.zeros(timeline.num_ranks)
    return before == at_first[rank]


def _input_times_s(timeline: Timeline, lane: Ints) -> tuple[Floats, Floats]:
    """From when to when the input of each event of the lane was on its way; (inf, -inf) where nothing was received."""
    begin_s = np.full((2, timeline.num_stages, timeline.num_microbatches), np.inf)
    done_s = np.full_like(begin_s, -np.inf)
    if not timeline.blocking:
        for direction, kind in enumerate((Kind.RECV_F, Kind.RECV_B)):
            here = np.flatnonzero(timeline.code == CODES[kind])
            cell = direction, timeline.stage[here], timeline.microbatch[here]
            begin_s[cell], done_s[cell] = timeline.start_s[here], timeline.end_s[here]
    forward = timeline.has_kind((Kind.F,))[lane]
    backward = timeline.has_kind((Kind.B, Kind.I))[lane]
    cell = backward.astype(np.int64), timeline.stage[lane], timeline.microbatch[lane]
    receives = forward | backward
    return np.where(receives, begin_s[cell], np.inf), np.where(receives, done_s[cell], -np.inf)


def _all_there_s(timeline: Timeline, lane: Ints, done_s: Floats) -> Floats:
    """From when on each event of the lane lacked nothing of another rank; inf where that is not known.

    The optimizer lacks nothing once all ranks have their gradients.
    """
    syncs = timeline.has_kind((Kind.SYNC,))
    synced_s = timeline.end_s[syncs].max(initial=-np.inf) if syncs.any() else np.inf
    step, sync, compute = (timeline.has_kind(kinds)[lane] for kinds in ((Kind.STEP,), (Kind.SYNC,), COMPUTE))
    there_s = np.where(step, synced_s, np.where(sync | compute, -np.inf, np.inf))
    remote = _needs_another_rank(timeline, lane)
    return np.where(remote, np.where(np.isfinite(done_s), done_s, np.inf), there_s)


def _needs_another_rank(timeline: Timeline, lane: Ints) -> Mask:
    """Which events of the lane compute with what a neighbouring stage on another rank has made."""
    stage, last = timeline.stage[lane], timeline.num_stages - 1
    rank_of = np.array([timeline.placement.rank_of(index, timeline.num_ranks) for index in range(timeline.num_stages)])
    forward, backward = (timeline.has_kind(kinds)[lane] for kinds in ((Kind.F,), (Kind.B, Kind.I)))
    before, after = rank_of[np.maximum(stage - 1, 0)], rank_of[np.minimum(stage + 1, last)]
    return (forward & (before != rank_of[stage])) | (backward & (after != rank_of[stage]))
