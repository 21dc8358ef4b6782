"""Advice after a run: what the stages took, and what another cut would gain."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cost.profiles import small_profile
from tests.jobs import LLAMA, small_job
from threefold.cost.parts import ModelCosts, PartCosts, flops_costs
from threefold.job import Job
from threefold.plan.balance import play_partition, schedule_to_play, step_costs, with_partition
from threefold.plan.imbalance import StagePasses, find_imbalance, fit_costs

NOTHING = PartCosts(0.0, 0.0, 0.0, 0.0)


def job_with(partition: tuple[float, ...], **pipeline: Any) -> Job:
    model = LLAMA | {"num_hidden_layers": round(sum(partition))}
    chunks = pipeline.get("chunks", 1)
    settings = {"pp": {"partition": list(partition), **pipeline}}
    return small_job(model, pp=len(partition) // chunks, parallelism=settings)


def passes(*totals: float) -> list[StagePasses]:
    return [StagePasses(total / 3, 2 * total / 3) for total in totals]


def test_a_heavy_head_is_found_and_the_gain_is_what_a_play_says() -> None:
    job = job_with((3, 3, 3, 3))
    found = find_imbalance(job, passes(3.0, 3.0, 3.0, 6.0))  # the head takes as long as three layers
    assert found is not None
    assert (found.what, found.rank) == ("stage", 3)
    assert found.over_mean == pytest.approx(6 / 3.75 - 1)
    layer, head = (PartCosts(t / 3, 2 * t / 3, t / 3, t / 3) for t in (1.0, 3.0))
    costs = ModelCosts(NOTHING, layer, head, "the truth")
    plan = schedule_to_play(job)
    before, after = (play_partition(costs, cut, plan).makespan_s for cut in ((3, 3, 3, 3), found.partition))
    assert found.gain == pytest.approx(before / after - 1)
    assert found.partition[3] < 3
    counts = ",".join(map(str, found.partition))
    assert found.words() == (
        f"stage 3 is 60% slower than the mean: --partition {counts} "
        f"(parallelism.pp.partition {list(found.partition)}) would give +{found.gain:.0%} tokens/s"
    )
    assert found.to_dict()["advice"] == found.words()


def test_a_slow_device_gets_fewer_layers() -> None:
    found = find_imbalance(job_with((4, 4, 4, 4)), passes(4.0, 4.0, 6.0, 4.0))
    assert found is not None
    assert (found.what, found.rank) == ("stage", 2)
    assert found.partition[2] < 4


@pytest.mark.parametrize("totals", [(4.0, 4.0), (4.0, 4.1), (4.0, 4.0, 4.0), (3.98, 4.0, 4.02, 4.05)], ids=str)
def test_balanced_stages_are_not_spoken_of(totals: tuple[float, ...]) -> None:
    assert find_imbalance(job_with((4,) * len(totals)), passes(*totals)) is None


def test_an_imbalance_that_no_cut_mends_is_not_spoken_of() -> None:
    assert find_imbalance(job_with((1, 1)), passes(1.0, 1.3)) is None


def test_half_a_layer_is_advised_where_a_layer_is_too_much() -> None:
    found = find_imbalance(job_with((1, 1)), passes(1.0, 1.8))
    assert found is not None
    assert found.partition == (1.5, 0.5)
    assert "--partition 1.5,0.5" in found.words()
    assert find_imbalance(job_with((1.5, 0.5)), passes(1.5, 1.3)) is None


def test_a_long_optimizer_step_makes_the_gain_smaller() -> None:
    job, times = job_with((4, 4)), passes(4.0, 8.0)
    free, held_up = find_imbalance(job, times), find_imbalance(job, times, step_s=20.0)
    assert free is not None and held_up is not None
    assert free.gain > held_up.gain > 0.03
    assert find_imbalance(job, times, step_s=1000.0) is None


def test_with_two_stages_a_profile_tells_the_embedding_from_the_layers() -> None:
    job = job_with((4, 4))
    known = small_profile(job, embedding_s=4.0, layer_s=1.0, head_s=4.0)
    assert find_imbalance(job, passes(8.0, 8.0), profile=known) is None
    fitted = fit_costs((4, 4), passes(8.0, 8.0), flops_costs(job))
    assert fitted.layer.forward_s + fitted.layer.backward_s == pytest.approx(2.0)  # nothing says that it is less


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (2, 0, 2), (0, 2, 2)], ids=str)
def test_costs_that_are_fitted_explain_the_stages(sizes: tuple[int, ...]) -> None:
    job = job_with(sizes)
    times = passes(*(1.0 + size for size in sizes[:-1]), 3.0 + sizes[-1])
    fitted = fit_costs(sizes, times, flops_costs(job))
    played = step_costs(fitted, sizes, schedule_to_play(job))
    totals = [f + b for f, b in zip(played.forward_s, played.backward_s, strict=True)]
    for stage in (0, len(sizes) - 1):
        assert totals[stage] == pytest.approx(times[stage].total_s)


def test_ranks_are_named_where_each_holds_several_stages() -> None:
    job = job_with((2, 2, 2, 2), schedule="interleaved_1f1b", chunks=2)
    found = find_imbalance(job, passes(2.0, 2.0, 2.0, 6.0))
    assert found is not None
    assert (found.what, found.rank) == ("rank", 1)
    assert found.words().startswith("rank 1 is 33% slower")


def test_nothing_is_said_of_what_is_not_known() -> None:
    job = job_with((4, 4))
    assert find_imbalance(job, passes(4.0)) is None
    assert find_imbalance(job, passes(4.0, 0.0)) is None
    assert find_imbalance(with_partition(job, "auto"), passes(4.0, 9.0)) is None
