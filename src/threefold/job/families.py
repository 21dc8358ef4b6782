"""The model families whose config.json is understood: what each means in the job's own names.

A family is one of the two styles with features. Most of what a config says has the same name in the job; here stands
the rest: names of its own, what it has without saying so, and what it means when it leaves something out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Model = dict[str, Any]


def _as_stated(config: Model) -> Model:
    return config


@dataclass(frozen=True)
class Family:
    """What a config.json of one ``model_type`` means.

    ``has``: settings of every model of the family. ``left_out``: what a config means that leaves these out, where that
    differs from a job's own default. ``renames``: its name -> ours. ``no_effect``: names that change no shape.
    ``off``: features that are not done, with the values that switch them off. ``plain``: the style itself, whose config
    may state no more than the runtime trains. ``read`` rewrites what needs more than a new name; what it can't read it
    leaves as it is, to be refused as unknown.
    """

    style: str
    has: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, Any] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    no_effect: str = ""
    off: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    has_experts: bool = False
    plain: bool = False
    read: Callable[[Model], Model] = _as_stated


def _without_window(config: Model) -> Model:
    """A window that is switched off, and layers that are all alike, say nothing."""
    unused = {"sliding_window", "max_window_layers"} if config.get("use_sliding_window") is False else set()
    if set(map(str, config.get("layer_types") or ())) == {"full_attention"}:
        unused.add("layer_types")
    return {name: value for name, value in config.items() if name not in unused}


def _with_all_key_value_heads(config: Model) -> Model:
    """Null key-value heads are as many as the heads, where leaving them out means another number."""
    if "num_key_value_heads" in config and config["num_key_value_heads"] is None and "num_attention_heads" in config:
        return {**config, "num_key_value_heads": config["num_attention_heads"]}
    return config


def _with_mixtral_heads(config: Model) -> Model:
    return _with_all_key_value_heads(_without_window(config))


_MISTRAL_POSITIONS = 131072


def _with_mistral_window(config: Model) -> Model:
    """Mistral has a window unless it says null; one as wide as the longest sequence is no window."""
    config = _with_all_key_value_heads(config)
    window = config.get("sliding_window", 4096)
    positions = config.get("max_position_embeddings", _MISTRAL_POSITIONS)
    unused = window is None or (_is_whole(window) and _is_whole(positions) and window >= positions)
    rest = {name: value for name, value in config.items() if name != "sliding_window"}
    return rest if unused else {**rest, "sliding_window": window}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _with_shared_experts(config: Model) -> Model:
    """Qwen states the width of all shared experts together; it is a multiple of one expert's."""
    config = _without_window(config)
    width, one = config.get("shared_expert_intermediate_size", 5632), config.get("moe_intermediate_size", 1408)
    if not (isinstance(width, int) and isinstance(one, int) and one > 0 and width % one == 0):
        return config
    rest = {name: value for name, value in config.items() if name != "shared_expert_intermediate_size"}
    return {**rest, "n_shared_experts": width // one}


def _with_opt_positions(config: Model) -> Model:
    """OPT's table of positions has two rows that no token uses; its embedding may be narrower than its layers."""
    rest = {name: value for name, value in config.items() if name != "word_embed_proj_dim"}
    config = rest if config.get("word_embed_proj_dim") in (None, config.get("hidden_size")) else config
    positions = config.get("max_position_embeddings", 2048)
    return {**config, "max_position_embeddings": positions + 2} if isinstance(positions, int) else config


_MPT_ATTENTION: Mapping[str, tuple[Any, ...]] = {
    "alibi": (True,),
    "attn_type": ("multihead_attention",),
    "clip_qkv": (None,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "softmax_scale": (None,),
}


def _with_mpt_attention(config: Model) -> Model:
    """MPT keeps attention in a section, and states the MLP's width as a multiple."""
    rest = dict(config)
    attention = config.get("attn_config")
    if isinstance(attention, Mapping) and all(
        attention.get(name, allowed[0]) in allowed for name, allowed in _MPT_ATTENTION.items()
    ):
        del rest["attn_config"]
        rest["attn_pdrop"] = attention.get("attn_pdrop", 0.0)
    ratio, width, no_bias = config.get("expansion_ratio", 4), config.get("d_model"), config.get("no_bias", True)
    if isinstance(ratio, int) and isinstance(width, int):
        rest.pop("expansion_ratio", None)
        rest["intermediate_size"] = ratio * width
    if isinstance(no_bias, bool):
        rest.pop("no_bias", None)
        rest |= {"use_bias": not no_bias, "norm_bias": not no_bias}
    return rest


_ROUTING = """
    aux_loss_alpha ep_size n_group norm_topk_prob output_router_logits routed_scaling_factor router_aux_loss_coef
    router_jitter_noise scoring_func seq_aux topk_group topk_method num_nextn_predict_layers
"""
"""How tokens find their experts, and modules beside the model; shapes do not depend on these."""

_EXPERTS: Mapping[str, str] = {"num_experts": "num_local_experts", "n_routed_experts": "num_local_experts"}
_DEEPSEEK_OFF: Mapping[str, tuple[Any, ...]] = {"moe_layer_freq": (1,)}
_QWEN_OFF: Mapping[str, tuple[Any, ...]] = {"mlp_only_layers": (None, [])}

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family("gpt2", left_out={"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}, plain=True),
    "llama": Family(
        "llama", left_out={"norm_eps": 1e-6, "max_position_embeddings": 2048}, plain=True, read=_without_window
    ),
    "mixtral": Family(
        "llama",
        left_out={
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        no_effect=_ROUTING,
        has_experts=True,
        read=_with_mixtral_heads,
    ),
    "mistral": Family(
        "llama",
        left_out={"norm_eps": 1e-6, "max_position_embeddings": _MISTRAL_POSITIONS, "num_key_value_heads": 8},
        read=_with_mistral_window,
    ),
    "qwen2": Family(
        "llama",
        has={"qkv_bias": True},
        left_out={"norm_eps": 1e-6, "max_position_embeddings": 32768},
        read=_without_window,
    ),
    "qwen2_moe": Family(
        "llama",
        has={"qkv_bias": True, "shared_expert_gate": True},
        left_out={
            "norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
        },
        renames=_EXPERTS,
        no_effect=_ROUTING,
        off=_QWEN_OFF,
        has_experts=True,
        read=_with_shared_experts,
    ),
    "qwen3": Family(
        "llama",
        has={"qk_norm": True},
        left_out={"norm_eps": 1e-6, "max_position_embeddings": 32768, "head_dim": 128},
        read=_without_window,
    ),
    "qwen3_moe": Family(
        "llama",
        has={"qk_norm": True},
        left_out={
            "norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        renames=_EXPERTS,
        no_effect=_ROUTING,
        off=_QWEN_OFF,
        has_experts=True,
        read=_without_window,
    ),
    "deepseek_v2": Family(
        "llama", left_out={"norm_eps": 1e-6}, renames=_EXPERTS, no_effect=_ROUTING, off=_DEEPSEEK_OFF, has_experts=True
    ),
    "deepseek_v3": Family(
        "llama",
        has={"router_bias": True},
        left_out={"norm_eps": 1e-6},
        renames=_EXPERTS,
        no_effect=_ROUTING,
        off=_DEEPSEEK_OFF,
        has_experts=True,
    ),
    "opt": Family(
        "gpt2",
        left_out={"hidden_act": "relu", "resid_pdrop": 0.1},
        renames={"ffn_dim": "intermediate_size", "dropout": "resid_pdrop", "init_std": "initializer_range"},
        no_effect="activation_dropout",
        off={
            "do_layer_norm_before": (True,),
            "_remove_final_layer_norm": (False,),
            "enable_bias": (True,),
            "layer_norm_elementwise_affine": (True,),
            "layerdrop": (0.0, 0),
        },
        read=_with_opt_positions,
    ),
    "bloom": Family(
        "gpt2",
        has={"position_embedding_type": "alibi", "embedding_norm": True},
        left_out={"max_position_embeddings": 2048},
        renames={
            "n_embed": "hidden_size",
            "seq_length": "max_position_embeddings",
            "hidden_dropout": "resid_pdrop",
        },
        no_effect="""
            attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi skip_bias_add
            skip_bias_add_qkv slow_but_exact unk_token_id
        """,
        off={"apply_residual_connection_post_layernorm": (False,)},
    ),
    "mpt": Family(
        "gpt2",
        has={"position_embedding_type": "alibi"},
        left_out={"hidden_act": "gelu"},
        renames={
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "max_seq_len": "max_position_embeddings",
            "emb_pdrop": "embd_pdrop",
        },
        no_effect="""
            attn_impl embedding_fraction init_config init_device learned_pos_emb norm_type tokenizer_name verbose
        """,
        off={"logit_scale": (None,)},
        read=_with_mpt_attention,
    ),
}
"""Hugging Face's model_type -> what its config means."""

UNKNOWN = Family("")
"""Settings that state no known family: only names that mean the same everywhere."""
