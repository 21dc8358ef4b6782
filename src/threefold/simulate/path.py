"""The critical path: which chain of events makes a step as long as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from threefold.schedule import Action, Kind, partner
from threefold.schedule.actions import RECEIVES, SENDS
from threefold.simulate.events import CODES, KINDS, Event

if TYPE_CHECKING:
    from threefold.simulate.timeline import Timeline

TOLERANCE = 1e-9
"""Times that differ by less than this share of the step are equal."""

_INPUT: Mapping[Kind, Kind] = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
_MAKERS: Mapping[Kind, tuple[Kind, ...]] = {Kind.SEND_F: (Kind.F,), Kind.SEND_B: (Kind.B, Kind.I)}


def critical_path(timeline: Timeline) -> tuple[Event, ...]:
    """The path as ``Timeline.critical_path`` describes it.

    It is found from the end: before each event stands, of what it had to wait for, what ended last. Of several that
    ended last, it is the one that took longest, and the rank's own where that is equal too.
    """
    if not len(timeline):
        return ()
    walk = _Walk(timeline)
    index: int | None = int(np.argmax(timeline.end_s))
    visited: list[int] = []
    while index is not None:
        visited.append(index)
        index = walk.before(index, visited)
    return tuple(timeline.event(index) for index in reversed(visited))


class _Walk:
    """Steps back from an event to the one that held it up. Events are rows of the timeline's columns."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.start_s, self.end_s = timeline.start_s.tolist(), timeline.end_s.tolist()
        self.slack_s = TOLERANCE * timeline.makespan_s
        in_lane = timeline.in_lane
        self.lanes = [np.flatnonzero(in_lane & (timeline.rank == rank)) for rank in range(timeline.num_ranks)]
        columns = timeline.code.tolist(), timeline.stage.tolist(), timeline.microbatch.tolist()
        self.index_of = {key: index for index, key in enumerate(zip(*columns, strict=True))}
        self.syncs = np.flatnonzero(timeline.has_kind((Kind.SYNC,))).tolist()
        self.previous_on_link = self._links()

    def before(self, index: int, visited: list[int]) -> int | None:
        """The event that ``index`` had to wait for longest; None at the start of the step."""
        candidates = [self._as_send(candidate) for candidate in self._waited_for(index)]
        latest_s = self.start_s[index] + self.slack_s
        # Only events that take no time can lead back to one that was visited.
        candidates = [i for i in candidates if self.end_s[i] <= latest_s and i not in visited[-8:]]
        return max(candidates, key=lambda i: (self.end_s[i], -self.start_s[i]), default=None)

    def _waited_for(self, index: int) -> Iterator[int]:
        event = self.timeline.event(index)
        if event.kind in SENDS:
            yield from self._before_transfer(index, event)
            return
        yield from self._lane_before(event.rank, index)
        if event.kind in _INPUT:
            yield from self._find(_INPUT[event.kind], event.action.stage, event.action.microbatch)
        elif event.kind is Kind.STEP:
            yield from self.syncs

    def _rank_of(self, action: Action) -> int:
        return self.timeline.placement.rank_of(action.stage, self.timeline.num_ranks)

    def _before_transfer(self, index: int, event: Event) -> Iterator[int]:
        """What made the data, what else the link carried, and what both ranks did until they took part."""
        for kind in _MAKERS[event.kind]:
            yield from self._find(kind, event.action.stage, event.action.microbatch)
        if index in self.previous_on_link:
            yield self.previous_on_link[index]
        for rank in (event.rank, self._rank_of(partner(event.action))):
            yield from self._lane_until(rank, event.start_s)

    def _lane_before(self, rank: int, index: int) -> Iterator[int]:
        """The event before ``index`` in the lane of its rank."""
        place = int(np.searchsorted(self.lanes[rank], index))
        if place > 0:
            yield int(self.lanes[rank][place - 1])

    def _lane_until(self, rank: int, time_s: float) -> Iterator[int]:
        """The last event of a lane that began before ``time_s``."""
        lane = self.lanes[rank]
        place = int(np.searchsorted(self.timeline.start_s[lane], time_s - self.slack_s))
        if place > 0:
            yield int(lane[place - 1])

    def _as_send(self, index: int) -> int:
        """A receive is told as its send, which has the same times."""
        event = self.timeline.event(index)
        if event.kind not in RECEIVES:
            return index
        send = partner(event.action)
        return next(self._find(send.kind, send.stage, send.microbatch), index)

    def _find(self, kind: Kind, stage: int, microbatch: int) -> Iterator[int]:
        index = self.index_of.get((CODES[kind], stage, microbatch))
        if index is not None:
            yield index

    def _links(self) -> dict[int, int]:
        """Send -> the send before it from the same rank to the same rank."""
        timeline = self.timeline
        last: dict[tuple[int, int], int] = {}
        found: dict[int, int] = {}
        for index in np.flatnonzero(timeline.has_kind(SENDS)).tolist():
            send = Action(KINDS[timeline.code[index]], int(timeline.stage[index]), 0)
            link = int(timeline.rank[index]), self._rank_of(partner(send))
            if link in last:
                found[index] = last[link]
            last[link] = index
        return found
