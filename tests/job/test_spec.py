"""Model shapes against published parameter counts, and the numbers that a job derives."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from tests.job.problems import BATCH, TINY
from threefold.job import ModelSpec, parse_job
from threefold.job.presets import presets

# Counts of the published weights (each checkpoint's own number of parameters, tied weights once).
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "tinyllama-1.1b": 1_100_048_384,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    assert ModelSpec(**presets()[name]).num_parameters == PUBLISHED[name]


def test_gpt3_has_175_billion_parameters() -> None:
    assert round(ModelSpec(**presets()["gpt3-175b"]).num_parameters / 1e9) == 175


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_valid_job(name: str) -> None:
    job = parse_job({**BATCH, "model": {"preset": name}})
    assert job.model is not None
    shapes = job.model.parameter_shapes()
    assert sum(math.prod(shape) for shape in shapes.values()) == job.model.num_parameters


def test_gpt2_shapes_in_model_order() -> None:
    spec = ModelSpec(**{**TINY, "num_hidden_layers": 1})
    assert spec.parameter_shapes() == {
        "embed.tokens.weight": (61, 48),
        "embed.positions.weight": (64, 48),
        "layers.0.attention_norm.weight": (48,),
        "layers.0.attention_norm.bias": (48,),
        "layers.0.attention.qkv.weight": (144, 48),
        "layers.0.attention.qkv.bias": (144,),
        "layers.0.attention.out.weight": (48, 48),
        "layers.0.attention.out.bias": (48,),
        "layers.0.mlp_norm.weight": (48,),
        "layers.0.mlp_norm.bias": (48,),
        "layers.0.mlp.up.weight": (192, 48),
        "layers.0.mlp.up.bias": (192,),
        "layers.0.mlp.down.weight": (48, 192),
        "layers.0.mlp.down.bias": (48,),
        "final_norm.weight": (48,),
        "final_norm.bias": (48,),
    }
    assert list(spec.parameter_shapes())[:3] == [
        "embed.tokens.weight",
        "embed.positions.weight",
        "layers.0.attention_norm.weight",
    ]


def test_llama_shapes_have_no_biases_and_an_own_head() -> None:
    spec = ModelSpec(
        model_type="llama",
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=40,
    )
    shapes = spec.parameter_shapes()
    assert not any(name.endswith("bias") for name in shapes)
    assert "embed.positions.weight" not in shapes
    assert shapes["layers.0.attention.qkv.weight"] == ((8 + 2 * 4) * 4, 32)
    assert shapes["layers.0.mlp.gate_up.weight"] == (80, 32)
    assert list(shapes)[-1] == "head.weight" and shapes["head.weight"] == (61, 32)


def test_left_out_numbers_follow_the_style() -> None:
    gpt2 = ModelSpec(**{key: value for key, value in TINY.items() if key != "max_position_embeddings"})
    assert (gpt2.num_key_value_heads, gpt2.intermediate_size, gpt2.max_position_embeddings) == (6, 192, 1024)
    assert gpt2.tie_word_embeddings and gpt2.hidden_act == "gelu_new"
    llama = ModelSpec(
        model_type="llama", vocab_size=32000, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32
    )
    assert llama.intermediate_size == 11008  # Llama 7B's own
    assert not llama.tie_word_embeddings and llama.hidden_act == "silu" and llama.max_position_embeddings == 4096


def test_specs_are_immutable() -> None:
    spec = ModelSpec(**TINY)
    with pytest.raises(ValidationError):
        spec.hidden_size = 1


def test_a_job_derives_world_and_microbatches() -> None:
    job = parse_job({**BATCH, "parallelism": {"tp": {"size": 2}, "pp": {"size": 3}, "dp": {"size": 4}}})
    assert (job.dp, job.tp, job.pp, job.world_size) == (4, 2, 3, 24)
    assert (job.micro_batch, job.num_microbatches) == (1, 2)
    assert job.parallelism.axes == ("tp", "pp", "dp")


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ({}, "fp32"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bfloat16": {"enabled": True}}, "bf16"),
        ({"dtype": "float64"}, "fp64"),
    ],
)
def test_precision(settings: dict[str, object], precision: str) -> None:
    assert parse_job({**BATCH, **settings}).precision == precision
