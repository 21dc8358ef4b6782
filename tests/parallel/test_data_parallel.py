"""Gradient buckets: how they are filled, that gradients stay inside, and when their sum over replicas starts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.jobs import small_job
from tests.parallel.fakes import RecordingGroup, data_parallel, silent_group, stage_of_entries, whole_parameter
from tests.parallel.ranks import RankRun, replica_samples, run_steps, tokens_of
from threefold.job import Job
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel.activity import NullActivity
from threefold.parallel.buckets import ShardingPolicy, build_buckets
from threefold.parallel.collectives import Group, Pending, ReduceOp
from threefold.parallel.engine import build_engine, build_job_mesh
from threefold.parallel.stage import ShardedParameter
from threefold.schedule import Action, Kind

B0 = Action(Kind.B, 0, 0)
DP, OTHER = silent_group(2, axis="dp"), silent_group(2, axis="dp+tp")


def parameters_of(*sizes: int, group: Group = DP) -> list[ShardedParameter]:
    return [whole_parameter(f"p{index}", (size,), group) for index, size in enumerate(sizes)]


def names_in(parameters: list[ShardedParameter], limit: int) -> list[list[str]]:
    buckets = build_buckets([stage_of_entries(parameters)], DP, ShardingPolicy(limit))
    return [[entry.name for entry in bucket.entries] for bucket in buckets]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, [["p3"], ["p2"], ["p1"], ["p0"]]),
        (5, [["p3", "p2"], ["p1"], ["p0"]]),
        (9, [["p3", "p2", "p1"], ["p0"]]),
        (10**9, [["p3", "p2", "p1", "p0"]]),
    ],
)
def test_buckets_are_filled_in_the_order_in_which_backward_finishes(limit: int, expected: list[list[str]]) -> None:
    assert names_in(parameters_of(20, 4, 3, 2), limit) == expected


def test_what_is_summed_over_other_ranks_is_apart_and_comes_later() -> None:
    parameters = [*parameters_of(2, 2), whole_parameter("norm", (2,), OTHER), whole_parameter("last", (2,), DP)]
    buckets = build_buckets([stage_of_entries(parameters)], DP, ShardingPolicy(100))
    assert [[entry.name for entry in bucket.entries] for bucket in buckets] == [["last", "p1", "p0"], ["norm"]]
    assert [bucket.group for bucket in buckets] == [DP, OTHER]
    assert [bucket.over_dp for bucket in buckets] == [True, False]


def test_frozen_parameters_are_in_no_bucket() -> None:
    parameters = [*parameters_of(2), whole_parameter("frozen", (3,), DP, trained=False)]
    assert names_in(parameters, 100) == [["p0"]]
    sync = data_parallel(parameters, DP, ShardingPolicy(100))
    sync.begin_step()
    assert parameters[1].parameter.grad is None


def test_gradients_are_views_into_their_bucket_and_stay_it() -> None:
    parameters = [whole_parameter("a", (3, 2), DP), whole_parameter("b", (2,), DP)]
    sync = data_parallel(parameters, DP, ShardingPolicy(100))
    flat = sync.buckets[0].grads
    assert flat.numel() == 8
    for _ in range(2):
        sync.begin_step()
        assert not flat.any()
        for _ in range(3):
            sum((entry.parameter * 2).sum() for entry in parameters).backward()  # type: ignore[union-attr]
        assert torch.equal(flat, torch.full((8,), 6.0))
        for entry in parameters:
            grad = entry.parameter.grad
            assert grad is not None
            assert grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    sync.hand_gradients(0.5)
    assert torch.equal(flat, torch.full((8,), 3.0))


# When reductions start


@dataclass
class Chain:
    """Three layers, the bucket of each a bucket of its own, and what happens in which order."""

    overlap: bool = True
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.group = RecordingGroup(self.events, axis="dp")
        self.entries = [whole_parameter(f"p{index}", (4,), self.group) for index in range(3)]
        self.sync = data_parallel(self.entries, self.group, ShardingPolicy(4, overlap=self.overlap))
        for entry in self.entries:
            name = entry.name
            entry.parameter.register_hook(lambda _, name=name: self.events.append(f"gradient of {name}"))

    def backward(self, is_last: bool = True) -> None:
        self.sync.before_backward(B0, is_last)
        x = torch.ones(4)
        for entry in self.entries:
            x = torch.tanh(x * entry.parameter)
        x.sum().backward()
        self.sync.after_compute(B0, None)


def test_a_complete_bucket_travels_while_backward_goes_on() -> None:
    chain = Chain()
    chain.sync.begin_step()
    chain.backward(is_last=False)
    assert chain.events == ["gradient of p2", "gradient of p1", "gradient of p0"]
    chain.events.clear()
    chain.backward()
    chain.sync.finish()
    started, waited = "all_reduce started", "all_reduce waited for"
    assert chain.events == [
        "gradient of p2",
        started,
        "gradient of p1",
        started,
        "gradient of p0",
        started,
        *[waited] * 3,
    ]


def test_without_overlap_everything_starts_after_backward() -> None:
    chain = Chain(overlap=False)
    chain.sync.begin_step()
    chain.backward()
    assert "all_reduce started" not in chain.events
    chain.sync.finish()
    assert chain.events[3:] == ["all_reduce started"] * 3 + ["all_reduce waited for"] * 3


def test_buckets_start_in_the_same_order_whatever_completes_first() -> None:
    """Ranks whose backward runs in another order must still post the same collectives."""
    chain = Chain()
    chain.sync.begin_step()
    chain.sync.before_backward(B0, is_last=True)
    for index in (0, 1):
        chain.entries[index].parameter.sum().backward()
    assert "all_reduce started" not in chain.events
    chain.entries[2].parameter.sum().backward()
    assert chain.events.count("all_reduce started") == 3


def test_a_parameter_without_a_gradient_holds_nobody_up() -> None:
    chain = Chain()
    chain.sync.begin_step()
    chain.sync.before_backward(B0, is_last=True)
    chain.entries[1].parameter.sum().backward()
    chain.sync.finish()
    assert chain.events.count("all_reduce started") == 3
    assert chain.entries[2].parameter.grad is not None


class CurrentAction(NullActivity):
    """Knows what the rank is doing."""

    action = ""

    def begin_action(self, action: str, stage: int, microbatch: int) -> None:
        self.action = action


def test_reduction_overlaps_the_last_backward_of_a_step_and_no_other(pool: WorkerPool) -> None:
    job = small_job(dp=2, pp=2, zero_optimization={"reduce_bucket_size": 2000})
    for rank, actions in enumerate(pool.run(actions_that_reduce, 4, job)):
        stage = rank % 2
        assert actions[0] == actions[-1]  # the second step is like the first
        assert set(actions[0]) == {f"{stage}B3", "SYNC"}
        assert actions[0].count(f"{stage}B3") >= 5
        assert actions[0].count("SYNC") == 1  # the tied embedding, which the other stage adds to


def actions_that_reduce(context: WorkerContext, job: Job) -> list[list[str]]:
    """For each of two steps: the action in which each gradient bucket's reduction starts."""
    activity = CurrentAction()
    mesh = build_job_mesh(job, context.rank, activity=activity)
    engine = build_engine(job, mesh)
    flats = {id(bucket.grads) for bucket in engine.data.buckets}
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        honest = Group.all_reduce

        def all_reduce(self: Group, tensor: Tensor, op: ReduceOp = "sum") -> Pending:
            if id(tensor) in flats:
                seen.append(activity.action)
            return honest(self, tensor, op)

        patch.setattr(Group, "all_reduce", all_reduce)
        found = []
        for step in range(2):
            engine.train_step(replica_samples(job, mesh.coord.dp, step), tokens_of(job).batch, lambda _: None)
            found.append(seen.copy())
            seen.clear()
    return found


def test_bucket_size_and_overlap_do_not_change_a_bit(pool: WorkerPool) -> None:
    settings = [{"reduce_bucket_size": 1}, {"reduce_bucket_size": 5000}, {"reduce_bucket_size": 10**9}]
    settings += [{"reduce_bucket_size": 5000, "overlap_comm": False}]
    runs: list[RankRun] = [
        pool.run(run_steps, 2, small_job(dp=2, gradient_clipping=0.1, zero_optimization=keys), 3)[0]
        for keys in settings
    ]
    for run in runs[1:]:
        assert run.hashes == runs[0].hashes
        assert run.losses == runs[0].losses
    calls = [run.traffic["dp", "all_reduce"][0] - 2 for run in runs]  # besides valid tokens and the step's summary
    assert calls[0] == len(runs[0].hashes)
    assert calls[0] > calls[1] > calls[2] == 1
    assert calls[3] == calls[1]


def test_an_empty_rank_has_nothing_to_sum() -> None:
    sync = data_parallel([], silent_group(), ShardingPolicy(100))
    sync.begin_step()
    sync.before_backward(B0, is_last=True)
    sync.after_compute(B0, None)
    sync.finish()
    sync.hand_gradients(0.5)
    assert sync.buckets == ()
