"""What the user decides is read, or refused with everything that is wrong with it."""

from __future__ import annotations

import pytest

from tests.plan.questions import ask, hardware_of
from threefold.cost.strategies import PRECISION_CODES, SCHEDULE_CODES
from threefold.errors import JobError
from threefold.plan.planner import answer
from threefold.plan.question import read_fixed, split_fixes


def test_words_become_codes() -> None:
    fixed = read_fixed({"tp": "8", "zero": 1, "schedule": "GPipe", "sequence_parallel": True, "order": "tp, dp, pp"})
    assert fixed == {"tp": 8, "zero_stage": 1, "schedule": SCHEDULE_CODES["gpipe"], "sequence_parallel": 1, "order": 1}


def test_all_wrong_decisions_are_named_at_once() -> None:
    wrong = {"tp": "0", "pp": "two", "zero": 4, "recompute": "some", "micro_bach": 1, "dp": -1}
    with pytest.raises(JobError) as caught:
        read_fixed(wrong)
    assert [problem.key for problem in caught.value.problems] == [f"--fix {name}" for name in wrong]
    assert caught.value.problems[4].fix == "use micro_batch"
    assert all(problem.fix for problem in caught.value.problems)


def test_two_values_for_one_decision_are_refused() -> None:
    with pytest.raises(JobError, match="two values"):
        read_fixed({"zero": 1, "zero_stage": 2})
    assert read_fixed({"zero": 1, "zero_stage": 1}) == {"zero_stage": 1}


def test_decisions_are_split_at_the_first_equals_sign() -> None:
    settings, problems = split_fixes(["tp=8", " order = tp,pp,dp", "tp", "=3", "pp=", "tp=4"])
    assert settings == {"tp": "8", "order": " tp,pp,dp"}
    assert len(problems) == 4


def test_the_number_format_is_what_the_device_has() -> None:
    assert ask("gpt2", hardware_of("a100-80gb"), 8).precision == PRECISION_CODES["bf16"]
    assert ask("gpt2", hardware_of("v100-32gb"), 8).precision == PRECISION_CODES["fp16"]
    assert ask("gpt2", hardware_of("v100-32gb"), 8, precision="fp32").precision == PRECISION_CODES["fp32"]


@pytest.mark.parametrize(
    ("batch", "fixed", "key", "fix"),
    [
        (64, {"tp": 5}, "--fix tp", "1, 2 or 4"),
        (64, {"pp": 16}, "--fix pp", "1, 2, 4 or 8"),
        (64, {"dp": 3}, "--fix dp", "1, 2, 4 or 8"),
        (64, {"micro_batch": 5}, "--fix micro_batch", "1, 2, 4, 8"),
        (7, {"dp": 8}, "--global-batch", "8"),
    ],
)
def test_a_decision_without_a_candidate_is_refused_with_the_values_that_have_one(
    batch: int, fixed: dict[str, int], key: str, fix: str
) -> None:
    with pytest.raises(JobError) as caught:
        answer(ask("gpt2", hardware_of(), batch, **fixed))
    problem = next(problem for problem in caught.value.problems if problem.key == key)
    assert fix in problem.fix


def test_decisions_that_fail_only_together_are_named_together() -> None:
    with pytest.raises(JobError, match="--fix dp, --fix tp"):
        answer(ask("gpt2", hardware_of(), 64, dp=3, tp=5))
