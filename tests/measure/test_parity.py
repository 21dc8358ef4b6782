"""Law 2: any layout gives the loss and every gradient of one process. And parity catches what breaks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import GPT2, LLAMA, small_job
from threefold.errors import WorkerError
from threefold.job import Job, relayout
from threefold.measure.layouts import all_layouts, factorizations, parse_layout
from threefold.measure.parity import (
    EXACT,
    Difference,
    ParitySettings,
    bytes_needed,
    compare_on_rank,
    free_bytes,
    run_parity,
    summarize,
)
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel import buckets as buckets_module
from threefold.parallel import engine as engine_module
from threefold.parallel import pipeline as pipeline_module
from threefold.parallel import stage as stage_module

WIDE_GPT2 = GPT2 | {"num_attention_heads": 8, "num_hidden_layers": 8, "vocab_size": 67}
WIDE_LLAMA = LLAMA | {"num_key_value_heads": 8, "num_hidden_layers": 8, "vocab_size": 67, "tie_word_embeddings": True}
MODELS = {"gpt2": WIDE_GPT2, "llama": WIDE_LLAMA}


def assert_parity(pool: WorkerPool, job: Job, layouts: list[str], **settings: Any) -> None:
    jobs = {layout: relayout(job, **parse_layout(layout)) for layout in layouts}
    report = run_parity(jobs, ParitySettings(**settings), pool)
    assert report.ok, [result for result in report.layouts if not result.ok]
    assert all(result.grad_error <= 1e-10 for result in report.layouts)


def layouts_of(world: int, schedules: tuple[str, ...]) -> list[str]:
    return [
        f"dp={dp},tp={tp},pp={pp},schedule={schedule}"
        for dp, tp, pp in factorizations(world)
        for schedule in (schedules if pp > 1 else schedules[:1])
    ]


@pytest.mark.parametrize("style", MODELS)
def test_all_factorizations_of_4_under_all_schedules(pool: WorkerPool, style: str) -> None:
    job = small_job(MODELS[style], gradient_clipping=0.05)
    assert_parity(pool, job, layouts_of(4, ("naive", "gpipe", "1f1b")))


@pytest.mark.parametrize("style", MODELS)
def test_3d_on_8_ranks_with_sequence_parallel(pool: WorkerPool, style: str) -> None:
    job = small_job(MODELS[style], gradient_clipping=0.05)
    assert_parity(pool, job, ["dp=2,tp=2,pp=2", "dp=2,tp=2,pp=2,sequence_parallel=true,schedule=gpipe"])


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("style", MODELS)
def test_all_factorizations_of_8_under_all_schedules(pool: WorkerPool, style: str, sequence_parallel: bool) -> None:
    job = small_job(MODELS[style], data={"sequence_length": 16}, gradient_clipping=0.05)
    suffix = f",sequence_parallel={str(sequence_parallel).lower()}"
    layouts = [layout + suffix for layout in layouts_of(8, ("naive", "gpipe", "1f1b"))]
    assert_parity(pool, job, layouts, timeout_s=300)


@pytest.mark.parametrize("keys", [GPT2, LLAMA | {"tie_word_embeddings": True}], ids=["gpt2", "llama"])
def test_seven_layers_and_a_prime_vocabulary_on_two_and_three_stages(pool: WorkerPool, keys: dict[str, Any]) -> None:
    job = small_job(keys | {"num_hidden_layers": 7, "vocab_size": 61})
    assert_parity(pool, job, ["pp=2", "pp=3", "pp=3,tp=2,schedule=gpipe", "pp=3,partition=1+4+2", "pp=2,partition=0+7"])


def test_untied_and_tied_heads(pool: WorkerPool) -> None:
    layouts = ["tp=4", "pp=2,tp=2,sequence_parallel=true"]
    assert_parity(pool, small_job(GPT2 | {"tie_word_embeddings": False}), layouts)
    assert_parity(pool, small_job(LLAMA), layouts)


def test_one_microbatch_on_four_stages(pool: WorkerPool) -> None:
    job = small_job()
    assert_parity(pool, job, [f"pp=4,accumulation=1,schedule={name}" for name in ("naive", "gpipe", "1f1b")])


def test_b016_b018_b019_ranks_with_few_valid_tokens_do_not_weigh_too_much(pool: WorkerPool) -> None:
    assert_parity(pool, small_job(), ["dp=2", "dp=2,tp=2", "dp=2,pp=2", "dp=4"], ignored_fraction=0.8)


def test_b022_one_valid_token_in_the_whole_batch(pool: WorkerPool) -> None:
    assert_parity(
        pool,
        small_job(gradient_clipping=0.01),
        ["dp=4", "tp=2,sequence_parallel=true", "pp=2,dp=2"],
        steps=1,
        only_valid=(5, 7),
    )


def test_b013_b015_b024_accumulation_does_not_change_raw_gradients(pool: WorkerPool) -> None:
    assert_parity(pool, small_job(), ["pp=2,accumulation=1", "pp=2,accumulation=4", "dp=2,pp=2,accumulation=2"])


def test_b025_accumulation_with_overlapped_reduction(pool: WorkerPool) -> None:
    job = small_job(zero_optimization={"reduce_bucket_size": 700})
    assert_parity(pool, job, ["dp=2,accumulation=1", "dp=2,accumulation=4"])


def test_dropout_masks_are_those_of_one_process(pool: WorkerPool) -> None:
    keys = GPT2 | {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.3}
    layouts = ["tp=2", "tp=2,sequence_parallel=true", "pp=2,dp=2", "dp=2,tp=2,pp=2"]
    assert_parity(pool, small_job(keys), layouts)


def test_axis_order_does_not_matter(pool: WorkerPool) -> None:
    assert_parity(pool, small_job(), ["dp=2,tp=2,order=dp>tp>pp", "dp=2,pp=2,tp=2,order=pp>dp>tp"])


def test_b114_float32_is_judged_by_the_rounding_that_was_measured(pool: WorkerPool) -> None:
    jobs = {"dp=2,tp=2": relayout(small_job(), dp=2, tp=2)}
    report = run_parity(jobs, ParitySettings(dtype="float32"), pool)
    assert report.ok
    drift = {entry.dtype: entry for entry in report.drift}
    assert 1e-8 < drift["float32"].grad_error < 1e-4 < drift["bfloat16"].grad_error
    assert report.tolerance == drift["float32"].tolerance
    assert report.tolerance.gradient == 10 * drift["float32"].grad_error
    assert 0 < report.layouts[0].grad_error < report.tolerance.gradient


def test_bfloat16_is_judged_by_kind(pool: WorkerPool) -> None:
    """Elements of a gradient may be off by percents; a wrong factor of all of them is seen in the norm."""
    jobs = {"dp=2,tp=2": relayout(small_job(), dp=2, tp=2)}
    report = run_parity(jobs, ParitySettings(dtype="bfloat16"), pool)
    assert report.ok, report.layouts
    assert report.tolerance.norm < report.tolerance.gradient < 0.15
    assert report.tolerance.norm < 0.02
    faulty = run_parity(jobs, ParitySettings(dtype="bfloat16"), pool, worker=three_percent_too_much)
    assert "the gradient norm at step 0" in str(faulty.layouts[0].first_difference)


def three_percent_too_much(context: WorkerContext, job: Job, settings: ParitySettings, path: Path) -> list[Difference]:
    """All gradients are a little too large, less than bfloat16 rounds an element."""
    honest = pipeline_module.PipelineExecutor.run

    def run(self: Any, schedule: Any, batch: Any, num_valid: float, *others: Any) -> Any:
        return honest(self, schedule, batch, num_valid / 1.03, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_module.PipelineExecutor, "run", run)
        return compare_on_rank(context, job, settings, path)


# Planted faults: parity must catch each and name it. The functions run on the ranks, so they patch there.


def wrong_count(context: WorkerContext, job: Job, settings: ParitySettings, path: Path) -> list[Difference]:
    """Each replica divides by its own number of valid tokens times dp: a mean of means."""
    honest = pipeline_module.PipelineExecutor.run

    def run(self: Any, schedule: Any, batch: Any, num_valid: float, *others: Any) -> Any:
        return honest(self, schedule, batch, batch.num_valid * self.mesh.dp.size, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_module.PipelineExecutor, "run", run)
        return compare_on_rank(context, job, settings, path)


def norm_without_sync(context: WorkerContext, job: Job, settings: ParitySettings, path: Path) -> list[Difference]:
    """Under sequence parallelism the gradients of norm weights are summed over dp only."""
    honest = stage_module._make

    def make(*args: Any) -> stage_module.ShardedParameter:
        from dataclasses import replace

        entry = honest(*args)
        return replace(entry, sum_over=args[4].dp) if "norm" in entry.name else entry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_module, "_make", make)
        patch.setattr(engine_module.Engine, "check_replicas", lambda self, step: None)
        return compare_on_rank(context, job, settings, path)


def swapped_shard(context: WorkerContext, job: Job, settings: ParitySettings, path: Path) -> list[Difference]:
    """The ranks of a tp pair hold each other's part of one weight."""
    honest = stage_module.shard

    def shard(rule: Any, kind: Any, shape: Any, tp_size: int, tp_coord: int, qkv: Any) -> Any:
        swap = tuple(shape) == (32, 128)  # mlp.down
        return honest(rule, kind, shape, tp_size, (tp_coord + 1) % tp_size if swap else tp_coord, qkv)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_module, "shard", shard)
        return compare_on_rank(context, job, settings, path)


