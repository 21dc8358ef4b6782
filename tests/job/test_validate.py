"""Types, ranges and names of single keys: each refusal in threefold's words, with a fix that works."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.job.problems import BATCH, TINY, problem_of, problems_of
from threefold.job import parse_job
from threefold.job.keys import assign, known_fields


def with_value(key: str, value: Any) -> dict[str, Any]:
    return assign({**BATCH, "model": TINY, "data": {"sequence_length": 8}}, key, value)


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("steps", "100", "write 100 without quotes"),
        ("steps", "0x1" + "0" * 5000, "write a whole number, for example 1000"),
        ("steps", 2.5, "write 2 or 3"),
        ("steps", True, "write a whole number, for example 1000"),
        ("seed", None, "leave seed out, or write 0"),
        ("seed", [1], "write a whole number, for example 0"),
        ("gradient_clipping", "1.0", "write 1.0 without quotes"),
        ("gradient_clipping", True, "write a number, for example 0.0"),
        ("optimizer.params.lr", "3e-4", "write 0.0003 without quotes"),
        ("optimizer.params.lr", "fast", "write a number, for example 0.001"),
        ("fp16.enabled", "true", "write true (no quotes)"),
        ("fp16.enabled", "yes", "write true (no quotes)"),
        ("fp16.enabled", 1, "write true (no quotes)"),
        ("fp16.enabled", "false", "write false (no quotes)"),
        ("fp16.enabled", 0, "write false (no quotes)"),
        ("data.train", 3, 'write it in quotes: "3"'),
        ("data.train", ["a"], "write text, for example"),
        ("data.train", "", "leave data.train out, or write"),
        ("fp16", True, 'write {"enabled": true}'),
        ("zero_optimization", 3, 'write {"stage": 3}'),
        ("parallelism.tp", 2, 'write {"size": 2}'),
        ("evaluation", 10, 'write {"every": 10}'),
        ("activation_checkpointing", "full", 'write {"mode": "full"}'),
        ("optimizer", "SGD", 'write {"type": "SGD"}'),
        ("model", "gpt2", 'write {"preset": "gpt2"}'),
        ("cluster", [8], "write a mapping with the keys device, nodes"),
        ("fp16", None, "leave fp16 out"),
        ("parallelism.pp.partition", "balanced", 'write "even", "auto" or a list'),
        ("parallelism.pp.partition", [3, "3"], 'write "even", "auto" or a list'),
        ("parallelism.pp.partition", [True], 'write "even", "auto" or a list'),
        ("parallelism.pp.partition", None, 'write "even", "auto" or a list'),
        ("optimizer.params.betas", [0.9], "write a list of two numbers"),
        ("optimizer.params.betas", [0.9, 1.0], "write a list of two numbers"),
        ("optimizer.params.betas", [0.9, "x"], "write a list of two numbers"),
        ("optimizer.params.betas", 0.9, "write a list of two numbers"),
        ("scheduler.type", "cosin", 'write "cosine"'),
        ("scheduler.type", "wave", 'write "constant", "linear" or "cosine"'),
        ("optimizer.type", "Lion", 'write "AdamW", "SGD" or "OneBitAdam"'),
        ("dtype", "float46", 'write "float64"'),
        ("parallelism.order", 3, 'write it in quotes: "3"'),
    ],
)
def test_wrong_types_say_what_to_write(key: str, value: Any, fix: str) -> None:
    problem = problem_of(with_value(key, value))
    assert problem.key == key
    assert problem.fix.startswith(fix)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("train_batch_size", 0, "1 or more"),
        ("train_micro_batch_size_per_gpu", -1, "1 or more"),
        ("gradient_accumulation_steps", 0, "1 or more"),
        ("steps", 0, "1 or more"),
        ("steps", 10**30, "1000000000000 or less"),
        ("seed", -1, "0 or more"),
        ("model.vocab_size", 0, "1 or more"),
        ("model.num_hidden_layers", 10**6, "100000 or less"),
        ("model.resid_pdrop", 1.0, "below 1"),
        ("model.attn_pdrop", -0.1, "0 or more"),
        ("model.norm_eps", 0, "above 0"),
        ("model.rope_theta", -1.0, "above 0"),
        ("data.sequence_length", 0, "1 or more"),
        ("parallelism.tp.size", 0, "1 or more"),
        ("parallelism.pp.size", -2, "1 or more"),
        ("parallelism.pp.chunks", 0, "1 or more"),
        ("parallelism.dp.size", 10**9, "1000000 or less"),
        ("zero_optimization.stage", 4, "3 or less"),
        ("zero_optimization.reduce_bucket_size", 0, "1 or more"),
        ("fp16.loss_scale", -1, "0 or more"),
        ("fp16.initial_scale_power", 65, "64 or less"),
        ("gradient_clipping", -1, "0 or more"),
        ("optimizer.params.lr", 0, "above 0"),
        ("optimizer.params.lr", -1e-3, "above 0"),
        ("optimizer.params.eps", 0, "above 0"),
        ("optimizer.params.weight_decay", -0.1, "0 or more"),
        ("optimizer.params.momentum", 1, "below 1"),
        ("scheduler.warmup_steps", -1, "0 or more"),
        ("scheduler.min_lr_ratio", 1.5, "1 or less"),
        ("scheduler.reference_batch_size", 0, "1 or more"),
        ("evaluation.every", -1, "0 or more"),
        ("evaluation.batches", 0, "1 or more"),
        ("checkpoint.keep_last", 0, "1 or more"),
        ("logging.every", 0, "1 or more"),
        ("replica_check.every", -1, "0 or more"),
        ("watchdog.timeout_s", 0, "1"),
    ],
)
def test_ranges_name_the_limit(key: str, value: Any, allowed: str) -> None:
    problem = problem_of(with_value(key, value))
    assert problem.key == key
    assert "out of range" in problem.message and allowed in problem.fix


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("stepz", "steps"),
        ("Seed", "seed"),
        ("train_micro_batch_size", "train_micro_batch_size_per_gpu"),
        ("parallelism.tp.sise", "parallelism.tp.size"),
        ("parallelism.tensor", "parallelism.tp"),
        ("parallelism.pp.shedule", "parallelism.pp.schedule"),
        ("parallelism.tp.chunks", "parallelism.pp.chunks"),
        ("zero_optimization.overlap_com", "zero_optimization.overlap_comm"),
        ("optimizer.lr", "optimizer.params.lr"),
        ("learning_rate", "optimizer.params.lr"),
        ("sequence_length", "data.sequence_length"),
        ("seq_length", "data.sequence_length"),
        ("global_batch_size", "train_batch_size"),
        ("tensor_model_parallel_size", "parallelism.tp.size"),
        ("pipeline_model_parallel_size", "parallelism.pp.size"),
        ("model.num_layers", "model.num_hidden_layers"),
        ("model.ffn_hidden_size", "model.intermediate_size"),
        ("nodes", "cluster.nodes"),
        ("qqqqqqqq", None),
    ],
)
def test_unknown_keys_name_the_nearest(key: str, meant: str | None) -> None:
    problem = problem_of(with_value(key, 1))
    assert problem.key == key and "not a known key" in problem.message
    if meant:
        assert problem.fix == f"write {meant} instead, or remove {key}"
        assert meant in known_fields()
    else:
        assert problem.fix.startswith("remove it; known here: ")


def test_missing_keys_are_named_with_an_example() -> None:
    problems = problems_of({**BATCH, "model": {"hidden_size": 8}, "data": {}, "cluster": {}})
    assert [problem.key for problem in problems] == [
        "model.model_type",
        "model.vocab_size",
        "model.num_hidden_layers",
        "model.num_attention_heads",
        "data.sequence_length",
        "cluster.device",
        "cluster.devices_per_node",
    ]
    assert "preset" in problems[0].fix and "for example 1024" in problems[4].fix


def test_a_misspelt_required_key_is_one_problem() -> None:
    problem = problem_of({**BATCH, "data": {"sequence_lenght": 8}})
    assert problem.key == "data.sequence_lenght" and "data.sequence_length" in problem.fix


def test_a_wrong_required_key_is_one_problem() -> None:
    assert problem_of({**BATCH, "model": {**TINY, "hidden_size": -1}}).key == "model.hidden_size"


def test_whole_numbers_may_be_written_as_floats() -> None:
    job = parse_job({**BATCH, "steps": 1e3, "zero_optimization": {"reduce_bucket_size": 5e8}, "gradient_clipping": 1})
    assert job.steps == 1000 and job.zero_optimization.reduce_bucket_size == 500_000_000
    assert job.gradient_clipping == 1.0


def test_everything_wrong_is_said_at_once() -> None:
    settings = {
        "model": {**TINY, "num_attention_heads": 5},
        "stepz": 1,
        "fp16": {"enabled": "yes"},
        "train_batch_size": 7,
        "train_micro_batch_size_per_gpu": 2,
        "parallelism": {"tp": {"size": 4}, "pp": {"size": 9}, "order": "tp,pp"},
        "scheduler": {"type": "cosine", "warmup_steps": -1, "batch_scaling": "sqrt"},
        "amp": {"enabled": True},
    }
    assert {problem.key for problem in problems_of(settings)} == {
        "model.num_attention_heads",
        "stepz",
        "fp16.enabled",
        "train_batch_size",
        "parallelism.tp.size",
        "parallelism.pp.size",
        "parallelism.order",
        "scheduler.warmup_steps",
        "scheduler.reference_batch_size",
        "amp",
    }


@pytest.mark.parametrize("key", sorted(known_fields()))
@pytest.mark.parametrize("value", [object(), {"x": {}}, [[]], -(10**40), "\x1b[31m"], ids=range(5))
def test_any_wrong_value_of_any_key_is_refused_in_our_words(key: str, value: Any) -> None:
    try:
        parse_job(with_value(key, value))
    except Exception as error:
        assert type(error).__name__ == "JobError"
        assert not re.search(r"pydantic|Input should|validation error", str(error))
        assert all(line.isprintable() for line in str(error).splitlines())
    else:
        paths = {"data.train", "data.validation", "parallelism.pp.schedule_file"}
        assert key in {*paths, "cluster.device"}  # any text is a path or a name
