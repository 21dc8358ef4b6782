"""The world and the batch triangle: any two sides give the third, contradictions name the nearest valid numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.job.problems import problem_of, problems_of
from threefold.errors import JobError
from threefold.job import parse_job

TOTAL, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
SMALL = st.integers(1, 40)


def layout(dp: int | None = None, tp: int = 1, pp: int = 1) -> dict[str, Any]:
    return {"tp": {"size": tp}, "pp": {"size": pp}, **({"dp": {"size": dp}} if dp else {})}


def cluster(nodes: int, devices_per_node: int) -> dict[str, Any]:
    return {"device": "cpu", "nodes": nodes, "devices_per_node": devices_per_node}


@given(
    micro=SMALL, accumulation=SMALL, dp=SMALL, tp=st.integers(1, 4), pp=st.integers(1, 4), left_out=st.integers(0, 3)
)
def test_any_two_give_the_third(micro: int, accumulation: int, dp: int, tp: int, pp: int, left_out: int) -> None:
    sides = {TOTAL: micro * accumulation * dp, MICRO: micro, ACCUMULATION: accumulation}
    stated = {key: value for number, (key, value) in enumerate(sides.items()) if number != left_out}
    job = parse_job({**stated, "parallelism": layout(dp, tp, pp)})
    assert (job.train_batch_size, job.micro_batch, job.num_microbatches) == tuple(sides.values())
    assert job.world_size == dp * tp * pp


@given(total=st.integers(1, 10**4), micro=SMALL, accumulation=SMALL, dp=SMALL)
def test_the_batch_sizes_that_a_contradiction_proposes_are_right(
    total: int, micro: int, accumulation: int, dp: int
) -> None:
    settings = {MICRO: micro, ACCUMULATION: accumulation, "parallelism": layout(dp)}
    if total == micro * accumulation * dp:
        return
    problem = problem_of({**settings, TOTAL: total})
    assert (
        str(total) in problem.message
        and f"{micro} × {accumulation} × {dp} = {micro * accumulation * dp}" in problem.message
    )
    assert parse_job({**settings, TOTAL: micro * accumulation * dp}).num_microbatches == accumulation
    assert f"set {TOTAL} to {micro * accumulation * dp}" in problem.fix


@given(total=st.integers(1, 10**4), micro=SMALL, dp=SMALL)
def test_an_indivisible_batch_names_the_nearest(total: int, micro: int, dp: int) -> None:
    unit = micro * dp
    settings = {MICRO: micro, "parallelism": layout(dp)}
    if total % unit == 0:
        assert parse_job({**settings, TOTAL: total}).num_microbatches == total // unit
        return
    fix = problem_of({**settings, TOTAL: total}).fix
    for near in (total // unit * unit, math.ceil(total / unit) * unit):
        if near:
            assert str(near) in fix
            assert parse_job({**settings, TOTAL: near}).train_batch_size == near


def test_every_refusal_prints_the_equation() -> None:
    equation = f"{TOTAL} = {MICRO} × {ACCUMULATION} × dp"
    wrong: list[dict[str, Any]] = [
        {TOTAL: 33, MICRO: 2, ACCUMULATION: 4},
        {TOTAL: 33, MICRO: 2},
        {TOTAL: 33, ACCUMULATION: 2},
        {TOTAL: 33},
        {ACCUMULATION: 2},
        {},
    ]
    for batch in wrong:
        problem = problem_of({**batch, "parallelism": layout(4)})
        assert problem.key == TOTAL and equation in problem.message


def test_nearest_numbers_of_every_side() -> None:
    assert "32 or 40" in problem_of({TOTAL: 33, MICRO: 2, "parallelism": layout(4)}).fix
    assert "48 or 60" in problem_of({TOTAL: 50, ACCUMULATION: 3, "parallelism": layout(4)}).fix
    fix = problem_of({TOTAL: 28, MICRO: 2, "parallelism": layout(4)}).fix
    assert "24 or 32" in fix and f"or {MICRO} to 1" in fix
    fix = problem_of({TOTAL: 28, ACCUMULATION: 6, "parallelism": layout(4)}).fix
    assert "24 or 48" in fix and f"or {ACCUMULATION} to 7" in fix
    assert "32 or 36" in problem_of({TOTAL: 33, "parallelism": layout(4)}).fix
    assert "or use 3 replicas" in problem_of({TOTAL: 33, "parallelism": layout(4)}).fix
    fix = problem_of({TOTAL: 48, MICRO: 2, ACCUMULATION: 4, "parallelism": layout(4)}).fix
    assert f"{TOTAL} to 32, or {ACCUMULATION} to 6" in fix


def test_one_side_alone() -> None:
    def sides(batch: dict[str, int], **axes: int) -> tuple[int, ...]:
        job = parse_job({**batch, "parallelism": layout(**axes)})
        return job.train_batch_size, job.micro_batch, job.num_microbatches

    assert sides({TOTAL: 32}, dp=4) == (32, 8, 1)  # as DeepSpeed
    assert sides({TOTAL: 32}, dp=4, pp=2) == (32, 1, 8)  # a pipeline lives from many microbatches
    assert sides({MICRO: 4}, dp=4) == (16, 4, 1)


def test_a_batch_beyond_reason_is_refused() -> None:
    problem = problem_of({MICRO: 10**6, ACCUMULATION: 10**6})
    assert problem.key == TOTAL and "below" in problem.fix


def test_dp_fills_the_world() -> None:
    assert parse_job({TOTAL: 8, "cluster": cluster(2, 8), "parallelism": layout(tp=4, pp=2)}).dp == 2
    assert parse_job({TOTAL: 8, "parallelism": layout(tp=2)}, world_size=8).dp == 4
    assert parse_job({TOTAL: 8, "parallelism": layout(tp=2)}).dp == 1
    assert parse_job({TOTAL: 8, "parallelism": layout(dp=2)}).world_size == 2
    assert parse_job({TOTAL: 8, "cluster": cluster(1, 8)}, world_size=8).dp == 8


def test_processes_that_are_not_the_clusters() -> None:
    problem = problem_of({TOTAL: 8, "cluster": cluster(2, 8)}, world_size=4)
    assert problem.key == "cluster"
    assert "2 nodes × 8 = 16 devices" in problem.message and "start 16 processes" in problem.fix


@pytest.mark.parametrize(
    ("axes", "world", "key", "fix"),
    [
        ({"pp": 2}, (1, 1), "parallelism.pp.size", "parallelism.pp.size to 1"),
        ({"tp": 4, "pp": 2}, (1, 12), "parallelism.tp.size", "parallelism.tp.size to 1, 2, 3 or 6"),
        ({"dp": 3, "tp": 2}, (1, 8), "parallelism.dp.size", "parallelism.dp.size to 4"),
        ({"dp": 4, "tp": 3}, (1, 8), "parallelism.tp.size", "parallelism.tp.size to 2"),
        ({"dp": 3, "tp": 3}, (1, 8), "parallelism", "cluster.nodes × cluster.devices_per_node to 9"),
        ({"tp": 16}, (1, 8), "parallelism.tp.size", "1, 2, 4 or 8"),
    ],
)
def test_layouts_that_do_not_fit(axes: dict[str, int], world: tuple[int, int], key: str, fix: str) -> None:
    problem = problem_of({MICRO: 1, "cluster": cluster(*world), "parallelism": layout(**axes)})
    assert problem.key == key and fix in problem.fix
    assert f"= {world[0] * world[1]} device" in problem.message


@given(dp=SMALL, tp=SMALL, pp=SMALL, world=st.integers(1, 64))
def test_a_wrong_world_never_gives_a_job(dp: int, tp: int, pp: int, world: int) -> None:
    settings = {MICRO: 1, "parallelism": layout(dp, tp, pp)}
    try:
        job = parse_job(settings, world_size=world)
    except JobError:
        assert dp * tp * pp != world
    else:
        assert job.world_size == world


def test_a_wrong_layout_does_not_hide_a_wrong_batch() -> None:
    settings = {TOTAL: 7, MICRO: 2, "parallelism": layout(dp=2, tp=3), "cluster": cluster(1, 4)}
    assert [problem.key for problem in problems_of(settings)] == ["parallelism.tp.size", TOTAL]
