"""Where stages are cut: dynamic programming against brute force, the play's choice, and what jobs get."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations_with_replacement, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.cost.profiles import small_profile
from tests.jobs import LLAMA, small_job
from threefold.cost.parts import ModelCosts, PartCosts, Share, attention_share, flops_costs
from threefold.errors import JobError
from threefold.job import Job, load_job, parse_job
from threefold.layout import format_partition
from threefold.plan.balance import (
    balance,
    balance_job,
    cut_evenly,
    play_partition,
    resolve_partition,
    schedule_to_play,
    step_costs,
)
from threefold.schedule import build_schedule

NOTHING = PartCosts(0.0, 0.0, 0.0, 0.0)


def part(seconds: float, **others: float) -> PartCosts:
    return PartCosts(seconds / 3, 2 * seconds / 3, seconds / 3, seconds / 3, **others)


def costs_of(embedding: float, layer: float, head: float, **others: Any) -> ModelCosts:
    return ModelCosts(part(embedding), part(layer), part(head), "made-up costs", **others)


def all_cuts(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Every cut in which only the ends may be without a layer."""
    for inner in combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        sizes = tuple(b - a for a, b in pairwise((0, *inner, num_layers)))
        if all(sizes[1:-1]):
            yield sizes


def slowest(cut: tuple[int, ...], layer_s: list[float], first_s: float, last_s: float) -> float:
    ends = list(accumulate(cut))
    seconds = [sum(layer_s[end - size : end]) for size, end in zip(cut, ends, strict=True)]
    seconds[0] += first_s
    seconds[-1] += last_s
    return max(seconds)


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_is_as_good_as_the_best_of_all_cuts(seed: int) -> None:
    chance = random.Random(seed)
    num_layers, num_stages = chance.randint(1, 9), chance.randint(1, 5)
    layer_s = [chance.choice((1.0, 1.0, chance.random())) for _ in range(num_layers)]
    first_s, last_s = chance.random(), chance.choice((0.0, 5 * chance.random()))
    cuts = list(all_cuts(num_layers, num_stages))
    found = cut_evenly(layer_s, first_s, last_s, num_stages)
    if not cuts:
        assert found is None
        return
    assert found in cuts
    best = min(slowest(cut, layer_s, first_s, last_s) for cut in cuts)
    assert slowest(found, layer_s, first_s, last_s) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(30))
def test_a_stage_gets_no_more_layers_than_fit(seed: int) -> None:
    chance = random.Random(seed)
    num_layers, num_stages = chance.randint(2, 9), chance.randint(2, 4)
    most = [chance.randint(0, num_layers) for _ in range(num_stages)]
    cuts = [c for c in all_cuts(num_layers, num_stages) if all(a <= b for a, b in zip(c, most, strict=True))]
    layer_s = [1.0] * num_layers
    found = cut_evenly(layer_s, 0.3, 2.0, num_stages, lambda stage, count: count <= most[stage])
    assert (found is None) == (not cuts)
    if found is not None:
        assert found in cuts
        best = min(slowest(cut, layer_s, 0.3, 2.0) for cut in cuts)
        assert slowest(found, layer_s, 0.3, 2.0) == pytest.approx(best)


