"""What is wrong with a job, for tests to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from threefold.errors import JobError, Problem
from threefold.job import parse_job

BATCH: dict[str, Any] = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}
TINY: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}


def problems_of(
    settings: Mapping[str, Any], overrides: Sequence[str] = (), world_size: int | None = None
) -> list[Problem]:
    """All problems of a job that must be wrong, in order."""
    with pytest.raises(JobError) as caught:
        parse_job(settings, overrides, world_size=world_size)
    assert caught.value.exit_status == 2
    return list(caught.value.problems)


def problem_of(settings: Mapping[str, Any], overrides: Sequence[str] = (), world_size: int | None = None) -> Problem:
    """The one problem of a job that must be wrong in one way."""
    problems = problems_of(settings, overrides, world_size)
    assert len(problems) == 1, problems
    return problems[0]
