"""Several stages on a rank, and backward passes in two: every schedule equals one process, and faults are found."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.jobs import GPT2, LLAMA, small_job
from tests.parallel.custom import TIED_STYLES, Case, compare_custom, gated_model, repeated_model, tied_model
from tests.parallel.fakes import RecordingGroup, silent_mesh, stage_of_entries, whole_parameter
from tests.parallel.ranks import RankRun, all_equal, replica_samples, run_steps, tokens_of
from tests.parallel.test_counters import counted
from tests.parallel.test_data_parallel import CurrentAction
from tests.parallel.test_traffic import predicted
from threefold.cost.held import estimate_held
from threefold.job import Job, relayout
from threefold.layout import Layout, Style, StyleRule
from threefold.measure.layouts import parse_layout
from threefold.measure.parity import Difference, ParitySettings, compare_on_rank, run_parity
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel import data as data_module
from threefold.parallel import pipeline as pipeline_module
from threefold.parallel import stage as stage_module
from threefold.parallel.buckets import Bucket, ShardingPolicy
from threefold.parallel.collectives import Group, Pending, ReduceOp
from threefold.parallel.data import DataParallel
from threefold.parallel.deferred import WeightTask
from threefold.parallel.engine import build_engine, build_job_mesh, build_layout
from threefold.parallel.row import completing_backwards, following_compute, plan_row
from threefold.parallel.stage import TensorParallelPlan
from threefold.schedule import Action, Kind, build_schedule, lower, parse_schedule

INTERLEAVED, ZB_H1, ZB_V = "schedule=interleaved_1f1b", "schedule=zb_h1", "schedule=zb_v"
SEARCHED = "schedule=searched"
NEW = (INTERLEAVED, "schedule=interleaved_1f1b,chunks=3", ZB_H1, ZB_V, SEARCHED)
TIED_LLAMA = LLAMA | {"tie_word_embeddings": True}
DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.2, "embd_pdrop": 0.1}


def deep(keys: dict[str, Any], layers: int = 7) -> dict[str, Any]:
    """An odd number of layers, which no number of stages divides."""
    return keys | {"num_hidden_layers": layers}


def assert_parity(pool: WorkerPool, job: Job, layouts: list[str], **settings: Any) -> None:
    jobs = {layout: relayout(job, **parse_layout(layout)) for layout in layouts}
    report = run_parity(jobs, ParitySettings(**settings), pool)
    assert report.ok, [result for result in report.layouts if not result.ok]


# Parity


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", [INTERLEAVED, ZB_H1, ZB_V])
def test_parity(pool: WorkerPool, schedule: str, zero: int) -> None:
    """Tied and untied, with and without recompute, spread over the cases; clipping sees the norm of all stages."""
    tied, mode = zero % 2 == (schedule == ZB_H1), ("none", "selective", "full", "none")[zero]
    job = small_job(
        {**deep(GPT2 | DROPOUT if zero % 2 else LLAMA), "tie_word_embeddings": tied},
        zero_optimization={"stage": zero, "reduce_bucket_size": 3000},
        activation_checkpointing={"mode": mode},
        gradient_clipping=0.05,
    )
    assert_parity(pool, job, [f"pp=2,{schedule}", f"dp=2,pp=2,{schedule}", f"pp=3,accumulation=4,{schedule}"])


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("schedule", [INTERLEAVED, ZB_H1, ZB_V])
def test_parity_with_tensor_parallelism(pool: WorkerPool, schedule: str, sequence_parallel: bool) -> None:
    keys = GPT2 | DROPOUT if sequence_parallel else TIED_LLAMA
    sizes = f"tp=2,pp=2,sequence_parallel={str(sequence_parallel).lower()}"
    assert_parity(pool, small_job(deep(keys), zero_optimization={"stage": 2}), [f"{sizes},{schedule}"])


@pytest.mark.parametrize(
    ("schedule", "modes"),
    [
        ("1f1b", ["full", "selective"]),
        ("interleaved_1f1b", ["full", "selective", "none", "full"]),
        ("zb_v", ["none", "full", "full", "selective"]),
    ],
)
def test_parity_where_each_stage_recomputes_something_else(pool: WorkerPool, schedule: str, modes: list[str]) -> None:
    pipeline = {"size": 2, "schedule": schedule, "chunks": len(modes) // 2}
    job = small_job(
        deep(GPT2 | DROPOUT),
        parallelism={"pp": pipeline, "dp": {"size": 2}},
        zero_optimization={"stage": 3},
        activation_checkpointing={"stages": modes},
    )
    report = run_parity({"mixed": job}, ParitySettings(), pool)
    assert report.ok, report.layouts


def test_parity_of_searched_schedules_and_many_chunks(pool: WorkerPool) -> None:
    job = small_job(deep(GPT2, 9))
    layouts = [f"pp=2,{SEARCHED}", f"dp=2,pp=2,{SEARCHED}", "pp=2,schedule=interleaved_1f1b,chunks=3"]
    assert_parity(pool, job, [*layouts, "pp=4,accumulation=1,schedule=interleaved_1f1b", "pp=1,schedule=zb_h1"])


SIZES = ("pp=2", "dp=2,pp=2", "tp=2,pp=2,sequence_parallel=true", "pp=4", "dp=2,tp=2,pp=2")


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("keys", [GPT2, LLAMA, TIED_LLAMA], ids=["gpt2", "llama", "tied llama"])
def test_wide_parity_matrix(pool: WorkerPool, keys: dict[str, Any], zero: int) -> None:
    """Every schedule at every size, two at each in one case, so that all meet over the cases; recompute goes round."""
    turn = zero + 4 * [GPT2, LLAMA, TIED_LLAMA].index(keys)
    job = small_job(
        deep(keys, 9) | (DROPOUT if keys is GPT2 else {}),
        zero_optimization={"stage": zero, "reduce_bucket_size": 3000},
        activation_checkpointing={"mode": ("none", "selective", "full")[turn % 3]},
        gradient_clipping=0.05,
    )
    chosen = [(size, NEW[(turn + shift + place) % len(NEW)]) for place, size in enumerate(SIZES) for shift in (0, 2)]
    layouts = [f"{size},{name}" for size, name in chosen if "chunks=3" not in name or size != "pp=4"]
    assert_parity(pool, job, layouts)


HAND_WRITTEN = """by_hand stages=4 ranks=2 microbatches=3 placement=v
# Fused and split backward passes side by side, a whole microbatch's W after another's I, stages in no usual order.
rank 0: 0F0 3F0 3B0 0F1 0I0 3F1 3I1 0F2 0B1 3F2 3I2 3W1 0I2 0W0 3W2 0W2
rank 1: 1F0 2F0 1F1 2B0 1I0 2F1 2I1 1B1 1F2 2F2 2I2 2W2 1I2 1W2 2W1 1W0
"""


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_parity_of_a_schedule_from_a_file(pool: WorkerPool, tmp_path: Path, zero: int) -> None:
    path = tmp_path / "schedule.txt"
    path.write_text(HAND_WRITTEN)
    settings: dict[str, Any] = {
        "parallelism": {"pp": {"size": 2, "schedule_file": str(path), "chunks": 2}},
        "zero_optimization": {"stage": zero, "reduce_bucket_size": 3000},
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 2,
    }
    job = small_job(deep(GPT2), dp=2, **settings)
    report = run_parity({"by hand": job}, ParitySettings(), pool)
    assert report.ok, report.layouts


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_h1", "zb_v"])
def test_half_precision_takes_the_steps_of_1f1b(pool: WorkerPool, schedule: str, precision: str) -> None:
    settings: dict[str, Any] = {precision: {"enabled": True}, "train_micro_batch_size_per_gpu": 2}
    job = small_job(GPT2, dp=2, pp=2, zero_optimization={"stage": 2}, **settings)
    plain, other = (pool.run(run_steps, 4, relayout(job, schedule=name), 3)[0] for name in ("1f1b", schedule))
    assert other.losses == pytest.approx(plain.losses, rel=1e-6)
    assert other.norms == pytest.approx(plain.norms, rel=1e-5)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_h1", "zb_v"])
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_compression": {"type": "powersgd", "rank": 2, "start_step": 1}},
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 1}}},
    ],
    ids=["powersgd", "one-bit-adam"],
)
def test_compression_composes(pool: WorkerPool, schedule: str, settings: dict[str, Any]) -> None:
    """Replicas stay equal, bit by bit; PowerSGD compresses each matrix alone, so the schedule changes nothing."""
    job = small_job(dp=2, pp=2, **settings)
    plain, other = (pool.run(run_steps, 4, relayout(job, schedule=name), 4) for name in ("1f1b", schedule))
    assert all_equal([run.losses for run in other])
    exact = "gradient_compression" in settings
    assert other[0].losses == pytest.approx(plain[0].losses, rel=1e-5 if exact else 0.05)


# Somebody else's models: ties over several stages of several ranks


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize(("schedule", "chunks", "pp"), [("interleaved_1f1b", 3, 2), ("zb_v", 2, 3), ("zb_h1", 1, 3)])
def test_b032_ties_on_one_rank_and_over_ranks(pool: WorkerPool, schedule: str, chunks: int, pp: int, zero: int) -> None:
    """Each part is a stage of its own, so that what is tied meets on one rank, on two, and on one that it is alone."""
    for layout in (Layout(pp=pp), Layout(pp=pp, dp=2)):
        case = Case(tied_model, TensorParallelPlan(TIED_STYLES), layout, schedule=schedule, chunks=chunks, zero=zero)
        pool.run(compare_custom, layout.world_size, case)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v"])
@pytest.mark.parametrize("zero", [0, 3])
def test_other_models(pool: WorkerPool, schedule: str, zero: int) -> None:
    plan = TensorParallelPlan(
        {"0": StyleRule(Style.VOCAB), "5": StyleRule(Style.VOCAB), "*": StyleRule(Style.REPLICATED)}
    )
    for build in (gated_model, repeated_model):
        case = Case(build, plan, Layout(dp=2, pp=2), schedule=schedule, chunks=2, zero=zero)
        pool.run(compare_custom, 4, case)


def test_stages_that_meet_on_one_rank_share_the_tied_embedding() -> None:
    turned = small_job(GPT2, pp=2, parallelism={"pp": {"schedule": "zb_v"}})
    engine = build_engine(turned, silent_mesh(Layout(pp=2), 0))
    first, last = engine.stages
    assert (first.index, last.index) == (0, 3)
    embedding, head = first.find("embed.tokens.weight"), last.find("embed.tokens.weight")
    assert embedding is head and embedding is not None
    assert embedding.sum_over.axis == "self"
    names = [entry.name for entry in engine.parameters]
    assert len(names) == len(set(names))
    held = [entry.name for bucket in engine.data.buckets for entry in bucket.entries]
    assert Counter(held) == Counter(names)
    shared = [bucket for bucket in engine.data.buckets if bucket.stages == (0, 3)]
    assert [entry.name for bucket in shared for entry in bucket.entries] == ["embed.tokens.weight"]


def test_what_passes_between_stages_of_one_rank_is_not_copied(pool: WorkerPool) -> None:
    job = small_job(GPT2, pp=2, parallelism={"pp": {"schedule": "zb_v"}})
    for rank, addresses in enumerate(pool.run(boundary_storages, 2, job)):
        # Stages 0 and 3 are on rank 0, 1 and 2 on rank 1: of three boundaries one is within a rank.
        assert addresses == ((8, 0) if rank else (0, 0))


def boundary_storages(context: WorkerContext, job: Job) -> tuple[int, int]:
    """How many outputs of a stage are, in place, the input of the next one, and how many were copied."""
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    outputs: list[int] = []
    same = other = 0

    def note(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal same, other
        if module.index == 2:
            same, other = (same + 1, other) if args[0].data_ptr() in outputs else (same, other + 1)
        outputs.append(output.data_ptr())

    for stage in engine.stages:
        stage.register_forward_hook(note)
    engine.train_step(replica_samples(job, 0, 0), tokens_of(job).batch, lambda _: None)
    return same, other


# What is sent and held


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", [INTERLEAVED, ZB_H1, ZB_V])
def test_predicted_equals_counted(pool: WorkerPool, schedule: str, zero: int) -> None:
    for keys, layout in ((GPT2, "dp=2,pp=2"), (TIED_LLAMA, "dp=2,tp=2,pp=2,sequence_parallel=true")):
        storage = {"stage": zero, "reduce_bucket_size": 3000}
        job = relayout(small_job(deep(keys), zero_optimization=storage), **parse_layout(f"{layout},{schedule}"))
        runs: list[RankRun] = pool.run(run_steps, job.world_size, job, 2)
        for rank, run in enumerate(runs):
            assert run.traffic == predicted(job, build_layout(job).coord(rank).pp), f"rank {rank} of {layout}"


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_h1", "zb_v"])
def test_counted_bytes_are_those_predicted(pool: WorkerPool, schedule: str, zero: int) -> None:
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    job = small_job(deep(GPT2), dp=2, pp=2, optimizer=adam, zero_optimization={"stage": zero})
    job = relayout(job, schedule=schedule)
    for rank, (memory, weights) in enumerate(pool.run(counted, 4, job)):
        expected = estimate_held(job, build_layout(job).coord(rank).pp)
        found = {kind: memory.held[kind] for kind in ("parameters", "gradients", "optimizer")}
        assert found == {kind: weights[kind] for kind in found}
        assert tuple(found.values()) == (expected.parameters, expected.gradients, expected.optimizer)
        assert memory.held["activations"] == memory.held["buffers"] == 0, "nothing is left of a step"


def test_b122_a_sent_tensor_is_not_kept_until_the_step_ends() -> None:
    """Of 1F1B's sends, a rank waits for those of which the answer shows that they have arrived."""
    schedule = lower(build_schedule("1f1b", 2, 8))
    settled = plan_row(schedule, 0).settled
    by_action = dict(zip(map(str, schedule.rows[0]), settled, strict=True))
    assert [str(send) for send in by_action["0B0"]] == ["0SEND_F0"]
    outputs = [f"0SEND_F{index}" for index in range(8)]
    assert sorted(str(send) for sends in settled for send in sends) == outputs
    for name in ("naive", "gpipe", "interleaved_1f1b", "zb_h1", "zb_v"):
        made = lower(build_schedule(name, 4, 6))
        for rank, row in enumerate(made.rows):
            sends = [send for sends in plan_row(made, rank).settled for send in sends]
            assert len(sends) == len(set(sends))
            assert set(sends) <= {action for action in row if action.kind in (Kind.SEND_F, Kind.SEND_B)}