def unreduced_bucket(context: WorkerContext, job: Job, settings: ParitySettings, path: Path) -> list[Difference]:
    """The first bucket never travels."""
    honest = buckets_module.Bucket.reduce

    def reduce(self: buckets_module.Bucket) -> None:
        if "final_norm.weight" not in [entry.name for entry in self.entries]:
            honest(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets_module.Bucket, "reduce", reduce)
        patch.setattr(engine_module.Engine, "check_replicas", lambda self, step: None)
        return compare_on_rank(context, job, settings, path)


@pytest.mark.parametrize(
    ("fault", "layout", "named"),
    [
        (wrong_count, "dp=2", "gradient of embed.tokens.weight at step 0"),
        (norm_without_sync, "tp=2,sequence_parallel=true", "gradient of layers.0.attention_norm.weight at step 0"),
        (swapped_shard, "tp=2", "loss at step 0"),
        (unreduced_bucket, "dp=2", "gradient of"),
    ],
)
def test_planted_faults_are_caught_and_named(pool: WorkerPool, fault: Any, layout: str, named: str) -> None:
    jobs = {layout: relayout(small_job(), **parse_layout(layout))}
    report = run_parity(jobs, ParitySettings(), pool, worker=fault)
    assert not report.ok
    difference = report.layouts[0].first_difference
    assert difference is not None
    assert named in difference
    assert "relative error" in difference


