"""Profiles: files that round-trip, and refusals of what they don't hold for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cost.profiles import small_profile
from tests.jobs import GPT2, LLAMA, small_job
from threefold.cost.measured import measured_hardware
from threefold.cost.parts import measured_costs, model_costs
from threefold.cost.profile import Profile, Workload, check_profile, read_profile
from threefold.errors import JobError
from threefold.job import Job, parse_job
from threefold.plan.as_is import predict_job
from threefold.plan.balance import play_partition
from threefold.plan.planner import answer
from threefold.plan.to_job import balanced_job, question_of
from threefold.schedule import job_schedule


def job_of(**settings: Any) -> Job:
    model = LLAMA | {"num_hidden_layers": 8} | settings.pop("model", {})
    return small_job(model, pp=2, **settings)


def written(tmp_path: Path, profile: Profile) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json())
    return path


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_file_is_read_back_as_it_was(tmp_path: Path, model: dict[str, Any]) -> None:
    job = small_job(model, pp=2)
    profile = small_profile(job)
    assert read_profile(written(tmp_path, profile), job) == profile


def test_the_number_of_layers_and_the_layout_of_stages_are_of_no_account(tmp_path: Path) -> None:
    path = written(tmp_path, small_profile(job_of()))
    for other in (small_job(LLAMA | {"num_hidden_layers": 5}), small_job(LLAMA, pp=4), small_job(LLAMA, dp=2)):
        assert read_profile(path, other).workload.fingerprint == Workload.of(other).fingerprint


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"model": {"hidden_size": 64}}, "model.hidden_size 32, but the job has 64"),
        ({"model": {"vocab_size": 99}}, "model.vocab_size 61, but the job has 99"),
        ({"data": {"sequence_length": 8}}, "sequence length 12, but the job has 8"),
        ({"train_micro_batch_size_per_gpu": 2}, "micro batch 1, but the job has 2"),
        ({"parallelism": {"tp": {"size": 2}}}, "tp 1, but the job has 2"),
        ({"activation_checkpointing": {"mode": "full"}}, "recompute none, but the job has full"),
        ({"bf16": {"enabled": True}}, "precision fp32, but the job has bf16"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_profile_of_other_work_is_refused(other: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as caught:
        check_profile(small_profile(job_of()), job_of(**other))
    text = str(caught.value)
    assert text.startswith("--profile: was measured with ")
    assert words in text
    assert "threefold profile" in text


def test_all_differences_are_said_at_once() -> None:
    with pytest.raises(JobError) as caught:
        check_profile(small_profile(job_of()), job_of(data={"sequence_length": 8}, bf16={"enabled": True}))
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: "{}", "is no profile of format 1"),
        (lambda text: "not JSON", "is no profile of format 1"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "format"),
        (lambda text: text.replace('"num_rounds": 5', '"num_rounds": -5'), "num_rounds"),
        (lambda text: text.replace('"sequence_length": 12', '"sequence_length": 13'), "another workload"),
    ],
    ids=["empty", "text", "format", "value", "changed by hand"],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(change(small_profile(job_of()).to_json()))
    with pytest.raises(JobError, match=words):
        read_profile(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="No such file"):
        read_profile(tmp_path / "nothing.json")


def test_a_job_without_data_has_no_workload() -> None:
    with pytest.raises(JobError, match="data: is missing"):
        Workload.of(parse_job({"model": LLAMA, "train_batch_size": 4}))


def test_measured_costs_are_those_of_the_file() -> None:
    job = job_of()
    costs = measured_costs(job, small_profile(job, embedding_s=0.3, layer_s=0.6, head_s=1.2))
    assert costs.layer.forward_s == pytest.approx(0.2)
    assert costs.layer.backward_s == pytest.approx(0.4)
    assert costs.head.step_s == pytest.approx(32_000e-8)
    # A message is 12 tokens of width 32 in four bytes.
    assert costs.message_s == pytest.approx(1e-4 + 12 * 32 * 4 / 1e9)
    assert costs.layer.static_bytes == 7_000 * 8  # SGD: parameters and gradients
    assert costs.layer.sync_s == 0


def test_replicas_sum_gradients_and_zero_shards_the_update() -> None:
    job = job_of(parallelism={"dp": {"size": 2}})
    plain = measured_costs(job, small_profile(job))
    assert plain.layer.sync_s == pytest.approx(7_000 * 4 / 5e8)
    sharded = job_of(parallelism={"dp": {"size": 2}}, zero_optimization={"stage": 1})
    assert measured_costs(sharded, small_profile(sharded)).layer.step_s == pytest.approx(7_000e-8 / 2)


def test_a_tied_embedding_is_summed_over_both_ends() -> None:
    job = small_job(LLAMA | {"tie_word_embeddings": True}, pp=2)
    costs = measured_costs(job, small_profile(job))
    assert costs.embedding.sync_s == costs.head.sync_s == pytest.approx(32_000 * 4 / 5e8)
    assert costs.layer.sync_s == 0


# Planning with a profile


def test_the_cost_model_gives_the_measurement_where_it_was_taken() -> None:
    from threefold.cost.case import Case, Machine
    from threefold.cost.estimate import constants_of
    from threefold.cost.layer import head_cost, layer_cost
    from threefold.cost.shape import shape_of
    from threefold.cost.strategies import PRECISION_CODES, Strategies

    job = job_of()
    profile = small_profile(job, layer_s=0.9, head_s=1.8)
    hardware = measured_hardware(job, profile)
    assert job.model is not None
    strategy = Strategies.build(pp=2, num_microbatches=8, precision=PRECISION_CODES["fp32"])
    case = Case(shape_of(job.model, 12), Machine.of(hardware), strategy, constants_of(hardware))
    assert float(layer_cost(case).total_s[0]) == pytest.approx(0.9)
    assert float(head_cost(case).total_s[0]) == pytest.approx(1.8)


def test_a_prediction_as_it_stands_is_the_play_of_the_measured_stages() -> None:
    job = job_of(parallelism={"pp": {"partition": [6, 2]}})
    profile = small_profile(job, layer_s=0.3, head_s=1.5)
    one = predict_job(job, profile).plans[0]
    played = play_partition(model_costs(job, profile), (6, 2), job_schedule(job))
    assert one.step_s == pytest.approx(played.makespan_s)
    assert one.tokens_per_s == pytest.approx(8 * 12 / played.makespan_s)
    assert not any("judged as an even one" in reason for reason in one.reasons)
    even = predict_job(job_of(parallelism={"pp": {"partition": "even"}}), profile).plans[0]
    assert even.step_s > one.step_s


def test_a_job_is_planned_by_its_profile_and_needs_no_cluster() -> None:
    job = job_of()
    assert job.cluster is None
    result = answer(question_of(job, small_profile(job)))
    assert result.plans
    assert all(plan.size("dp") * plan.size("tp") * plan.size("pp") == 2 for plan in result.plans)


def test_slower_links_are_never_better() -> None:
    job = job_of(parallelism={"dp": {"size": 2}})
    fast = small_profile(job)
    slow = fast.model_copy(update={"links": tuple(link.model_copy(update={"bytes_per_s": 1e5}) for link in fast.links)})
    assert predict_job(job, slow).plans[0].step_s > predict_job(job, fast).plans[0].step_s
    assert answer(question_of(job, slow)).plans[0].step_s >= answer(question_of(job, fast)).plans[0].step_s


def test_a_planned_job_gets_the_measured_cut_where_the_profile_is_of_its_work() -> None:
    job = job_of()
    profile = small_profile(job, layer_s=0.3, head_s=1.2)
    planned = json.loads(job.to_json()) | {}
    planned["parallelism"]["pp"]["partition"] = "even"
    assert balanced_job(planned, profile)["parallelism"]["pp"]["partition"] == [6, 2]
    other = job_of(train_micro_batch_size_per_gpu=2)
    unchanged = json.loads(other.to_json())
    assert balanced_job(unchanged, profile) == unchanged


def test_a_profile_in_which_layers_take_no_time_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(small_profile(small_job(), layer_s=0.0).to_json())
    with pytest.raises(JobError, match="a layer takes no time"):
        read_profile(path)