# When gradients are reduced


def actions(text: str) -> tuple[Action, ...]:
    row = f"x stages=4 ranks=2 microbatches=9\nrank 0: {text}\nrank 1:"
    return parse_schedule(row).rows[0]


def test_a_stage_is_complete_after_its_last_b_or_w() -> None:
    row = actions("0F0 2F0 2I0 0F1 0I0 2F1 2B1 2W0 0B1 0W0 SYNC STEP")
    assert completing_backwards(row) == {7, 9}
    following = [str(action) for action in following_compute(row)]
    assert following == ["2F0", "2I0", "0F1", "0I0", "2F1", "2B1", "2W0", "0B1", "0W0", "None", "None", "None"]


@pytest.mark.parametrize(
    ("schedule", "starts"),
    [
        ("zb_h1", {0: {"0W3"}, 1: {"1W3"}}),
        ("interleaved_1f1b", {0: {"0B3", "2B3"}, 1: {"1B3", "3B3"}}),
        ("zb_v", {0: {"0W3", "3W3"}, 1: {"1W3", "2W3"}}),
    ],
)
def test_reduction_starts_when_a_stage_is_complete(
    pool: WorkerPool, schedule: str, starts: dict[int, set[str]]
) -> None:
    job = small_job(LLAMA, dp=2, pp=2, zero_optimization={"reduce_bucket_size": 2000})
    job = relayout(job, schedule=schedule)
    for rank, seen in enumerate(pool.run(actions_that_reduce, 4, job)):
        kinds = {action.replace("B", "?").replace("W", "?") for action in seen}
        expected = {action.replace("B", "?").replace("W", "?") for action in starts[rank % 2]}
        assert kinds == expected, seen
        assert len(seen) >= 5