def test_a_rank_that_raises_is_told_with_its_traceback(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"rank 1: Traceback(.|\n)*planted"):
        pool.run(raise_on_rank_1, 2)
    assert pool.run(rank_of, 2) == [0, 1]  # the pool can be used again


def raise_on_rank_1(context: WorkerContext) -> None:
    if context.rank == 1:
        raise RuntimeError("planted")


def rank_of(context: WorkerContext) -> int:
    return context.rank


def test_a_hang_is_ended_and_named(pool: WorkerPool) -> None:
    with pytest.raises(
        WorkerError, match=r"did not finish(.|\n)*rank 1 .*rank 0 waits for it in all_reduce over dp\[0,1\]"
    ):
        pool.run(wait_for_nobody, 2, timeout_s=3.0)


def wait_for_nobody(context: WorkerContext) -> None:
    import time

    from threefold.layout import Layout
    from threefold.parallel.mesh import build_mesh

    mesh = build_mesh(Layout(dp=2), context.rank, activity=context.activity)
    if context.rank == 0:
        mesh.dp.all_reduce(torch.ones(1)).wait()
    else:
        time.sleep(60)


def test_layouts_that_a_job_cannot_have_are_told_apart() -> None:
    jobs, impossible = all_layouts(small_job(GPT2 | {"num_hidden_layers": 2}), 4)
    assert set(jobs) == {"dp=4,tp=1,pp=1", "dp=2,tp=2,pp=1", "dp=2,tp=1,pp=2", "dp=1,tp=2,pp=2", "dp=1,tp=4,pp=1"}
    assert set(impossible) == {"dp=1,tp=1,pp=4"}
    assert "parallelism.pp.size" in str(impossible["dp=1,tp=1,pp=4"])


def test_one_layout_comes_under_schedules_with_several_stages_a_rank() -> None:
    jobs, _ = all_layouts(small_job(), 8)
    extra = {name: job for name, job in jobs.items() if "schedule" in name}
    assert set(extra) == {"dp=2,tp=2,pp=2,schedule=interleaved_1f1b", "dp=2,tp=2,pp=2,schedule=zb_v"}
    assert {job.parallelism.pp.chunks for job in extra.values()} == {2}
    stated = small_job(parallelism={"pp": {"schedule": "zb_v"}}, pp=2)
    assert "dp=1,tp=1,pp=2,schedule=zb_v" not in all_layouts(stated, 2)[0]
    assert parse_layout("pp=2,schedule=interleaved_1f1b,chunks=3")["chunks"] == 3
    assert parse_layout("pp=2,partition=4.5+3.5")["partition"] == [4.5, 3.5]


def test_the_memory_that_parity_takes_is_known_before() -> None:
    job = small_job(dp=2)
    assert job.model is not None
    assert bytes_needed(job, "float64") == 2 * 8 * 3 * job.model.num_parameters
    assert bytes_needed(job, "bfloat16") * 4 == bytes_needed(job, "float64")
    assert (free_bytes() or 1) > 0


def test_the_first_difference_is_the_first_that_happens() -> None:
    found = [
        Difference("value", "a", 0, 1.0, 0, "x"),
        Difference("gradient", "b", 1, 1.0, 0, "x"),
        Difference("gradient", "c", 0, 1.0, 0, "x"),
        Difference("loss", "loss", 0, 1e-12, 0, "x"),
    ]
    result = summarize("dp=2", found, EXACT)
    assert result.first_difference is not None
    assert result.first_difference.startswith("gradient of c at step 0")
    assert not result.ok
