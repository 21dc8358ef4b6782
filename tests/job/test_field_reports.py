"""Reports from users of other systems, as tests: the mistakes that theirs met late or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.job.problems import BATCH, TINY, problem_of, problems_of
from threefold.job import parse_job

EIGHT_CPUS = {"device": "cpu", "nodes": 1, "devices_per_node": 8}


def job(model: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    return {**BATCH, "model": {**TINY, **(model or {})}, **settings}


@pytest.mark.parametrize("layers", range(1, 13))
@pytest.mark.parametrize("stages", range(1, 13))
def test_b049_layers_are_never_dropped(layers: int, stages: int) -> None:
    """30 layers on 4 stages silently became 28: here any number of layers that covers the stages is kept whole."""
    settings = job({"num_hidden_layers": layers}, parallelism={"pp": {"size": stages}})
    if stages > layers:
        assert problem_of(settings).key == "parallelism.pp.size"
        return
    model = parse_job(settings).model
    assert model is not None and model.num_hidden_layers == layers


def test_b049_an_explicit_split_that_drops_layers_is_refused() -> None:
    problem = problem_of(job({"num_hidden_layers": 30}, parallelism={"pp": {"size": 4, "partition": [7, 7, 7, 7]}}))
    assert "places 28 layers, but the model has 30" in problem.message and "[8, 8, 7, 7]" in problem.fix


def test_b052_uneven_splits_are_allowed() -> None:
    seven = {"num_hidden_layers": 7}
    assert parse_job(job(seven, parallelism={"pp": {"size": 2}})).pp == 2
    explicit = parse_job(job(seven, parallelism={"pp": {"size": 2, "partition": [5, 2]}}))
    assert explicit.parallelism.pp.partition == (5, 2)


@pytest.mark.parametrize("total", [1, 7, 15, 17, 63, 127])
def test_b056_a_wrong_triangle_prints_equation_numbers_and_neighbours(total: int) -> None:
    settings = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "parallelism": {"dp": {"size": 2}},
    }
    problem = problem_of(settings)
    assert "train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × dp" in problem.message
    assert f"{total} is not 2 × 4 × 2 = 16" in problem.message
    assert "set train_batch_size to 16" in problem.fix
    assert str(total // 4 * 4 or 4) in problem.fix and str(total // 4 * 4 + 4) in problem.fix


def test_b056_the_world_is_known_before_any_process_starts() -> None:
    """There, the world size was read as 1 because communication had not begun; here it is the job's or the caller's."""
    batch = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    assert parse_job({**batch, "cluster": EIGHT_CPUS}).dp == 8
    assert parse_job(batch, world_size=8).dp == 8


def test_b058_tensor_parallel_ranks_are_no_data_ranks() -> None:
    tensor = parse_job(
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
            "parallelism": {"tp": {"size": 2}, "dp": {"size": 1}},
        }
    )
    assert tensor.world_size == 2 and tensor.train_batch_size == 4 * 8


def test_b058_multiplying_by_all_devices_is_recognized() -> None:
    settings = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "parallelism": {"tp": {"size": 2}, "dp": {"size": 1}},
    }
    assert "the last factor is dp 1, not all 2 devices" in problem_of(settings).message


COMMON: list[tuple[str, dict[str, Any], str]] = [
    (
        "the axes do not multiply to the world",
        job(cluster=EIGHT_CPUS, parallelism={"tp": {"size": 3}}),
        "parallelism.tp.size",
    ),
    ("heads do not divide over tp", job(parallelism={"tp": {"size": 4}}), "parallelism.tp.size"),
    (
        "key-value heads do not divide over tp",
        job({"num_attention_heads": 12, "num_key_value_heads": 3}, parallelism={"tp": {"size": 2}}),
        "parallelism.tp.size",
    ),
    (
        "the sequence does not divide over tp",
        job(data={"sequence_length": 63}, parallelism={"tp": {"size": 2, "sequence_parallel": True}}),
        "data.sequence_length",
    ),
    ("more stages than layers", job(parallelism={"pp": {"size": 8}}), "parallelism.pp.size"),
    (
        "the batch does not divide over dp and micro batch",
        job(train_batch_size=9, train_micro_batch_size_per_gpu=2, parallelism={"dp": {"size": 2}}),
        "train_batch_size",
    ),
    (
        "the stated layers are not the model's",
        job(parallelism={"pp": {"size": 2, "partition": [3, 2]}}),
        "parallelism.pp.partition",
    ),
    (
        "a schedule that does not exist",
        job(parallelism={"pp": {"size": 2, "schedule": "pipedream"}}),
        "parallelism.pp.schedule",
    ),
]


@pytest.mark.parametrize(("what", "settings", "key"), COMMON, ids=[what for what, _, _ in COMMON])
def test_b059_the_eight_common_errors_name_key_and_fix(what: str, settings: dict[str, Any], key: str) -> None:
    problems = problems_of(settings)
    assert key in {problem.key for problem in problems}
    for problem in problems:
        assert problem.key in str(problem) and "fix: " in str(problem)
        assert any(char.isdigit() for char in problem.fix) or '"' in problem.fix  # something to type, not advice


def test_b059_all_eight_are_said_together() -> None:
    settings = job(
        {"num_attention_heads": 12, "num_key_value_heads": 3},
        cluster=EIGHT_CPUS,
        train_batch_size=9,
        train_micro_batch_size_per_gpu=2,
        data={"sequence_length": 63},
        parallelism={
            "tp": {"size": 5, "sequence_parallel": True},
            "pp": {"size": 8, "partition": [3, 2], "schedule": "pipedream"},
            "dp": {"size": 2},
        },
    )
    assert {key for _, _, key in COMMON} <= {problem.key for problem in problems_of(settings)}


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_b061_a_parallel_size_on_one_device_is_a_sentence(axis: str) -> None:
    settings = job(cluster={"device": "cpu", "nodes": 1, "devices_per_node": 1}, parallelism={axis: {"size": 2}})
    problem = problem_of(settings)
    assert problem.key == f"parallelism.{axis}.size"
    assert "1 node × 1 = 1 device" in problem.message
    assert f"set parallelism.{axis}.size to 1" in problem.fix
    assert problem_of(job(parallelism={axis: {"size": 2}}), world_size=1).key == f"parallelism.{axis}.size"


def test_b062_a_sequence_that_does_not_divide_is_refused_at_once() -> None:
    tensor = {"tp": {"size": 2, "sequence_parallel": True}}
    problem = problem_of(job({"max_position_embeddings": 2048}, data={"sequence_length": 1023}, parallelism=tensor))
    assert problem.key == "data.sequence_length"
    assert "1023" in problem.message and "1022 or 1024" in problem.fix


@pytest.mark.parametrize("vocab_size", [50257, 151669, 61])
def test_b044_b048_a_vocabulary_that_does_not_divide_is_fine(vocab_size: int) -> None:
    assert parse_job(job({"vocab_size": vocab_size}, parallelism={"tp": {"size": 3}})).tp == 3


def test_b120_the_peak_rate_is_scaled_only_when_asked() -> None:
    assert parse_job(BATCH).scheduler.batch_scaling == "none"
    scaling = {"batch_scaling": "linear"}
    assert problem_of({**BATCH, "scheduler": scaling}).key == "scheduler.reference_batch_size"
