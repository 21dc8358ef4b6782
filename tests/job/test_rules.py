"""What keys say together: each rule refuses with its key and a fix that is itself accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.job.problems import BATCH, TINY, problem_of, problems_of
from threefold.errors import JobError
from threefold.job import check_trainable, parse_job, relayout
from threefold.job.keys import assign, known_fields
from threefold.job.rules import NOT_YET, RULES

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "intermediate_size": 64,
}


def with_all(model: dict[str, Any] | None = None, **dotted: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {**BATCH, "model": model or TINY}
    for key, value in dotted.items():
        settings = assign(settings, key.replace("__", "."), value)
    return settings


@pytest.mark.parametrize(
    ("settings", "key", "message", "fix"),
    [
        (with_all({**TINY, "num_attention_heads": 7}), "model.num_attention_heads", "hidden_size 48", "set it to 6"),
        (
            with_all({**LLAMA, "num_key_value_heads": 5}),
            "model.num_key_value_heads",
            "5 key-value heads do not divide 12",
            "1, 2, 3, 4, 6 or 12",
        ),
        (
            with_all({**LLAMA, "hidden_size": 36, "num_attention_heads": 12}),
            "model.num_attention_heads",
            "width 3",
            "set model.num_attention_heads to 9",
        ),
        (with_all({**TINY, "hidden_act": "silu"}), "model.hidden_act", "gelu_new or gelu", 'write "gelu_new"'),
        (with_all({**LLAMA, "hidden_act": "gelu"}), "model.hidden_act", "which has silu", 'write "silu"'),
        (with_all(data__sequence_length=65), "data.sequence_length", "64 learned positions", "set it to 64 or less"),
        (with_all(parallelism__tp__size=4), "parallelism.tp.size", "6 attention heads", "set it to 1, 2, 3 or 6"),
        (
            with_all(LLAMA, parallelism__tp__size=4),
            "parallelism.tp.size",
            "6 key-value heads",
            "set it to 1 or 2",
        ),
        (
            with_all(LLAMA, parallelism__tp__size=3),
            "parallelism.tp.size",
            "64 intermediate_size",
            "set it to 1 or 2",
        ),
        (
            with_all(data__sequence_length=63, parallelism__tp={"size": 2, "sequence_parallel": True}),
            "data.sequence_length",
            "63 tokens do not divide over tp 2",
            "62 or 64",
        ),
        (with_all(parallelism__pp__size=7), "parallelism.pp.size", "7 stages", "6 or less"),
        (
            with_all(parallelism__pp={"size": 2, "partition": [2, 2, 2]}),
            "parallelism.pp.partition",
            "3 counts for 2 stages",
            "such as [3, 3]",
        ),
        (
            with_all(parallelism__pp={"size": 2, "partition": [4, 3]}),
            "parallelism.pp.partition",
            "places 7 layers, but the model has 6",
            "such as [3, 3]",
        ),
        (
            with_all(parallelism__pp={"size": 2, "partition": [7, -1]}),
            "parallelism.pp.partition",
            "-1 layers",
            "0 or more",
        ),
        (
            with_all(parallelism__pp={"size": 2, "partition": [2.25, 3.75]}),
            "parallelism.pp.partition",
            "cuts a layer elsewhere than between attention and feed-forward",
            "such as [3, 3]",
        ),
        (with_all(parallelism__pp__schedule="1F1B"), "parallelism.pp.schedule", '"1F1B"', 'write "1f1b"'),
        (with_all(parallelism__pp__schedule="g-pipe"), "parallelism.pp.schedule", "is not one of", 'write "gpipe"'),
        (with_all(parallelism__pp__schedule="zb-h1"), "parallelism.pp.schedule", "is not one of", 'write "zb_h1"'),
        (with_all(parallelism__pp__schedule="interleaved_1f1b"), "parallelism.pp.chunks", "1 is 1f1b", "2 or more"),
        (
            with_all(parallelism__pp__schedule="zb_h1", parallelism__pp__chunks=2),
            "parallelism.pp.chunks",
            "1 chunk",
            "1",
        ),
        (
            with_all(parallelism__pp__schedule="zb_v", parallelism__pp__chunks=3),
            "parallelism.pp.chunks",
            "has 2",
            "to 2",
        ),
        (
            with_all(parallelism__pp={"size": 2, "schedule": "1f1b", "schedule_file": "mine.txt"}),
            "parallelism.pp.schedule_file",
            "both stated",
            "leave one of them out",
        ),
        (
            with_all(parallelism__pp={"size": 4, "schedule": "interleaved_1f1b", "chunks": 2}),
            "parallelism.pp.size",
            "8 stages (2 chunks on each of 4 devices) are more than",
            "or use fewer chunks",
        ),
        (
            with_all(parallelism__pp={"size": 2, "schedule": "zb_v", "partition": [3, 3]}),
            "parallelism.pp.partition",
            "2 counts for 4 stages",
            "4 counts",
        ),
        (with_all(parallelism__pp__chunks=2), "parallelism.pp.chunks", "interleaved", "set it to 1"),
        (with_all(parallelism__order="tp,pp"), "parallelism.order", '"tp,pp"', '"tp,pp,dp"'),
        (with_all(parallelism__order="tp,pp,pp"), "parallelism.order", "once", '"tp,pp,dp"'),
        (with_all(fp16__enabled=True, bf16__enabled=True), "fp16.enabled", "both on", "one of them to false"),
        (with_all(fp16__enabled=True, dtype="float64"), "dtype", "contradicts fp16", '"float32"'),
        (
            with_all(zero_optimization__offload_optimizer={"device": "cpu"}),
            "zero_optimization.offload_optimizer",
            "ZeRO stage 1",
            "stage to 1",
        ),
        (
            with_all(zero_optimization={"stage": 2, "offload_param": {}}),
            "zero_optimization.offload_param",
            "ZeRO stage 3",
            "stage to 3",
        ),
        (with_all(optimizer__params__momentum=0.9), "optimizer.params.momentum", "AdamW", "SGD"),
        (with_all(steps=10, scheduler__warmup_steps=11), "scheduler.warmup_steps", "steps 10", "10 or less"),
        (
            with_all(steps=100, scheduler={"warmup_steps": 11, "total_steps": 10}),
            "scheduler.warmup_steps",
            "scheduler.total_steps 10",
            "10 or less",
        ),
        (
            with_all(scheduler__batch_scaling="linear"),
            "scheduler.reference_batch_size",
            "linear scaling",
            '"reference_batch_size": 256',
        ),
    ],
)
def test_each_rule_refuses_with_key_and_fix(settings: dict[str, Any], key: str, message: str, fix: str) -> None:
    problem = problem_of(settings)
    assert problem.key == key
    assert message in problem.message and fix in problem.fix


@pytest.mark.parametrize(
    "settings",
    [
        with_all({**TINY, "vocab_size": 50257}, parallelism__tp__size=2),  # vocabulary need not divide
        with_all({**TINY, "num_hidden_layers": 7}, parallelism__pp__size=2),
        with_all(parallelism__pp={"size": 2, "partition": [5, 1]}),
        with_all(parallelism__pp={"size": 2, "partition": [2.5, 3.5]}),
        with_all(parallelism__pp={"size": 3, "partition": "auto"}),
        with_all(LLAMA, data__sequence_length=10**6),  # rotary positions have no table
        with_all(data__sequence_length=63, parallelism__tp__size=2),
        with_all(data__sequence_length=63, parallelism__tp__sequence_parallel=True),
        with_all(parallelism__order="dp, tp, pp"),
        with_all(
            parallelism__tp__size=6,
            cluster={"device": "cpu", "nodes": 3, "devices_per_node": 2},  # tp over several nodes
        ),
        with_all(zero_optimization={"stage": 0, "offload_optimizer": {"device": "none"}}),
        with_all(optimizer={"type": "SGD", "params": {"momentum": 0.9}}),
        with_all(scheduler={"batch_scaling": "sqrt", "reference_batch_size": 4}),
        with_all(scheduler__warmup_steps=10**6),  # without steps there is no total to exceed
    ],
)
def test_what_is_allowed(settings: dict[str, Any]) -> None:
    assert parse_job(settings).train_batch_size == 8


def test_rules_and_not_yet_read_keys_that_exist() -> None:
    sections = {key for rule in RULES for key in rule.needs} | {item.key for item in NOT_YET}
    assert sections <= known_fields().keys()


def test_a_rule_is_silent_about_keys_that_are_wrong_by_themselves() -> None:
    problems = problems_of(with_all(parallelism={"tp": {"size": "4"}, "pp": {"size": 7}}))
    assert [problem.key for problem in problems] == ["parallelism.tp.size", "parallelism.pp.size"]


def test_trainable_needs_sections() -> None:
    missing = {problem.key for problem in check_trainable(parse_job(BATCH))}
    assert missing == {"model", "data", "steps"}
    assert [p.key for p in check_trainable(parse_job(with_all(steps=1, data__sequence_length=8)))] == ["data.train"]


def test_a_complete_job_is_trainable() -> None:
    assert check_trainable(parse_job(with_all(steps=1, data={"train": "tokens", "sequence_length": 8}))) == []


def test_what_training_does_not_do_yet_is_named() -> None:
    trainable = with_all(steps=1, data={"train": "tokens", "sequence_length": 8})
    (problem,) = check_trainable(parse_job({**trainable, "checkpoint": {"every": 5}}))
    assert problem.key == "checkpoint.every" and problem.fix


@pytest.mark.parametrize(
    "settings",
    [
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
        {"fp16": {"enabled": True}},
        {"bf16": {"enabled": True}},
        {"activation_checkpointing": {"mode": "full"}},
        {"parallelism": {"pp": {"size": 2}}, "activation_checkpointing": {"stages": ["full", "none"]}},
    ],
)
def test_what_saves_memory_is_trained(settings: dict[str, Any]) -> None:
    trainable = with_all(steps=1, data={"train": "tokens", "sequence_length": 8})
    assert check_trainable(parse_job({**trainable, **settings})) == []


def test_shared_memory_is_for_cpu_processes() -> None:
    cluster = {"device": "h100", "nodes": 1, "devices_per_node": 1, "shared_memory": True}
    with pytest.raises(JobError, match=r'cluster.shared_memory: is for CPU processes, but cluster.device is "h100"'):
        parse_job(with_all(cluster=cluster))
    assert parse_job(with_all(cluster=cluster | {"device": "cpu"})).shared_memory


@pytest.mark.parametrize(
    ("cluster", "shared"),
    [
        (None, True),
        ({"device": "cpu"}, True),
        ({"device": "cpu", "shared_memory": False}, False),
        ({"device": "h100"}, False),
    ],
)
def test_cpu_processes_share_memory_unless_told_not_to(cluster: dict[str, Any] | None, shared: bool) -> None:
    settings = {} if cluster is None else {"cluster": {"nodes": 1, "devices_per_node": 1} | cluster}
    job = parse_job(with_all(**settings))
    assert job.shared_memory is shared
    assert parse_job(json.loads(job.to_json())) == job


def test_there_is_a_recompute_mode_for_every_stage() -> None:
    settings: dict[str, Any] = {"parallelism": {"pp": {"size": 2}}, "activation_checkpointing": {"stages": ["full"]}}
    with pytest.raises(JobError, match=r"has 1 modes for 2 stages") as caught:
        parse_job(with_all(**settings))
    assert caught.value.problems[0].fix.startswith('give one for each, for example ["full", "none"]')
    job = parse_job(with_all(**settings | {"activation_checkpointing": {"stages": ["full", "selective"]}}))
    assert [job.activation_checkpointing.of_stage(stage) for stage in (0, 1)] == ["full", "selective"]
    assert relayout(job, pp=1).activation_checkpointing.stages is None


def test_a_world_that_no_machine_has_is_refused() -> None:
    sizes = {axis: {"size": 1000} for axis in ("tp", "pp", "dp")}
    with pytest.raises(JobError, match="1,000,000,000 ranks"):
        parse_job({"train_batch_size": 1000, "parallelism": sizes})