def actions_that_reduce(context: WorkerContext, job: Job) -> list[str]:
    activity = CurrentAction()
    mesh = build_job_mesh(job, context.rank, activity=activity)
    engine = build_engine(job, mesh)
    flats, seen = {id(bucket.grads) for bucket in engine.data.buckets}, []
    honest = Group.all_reduce

    def all_reduce(self: Group, tensor: Tensor, op: ReduceOp = "sum") -> Pending:
        if id(tensor) in flats:
            seen.append(activity.action)
        return honest(self, tensor, op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "all_reduce", all_reduce)
        engine.train_step(replica_samples(job, mesh.coord.dp, 0), tokens_of(job).batch, lambda _: None)
    return seen


class TwoStages:
    """Two stages with two parameters each, every one a bucket, and the order in which they are summed."""

    def __init__(self, zero: int = 0) -> None:
        self.events: list[str] = []
        group = RecordingGroup(self.events, axis="dp")
        self.entries = [whole_parameter(name, (4,), group) for name in ("a", "b", "c", "d")]
        stages = [stage_of_entries(self.entries[:2], 0), stage_of_entries(self.entries[2:], 2)]
        self.data = DataParallel(stages, group, ShardingPolicy(4, stage=zero))
        for bucket in self.data.buckets:
            honest = bucket.reduce

            def reduce(bucket: Bucket = bucket, honest: Any = honest) -> None:
                self.events.append(bucket.entries[0].name)
                honest()

            bucket.reduce = reduce
        self.data.begin_step()

    def parameter(self, name: str) -> Tensor:
        return next(entry.parameter for entry in self.entries if entry.name == name)

    def task(self, name: str) -> WeightTask:
        return WeightTask(self.parameter(name), lambda: lambda: self.parameter(name).sum().backward())

    def reduced(self) -> list[str]:
        return [event for event in self.events if len(event) == 1]