def test_of_equally_slow_cuts_the_most_even_one_is_taken() -> None:
    assert cut_evenly([1.0] * 9, 0.0, 4.0, 3) == (4, 4, 1)
    assert cut_evenly([1.0] * 6, 0.0, 10.0, 3) == (3, 3, 0)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "zb_h1", "interleaved_1f1b", "zb_v"])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_chosen_is_never_slower_than_the_even_split(schedule: str, seed: int) -> None:
    chance = random.Random(seed)
    ranks = chance.choice((2, 3, 4))
    plan = build_schedule(schedule, ranks, chance.choice((4, 6, 8)))
    costs = costs_of(chance.random(), 1.0, 4 * chance.random(), message_s=0.1 * chance.random(), action_s=0.02)
    chosen = balance(costs, chance.randint(plan.num_stages, 3 * plan.num_stages), plan)
    assert chosen.even is not None
    assert chosen.step_s <= chosen.even_step_s
    assert chosen.step_s == play_partition(costs, chosen.partition, plan).makespan_s
    assert chosen.even_step_s == play_partition(costs, chosen.even, plan).makespan_s
    assert chosen.partition == chosen.even or chosen.gain > 0.01


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_best_of_all_cuts_of_a_small_model(seed: int) -> None:
    chance = random.Random(seed)
    plan = build_schedule("1f1b", chance.choice((2, 3)), 6)
    costs = costs_of(chance.random(), 1.0, 5 * chance.random())
    chosen = balance(costs, 7, plan)
    best = min(play_partition(costs, cut, plan).makespan_s for cut in all_cuts(7, plan.num_stages))
    assert chosen.step_s <= best * 1.01 + 1e-12


def test_a_heavy_head_takes_layers_from_its_stage() -> None:
    chosen = balance(costs_of(0.0, 1.0, 6.0), 8, build_schedule("1f1b", 2, 8))
    assert chosen.partition == (7, 1)
    # 1F1B of two stages: all microbatches on the slower one, and once round the other.
    assert (chosen.step_s, chosen.even_step_s) == (pytest.approx(8 * 7 + 7), pytest.approx(8 * 10 + 4))
    assert "[7, 1]" in chosen.words() and "even split [4, 4]" in chosen.words() and "33.3%" in chosen.words()


def test_a_layer_is_cut_where_that_is_faster() -> None:
    """8 layers and a head of one: 4.5 are half of the work, and no cut between layers comes near."""
    plan = build_schedule("1f1b", 2, 8)
    costs = costs_of(0.0, 1.0, 1.0, attention=Share(seconds=0.4))
    chosen = balance(costs, 8, plan)
    assert chosen.partition == (4.5, 3.5)  # 4.4 layers against 3.6 and the head
    assert chosen.step_s == pytest.approx(play_partition(costs, (4.5, 3.5), plan).makespan_s)
    assert chosen.step_s < play_partition(costs, (5, 3), plan).makespan_s
    assert "[4.5, 3.5]" in chosen.words() and "A half is a layer's attention" in chosen.words()
    assert balance(replace(costs, attention=None), 8, plan).partition in ((4, 4), (5, 3))
    assert balance(replace(costs, attention=Share(seconds=0.05)), 8, plan).partition in ((4, 4), (5, 3))


@pytest.mark.parametrize("seed", range(6))
def test_half_layers_are_chosen_only_where_they_gain(seed: int) -> None:
    chance = random.Random(seed)
    plan = build_schedule(chance.choice(("1f1b", "zb_v", "interleaved_1f1b")), chance.choice((2, 3)), 6)
    costs = costs_of(chance.random(), 1.0, 5 * chance.random(), attention=Share(0.2 + 0.6 * chance.random()))
    whole, halves = balance(replace(costs, attention=None), 12, plan), balance(costs, 12, plan)
    if halves.partition != whole.partition:
        assert any(size % 1 for size in halves.partition)
        assert halves.step_s * 1.01 < whole.step_s
    assert sum(halves.partition) == 12 and min(halves.partition[1:-1], default=1) > 0


def test_the_attention_of_a_layer_is_counted() -> None:
    """Width 256, 704 in the feed-forward, 256 tokens: 8 x 256² + 4 x 256 x 256 FLOPs against 6 x 256 x 704 a token."""
    model = LLAMA | {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}
    job = small_job(model | {"intermediate_size": 704, "max_position_embeddings": 256}, data={"sequence_length": 256})
    share = attention_share(job)
    assert share.seconds == pytest.approx(12 / (12 + 6 * 704 / 256))
    assert share.parameters == pytest.approx(4 / (4 + 3 * 704 / 256))
    assert share.rest.parameters == pytest.approx(1 - share.parameters)
    costs = flops_costs(job)
    assert sum(half.forward_s for half in costs.halves) == pytest.approx(costs.layer.forward_s)


