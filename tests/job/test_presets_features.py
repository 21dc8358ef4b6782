"""Features that other families add to the two styles: their parameters, their rules, their config.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.job.problems import BATCH, TINY, problem_of
from threefold.errors import JobError
from threefold.job import ClusterSpec, ModelSpec, parse_job
from threefold.job.presets import presets
from threefold.job.shrink import shrink_job

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 7}


def layer_of(layer: int = 0, **features: Any) -> dict[str, tuple[int, ...]]:
    return ModelSpec(**{**LLAMA, **features}).layer_shapes(layer)


# Parameters


def test_a_layer_with_experts() -> None:
    shapes = layer_of(**EXPERTS, n_shared_experts=2, shared_expert_gate=True, router_bias=True)
    mlp = {name: shape for name, shape in shapes.items() if name.startswith("mlp.")}
    assert mlp == {
        "mlp.router.weight": (4, 32),
        "mlp.router.bias": (4,),
        **{f"mlp.experts.{e}.gate_up.weight": (32, 32) for e in range(4)},
        **{f"mlp.experts.{e}.down.weight": (32, 16) for e in range(4)},
        "mlp.shared.gate_up.weight": (64, 32),
        "mlp.shared.down.weight": (32, 32),
        "mlp.shared_gate.weight": (1, 32),
    }


def test_which_layers_have_experts() -> None:
    spec = ModelSpec(
        **{**LLAMA, **EXPERTS, "num_hidden_layers": 6, "first_k_dense_replace": 1, "decoder_sparse_step": 2}
    )
    assert [spec.has_experts(layer) for layer in range(6)] == [False, True, False, True, False, True]
    assert (spec.num_moe_layers, spec.moe_layer_share) == (3, 0.5)
    assert "mlp.down.weight" in spec.layer_shapes(0) and "mlp.router.weight" in spec.layer_shapes(1)


def test_experts_are_as_wide_as_the_mlp_unless_stated() -> None:
    assert ModelSpec(**{**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1}).moe_intermediate_size == 48
    assert ModelSpec(**LLAMA).moe_intermediate_size == 0


def test_a_token_meets_only_the_experts_that_it_visits() -> None:
    spec = ModelSpec(**{**LLAMA, **EXPERTS})
    one_expert = 3 * 16 * 32
    assert spec.num_parameters - spec.num_active_parameters == 2 * (4 - 2) * one_expert


def test_latent_attention() -> None:
    shapes = layer_of(**LATENT, q_lora_rank=12)
    attention = {name: shape for name, shape in shapes.items() if name.startswith("attention.")}
    assert attention == {
        "attention.q_down.weight": (12, 32),
        "attention.q_down_norm.weight": (12,),
        "attention.q_up.weight": (4 * (6 + 2), 12),
        "attention.kv_down.weight": (10 + 2, 32),
        "attention.kv_down_norm.weight": (10,),
        "attention.kv_up.weight": (4 * (6 + 7), 10),
        "attention.out.weight": (32, 4 * 7),
    }
    assert layer_of(**LATENT)["attention.q.weight"] == (4 * (6 + 2), 32)


@pytest.mark.parametrize(
    ("features", "more"),
    [
        ({"qkv_bias": True}, {"attention.qkv.bias": (32 + 2 * 16,)}),
        ({"qk_norm": True}, {"attention.q_norm.weight": (8,), "attention.k_norm.weight": (8,)}),
        ({"norm_bias": True}, {"attention_norm.bias": (32,), "mlp_norm.bias": (32,)}),
    ],
)
def test_features_add_parameters(features: dict[str, Any], more: dict[str, tuple[int, ...]]) -> None:
    assert layer_of(**features) == {**layer_of(), **more}


def test_an_mlp_without_a_gate() -> None:
    shapes = layer_of(gated_mlp=False)
    assert shapes["mlp.up.weight"] == (48, 32) and "mlp.gate_up.weight" not in shapes
    assert ModelSpec(**{**LLAMA, "gated_mlp": False}).hidden_act == "gelu_new"


def test_heads_of_their_own_width() -> None:
    shapes = layer_of(head_dim=24)
    assert shapes["attention.qkv.weight"] == ((4 + 2 * 2) * 24, 32)
    assert shapes["attention.out.weight"] == (32, 4 * 24)
    assert parse_job({**BATCH, "model": {**LLAMA, "num_attention_heads": 6, "head_dim": 8}}).model is not None


def test_positions_and_norm_of_the_embedding() -> None:
    assert "embed.positions.weight" not in ModelSpec(**{**TINY, "position_embedding_type": "alibi"}).parameter_shapes()
    assert ModelSpec(**{**TINY, "embedding_norm": True}).parameter_shapes()["embed.norm.bias"] == (48,)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite", "bloom-560m", "qwen3-0.6b", "mpt-7b"])
def test_the_count_is_the_sum_of_the_shapes(name: str) -> None:
    spec = ModelSpec(**presets()[name])
    assert sum(math.prod(shape) for shape in spec.parameter_shapes().values()) == spec.num_parameters


def test_features_that_are_off_are_not_written() -> None:
    written = json.loads(parse_job({**BATCH, "model": TINY}).to_json())["model"]
    assert "num_local_experts" not in written and "kv_lora_rank" not in written
    assert written["head_dim"] == 8


def test_a_shrunk_model_keeps_the_width_of_its_heads_small() -> None:
    small = shrink_job(parse_job({**BATCH, "model": {"preset": "mistral-nemo-12b"}})).model
    assert small is not None
    assert small.head_dim == 8 and small.num_attention_heads * 8 == small.hidden_size


# Rules


@pytest.mark.parametrize(
    ("features", "key", "fix"),
    [
        ({"num_local_experts": 4}, "num_local_experts", '"num_experts_per_tok": 2'),
        ({**EXPERTS, "num_experts_per_tok": 5}, "num_experts_per_tok", "1 to 4"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok", "remove it"),
        ({"n_shared_experts": 1}, "n_shared_experts", "remove it"),
        ({**LATENT, "v_head_dim": 0}, "v_head_dim", '"v_head_dim", for example 128'),
        ({"q_lora_rank": 8}, "q_lora_rank", "kv_lora_rank"),
        ({"head_dim": 7}, "head_dim", "set it to 6 or 8"),
        ({"hidden_act": "relu2"}, "hidden_act", 'write "silu"'),
    ],
)
def test_features_that_contradict_are_refused(features: dict[str, Any], key: str, fix: str) -> None:
    problem = problem_of({**BATCH, "model": {**LLAMA, **features}})
    assert problem.key == f"model.{key}" and fix in problem.fix


def test_tp_divides_the_experts() -> None:
    experts = {**EXPERTS, "moe_intermediate_size": 15}
    problem = problem_of({**BATCH, "model": {**LLAMA, **experts}, "parallelism": {"tp": {"size": 2}}})
    assert problem.key == "parallelism.tp.size" and "15 moe_intermediate_size" in problem.message


# config.json

COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
}
MIXTRAL = {
    **COMMON,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "vocab_size": 32000,
}
MISTRAL = {
    **COMMON,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32768,
}
MISTRAL_NEMO = {
    **MISTRAL,
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 40,
    "vocab_size": 131072,
}
QWEN2 = {
    **COMMON,
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN2_MOE = {
    **QWEN2,
    "model_type": "qwen2_moe",
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 2560,
    "norm_topk_prob": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 20480,
    "vocab_size": 151936,
}
QWEN3 = {
    **COMMON,
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "layer_types": ["full_attention"] * 64,
    "max_position_embeddings": 40960,
    "max_window_layers": 64,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_MOE = {
    **{name: value for name, value in QWEN3.items() if name != "layer_types"},
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
DEEPSEEK_V2_LITE = {
    **COMMON,
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
DEEPSEEK_V3 = {
    **DEEPSEEK_V2_LITE,
    "model_type": "deepseek_v3",
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
OPT = {
    "model_type": "opt",
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "attention_dropout": 0.0,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "ffn_dim": 8192,
    "hidden_size": 2048,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "prefix": "</s>",
    "vocab_size": 50272,
    "word_embed_proj_dim": 2048,
}
BLOOM = {
    "model_type": "bloom",
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "n_embed": 1024,
    "n_layer": 24,
    "num_attention_heads": 16,
    "offset_alibi": 100,
    "pretraining_tp": 1,
    "seq_length": 2048,
    "skip_bias_add": True,
    "skip_bias_add_qkv": False,
    "slow_but_exact": False,
    "vocab_size": 250880,
}
MPT = {
    "model_type": "mpt",
    "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "clip_qkv": None},
    "d_model": 4096,
    "emb_pdrop": 0,
    "embedding_fraction": 1.0,
    "expansion_ratio": 4,
    "init_config": {"name": "kaiming_normal_"},
    "init_device": "cpu",
    "learned_pos_emb": True,
    "logit_scale": None,
    "max_seq_len": 2048,
    "n_heads": 32,
    "n_layers": 32,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "resid_pdrop": 0,
    "tokenizer_name": "gpt-neox",
    "verbose": 0,
    "vocab_size": 50432,
}


def config_at(tmp_path: Path, config: dict[str, Any]) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return {**BATCH, "model": {"hf": str(tmp_path)}}


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (MIXTRAL, "mixtral-8x7b"),
        (MISTRAL, "mistral-7b"),
        (MISTRAL_NEMO, "mistral-nemo-12b"),
        (QWEN2, "qwen2.5-7b"),
        (QWEN2_MOE, "qwen2-57b-a14b"),
        (QWEN3, "qwen3-32b"),
        (QWEN3_MOE, "qwen3-30b-a3b"),
        (DEEPSEEK_V2_LITE, "deepseek-v2-lite"),
        (DEEPSEEK_V3, "deepseek-v3"),
        (BLOOM, "bloom-560m"),
        (MPT, "mpt-7b"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_says_what_its_preset_says(tmp_path: Path, config: dict[str, Any], preset: str) -> None:
    assert parse_job(config_at(tmp_path, config)).model == ModelSpec(**presets()[preset])


def test_a_config_of_opt_has_two_more_positions(tmp_path: Path) -> None:
    model = parse_job(config_at(tmp_path, OPT)).model
    assert model == ModelSpec(**presets()["opt-1.3b"], resid_pdrop=0.1)
    assert model is not None and model.num_parameters == 1_315_758_080


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (QWEN2, {"use_sliding_window": True}, "sliding_window"),
        (QWEN2_MOE, {"shared_expert_intermediate_size": 1000}, "shared_expert_intermediate_size"),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (OPT, {"do_layer_norm_before": False}, "do_layer_norm_before"),
        (OPT, {"word_embed_proj_dim": 512}, "word_embed_proj_dim"),
        (BLOOM, {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        (MPT, {"attn_config": {"alibi": False}}, "attn_config"),
        (MPT, {"expansion_ratio": 2.5}, "expansion_ratio"),
        (MIXTRAL, {"sliding_window": 4096}, "sliding_window"),
        (MISTRAL, {"sliding_window": 4096}, "4096 asks for attention over a window of so many tokens"),
        (MISTRAL, {"sliding_window": 32767}, "sliding_window to null"),
        (MISTRAL, {"sliding_window": "wide"}, "sliding_window"),
    ],
)
def test_variants_that_would_be_described_wrongly_are_refused(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    settings = config_at(tmp_path, {**config, **changes})
    with pytest.raises(JobError, match=words):
        parse_job(settings)


@pytest.mark.parametrize("window", [None, 32768, 131072])
def test_a_window_as_wide_as_the_sequence_is_none(tmp_path: Path, window: int | None) -> None:
    model = parse_job(config_at(tmp_path, {**MISTRAL, "sliding_window": window})).model
    assert model == ModelSpec(**presets()["mistral-7b"])


def test_mistral_has_a_window_unless_it_says_otherwise(tmp_path: Path) -> None:
    config = {name: value for name, value in MISTRAL.items() if name != "sliding_window"}
    with pytest.raises(JobError, match="sliding_window"):
        parse_job(config_at(tmp_path, config))


def test_what_mistral_leaves_out(tmp_path: Path) -> None:
    stated = {name: value for name, value in MISTRAL.items() if name not in ("num_key_value_heads", "rms_norm_eps")}
    del stated["max_position_embeddings"]
    model = parse_job(config_at(tmp_path, stated)).model
    assert model is not None
    assert (model.num_key_value_heads, model.norm_eps, model.max_position_embeddings) == (8, 1e-6, 131072)


@pytest.mark.parametrize("config", [MISTRAL, MIXTRAL], ids=["mistral", "mixtral"])
def test_null_key_value_heads_are_all_heads(tmp_path: Path, config: dict[str, Any]) -> None:
    model = parse_job(config_at(tmp_path, {**config, "num_key_value_heads": None})).model
    assert model is not None and model.num_key_value_heads == 32


def test_a_config_may_be_pasted_into_the_job() -> None:
    model = parse_job({**BATCH, "model": MIXTRAL}).model
    assert model is not None and model.num_parameters == 46_702_792_704


# The cluster


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("8x200Gb/s", 200e9), ("100Gb/s", 12.5e9), ("2x25GB/s", 50e9), ("12.5GB/s", 12.5e9), (None, None)],
)
def test_the_network_of_a_node_in_bytes(text: str | None, bytes_per_s: float | None) -> None:
    assert ClusterSpec(device="h100", devices_per_node=8, inter_node=text).inter_node_bytes_per_s == bytes_per_s