def test_a_bucket_waits_for_all_weight_gradients_of_the_last_w() -> None:
    """In I one parameter gets its gradient at once, the other later, twice: none of it starts a reduction."""
    case = TwoStages()
    case.data.before_backward(Action(Kind.I, 2, 0), False)
    case.parameter("c").sum().backward()
    case.data.after_compute(Action(Kind.I, 2, 0), None)
    assert case.reduced() == []
    tasks = [case.task("d"), case.task("d")]
    case.data.before_backward(Action(Kind.W, 2, 0), True, tasks)
    assert case.reduced() == []  # d comes first in a bucket order that is the same on every rank
    tasks[0].start()()
    assert case.reduced() == []
    tasks[1].start()()
    assert case.reduced() == ["d", "c"]


def test_no_stage_overtakes_what_another_left_incomplete() -> None:
    """A parameter that got no gradient on one replica must not change the order of collectives there."""
    case = TwoStages()
    case.data.before_backward(Action(Kind.B, 2, 0), True)
    case.parameter("c").sum().backward()
    case.data.after_compute(Action(Kind.B, 2, 0), None)
    case.data.before_backward(Action(Kind.B, 0, 0), True)
    for name in ("b", "a"):
        case.parameter(name).sum().backward()
    case.data.finish()
    assert case.reduced() == ["d", "c", "b", "a"]


