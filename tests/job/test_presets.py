"""Presets: numbers of parameters against what was published, and against real modules."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.job.problems import BATCH
from threefold.job import Job, ModelSpec, check_trainable, parse_job
from threefold.job.presets import preset_table, presets
from threefold.job.rules import MODEL_NOT_YET
from threefold.models.decoder import Decoder

UNITS = {"M": 10**6, "B": 10**9, "T": 10**12}
LOOSELY_ROUNDED = {"gpt3-350m": 0.02}  # the paper's round name for 355.9 M
MIXTURES = [name for name, preset in preset_table().items() if preset.published_active]


def job_of(name: str, **model: Any) -> Job:
    return parse_job(
        {**BATCH, "model": {"preset": name, **model}, "data": {"train": "x", "sequence_length": 8}, "steps": 1}
    )


def model_of(name: str) -> ModelSpec:
    return ModelSpec(**presets()[name])


def is_trainable(name: str) -> bool:
    return not check_trainable(job_of(name))


def published(text: str) -> tuple[float, float]:
    """The number that a text like 6.7B states, and half a unit of its last digit."""
    if text.isdigit():
        return int(text), 0
    digits, unit = text[:-1], UNITS[text[-1]]
    decimals = len(digits.partition(".")[2])
    return float(digits) * unit, 0.5 * 10**-decimals * unit


@pytest.mark.parametrize("name", presets())
def test_the_count_is_the_published_one_within_its_rounding(name: str) -> None:
    number, half_a_unit = published(preset_table()[name].published)
    tolerance = max(half_a_unit, LOOSELY_ROUNDED.get(name, 0) * number)
    assert abs(model_of(name).num_parameters - number) <= tolerance


@pytest.mark.parametrize("name", MIXTURES)
def test_active_parameters_are_the_published_ones_with_or_without_embeddings(name: str) -> None:
    """Publishers differ in whether the two embedding matrices are active parameters."""
    spec = model_of(name)
    active = preset_table()[name].published_active
    assert active is not None
    number, half_a_unit = published(active)
    embeddings = 2 * spec.vocab_size * spec.hidden_size
    assert number - half_a_unit <= spec.num_active_parameters <= number + half_a_unit + embeddings
    assert spec.num_active_parameters < spec.num_parameters / 3


@pytest.mark.parametrize("name", [name for name in presets() if name not in MIXTURES])
def test_every_parameter_of_a_dense_model_is_active(name: str) -> None:
    spec = model_of(name)
    assert spec.num_active_parameters == spec.num_parameters and spec.num_moe_layers == 0


@pytest.mark.parametrize("name", list(filter(is_trainable, presets())))
def test_names_and_shapes_are_those_of_the_real_module(name: str) -> None:
    with torch.device("meta"):
        module = Decoder(model_of(name))
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == model_of(name).parameter_shapes()


def test_what_can_be_trained() -> None:
    trainable = {name.partition("-")[0] for name in presets() if is_trainable(name)}
    assert trainable == {
        *("gpt2", "gpt3", "megatron", "mt", "gpt", "tinyllama", "llama", "llama2", "llama3", "llama3.1", "llama3.2"),
        "mistral",
    }


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("mixtral-8x7b", {"num_local_experts"}),
        ("qwen2.5-7b", {"qkv_bias"}),
        ("qwen3-8b", {"qk_norm"}),
        ("qwen2-57b-a14b", {"num_local_experts", "qkv_bias"}),
        ("deepseek-v3", {"num_local_experts", "kv_lora_rank"}),
        ("opt-1.3b", {"hidden_act"}),
        ("bloom-176b", {"embedding_norm", "position_embedding_type"}),
        ("mpt-7b", {"use_bias", "norm_bias", "position_embedding_type"}),
        ("nemotron4-15b", {"gated_mlp", "norm_bias", "hidden_act"}),
    ],
)
def test_what_can_only_be_described_is_named(name: str, keys: set[str]) -> None:
    problems = check_trainable(job_of(name))
    assert {problem.key for problem in problems} == {f"model.{key}" for key in keys}
    assert all("explained and planned" in problem.fix for problem in problems)


def test_every_feature_that_is_not_trained_is_in_some_preset() -> None:
    named = {problem.key for name in presets() for problem in check_trainable(job_of(name))}
    # Presets of Llama 3 are those before the frequencies were stretched.
    assert named | {"model.rope_scaling"} == {item.key for item in MODEL_NOT_YET}


@pytest.mark.parametrize("name", ["gpt3-175b", "mt-nlg-530b", "gpt-1t", "llama3-405b", "mistral-7b", "mixtral-8x22b"])
def test_the_names_that_people_look_for(name: str) -> None:
    assert name in presets()


def test_every_preset_says_where_it_is_from() -> None:
    assert all(preset.source and preset.published for preset in preset_table().values())


@pytest.mark.parametrize("name", presets())
def test_a_resolved_job_file_loads_to_the_same_job(name: str) -> None:
    job = job_of(name)
    assert parse_job(json.loads(job.to_json())) == job


def test_a_preset_may_be_changed() -> None:
    model = job_of("mixtral-8x7b", num_local_experts=4, num_hidden_layers=2).model
    assert model is not None
    assert model.num_parameters < 4e9 and model.preset == "mixtral-8x7b"