def test_costs_of_halves_add_up() -> None:
    costs = costs_of(0.0, 3.0, 0.0, attention=Share(seconds=0.25))
    attention, feed_forward = costs.halves
    assert attention.forward_s == pytest.approx(0.25) and feed_forward.backward_s == pytest.approx(1.5)
    stages = step_costs(costs, [1.5, 1, 0.5], build_schedule("gpipe", 3, 2))
    assert stages.forward_s == pytest.approx([1.25, 1.0, 0.75])


def test_equal_stages_stay_even() -> None:
    chosen = balance(costs_of(0.0, 1.0, 0.005), 8, build_schedule("1f1b", 2, 8))
    assert chosen.partition == chosen.even == (4, 4)
    assert chosen.gain == 0
    assert "even split" in chosen.words()


def test_memory_decides_where_the_fastest_cut_does_not_fit() -> None:
    layer = PartCosts(1.0, 2.0, 1.0, 1.0, activation_bytes=1.0, static_bytes=10.0)
    costs = ModelCosts(NOTHING, layer, part(18.0), "made-up costs", usable_bytes=61.0)
    plan = build_schedule("1f1b", 2, 4)
    free = balance(ModelCosts(NOTHING, layer, part(18.0), "made-up costs"), 8, plan)
    bound = balance(costs, 8, plan)
    assert free.partition == (7, 1) and free.fits
    assert bound.partition == (5, 3) and bound.fits  # 5 layers, of which 1F1B keeps 2 microbatches: 50 + 10
    assert play_partition(costs, bound.partition, plan).peak_memory_bytes.max() <= 61.0


def test_nothing_fits_is_said_and_the_least_is_held() -> None:
    layer = PartCosts(1.0, 2.0, 1.0, 1.0, static_bytes=10.0)
    chosen = balance(
        ModelCosts(NOTHING, layer, NOTHING, "made-up costs", usable_bytes=5.0), 8, build_schedule("1f1b", 2, 4)
    )
    assert not chosen.fits
    assert chosen.partition == (4, 4)
    assert "no split fits into a device" in chosen.words()


def test_long_lists_are_told_by_runs() -> None:
    assert format_partition([7, 1]) == "[7, 1]"
    assert format_partition([1, *[2] * 62, 1]) == "[1, 62 × 2, 1]"


def test_costs_of_stages_add_up() -> None:
    costs = costs_of(0.5, 1.0, 2.0, action_s=0.1, post_s=0.01, message_s=0.25, step_s=0.4)
    stages = step_costs(costs, (1, 2, 3), build_schedule("1f1b", 3, 4))
    assert stages.forward_s == pytest.approx([1.5 / 3 + 0.11, 2 / 3 + 0.12, 5 / 3 + 0.11])
    assert stages.backward_s == pytest.approx([3 / 3 + 0.11, 4 / 3 + 0.12, 10 / 3 + 0.11])
    assert list(stages.p2p_s) == [0.25, 0.25]
    assert stages.step_s == pytest.approx([0.4] * 3)


def test_split_passes_cost_what_they_cost_apart() -> None:
    slow = PartCosts(1.0, 2.0, 1.5, 1.25)
    costs = ModelCosts(NOTHING, slow, NOTHING, "made-up costs")
    whole = step_costs(costs, (2, 2), build_schedule("1f1b", 2, 4))
    split = step_costs(costs, (2, 2), build_schedule("zb_h1", 2, 4))
    assert whole.backward_s == pytest.approx([4.0, 4.0])
    assert (split.input_grad_s, split.weight_grad_s) == ([3.0, 3.0], [2.5, 2.5])


def test_stages_of_one_rank_send_nothing() -> None:
    plan = build_schedule("zb_v", 2, 4)  # stages 1 and 2 are both on the last rank
    assert list(step_costs(costs_of(0.0, 1.0, 0.0, message_s=0.5), (1, 1, 1, 1), plan).p2p_s) == [0.5, 0.0, 0.5]


