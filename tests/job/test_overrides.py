"""``--set KEY=VALUE``, and what it does to the batch that a file states."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.job.problems import BATCH, TINY, problem_of, problems_of
from threefold.job import parse_job


def sizes(settings: Mapping[str, object], overrides: list[str], world_size: int | None = None) -> tuple[int, ...]:
    job = parse_job(settings, overrides, world_size=world_size)
    return job.train_batch_size, job.micro_batch, job.num_microbatches, job.dp


def test_values_are_json_or_yaml() -> None:
    overrides = [
        "optimizer.params.lr=3e-4",
        "optimizer.params.betas=[0.8, 0.9]",
        "parallelism.pp.schedule=gpipe",
        "parallelism.order=pp,tp,dp",
        "bf16={enabled: true}",
        "logging.tensorboard=true",
        "data={'train': 'a=b', 'sequence_length': 8}",
    ]
    job = parse_job(BATCH, overrides)
    assert job.optimizer.params.lr == 3e-4 and job.optimizer.params.betas == (0.8, 0.9)
    assert job.parallelism.pp.schedule == "gpipe" and job.parallelism.axes == ("pp", "tp", "dp")
    assert job.bf16.enabled and job.logging.tensorboard
    assert job.data is not None and job.data.train == "a=b"


def test_the_last_of_two_wins() -> None:
    assert parse_job(BATCH, ["seed=1", "seed=2"]).seed == 2


def test_null_takes_a_key_out() -> None:
    settings = {**BATCH, "steps": 3, "cluster": {"device": "cpu", "nodes": 1, "devices_per_node": 4}}
    job = parse_job(settings, ["steps=null", "cluster=null", "data=null"])
    assert job.steps is None and job.cluster is None and job.world_size == 1


def test_a_preset_can_be_changed_in_part() -> None:
    job = parse_job({**BATCH, "model": {"preset": "llama3-8b"}}, ["model.num_hidden_layers=2", "model.vocab_size=99"])
    assert job.model is not None
    assert (job.model.num_hidden_layers, job.model.vocab_size, job.model.hidden_size) == (2, 99, 4096)


def test_another_preset_is_another_model() -> None:
    job = parse_job({**BATCH, "model": TINY}, ["model.num_hidden_layers=3", "model.preset=gpt2"])
    assert job.model is not None
    assert (job.model.num_hidden_layers, job.model.hidden_size, job.model.vocab_size) == (3, 768, 50257)


@pytest.mark.parametrize(
    "text", ["seed", "=3", "seed.=3", ".seed=1", "a..b=1", " =1", "", "=", "seed=", "seed=[1", "x={a"]
)
def test_malformed_overrides_are_quoted(text: str) -> None:
    problem = problem_of(BATCH, [text])
    assert problem.key == f"--set {text}" and problem.fix


@pytest.mark.parametrize("text", ["seed.x=1", "optimizer.params.lr.value=1", "parallelism.pp.partition.0=3"])
def test_a_path_through_a_value(text: str) -> None:
    problem = problem_of({**BATCH, "seed": 3}, [text])
    assert problem.key == text.partition("=")[0]
    assert "no keys inside" in problem.message and "--set" in problem.fix


def test_a_path_through_a_wrong_section() -> None:
    problems = problems_of({**BATCH, "optimizer": "AdamW"}, ["optimizer.params.lr=1"])
    assert [problem.key for problem in problems] == ["optimizer.params.lr", "optimizer"]


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    assert problem_of(BATCH, ["parallelism.tp.siez=2"]).fix.startswith("write parallelism.tp.size instead")
    assert problem_of(BATCH, ["lr=0.1"]).fix.startswith("write optimizer.params.lr instead")
    assert problem_of(BATCH, ["sede=null"]).fix == "write --set seed=null"
    assert problem_of(BATCH, ["qqqqqqq=null"]).fix == "leave this --set out"


@pytest.mark.parametrize(
    ("batch", "overrides", "expected"),
    [
        # A layout without a batch keeps the total and the micro batch; the accumulation follows.
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, [], (32, 2, 4, 4)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, ["parallelism.dp.size=2"], (32, 2, 8, 2)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, ["parallelism.dp.size=2"], (32, 2, 8, 2)),
        (
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            ["parallelism.dp.size=1"],
            (32, 2, 16, 1),
        ),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            ["parallelism.dp.size=8"],
            (32, 2, 2, 8),
        ),
        ({"train_batch_size": 32}, ["parallelism.dp.size=2"], (32, 16, 1, 2)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, ["parallelism={dp: {size: 2}}"], (32, 2, 8, 2)),
        # A batch on the command line is obeyed.
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, ["train_batch_size=64"], (64, 2, 8, 4)),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            ["train_batch_size=64"],
            (64, 2, 8, 4),
        ),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            ["train_micro_batch_size_per_gpu=1"],
            (32, 1, 8, 4),
        ),
        (
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            ["train_micro_batch_size_per_gpu=1"],
            (16, 1, 4, 4),
        ),
        (
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            ["parallelism.dp.size=2", "gradient_accumulation_steps=4"],
            (16, 2, 4, 2),
        ),
    ],
)
def test_the_accumulation_gives_way(batch: dict[str, int], overrides: list[str], expected: tuple[int, ...]) -> None:
    assert sizes({**batch, "parallelism": {"dp": {"size": 4}}}, overrides) == expected


def test_a_layout_that_can_not_keep_the_batch_names_the_nearest() -> None:
    settings = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "parallelism": {"dp": {"size": 4}}}
    problem = problem_of(settings, ["parallelism.dp.size=3"])
    assert problem.key == "train_batch_size" and "30 or 36" in problem.fix


def test_a_file_without_a_total_keeps_the_one_of_its_own_layout() -> None:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "cluster": {"device": "cpu", "devices_per_node": 8},
        "parallelism": {"tp": {"size": 2}},
        "model": {**TINY},
    }
    assert sizes(settings, []) == (16, 1, 4, 4)
    assert sizes(settings, ["parallelism.pp.size=2"]) == (16, 1, 8, 2)


def test_the_number_of_processes_fills_dp() -> None:
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    assert sizes(settings, ["parallelism.tp.size=2"], world_size=8) == (32, 1, 8, 4)


def test_every_kind_of_problem_comes_at_once() -> None:
    problems = problems_of({**BATCH, "stepz": 1, "seed": -1}, ["bad", "fp16=3", "lr=2"])
    assert {problem.key for problem in problems} == {"--set bad", "fp16", "stepz", "seed", "lr"}
