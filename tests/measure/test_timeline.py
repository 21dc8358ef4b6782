"""Recorded steps as timelines: from marks that a simulation made up, and from real ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest

from tests.jobs import GPT2, small_job
from threefold.job import Job
from threefold.layout import Layout
from threefold.measure.timeline import measured_costs, measured_timeline, measured_timelines, step_times
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel.engine import build_engine, build_job_mesh
from threefold.parallel.recorder import Marks
from threefold.schedule import Action, Kind, Schedule, build_schedule, lower, partner
from threefold.schedule.actions import COMPUTE, RECEIVES, SENDS
from threefold.simulate import Cause, Event, StepCosts, Timeline, simulate
from threefold.train.data.synthetic import SyntheticTokens
from threefold.train.recorded import RecordedStep
from threefold.train.recording import StepRecords
from threefold.train.trainer import Sources, Trainer

NAMED = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2)]
Case = tuple[str, int]


def marks_of(schedule: Schedule, timeline: Timeline) -> list[Marks]:
    """What recorders would have noted in a step that went as ``timeline``."""
    when = {event.action: event for event in timeline.events if event.kind not in (Kind.SYNC, Kind.STEP)}
    found = []
    for rank, row in enumerate(schedule.rows):
        times, free_s = [], 0.0
        for action in row:
            if action.kind in SENDS | RECEIVES:
                times.append((free_s, free_s, free_s))
                continue
            own = [event for event in timeline.events if event.rank == rank and event.kind is action.kind]
            event = when[action] if action.kind in COMPUTE else own[0]
            begin_s = event.start_s if action.kind is Kind.SYNC else free_s
            times.append((begin_s, event.start_s, event.end_s))
            free_s = event.end_s
        found.append(Marks(0.0, np.array(times)))
    return found


def costs_of(num_stages: int) -> StepCosts:
    """Uneven ones."""
    wave = [1 + 0.2 * math.sin(stage) for stage in range(num_stages)]
    return StepCosts(
        forward_s=wave,
        input_grad_s=[1.2 * seconds for seconds in wave],
        weight_grad_s=[0.7 * seconds for seconds in wave],
        p2p_s=[0.05] * (num_stages - 1),
        sync_s=[0.3] * num_stages,
        step_s=[0.2] * num_stages,
        activation_bytes=[0] * num_stages,
        static_bytes=[0] * num_stages,
    )


def played(case: Case, ranks: int = 3, microbatches: int = 6) -> tuple[Schedule, Timeline]:
    schedule = lower(build_schedule(case[0], ranks, microbatches, case[1]))
    return schedule, simulate(schedule, costs_of(schedule.num_stages), step_together=True)


@pytest.mark.parametrize("case", NAMED)
def test_a_step_that_went_as_simulated_is_measured_as_simulated(case: Case) -> None:
    schedule, simulated = played(case)
    measured = measured_timeline(schedule, marks_of(schedule, simulated))
    assert measured.makespan_s == pytest.approx(simulated.makespan_s)
    assert measured.bubble_fraction == pytest.approx(simulated.bubble_fraction)
    assert measured.compute_s == pytest.approx(simulated.compute_s)
    for cause in Cause:
        assert measured.idle_s[cause] == pytest.approx(simulated.idle_s[cause], abs=1e-9), cause
    assert len(measured) == len(simulated)


@pytest.mark.parametrize("case", NAMED)
def test_the_costs_of_a_run_are_found_in_its_steps(case: Case) -> None:
    schedule, simulated = played(case)
    found = measured_costs([measured_timeline(schedule, marks_of(schedule, simulated))])
    expected = costs_of(schedule.num_stages)
    assert found.forward_s == pytest.approx(expected.forward_s)
    assert found.backward_s == pytest.approx(expected.backward_s)
    if any(action.kind is Kind.I for row in schedule.rows for action in row):
        assert found.weight_grad_s == pytest.approx(expected.weight_grad_s)
    # The first stage's ends with everybody's; whoever is later waits for less.
    assert found.step_s == pytest.approx(expected.step_s)
    again = simulate(schedule, found, step_together=True)
    assert again.makespan_s == pytest.approx(simulated.makespan_s, rel=0.02)


def test_what_the_process_does_besides_is_no_bubble() -> None:
    """Loading data before the first action, and a pause before one whose input is there."""
    schedule = lower(build_schedule("1f1b", 2, 1))
    by_rank = {
        0: {"0F0": (1.0, 1.0, 2.0), "0SEND_F0": (2.0,) * 3, "0RECV_B0": (2.0,) * 3, "0B0": (2.0, 6.0, 8.0)},
        1: {"1RECV_F0": (0.0,) * 3, "1F0": (0.0, 2.5, 3.0), "1B0": (3.5, 3.5, 5.5), "1SEND_B0": (5.5,) * 3},
    }
    ends = {"SYNC": (8.0, 8.0, 8.5), "STEP": (8.5, 9.0, 10.0)}
    marks = [
        Marks(0.0, np.array([(by_rank[rank] | ends)[str(action)] for action in schedule.rows[rank]])) for rank in (0, 1)
    ]
    timeline = measured_timeline(schedule, marks)
    idle = {cause: timeline.idle_s[cause].tolist() for cause in Cause}
    assert idle[Cause.WARM_UP] == [0, 2.0]  # rank 0 loads, rank 1 can't go on
    assert idle[Cause.TRANSFER] == [0.5, 0.5]
    assert idle[Cause.STAGE] == [3.5, 0]
    # Rank 0: loading, the norm. Rank 1: between its passes, before its sync, the norm.
    assert idle[Cause.HOST] == [1.5, 0.5 + 2.5 + 0.5]


def test_a_message_that_nobody_waited_for_is_drawn_as_long_as_one_that_somebody_did() -> None:
    schedule = lower(build_schedule("gpipe", 2, 2))
    rows = {
        0: {"0F0": 0.0, "0SEND_F0": 1.0, "0F1": 1.0, "0SEND_F1": 2.0},
        1: {"1RECV_F0": 0.0, "1F0": 1.25, "1RECV_F1": 0.0, "1F1": 5.0},
    }

    def marks(rank: int) -> Marks:
        times = []
        for action in schedule.rows[rank]:
            start_s = rows[rank].get(str(action), 9.0)
            waits = str(action) == "1F0"
            times.append((0.0 if waits else start_s, start_s, start_s + 1))
        return Marks(0.0, np.array(times))

    timeline = measured_timeline(schedule, [marks(0), marks(1)])
    spans = {str(event.action): (event.start_s, event.end_s) for event in timeline.events}
    assert spans["0SEND_F0"] == spans["1RECV_F0"] == (1.0, 1.25)
    assert spans["0SEND_F1"] == spans["1RECV_F1"] == (2.0, 2.25)  # and not until 5, when it was looked for


# Real ranks


def record(context: WorkerContext, job: Job, steps: int = 2) -> list[RecordedStep | None]:
    assert job.model is not None and job.data is not None
    mesh = build_job_mesh(job, context.rank, activity=context.activity)
    engine = build_engine(job, mesh)
    source = SyntheticTokens(job.model.vocab_size, job.data.sequence_length, job.seed)
    trainer = Trainer(job.model_copy(update={"steps": 1}), engine, Sources(source), None)
    records = StepRecords(mesh, engine.schedule)
    found: list[RecordedStep | None] = []
    for step in range(steps):
        trainer.run()
        found.append(records.gather(step + 1))
    records.finish()
    return found


def check_invariants(timeline: Timeline, schedule: Schedule) -> None:
    total = timeline.compute_s + timeline.step_s + np.sum(list(timeline.idle_s.values()), axis=0)
    assert total == pytest.approx(timeline.makespan_s, rel=1e-6)
    assert all((seconds >= -1e-9).all() for seconds in timeline.idle_s.values())
    assert 0 <= timeline.bubble_fraction < 1
    when = {(event.rank, event.action): event for event in timeline.events}
    for rank, row in enumerate(schedule.rows):
        assert {action for owner, action in when if owner == rank} == set(row)
        lane = [when[rank, action] for action in row if action.kind not in SENDS | RECEIVES]
        assert all(one.end_s <= other.start_s for one, other in pairwise(lane))
        assert all(event.duration_s > 0 for event in lane)
    for (_, action), event in when.items():
        if action.kind in SENDS:
            other = when[schedule.stage_rank(partner(action).stage), partner(action)]
            assert (other.start_s, other.end_s) == (event.start_s, event.end_s)
            assert event.end_s <= used_at(when, other.rank, other.action.stage, action) + 1e-9


def used_at(when: Mapping[tuple[int, Action], Event], rank: int, stage: int, send: Action) -> float:
    kinds = (Kind.F,) if send.kind is Kind.SEND_F else (Kind.B, Kind.I)
    return next(
        event.start_s
        for (owner, action), event in when.items()
        if owner == rank and action.kind in kinds and (action.stage, action.microbatch) == (stage, send.microbatch)
    )


@pytest.mark.parametrize("case", NAMED)
def test_real_ranks_record_every_action_once_and_in_order(pool: WorkerPool, case: Case) -> None:
    pipeline = {"schedule": case[0], "chunks": case[1]}
    job = small_job(GPT2, pp=2, dp=2, parallelism={"pp": pipeline})
    steps = pool.run(record, 4, job)
    assert all(step is None for rank in steps[1:] for step in rank)
    for recorded in steps[0]:
        assert recorded.layout == Layout(dp=2, pp=2)
        timelines = measured_timelines(recorded)
        assert list(timelines) == [(0, 0), (1, 0)]
        for timeline in timelines.values():
            check_invariants(timeline, recorded.schedule)
        times = step_times(recorded)
        assert times.bubble is not None and 0 < times.bubble < 1
        assert times.exposed_comm_s == pytest.approx(times.idle_s["transfer"] + times.idle_s["sync"], abs=2e-6)
        assert set(times.idle_s) == {"warm_up", "stage", "transfer", "sync", "cool_down", "host"}


@pytest.mark.parametrize("layout", [{"dp": 1}, {"tp": 2}, {"dp": 2}])
def test_without_a_pipeline_there_is_no_bubble(pool: WorkerPool, layout: dict[str, int]) -> None:
    job = small_job(GPT2, **layout)
    (recorded, *_) = pool.run(record, job.world_size, job, 1)[0]
    assert step_times(recorded).bubble is None
    for timeline in measured_timelines(recorded).values():
        check_invariants(timeline, recorded.schedule)


def test_a_slow_rank_is_seen_where_it_is(pool: WorkerPool) -> None:
    """What rank 1 takes longer is its own computing, and the other's waiting."""
    steps = pool.run(record_slowed, 2, small_job(GPT2, pp=2))
    timeline = measured_timelines(steps[0])[0, 0]
    assert timeline.compute_s[1] > 8 * 0.02
    assert timeline.bubble_s[0] > 0.5 * 8 * 0.02
    assert timeline.idle_s[Cause.TRANSFER][0] < timeline.idle_s[Cause.STAGE][0]


def record_slowed(context: WorkerContext, job: Job) -> RecordedStep | None:
    mesh = build_job_mesh(job, context.rank, activity=context.activity)
    engine = build_engine(job, mesh)
    if context.rank == 1:
        for stage in engine.stages:
            stage.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    source = SyntheticTokens(61, 12, job.seed)
    Trainer(job.model_copy(update={"steps": 1}), engine, Sources(source), None).run()
    records = StepRecords(mesh, engine.schedule)
    recorded = records.gather(1)
    records.finish()
    return recorded
