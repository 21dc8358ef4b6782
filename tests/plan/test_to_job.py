"""A plan becomes a job that states exactly the plan."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.questions import ask, hardware_of, model_of
from threefold.cost.strategies import PARTITION_CODES, Strategies
from threefold.errors import JobError
from threefold.job import ClusterSpec, parse_job
from threefold.plan.as_is import predict_job
from threefold.plan.planner import answer
from threefold.plan.plans import predict
from threefold.plan.question import Resort
from threefold.plan.rungs import on_rungs
from threefold.plan.space import build_space
from threefold.plan.to_job import new_job, question_of, replanned_job, strategy_of

CLUSTER = ClusterSpec(device="a100-80gb", nodes=2, devices_per_node=8, inter_node="8x200Gb/s")
MODEL = model_of(
    model_type="llama", vocab_size=1000, hidden_size=256, num_hidden_layers=11, num_attention_heads=8,
    intermediate_size=768, max_position_embeddings=512,
)  # fmt: skip
QUESTION = replace(ask(MODEL, hardware_of(nodes=2), 48), resort=Resort.OFFLOAD)
SPACE = build_space(QUESTION)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, int(SPACE.legal.sum()) - 1))
def test_every_candidate_survives_the_way_to_a_job_and_back(pick: int) -> None:
    rows, rungs = SPACE.legal.nonzero()
    strategy = on_rungs(SPACE.tops.take(rows[[pick]]), SPACE.rungs, rungs[[pick]])
    job = parse_job(new_job(predict(QUESTION, strategy)[0], MODEL, CLUSTER, 512))
    assert job.model == MODEL
    assert job.cluster == CLUSTER
    back = strategy_of(job)
    for field in fields(Strategies):
        assert np.array_equal(getattr(back, field.name), getattr(strategy, field.name)), field.name


def test_the_best_plan_is_written_with_its_batch_and_a_learning_rate() -> None:
    plan = answer(ask("gpt3-175b", hardware_of(nodes=8), 512, 2048), top=1).plans[0]
    cluster = ClusterSpec(device="a100-80gb", nodes=8, devices_per_node=8)
    job = parse_job(new_job(plan, model_of(preset="gpt3-175b"), cluster, 2048))
    assert job.train_batch_size == 512
    assert job.bf16.enabled
    assert job.optimizer.params.lr == pytest.approx(3.4e-5)
    assert predict_job(job).plans[0].step_s == pytest.approx(plan.step_s)


def test_replanning_keeps_everything_but_the_strategy() -> None:
    job = parse_job(
        {
            "model": {"preset": "gpt2"},
            "data": {"train": "tokens", "sequence_length": 1024},
            "cluster": {"device": "a100-80gb", "nodes": 1, "devices_per_node": 8},
            "steps": 10,
            "train_batch_size": 64,
            "parallelism": {"tp": {"size": 4}, "pp": {"size": 2}},
            "zero_optimization": {"stage": 0, "reduce_bucket_size": 1000},
            "optimizer": {"params": {"lr": 0.5}},
        }
    )
    plan = answer(question_of(job), top=1).plans[0]
    again = parse_job(replanned_job(plan, job))
    assert (again.tp, again.pp, again.dp) == (1, 1, 8)
    assert again.zero_optimization.reduce_bucket_size == 1000
    kept = ("model", "data", "cluster", "steps", "optimizer", "train_batch_size", "scheduler")
    assert all(getattr(again, name) == getattr(job, name) for name in kept)


@pytest.mark.parametrize("fixed", [{"cp": 2}, {"precision": "fp8"}])
def test_what_training_does_not_do_is_not_written(fixed: dict[str, Any]) -> None:
    question = ask("gpt2", hardware_of("h100", nodes=2), 64, **fixed)
    plan = answer(question, top=1).plans[0]
    assert any(reason.startswith("prediction only") for reason in plan.reasons)
    with pytest.raises(JobError, match="prediction only"):
        new_job(plan, question.model, CLUSTER, 512)


def test_a_prediction_names_the_sections_that_are_missing() -> None:
    with pytest.raises(JobError) as caught:
        predict_job(parse_job({"train_batch_size": 8}))
    assert [problem.key for problem in caught.value.problems] == ["model", "data", "cluster"]


def test_a_prediction_says_what_it_judges_as_something_else() -> None:
    stated = {
        "model": {"preset": "gpt2"},
        "data": {"sequence_length": 1024},
        "cluster": {"device": "a100-80gb", "devices_per_node": 2},
        "train_batch_size": 8,
        "parallelism": {"pp": {"size": 2}},
        "optimizer": {"type": "SGD"},
    }
    reasons = predict_job(parse_job(stated)).plans[0].reasons
    assert any("SGD is judged as AdamW" in reason for reason in reasons)
    with pytest.raises(JobError, match="float64"):
        predict_job(parse_job(stated | {"dtype": "float64"}))


def test_a_job_without_a_model_is_not_replanned() -> None:
    plan = predict(QUESTION, SPACE.tops.take([0]))[0]
    with pytest.raises(JobError, match="model"):
        replanned_job(plan, parse_job({"train_batch_size": 48}))


def test_a_balanced_partition_is_written_as_a_list() -> None:
    tops = SPACE.tops.take(SPACE.tops.partition == PARTITION_CODES["balanced"])
    job = parse_job(new_job(predict(QUESTION, tops.take([0]))[0], MODEL, CLUSTER, 512))
    partition = job.parallelism.pp.partition
    assert not isinstance(partition, str)
    assert sum(partition) == MODEL.num_hidden_layers
    assert partition[-1] < max(partition)
