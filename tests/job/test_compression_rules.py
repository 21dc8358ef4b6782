"""Compression that does not compose is refused with its key and the nearest that does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.job.problems import BATCH, problem_of, problems_of
from threefold.job import parse_job

POWER: dict[str, Any] = {"gradient_compression": {"type": "powersgd"}}
ONE_BIT: dict[str, Any] = {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 10}}}


@pytest.mark.parametrize(
    ("settings", "key", "message", "fix"),
    [
        ({"communication_data_type": "fp16"}, "communication_data_type", "below 6e-8", 'write "bf16"'),
        (POWER | ONE_BIT, "gradient_compression.type", "both compress", 'write "none"'),
        (POWER | {"communication_data_type": "bf16"}, "communication_data_type", "powersgd compresses", "leave it out"),
        (ONE_BIT | {"communication_data_type": "bf16"}, "communication_data_type", "OneBitAdam", "leave it out"),
        (POWER | {"zero_optimization": {"stage": 2}}, "zero_optimization.stage", "keeps a part", "set it to 1"),
        (POWER | {"fp16": {"enabled": True}}, "gradient_compression.type", "infinities", "bf16 instead of fp16"),
        (ONE_BIT | {"zero_optimization": {"stage": 1}}, "zero_optimization.stage", "whole momentum", "set it to 0"),
        (ONE_BIT | {"gradient_clipping": 1.0}, "gradient_clipping", "never sums", "set it to 0"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.params.freeze_step", "is missing", "set it to 100"),
        (ONE_BIT | {"steps": 10}, "optimizer.params.freeze_step", "leave none of the 10", "set it to 2"),
        (POWER | {"steps": 10}, "gradient_compression.start_step", "leave none of the 10", "set it to 1"),
        (
            {"optimizer": {"type": "AdamW", "params": {"freeze_step": 3}}},
            "optimizer.params.freeze_step",
            "AdamW freezes nothing",
            "remove it",
        ),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 3, "momentum": 0.5}}},
            "optimizer.params.momentum",
            "OneBitAdam has no momentum",
            "remove it",
        ),
    ],
)
def test_each_rule_refuses_with_key_and_fix(settings: dict[str, Any], key: str, message: str, fix: str) -> None:
    problem = problem_of(BATCH | settings)
    assert problem.key == key
    assert message in problem.message and fix in problem.fix


@pytest.mark.parametrize(
    "settings",
    [
        POWER,
        POWER | {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 1.0},
        POWER | {"communication_data_type": "fp32", "bf16": {"enabled": True}},
        ONE_BIT,
        ONE_BIT | {"fp16": {"enabled": True}},
        {"communication_data_type": "fp16", "fp16": {"enabled": True}, "zero_optimization": {"stage": 3}},
        {"communication_data_type": "bf16", "dtype": "float64"},
    ],
)
def test_what_composes(settings: dict[str, Any]) -> None:
    job = parse_job(BATCH | settings)
    assert parse_job(job.model_dump(mode="json", exclude_none=True)) == job


def test_deepspeeds_one_bit_adam_is_read() -> None:
    """As in DeepSpeed's own example, but for the keys of its engine."""
    params = {"lr": 4e-4, "freeze_step": 230, "cuda_aware": False, "comm_backend_name": "nccl", "betas": [0.9, 0.95]}
    job = parse_job(BATCH | {"optimizer": {"type": "onebitadam", "params": params}})
    assert job.optimizer.type == "OneBitAdam" and job.optimizer.params.freeze_step == 230


def test_all_problems_of_a_job_are_told() -> None:
    everything = ONE_BIT | POWER | {"gradient_clipping": 1.0, "zero_optimization": {"stage": 3}}
    keys = {problem.key for problem in problems_of(BATCH | everything)}
    assert keys == {"gradient_compression.type", "gradient_clipping", "zero_optimization.stage"}
