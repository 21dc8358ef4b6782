"""The explanation of a job has its predicted numbers, where there are any."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.questions import hardware_of, model_of
from threefold.cost.case import Cut
from threefold.cost.estimate import estimate
from threefold.cost.strategies import PARTITION_CODES, SCHEDULE_CODES, Strategies
from threefold.job import parse_job
from threefold.layout import balanced_sizes
from threefold.plan.as_is import predict_job
from threefold.plan.balance import resolve_partition, with_partition
from threefold.plan.options import even_layers
from threefold.plan.plans import Plan
from threefold.plan.wording import format_gigabytes, format_seconds, percent, settings_words
from threefold.report.explain import explain_sections
from threefold.report.facts import TextTable
from threefold.report.prediction import TITLE, prediction_section
from threefold.schedule import build_schedule

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


# ---------------------------------------------------------------------------------------------------------------------
# Stages of stated sizes


def predicted(partition: Any, **pipeline: Any) -> Plan:
    stated = {"size": 4, "partition": partition, **pipeline}
    return predict_job(parse_job(STATED | {"parallelism": {"tp": {"size": 4}, "pp": stated}})).plans[0]


@pytest.mark.parametrize("schedule", sorted(SCHEDULE_CODES))
@pytest.mark.parametrize("num_layers", [40, 46])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_cut_that_has_a_name_costs_what_it_costs_by_name(schedule: str, num_layers: int, num_ranks: int) -> None:
    """40 layers are even on 2 and 4 devices with 2 chunks, 46 are balanced: the ends count as a layer each."""
    model = model_of(preset="gpt3-6.7b", num_hidden_layers=num_layers)
    chunks = 2 if schedule in ("interleaved_1f1b", "zb_v") else 1
    num_stages = num_ranks * chunks
    name, split = ("even", even_layers) if num_layers == 40 else ("balanced", balanced_sizes)
    one = Strategies.build(
        pp=num_ranks, chunks=chunks, num_microbatches=8, schedule=SCHEDULE_CODES[schedule],
        partition=PARTITION_CODES[name],
    )  # fmt: skip
    placed = build_schedule(schedule, num_ranks, 8, chunks)
    cut = Cut(split(num_layers, num_stages), tuple(map(placed.stage_rank, range(num_stages))))
    named, stated = (estimate(model, 2048, hardware_of("h100"), one, cut=stages) for stages in (None, cut))
    for field in ("step_s", "compute_s", "bubble_s", "peak_memory_bytes"):
        assert getattr(stated, field) == pytest.approx(getattr(named, field)), field
    assert {axis: value[0] for axis, value in stated.communication_bytes.items()} == pytest.approx(
        {axis: value[0] for axis, value in named.communication_bytes.items()}
    )


def test_stages_of_stated_sizes_are_judged_as_they_are() -> None:
    even, lopsided = predicted("even"), predicted([14, 6, 6, 6])
    assert lopsided.step_s > 1.3 * even.step_s and lopsided.peak_memory_bytes > 1.3 * even.peak_memory_bytes
    assert even.step_s < predicted([7.5, 8, 8, 8.5]).step_s < predicted([7, 8, 8, 9]).step_s
    assert lopsided.timeline is not None and even.timeline is not None
    # The play has no replicas and no optimizer; it agrees with the closed form about what the layers do to the step.
    slower_s = lopsided.timeline.makespan_s - even.timeline.makespan_s
    assert slower_s == pytest.approx(lopsided.step_s - even.step_s, rel=0.2)
    assert lopsided.parallelism["partition"] == [14, 6, 6, 6] and even.parallelism["partition"] == "even"
    assert "stages of [14, 6, 6, 6] layers" in settings_words(lopsided)
    assert "stages of" not in settings_words(even)


def test_a_fuller_middle_stage_paces_the_pipeline() -> None:
    """Two devices lie between the ends: the fuller one sets the pace, both count for the fill."""
    one, two = predicted([6, 12, 8, 6]), predicted([4, 12, 12, 4])
    assert one.compute_s == pytest.approx(two.compute_s)
    assert one.step_s == pytest.approx(two.step_s, rel=1e-3)  # the same layers fill the pipeline
    assert one.step_s > 1.2 * predicted("even").step_s


def test_auto_is_predicted_as_it_is_trained() -> None:
    heavy = {**STATED["model"], "vocab_size": 500_000, "num_hidden_layers": 12}
    stated = STATED | {"model": heavy, "parallelism": {"tp": {"size": 4}, "pp": {"size": 4}}}
    job = parse_job(stated)
    settled, balance = resolve_partition(job)
    assert balance is not None and balance.partition != (3, 3, 3, 3)
    auto, chosen = predict_job(job).plans[0], predict_job(settled).plans[0]
    assert auto.step_s == chosen.step_s
    assert auto.parallelism["partition"] == list(balance.partition)
    assert auto.step_s < predict_job(with_partition(job, "even")).plans[0].step_s


def test_stages_without_layers_are_predicted() -> None:
    few = STATED | {"model": {**STATED["model"], "num_hidden_layers": 2}}
    pipeline = {"size": 4, "partition": [1, 0, 1, 0]}
    plan = predict_job(parse_job(few | {"parallelism": {"tp": {"size": 4}, "pp": pipeline}})).plans[0]
    assert plan.step_s > 0 and plan.parallelism["partition"] == [1, 0, 1, 0]
