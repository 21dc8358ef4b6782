"""The model as a type: its dimensions, its features, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from threefold.job.base import Count, CountOrZero, Positive, Probability, Section, Text, Whole
from threefold.job.shapes import Shapes, count_parameters, layer_shapes, model_shapes

# What a model has that states only its style.
_STYLES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "position_embedding_type": "learned",
        "gated_mlp": False,
        "use_bias": True,
    },
    "llama": {
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "position_embedding_type": "rotary",
        "gated_mlp": True,
        "use_bias": False,
    },
}


def style_default(model_type: str, name: str) -> Any:
    """What ``name`` is in a model of style ``model_type`` that doesn't state it."""
    return _STYLES[model_type][name]


def _of_style(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda values: style_default(values["model_type"], name)


def _same_as(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values[name]


def _head_dim(values: dict[str, Any]) -> int:
    return max(1, values["hidden_size"] // values["num_attention_heads"])


def _intermediate_size(values: dict[str, Any]) -> int:
    """4 × hidden for GPT-2; for Llama the same parameter count with three matrices: 8/3 × hidden, up to a 256."""
    hidden = values["hidden_size"]
    return 4 * hidden if values["model_type"] == "gpt2" else 256 * math.ceil(8 * hidden // 3 / 256)


def _activation(values: dict[str, Any]) -> Literal["gelu_new", "silu"]:
    return "silu" if values["gated_mlp"] else "gelu_new"


def _expert_size(values: dict[str, Any]) -> int:
    return values["intermediate_size"] if values["num_local_experts"] else 0


class RopeScaling(Section):
    """Rotary frequencies stretched for longer sequences, as Llama 3.1 does: the slow ones only."""

    rope_type: Literal["llama3"] = Field(description="How the frequencies are stretched.", examples=["llama3"])
    factor: Positive = Field(description="How many times slower the slow frequencies become.", examples=[8.0])
    low_freq_factor: Positive = Field(
        description="Frequencies that turn less often than this in the original length are slow.", examples=[1.0]
    )
    high_freq_factor: Positive = Field(
        description="Frequencies that turn more often than this in the original length stay.", examples=[4.0]
    )
    original_max_position_embeddings: Count = Field(description="Longest sequence before the stretch.", examples=[8192])


class ModelSpec(Section):
    """A decoder by Hugging Face's names: ``gpt2`` style (LayerNorm, learned positions, GELU, biases) or ``llama`` style
    (RMSNorm, rotary positions, SwiGLU, grouped-query attention), and the features that other families add to them.

    Left-out numbers follow the style: key-value heads equal the heads; the MLP is 4 × hidden wide (gpt2) or
    8/3 × hidden rounded up to a multiple of 256 (llama). Dropout is 0 unless stated, and features are off. Everything
    here can be described, counted and planned; ``check_trainable`` says what can't be trained yet.
    """

    preset: Text | None = Field(
        default=None, description="A known model to start from; other keys here override its numbers."
    )
    hf: Text | None = Field(default=None, description="A directory with Hugging Face's config.json to start from.")
    model_type: Literal["gpt2", "llama"] = Field(description="The style of the decoder.", examples=["gpt2"])
    vocab_size: Count = Field(description="Tokens in the vocabulary; need not divide by tp.", examples=[50257])
    hidden_size: Count = Field(description="Width of the residual stream.", examples=[768])
    num_hidden_layers: Annotated[Whole, Field(ge=1, le=10**5)] = Field(description="Decoder layers.", examples=[12])
    num_attention_heads: Count = Field(description="Query heads.", examples=[12])
    num_key_value_heads: Count = Field(
        default_factory=_same_as("num_attention_heads"), description="Key-value heads; default: all heads."
    )
    head_dim: Count = Field(default_factory=_head_dim, description="Width of a head; default: hidden_size / heads.")
    intermediate_size: Count = Field(default_factory=_intermediate_size, description="Inner width of the MLP.")
    max_position_embeddings: Count = Field(
        default_factory=_of_style("max_position_embeddings"), description="Longest sequence; gpt2: a table."
    )
    tie_word_embeddings: bool = Field(
        default_factory=_of_style("tie_word_embeddings"), description="The output head is the token embedding."
    )
    gated_mlp: bool = Field(
        default_factory=_of_style("gated_mlp"), description="The MLP has a gate: three matrices, not two; llama: true."
    )
    hidden_act: Literal["gelu", "gelu_new", "silu", "relu", "relu2"] = Field(
        default_factory=_activation, description="gelu_new is GELU's tanh form, GPT-2's own; with a gate: silu."
    )
    position_embedding_type: Literal["learned", "rotary", "alibi"] = Field(
        default_factory=_of_style("position_embedding_type"), description="How positions are told; gpt2: learned."
    )
    use_bias: bool = Field(
        default_factory=_of_style("use_bias"), description="Linear layers have biases; gpt2: true, llama: false."
    )
    norm_bias: bool = Field(
        default_factory=_of_style("use_bias"), description="Norms have biases, as LayerNorm does; gpt2: true."
    )
    qkv_bias: bool = Field(
        default_factory=_same_as("use_bias"), description="Query, key and value have biases; default: use_bias."
    )
    qk_norm: bool = Field(default=False, description="Queries and keys of every head are normed, as in Qwen3.")
    embedding_norm: bool = Field(default=False, description="A norm follows the embedding, as in BLOOM.")
    rope_theta: Positive = Field(default=10000.0, description="Base of the rotary frequencies (llama).")
    rope_scaling: RopeScaling | None = Field(
        default=None, description="Rotary frequencies stretched for longer sequences (llama); null: as they are."
    )
    norm_eps: Positive = Field(default=1e-5, description="Added to the variance in every norm.")
    initializer_range: Positive = Field(default=0.02, description="Standard deviation of the initial weights.")
    resid_pdrop: Probability = Field(
        default=0.0, description="Dropout on what attention and MLP add to the residual stream."
    )
    embd_pdrop: Probability = Field(default=0.0, description="Dropout on the embeddings.")
    attn_pdrop: Probability = Field(default=0.0, description="Dropout on the attention probabilities.")

    num_local_experts: CountOrZero = Field(
        default=0, description="Routed experts of a mixture-of-experts layer; 0 is a dense model.", examples=[8]
    )
    num_experts_per_tok: CountOrZero = Field(
        default=0, description="Routed experts that each token visits.", examples=[2]
    )
    moe_intermediate_size: CountOrZero = Field(
        default_factory=_expert_size, description="Inner width of one expert; default: intermediate_size."
    )
    n_shared_experts: CountOrZero = Field(default=0, description="Experts that every token visits besides.")
    shared_expert_gate: bool = Field(default=False, description="A gate scales the shared experts, as in Qwen2-MoE.")
    router_bias: bool = Field(default=False, description="The router has a bias per expert, as in DeepSeek-V3.")
    first_k_dense_replace: CountOrZero = Field(default=0, description="Layers before the first one with experts.")
    decoder_sparse_step: Count = Field(default=1, description="Every so many layers, one has experts.")

    kv_lora_rank: CountOrZero = Field(
        default=0, description="Latent width of keys and values in multi-head latent attention; 0: ordinary attention."
    )
    q_lora_rank: CountOrZero = Field(default=0, description="Latent width of queries; 0: queries are not compressed.")
    qk_nope_head_dim: CountOrZero = Field(default=0, description="Width of a head's queries and keys without rotation.")
    qk_rope_head_dim: CountOrZero = Field(default=0, description="Width of a head's rotated queries and keys.")
    v_head_dim: CountOrZero = Field(default=0, description="Width of a head's values.")

    @model_serializer(mode="wrap")
    def _without_absent_features(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Features that are off are not written: they are many, and few models have any."""
        return {name: value for name, value in handler(self).items() if name not in FEATURES or value != FEATURES[name]}

    @property
    def attention_out_features(self) -> int:
        """Width of what the heads together hand to the output projection."""
        return self.num_attention_heads * (self.v_head_dim if self.kv_lora_rank else self.head_dim)

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of that index has experts in place of the dense MLP."""
        if not self.num_local_experts or layer < self.first_k_dense_replace:
            return False
        return (layer + 1) % self.decoder_sparse_step == 0

    @property
    def num_moe_layers(self) -> int:
        """Layers that have experts."""
        return sum(self.has_experts(layer) for layer in range(self.num_hidden_layers))

    @property
    def moe_layer_share(self) -> float:
        """Share of the layers that have experts."""
        return self.num_moe_layers / self.num_hidden_layers

    def parameter_shapes(self, layers: Iterable[int] | None = None) -> Shapes:
        """Global name -> shape of every parameter, in model order (weights are ``[out, in]`` as torch keeps them).

        With ``layers``, only of these and of what comes before and after all layers.
        """
        return model_shapes(self, layers)

    def layer_shapes(self, layer: int) -> Shapes:
        """The same for one layer, with the names that follow ``layers.{layer}.``."""
        return layer_shapes(self, self.has_experts(layer), self.num_local_experts)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; tied embeddings count once."""
        return count_parameters(self, self.num_local_experts)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token meets: all but the routed experts that it doesn't visit. Embeddings count."""
        return count_parameters(self, self.num_experts_per_tok)


FEATURES: Mapping[str, Any] = {
    **{name: field.default for name, field in ModelSpec.model_fields.items() if type(field.default) in (bool, int)},
    "moe_intermediate_size": 0,
    "rope_scaling": None,
}
"""Features that a model has only when it says so, with the value that means: not there."""