# Jobs


def heavy_job(**settings: Any) -> Job:
    model = LLAMA | {"num_hidden_layers": 8, "vocab_size": 1000}
    return small_job(model, pp=2, **settings)


def test_auto_is_the_default_and_becomes_a_list() -> None:
    job = heavy_job()
    assert job.parallelism.pp.partition == "auto"
    resolved, chosen = resolve_partition(job)
    assert chosen is not None
    assert resolved.parallelism.pp.partition == chosen.partition
    assert chosen.partition[0] > 4  # the head costs as much as some layers
    assert "by FLOPs" in chosen.words()
    assert parse_job(resolved.model_dump(mode="json", exclude_none=True)) == resolved


@pytest.mark.parametrize("settings", [{"partition": "even"}, {"partition": [3, 5]}], ids=str)
def test_what_is_stated_is_obeyed(settings: dict[str, Any]) -> None:
    job = heavy_job(parallelism={"pp": settings})
    assert resolve_partition(job) == (job, None)


def test_a_pipeline_of_one_stage_and_a_job_without_model_are_left_alone() -> None:
    job = small_job(LLAMA)
    assert resolve_partition(job) == (job, None)
    nothing = parse_job({"parallelism": {"pp": {"size": 2}}, "train_batch_size": 4})
    assert resolve_partition(nothing) == (nothing, None)


def test_chunks_are_cut_too() -> None:
    job = heavy_job(parallelism={"pp": {"schedule": "interleaved_1f1b", "chunks": 2}})
    resolved, _ = resolve_partition(job)
    partition = resolved.parallelism.pp.partition
    assert len(partition) == 4 and sum(map(int, partition)) == 8


def test_flops_are_those_of_papers() -> None:
    job = heavy_job()
    costs = flops_costs(job)
    model = job.model
    assert model is not None
    width, ffn, length = model.hidden_size, model.intermediate_size, 12
    kv = model.num_key_value_heads * model.head_dim
    layer = 2 * (2 * width**2 + 2 * width * kv + 3 * width * ffn) + 4 * length * width
    assert costs.layer.forward_s * 1e12 == pytest.approx(layer * length)
    assert costs.head.forward_s * 1e12 == pytest.approx(2 * 1000 * width * length)
    assert costs.layer.backward_s == pytest.approx(2 * costs.layer.forward_s)


def test_recompute_makes_layers_dearer_and_the_head_not() -> None:
    plain, full = (flops_costs(heavy_job(activation_checkpointing={"mode": mode})) for mode in ("none", "full"))
    assert full.layer.backward_s == pytest.approx(1.5 * plain.layer.backward_s)
    assert full.head == plain.head


def test_the_memory_of_a_known_device_is_respected() -> None:
    job = load_job(Path(__file__).parents[2] / "examples" / "llama3-8b-64xa100.json")
    chosen = balance_job(job)
    assert chosen.fits
    assert "cost model of a100-80gb" in chosen.words()
    limit = chosen.costs.usable_bytes
    assert limit is not None and 60e9 < limit < 80 * 2**30


def test_a_profile_decides_where_there_is_one() -> None:
    job = heavy_job()
    profile = small_profile(job, layer_s=1.0, head_s=4.0)
    _, chosen = resolve_partition(job, profile)
    assert chosen is not None and chosen.partition == (6, 2)
    assert "measured costs" in chosen.words()
    _, other = resolve_partition(job, small_profile(job, layer_s=1.0, head_s=0.0))
    assert other is not None and other.partition == (4, 4)


def test_very_many_microbatches_are_played_in_part() -> None:
    job = heavy_job(train_batch_size=1 << 16, train_micro_batch_size_per_gpu=1)
    plan = schedule_to_play(job)
    assert plan.num_microbatches < 1 << 13
    assert plan.num_microbatches % 2 == 0


def test_more_stages_than_layers_are_still_refused() -> None:
    with pytest.raises(JobError, match=r"parallelism\.pp\.size"):
        small_job(LLAMA, pp=8)
