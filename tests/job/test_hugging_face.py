"""Hugging Face's config.json: names translated, features that are not done refused, everything harmless ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.job.problems import BATCH, TINY, problem_of, problems_of
from threefold.job import ModelSpec, check_trainable, parse_job, read_job

GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "n_layer": 12,
    "n_positions": 1024,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.1,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "transformers_version": "4.50.0",
    "use_cache": True,
    "vocab_size": 50257,
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "use_cache": True,
    "vocab_size": 128256,
}


def directory_with(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def model_from(directory: str, **own: Any) -> ModelSpec:
    model = parse_job({**BATCH, "model": {"hf": directory, **own}}).model
    assert model is not None
    return model


def test_gpt2s_names_are_translated(tmp_path: Path) -> None:
    model = model_from(directory_with(tmp_path, GPT2))
    assert model.num_parameters == 124_439_808
    assert (model.hidden_size, model.num_hidden_layers, model.num_attention_heads) == (768, 12, 12)
    assert (model.intermediate_size, model.max_position_embeddings) == (3072, 1024)
    assert (model.resid_pdrop, model.embd_pdrop, model.attn_pdrop) == (0.1, 0.1, 0.1)
    assert model.tie_word_embeddings and model.hidden_act == "gelu_new" and model.hf is None


def test_llamas_config(tmp_path: Path) -> None:
    model = model_from(directory_with(tmp_path, LLAMA))
    assert model.num_parameters == 8_030_261_248
    assert (model.rope_theta, model.norm_eps, model.num_key_value_heads) == (500000.0, 1e-5, 8)


def test_the_job_overrides_the_config(tmp_path: Path) -> None:
    model = model_from(directory_with(tmp_path, GPT2), num_hidden_layers=2, resid_pdrop=0.0)
    assert (model.num_hidden_layers, model.resid_pdrop, model.hidden_size) == (2, 0.0, 768)


def test_the_file_itself_may_be_named(tmp_path: Path) -> None:
    directory_with(tmp_path, GPT2)
    assert model_from(str(tmp_path / "config.json")).hidden_size == 768


def test_what_a_config_leaves_out_has_hugging_faces_default(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key not in {"rms_norm_eps", "max_position_embeddings"}}
    model = model_from(directory_with(tmp_path, config))
    assert (model.norm_eps, model.max_position_embeddings) == (1e-6, 2048)


def test_newer_configs_keep_rope_in_a_section(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key not in {"rope_theta", "rope_scaling"}}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    assert model_from(directory_with(tmp_path, config)).rope_theta == 1e6


STRETCH: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
STRETCHED: dict[str, Any] = {
    **LLAMA,
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "llama3", **STRETCH},
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"rope_type": "llama3", **STRETCH}, "rope_theta": 5e5},
        {"rope_scaling": {"type": "llama3", **STRETCH}, "rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **STRETCH}},
    ],
    ids=["rope_type", "type", "rope_parameters"],
)
def test_llama3s_stretched_frequencies_are_described(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = {key: value for key, value in STRETCHED.items() if not key.startswith("rope_")}
    model = model_from(directory_with(tmp_path, {**config, **rope}))
    assert model.rope_scaling is not None and model.rope_theta == 5e5
    assert model.rope_scaling.model_dump() == {"rope_type": "llama3", **STRETCH}
    assert model.num_parameters == 8_030_261_248 and model.max_position_embeddings == 131072


def test_stretched_frequencies_are_not_trained(tmp_path: Path) -> None:
    path = directory_with(tmp_path, STRETCHED)
    rest = {**BATCH, "data": {"train": "x", "sequence_length": 8192}, "steps": 1}
    (problem,) = check_trainable(parse_job({**rest, "model": {"hf": path}}))
    assert problem.key == "model.rope_scaling" and "null" in problem.fix and "stretch" in problem.message
    assert check_trainable(parse_job({**rest, "model": {"hf": path, "rope_scaling": None}})) == []


def test_a_job_with_stretched_frequencies_is_written_whole(tmp_path: Path) -> None:
    job = parse_job({**BATCH, "model": {"hf": directory_with(tmp_path, STRETCHED)}})
    assert parse_job(json.loads(job.to_json())) == job
    plain = parse_job({**BATCH, "model": {"hf": directory_with(tmp_path, LLAMA)}})
    assert "rope_scaling" not in json.loads(plain.to_json())["model"]


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({**TINY, "rope_scaling": {"rope_type": "llama3", **STRETCH}}, "model.rope_scaling"),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "model.rope_scaling.low_freq_factor"),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", **STRETCH, "factor": 0}}, "model.rope_scaling.factor"),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", **STRETCH, "beta": 1}}, "model.rope_scaling.beta"),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "llama3", **STRETCH, "low_freq_factor": 4.0}},
            "model.rope_scaling.high_freq_factor",
        ),
    ],
)
def test_a_stretch_that_is_not_one(model: dict[str, Any], key: str) -> None:
    keys = {problem.key for problem in problems_of({**BATCH, "model": model})}
    assert key in keys and all(found.startswith("model.rope_scaling") for found in keys)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rope_scaling", {"rope_type": "linear", "factor": 8.0}),
        ("rope_scaling", {"type": "dynamic", "factor": 8.0}),
        ("rope_scaling", "llama3"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
        ("sliding_window", 4096),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("partial_rotary_factor", 0.5),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("quantization_config", {"bits": 4}),
        ("num_local_experts", 8),
    ],
)
def test_features_that_are_not_done_are_refused(tmp_path: Path, name: str, value: object) -> None:
    from_file = problem_of({**BATCH, "model": {"hf": directory_with(tmp_path, {**LLAMA, name: value})}})
    assert from_file.key == "model.hf" and f"{name} in " in from_file.message and name in from_file.fix
    in_the_job = problem_of({**BATCH, "model": {**TINY, name: value}})
    assert in_the_job.key == f"model.{name}"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "model_type": "gemma"}, '"gemma"'),
        ({key: value for key, value in LLAMA.items() if key != "model_type"}, "null"),
        ({**LLAMA, "clip_qkv": 8}, "clip_qkv"),
    ],
)
def test_configs_that_are_not_known(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    problem = problem_of({**BATCH, "model": {"hf": directory_with(tmp_path, config)}})
    assert problem.key == "model.hf" and words in problem.message and problem.fix


def test_a_head_width_of_its_own_is_refused(tmp_path: Path) -> None:
    problem = problem_of({**BATCH, "model": {"hf": directory_with(tmp_path, {**LLAMA, "head_dim": 64})}})
    assert problem.key == "model.head_dim" and "128" in problem.message


def test_an_activation_of_its_own_is_refused(tmp_path: Path) -> None:
    problem = problem_of({**BATCH, "model": {"hf": directory_with(tmp_path, {**GPT2, "activation_function": "relu"})}})
    assert problem.key == "model.hidden_act" and '"relu"' in problem.message


@pytest.mark.parametrize("name", ["gelu_pytorch_tanh", "gelu_fast"])
def test_the_tanh_gelu_has_many_names(name: str) -> None:
    model = parse_job({**BATCH, "model": {**TINY, "activation_function": name}}).model
    assert model is not None and model.hidden_act == "gelu_new"


def test_unreadable_directories() -> None:
    assert "no such file" in problem_of({**BATCH, "model": {"hf": "no/such/directory"}}).message
    assert problem_of({**BATCH, "model": {"hf": 3}}).key == "model.hf"
    assert problem_of({**BATCH, "model": {"hf": "x", "preset": "gpt2"}}).key == "model.hf"


def test_a_broken_config_is_placed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2",\n "n_embd" 8}')
    problem = problem_of({**BATCH, "model": {"hf": str(tmp_path)}})
    assert problem.key == "model.hf" and "config.json:2:" in problem.message


@pytest.mark.parametrize("text", ["vocab_size: 0x1" + "0" * 5000, '{"norm_eps": NaN}', '{"a": "\\ud800"}'])
def test_odd_values_in_a_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert problem_of({**BATCH, "model": {"hf": str(tmp_path)}}).key == "model.hf"


def test_unknown_presets_name_the_nearest() -> None:
    problem = problem_of({**BATCH, "model": {"preset": "lama3-8b"}})
    assert problem.key == "model.preset" and problem.fix == 'write "llama3-8b"'
    assert "one of them" in problem_of({**BATCH, "model": {"preset": "zzz"}}).fix
    assert problem_of({**BATCH, "model": {"preset": 3}}).key == "model.preset"


def test_a_config_may_be_pasted_into_the_job(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**BATCH, "model": GPT2}))
    loaded = read_job(path)
    assert loaded.job.model is not None and loaded.job.model.num_parameters == 124_439_808
    assert any(note.startswith("model.use_cache: ") for note in loaded.notes)


def test_two_names_for_one_number_contradict() -> None:
    problem = problem_of({**BATCH, "model": {**TINY, "n_embd": 96}})
    assert problem.key == "model.n_embd" and "hidden_size 48" in problem.message
    assert parse_job({**BATCH, "model": {**TINY, "n_embd": 48}}).model is not None


def test_a_model_that_is_not_resolved_does_not_hide_other_problems() -> None:
    problems = problems_of({**BATCH, "model": {"preset": "zzz"}, "stepz": 1, "parallelism": {"order": "x"}})
    assert [problem.key for problem in problems] == ["model.preset", "stepz", "parallelism.order"]
