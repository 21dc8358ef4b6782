"""Names and shapes of every parameter of a described model; weights are ``[out, in]``.

Names, in model order (the parts in brackets only where the model has them):

- ``embed.tokens``, [``embed.positions``], [``embed.norm``]
- of each layer: ``attention_norm``, ``attention.qkv`` (query, key and value heads in one), [``attention.q_norm``,
  ``attention.k_norm``], ``attention.out``, ``mlp_norm``, and ``mlp.gate_up`` (gate and up in one) or ``mlp.up``,
  ``mlp.down``
- of a layer with experts, in place of the last two: ``mlp.router``, ``mlp.experts.{e}.gate_up`` and
  ``mlp.experts.{e}.down`` of each expert e, [``mlp.shared.gate_up``, ``mlp.shared.down`` of all shared experts side by
  side], [``mlp.shared_gate``]
- of a layer with latent attention (DeepSeek-AI 2024, DeepSeek-V2), in place of ``attention.qkv``: ``attention.q``, or
  ``attention.q_down``, ``attention.q_down_norm`` and ``attention.q_up``; then ``attention.kv_down``,
  ``attention.kv_down_norm`` and ``attention.kv_up``
- ``final_norm``, [``head``]: a tied head is ``embed.tokens``
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threefold.job.model import ModelSpec

Shapes = dict[str, tuple[int, ...]]
"""Name -> shape."""


def model_shapes(spec: ModelSpec, layers: Iterable[int] | None = None) -> Shapes:
    """Of the whole model, or of its ends and ``layers`` alone: a model of many experts has tens of thousands."""
    shapes = _embedding(spec)
    for layer in range(spec.num_hidden_layers) if layers is None else layers:
        of_layer = layer_shapes(spec, spec.has_experts(layer), spec.num_local_experts)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes | _head(spec)


def layer_shapes(spec: ModelSpec, has_experts: bool, num_experts: int) -> Shapes:
    """Of a layer, with a dense MLP or with ``num_experts`` routed experts."""
    return {
        **_norm(spec, "attention_norm", spec.hidden_size),
        **(_latent_attention(spec) if spec.kv_lora_rank else _attention(spec)),
        **_linear("attention.out", spec.hidden_size, spec.attention_out_features, spec.use_bias),
        **_norm(spec, "mlp_norm", spec.hidden_size),
        **(_experts(spec, num_experts) if has_experts else _mlp(spec, "mlp", spec.intermediate_size)),
    }


def count_parameters(spec: ModelSpec, num_experts: int) -> int:
    """Parameters of the model if its sparse layers had ``num_experts`` routed experts. Tied embeddings count once."""
    one_expert = num_elements(_mlp(spec, "mlp", spec.moe_intermediate_size))
    sparse = num_elements(layer_shapes(spec, has_experts=True, num_experts=0)) + num_experts * one_expert
    dense = num_elements(layer_shapes(spec, has_experts=False, num_experts=0))
    num_sparse = spec.num_moe_layers
    ends = num_elements(_embedding(spec)) + num_elements(_head(spec))
    return ends + num_sparse * sparse + (spec.num_hidden_layers - num_sparse) * dense


def num_elements(shapes: Shapes) -> int:
    """Numbers in all parameters together."""
    return sum(math.prod(shape) for shape in shapes.values())


def _embedding(spec: ModelSpec) -> Shapes:
    shapes: Shapes = {"embed.tokens.weight": (spec.vocab_size, spec.hidden_size)}
    if spec.position_embedding_type == "learned":
        shapes["embed.positions.weight"] = (spec.max_position_embeddings, spec.hidden_size)
    return shapes | (_norm(spec, "embed.norm", spec.hidden_size) if spec.embedding_norm else {})


def _head(spec: ModelSpec) -> Shapes:
    head = {} if spec.tie_word_embeddings else {"head.weight": (spec.vocab_size, spec.hidden_size)}
    return {**_norm(spec, "final_norm", spec.hidden_size), **head}


def _attention(spec: ModelSpec) -> Shapes:
    rows = (spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim
    norms = {f"attention.{which}_norm.weight": (spec.head_dim,) for which in ("q", "k")} if spec.qk_norm else {}
    return {**_linear("attention.qkv", rows, spec.hidden_size, spec.qkv_bias), **norms}


def _latent_attention(spec: ModelSpec) -> Shapes:
    """Queries, and keys and values, go through a narrow latent vector; the rotated part of the keys is shared."""
    hidden, heads = spec.hidden_size, spec.num_attention_heads
    query_rows = heads * (spec.qk_nope_head_dim + spec.qk_rope_head_dim)
    if spec.q_lora_rank:
        queries = {
            **_linear("attention.q_down", spec.q_lora_rank, hidden, spec.qkv_bias),
            **_norm(spec, "attention.q_down_norm", spec.q_lora_rank),
            **_linear("attention.q_up", query_rows, spec.q_lora_rank, False),
        }
    else:
        queries = _linear("attention.q", query_rows, hidden, False)
    return {
        **queries,
        **_linear("attention.kv_down", spec.kv_lora_rank + spec.qk_rope_head_dim, hidden, spec.qkv_bias),
        **_norm(spec, "attention.kv_down_norm", spec.kv_lora_rank),
        **_linear("attention.kv_up", heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank, False),
    }


def _mlp(spec: ModelSpec, name: str, width: int) -> Shapes:
    widen = (f"{name}.gate_up", 2 * width) if spec.gated_mlp else (f"{name}.up", width)
    return {
        **_linear(*widen, spec.hidden_size, spec.use_bias),
        **_linear(f"{name}.down", spec.hidden_size, width, spec.use_bias),
    }


def _experts(spec: ModelSpec, num_experts: int) -> Shapes:
    shapes = _linear("mlp.router", spec.num_local_experts, spec.hidden_size, spec.router_bias)
    for expert in range(num_experts):
        shapes |= _mlp(spec, f"mlp.experts.{expert}", spec.moe_intermediate_size)
    if spec.n_shared_experts:
        shapes |= _mlp(spec, "mlp.shared", spec.n_shared_experts * spec.moe_intermediate_size)
    return shapes | (_linear("mlp.shared_gate", 1, spec.hidden_size, False) if spec.shared_expert_gate else {})


def _norm(spec: ModelSpec, name: str, width: int) -> Shapes:
    parts = ("weight", "bias") if spec.norm_bias else ("weight",)
    return {f"{name}.{part}": (width,) for part in parts}


def _linear(name: str, out_features: int, in_features: int, bias: bool) -> Shapes:
    weight: Shapes = {f"{name}.weight": (out_features, in_features)}
    return weight | ({f"{name}.bias": (out_features,)} if bias else {})
