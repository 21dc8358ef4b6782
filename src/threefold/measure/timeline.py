"""Recorded steps as Timelines: what a run's ranks did, in the type that a simulation makes (no torch).

A transfer begins when both ends have posted it and what the link carried before has arrived. A receiver that waits sees
it arrive. One that computes looks only when it needs the message: then it is drawn as long as the fastest that somebody
waited for on that link, and where nobody ever waited, until it was seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from threefold.cost.parts import model_costs
from threefold.cost.profile import read_profile
from threefold.job import load_job
from threefold.layout import stage_sizes
from threefold.parallel.recorder import BEGIN, END, READY, Marks
from threefold.plan.balance import play_partition
from threefold.report.timeline_compare import Comparison
from threefold.schedule import Action, Kind, Schedule, job_schedule, partner
from threefold.schedule.actions import RECEIVES, SENDS
from threefold.simulate import Cause, Event, StepCosts, Timeline, simulate
from threefold.simulate.events import Floats
from threefold.simulate.idle import COMMUNICATION
from threefold.train.recorded import RecordedStep, StepTimes, read_recording

JOB_FILE, PROFILE_FILE = "job.json", "profile.json"
_FOUND_THERE_S = 1e-4
"""A wait shorter than this found the message there."""

_RECEIVES: Mapping[Kind, Kind] = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}


def measured_timelines(recorded: RecordedStep) -> dict[tuple[int, int], Timeline]:
    """A timeline for each pipeline of a step, by its (dp, tp); ranks are pipeline ranks."""
    layout, found = recorded.layout, {}
    for dp in range(layout.dp):
        for tp in range(layout.tp):
            ranks = [layout.rank(dp=dp, pp=pp, tp=tp) for pp in range(layout.pp)]
            found[dp, tp] = measured_timeline(recorded.schedule, [recorded.ranks[rank] for rank in ranks])
    return found


def measured_timeline(schedule: Schedule, marks: Sequence[Marks]) -> Timeline:
    """The timeline of one pipeline from the marks of its ranks; ``schedule`` is the lowered one that they ran."""
    events = [
        Event(rank, action, start_s, end_s)
        for rank, row in enumerate(schedule.rows)
        for action, start_s, end_s in _lane(row, marks[rank].times_s)
    ]
    events += _transfers(schedule, marks)
    sizes = schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
    return Timeline.from_events(schedule.name, *sizes, events, schedule.placement)


def _lane(row: Sequence[Action], times_s: Floats) -> list[tuple[Action, float, float]]:
    """What occupies a rank. Waiting does not: computing and the optimizer begin when they are ready."""
    begin = {Kind.SYNC: BEGIN}
    return [
        (action, float(times[begin.get(action.kind, READY)]), float(times[END]))
        for action, times in zip(row, times_s, strict=True)
        if action.kind not in SENDS | RECEIVES
    ]


def _transfers(schedule: Schedule, marks: Sequence[Marks]) -> list[Event]:
    """Both ends of every transfer, with the same times."""
    times_of = {
        action: times
        for row, mark in zip(schedule.rows, marks, strict=True)
        for action, times in zip(row, mark.times_s, strict=True)
    }
    events = []
    for rank, row in enumerate(schedule.rows):
        links: defaultdict[int, list[Action]] = defaultdict(list)
        for action in row:
            if action.kind in SENDS:
                links[schedule.stage_rank(partner(action).stage)].append(action)
        for peer, sends in links.items():
            for send, start_s, end_s in _on_link(sends, times_of):
                events += [Event(rank, send, start_s, end_s), Event(peer, partner(send), start_s, end_s)]
    return events


def _on_link(sends: Sequence[Action], times_of: Mapping[Action, Floats]) -> list[tuple[Action, float, float]]:
    """(send, start, end) of what one rank sends to another, in its order."""
    used = {_receive_of(action): times for action, times in times_of.items() if action.kind in _RECEIVES}
    posted_s = [max(float(times_of[send][BEGIN]), float(times_of[partner(send)][BEGIN])) for send in sends]
    looked_s = [float(used[partner(send)][BEGIN]) for send in sends]
    seen_s = [float(used[partner(send)][READY]) for send in sends]
    waited = [seen - looked > _FOUND_THERE_S for looked, seen in zip(looked_s, seen_s, strict=True)]
    watched = [seen - posted for posted, seen, was in zip(posted_s, seen_s, waited, strict=True) if was]
    fastest_s = max(min(watched, default=np.inf), 0.0)
    found, free_s = [], -np.inf
    for send, posted, looked, seen, was in zip(sends, posted_s, looked_s, seen_s, waited, strict=True):
        start_s = min(max(posted, free_s), seen)
        free_s = seen if was else max(min(looked, start_s + fastest_s), start_s)
        found.append((send, start_s, free_s))
    return _in_order(found)


def _in_order(transfers: Sequence[tuple[Action, float, float]]) -> list[tuple[Action, float, float]]:
    """Nothing on a link arrives after what was sent later: whoever looked late for one has seen that for the other."""
    found, next_s = [], np.inf
    for send, start_s, end_s in reversed(transfers):
        next_s = min(end_s, next_s)
        found.append((send, min(start_s, next_s), next_s))
    return found[::-1]


def _receive_of(action: Action) -> Action:
    """The receive that brings what ``action`` needs, if it needs one."""
    return Action(_RECEIVES[action.kind], action.stage, action.microbatch)


def step_times(recorded: RecordedStep) -> StepTimes:
    """What a step amounts to, as means over all ranks."""
    timelines = list(measured_timelines(recorded).values())
    makespan_s = max(timeline.makespan_s for timeline in timelines)
    idle_s = {cause.value: float(np.mean([t.idle_s[cause] for t in timelines])) for cause in Cause}
    bubble_s = float(np.mean([timeline.bubble_s for timeline in timelines]))
    has_pipeline = recorded.layout.pp > 1 and makespan_s > 0
    return StepTimes(
        bubble=round(bubble_s / makespan_s, 4) if has_pipeline else None,
        idle_s={cause: round(seconds, 6) for cause, seconds in idle_s.items()},
        exposed_comm_s=round(sum(idle_s[cause.value] for cause in COMMUNICATION), 6),
    )


def measured_costs(timelines: Sequence[Timeline]) -> StepCosts:
    """What every action of a run took, by its stage: means over microbatches and steps.

    A fused backward pass is halved into I and W. A transfer costs what the fastest one between its stages took. Where a
    rank holds several stages, its sync and step are shared out evenly. Bytes are not known, and 0.
    """
    first = timelines[0]
    seconds: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for event in timeline.events:
            place = event.rank if event.kind in (Kind.SYNC, Kind.STEP) else event.action.stage
            seconds[event.kind, place].append(event.duration_s)

    def mean(kind: Kind, place: int) -> float:
        values = seconds.get((kind, place))
        return float(np.mean(values)) if values else 0.0

    stages = range(first.num_stages)
    rank_of = [first.placement.rank_of(stage, first.num_ranks) for stage in stages]
    chunks = [rank_of.count(rank) for rank in rank_of]
    halves = [mean(Kind.B, stage) / 2 for stage in stages]
    split = [(mean(Kind.I, stage) or half, mean(Kind.W, stage) or half) for stage, half in enumerate(halves)]
    return StepCosts(
        forward_s=[mean(Kind.F, stage) for stage in stages],
        input_grad_s=[input_grad_s for input_grad_s, _ in split],
        weight_grad_s=[weight_grad_s for _, weight_grad_s in split],
        p2p_s=[min(seconds.get((Kind.SEND_F, stage), [0.0])) for stage in stages[:-1]],
        sync_s=[mean(Kind.SYNC, rank_of[stage]) / chunks[stage] for stage in stages],
        step_s=[mean(Kind.STEP, rank_of[stage]) / chunks[stage] for stage in stages],
        activation_bytes=[0.0] * first.num_stages,
        static_bytes=[0.0] * first.num_stages,
    )


def compare(run_dir: Path, step: int | None = None) -> Comparison:
    """A recorded step of a run, by default one of median length, beside the simulation of the run's job.

    Seconds of the simulation are those of ``profile.json`` in ``run_dir``; without one they are what the run's own
    actions took on average, so that what is left to see is what the schedule makes of them. Raises JobError where the
    run has no recording of the step, or a profile of other work.
    """
    recording = read_recording(run_dir)
    recorded = recording.step(step)
    measured = measured_timelines(recorded)
    profile_path = run_dir / PROFILE_FILE
    if profile_path.exists():
        words, simulated = f"the costs of {profile_path}", _simulated_by_profile(run_dir, profile_path)
    else:
        steps = [measured_timelines(recording.step(number)) for number in recording.settled]
        costs = measured_costs([timeline for kept in steps for timeline in kept.values()])
        words = "the mean times of the run's own actions"
        simulated = simulate(recorded.schedule, costs, step_together=True)
    return Comparison(str(run_dir), recorded.step, words, simulated, measured)


def _simulated_by_profile(run_dir: Path, profile_path: Path) -> Timeline:
    job = load_job(run_dir / JOB_FILE)
    assert job.model is not None, "a run's job has a model"
    costs = model_costs(job, read_profile(profile_path, job))
    schedule = job_schedule(job)
    sizes = stage_sizes(job.model.num_hidden_layers, schedule.num_stages, job.parallelism.pp.partition)
    return play_partition(costs, sizes, schedule)