def test_stage_2_keeps_no_whole_bucket_between_i_and_w(pool: WorkerPool) -> None:
    job = relayout(small_job(GPT2, dp=2, pp=2, zero_optimization={"stage": 2}), schedule="zb_h1")
    assert pool.run(moments_after_i, 4, job) == [0] * 4


def moments_after_i(context: WorkerContext, job: Job) -> int:
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    honest, found = engine.data.after_compute, []

    def after_compute(action: Action, following: Action | None) -> None:
        honest(action, following)
        found.append(sum(bucket.moment is not None for bucket in engine.data.buckets))

    engine.data.after_compute = after_compute
    engine.train_step(replica_samples(job, engine.mesh.coord.dp, 0), tokens_of(job).batch, lambda _: None)
    return sum(found)


def test_stage_3_gathers_what_the_next_action_begins_with(pool: WorkerPool) -> None:
    """Parameters arrive in the order of the schedule, and nothing is left gathered."""
    job = relayout(small_job(GPT2, dp=2, pp=2, zero_optimization={"stage": 3}), schedule="interleaved_1f1b")
    for early, left in pool.run(gathered_early, 4, job):
        assert early
        assert left == 0


def gathered_early(context: WorkerContext, job: Job) -> tuple[bool, int]:
    """Whether, after every action but the last, the part that comes first in the next one is here or on its way."""
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    honest, found = engine.data.after_compute, []

    def after_compute(action: Action, following: Action | None) -> None:
        honest(action, following)
        if following is not None:
            parts = engine.data._gathered[following.stage]
            index = 0 if following.kind is Kind.F else len(parts.parts) - 1
            found.append(index in parts.arriving and all(bucket.present for bucket in parts.buckets_of[index]))

    engine.data.after_compute = after_compute
    engine.train_step(replica_samples(job, engine.mesh.coord.dp, 0), tokens_of(job).batch, lambda _: None)
    return all(found), sum(bucket.present for bucket in engine.data.buckets if bucket.shards_parameters)


