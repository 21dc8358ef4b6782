"""The explanation of a job has its predicted numbers, where there are any."""

from __future__ import annotations

from typing import Any

import pytest

from threefold.job import parse_job
from threefold.plan.as_is import predict_job
from threefold.plan.wording import format_gigabytes, format_seconds, percent
from threefold.report.explain import explain_sections
from threefold.report.facts import TextTable
from threefold.report.prediction import TITLE, prediction_section

STATED: dict[str, Any] = {
    "model": {"preset": "gpt3-6.7b"},
    "data": {"sequence_length": 2048},
    "cluster": {"device": "a100-80gb", "nodes": 2, "devices_per_node": 8},
    "train_batch_size": 64,
    "parallelism": {"tp": {"size": 8}, "pp": {"size": 2}},
}


def test_the_section_states_the_prediction() -> None:
    job = parse_job(STATED)
    section = prediction_section(job)
    table = section.body[0]
    assert isinstance(table, TextTable)
    plan = predict_job(job).plans[0]
    cells = {row[0]: row[1] for row in table.rows}
    assert cells["optimizer step"] == format_seconds(plan.step_s)
    assert cells["memory of the fullest device"] == format_gigabytes(plan.peak_memory_bytes)
    assert TITLE in [one.title for one in explain_sections(job)]


@pytest.mark.parametrize("missing", ["model", "data", "cluster"])
def test_a_job_without_numbers_is_explained_without_them(missing: str) -> None:
    job = parse_job({key: value for key, value in STATED.items() if key != missing})
    assert prediction_section(job).body == ()
    assert TITLE not in [one.title for one in explain_sections(job)]


def test_unknown_devices_are_explained_without_numbers() -> None:
    assert prediction_section(parse_job(STATED | {"cluster": {"device": "cpu", "devices_per_node": 16}})).body == ()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (format_seconds(97.02), "97.0 s"),
        (format_seconds(1234.5), "1,234 s"),
        (format_seconds(7.6756), "7.68 s"),
        (format_seconds(0.06366), "63.7 ms"),
        (format_seconds(0.0), "0.00 ms"),
        (format_gigabytes(83.3e9), "83.3 GB"),
        (format_gigabytes(3310e9), "3,310 GB"),
        (percent(0.421), "42 %"),
        (percent(0.0421), "4.2 %"),
        (percent(0.0003), "under 0.1 %"),
        (percent(0.0), "0 %"),
    ],
)
def test_quantities_are_written_with_three_digits(words: str, expected: str) -> None:
    assert words == expected