# Planted faults


def skipped_weights(context: WorkerContext, job: Job, settings: ParitySettings, path: Path) -> list[Difference]:
    """W of one microbatch is lost on every rank."""
    honest = stage_module.Stage.backward_weights
    calls: list[int] = []

    def backward_weights(self: Any, tasks: list[WeightTask]) -> None:
        calls.append(1)
        if len(calls) != 3:
            honest(self, tasks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_module.Stage, "backward_weights", backward_weights)
        return compare_on_rank(context, job, settings, path)


def reduced_before_weights(context: WorkerContext, job: Job, settings: ParitySettings, path: Path) -> list[Difference]:
    """Buckets travel when the last I is over, before its W."""
    honest = data_module.DataParallel.before_backward

    def before_backward(self: Any, action: Action, is_last: bool, tasks: Any = ()) -> None:
        honest(self, action, is_last, () if action.kind is Kind.W else tasks)
        for bucket in self.buckets:
            bucket.finish_reduce()  # what has left has left: a slow link must not hide the fault

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_module.DataParallel, "before_backward", before_backward)
        patch.setattr("threefold.parallel.engine.Engine.check_replicas", lambda self, step: None)
        return compare_on_rank(context, job, settings, path)


def one_last_backward_for_all_stages(
    context: WorkerContext, job: Job, settings: ParitySettings, path: Path
) -> list[Difference]:
    """The first stage that is complete takes all to be complete."""
    honest = pipeline_module.plan_row

    def plan(schedule: Any, rank: int) -> Any:
        row = honest(schedule, rank)
        first = min(row.completing)
        later = [i for i, action in enumerate(row.actions) if action.kind in (Kind.B, Kind.W) and i < first]
        return replace(row, completing=frozenset({first, *later[-2:]}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_module, "plan_row", plan)
        patch.setattr("threefold.parallel.engine.Engine.check_replicas", lambda self, step: None)
        return compare_on_rank(context, job, settings, path)


@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        (skipped_weights, f"pp=2,{ZB_H1}"),
        (skipped_weights, f"pp=2,{ZB_V}"),
        (reduced_before_weights, f"dp=2,pp=2,{ZB_H1}"),
        (one_last_backward_for_all_stages, f"dp=2,pp=2,{INTERLEAVED}"),
    ],
)
def test_planted_faults_are_caught(pool: WorkerPool, fault: Any, layout: str) -> None:
    jobs = {layout: relayout(small_job(), **parse_layout(layout))}
    report = run_parity(jobs, ParitySettings(), pool, worker=fault)
    assert not report.ok
    assert "gradient of" in str(report.layouts[0].first_difference)
