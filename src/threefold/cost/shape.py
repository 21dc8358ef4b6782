"""The numbers of a model that decide what it costs, as scalars or as one array a field."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    from threefold.job.spec import ModelSpec

Number = float | NDArray[Any]
"""A scalar that holds for every strategy, or one value each."""


@dataclass(frozen=True)
class Shape:
    """L ``layers``, D ``hidden``, H ``heads``, KV ``kv_heads``, K ``head_dim``, F ``ffn``, V ``vocab``, S ``sequence``.

    ``gated`` is 1 for an MLP with a gate (three matrices), 0 for two. ``tied``: the head is the embedding. With
    ``experts`` > 0 a share ``moe_share`` of the layers has, instead of the MLP, experts of width ``expert_ffn`` of
    which each token visits ``experts_per_token``, beside shared ones of width ``shared_ffn`` in all. ``dropout`` is
    1 where dropout masks are kept. ``positions`` are learned position embeddings, 0 for none.
    ``attention_parameters`` are the matrices of one layer's attention, ``vector_parameters`` everything in a layer
    that is no matrix.
    """

    layers: Number
    hidden: Number
    heads: Number
    kv_heads: Number
    head_dim: Number
    ffn: Number
    vocab: Number
    sequence: Number
    attention_parameters: Number
    vector_parameters: Number
    gated: Number = 0.0
    tied: Number = 0.0
    dropout: Number = 0.0
    positions: Number = 0.0
    experts: Number = 0.0
    experts_per_token: Number = 0.0
    expert_ffn: Number = 0.0
    shared_ffn: Number = 0.0
    moe_share: Number = 0.0

    @property
    def mlp_matrices(self) -> Number:
        """Matrices of D × F in one MLP."""
        return 2.0 + self.gated

    @property
    def dense_mlp_parameters(self) -> Number:
        """Matrices of the MLP of one layer, averaged over the layers; shared experts count here, routed ones do not."""
        dense = (1 - self.moe_share) * self.ffn + self.moe_share * self.shared_ffn
        return self.mlp_matrices * self.hidden * dense + self.moe_share * self.hidden * self.experts

    @property
    def expert_parameters(self) -> Number:
        """All routed experts of one layer, averaged over the layers."""
        return self.moe_share * self.experts * self.mlp_matrices * self.hidden * self.expert_ffn

    @property
    def embedding_parameters(self) -> Number:
        """Token and position embeddings."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_parameters(self) -> Number:
        """The output matrix V × D, whether or not it is tied to the embedding."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> Number:
        """Of the whole model; tied embeddings count once."""
        layer = self.attention_parameters + self.dense_mlp_parameters + self.expert_parameters + self.vector_parameters
        ends = self.embedding_parameters + (1 - self.tied) * self.head_parameters + self.hidden
        return self.layers * layer + ends

    @property
    def active_mlp_parameters(self) -> Number:
        """Matrices that one token visits in the MLP of a layer, averaged over the layers."""
        routed = self.moe_share * self.experts_per_token * self.mlp_matrices * self.hidden * self.expert_ffn
        return self.dense_mlp_parameters + routed


def attention_matrices(hidden: Number, heads: Number, kv_heads: Number, head_dim: Number) -> Number:
    """Parameters of queries, keys, values and output of one layer: D·K·(2·H + 2·KV)."""
    return hidden * head_dim * (2 * heads + 2 * kv_heads)


def shape_of(model: ModelSpec, sequence_length: int) -> Shape:
    """The shape of ``model`` on sequences of ``sequence_length`` tokens."""
    attention, vectors = _layer_parameters(model)
    experts = model.num_local_experts
    positions = model.max_position_embeddings if model.position_embedding_type == "learned" else 0
    return Shape(
        layers=float(model.num_hidden_layers),
        hidden=float(model.hidden_size),
        heads=float(model.num_attention_heads),
        kv_heads=float(model.num_key_value_heads),
        head_dim=model.attention_out_features / model.num_attention_heads,
        ffn=float(model.intermediate_size),
        vocab=float(model.vocab_size),
        sequence=float(sequence_length),
        attention_parameters=attention,
        vector_parameters=vectors,
        gated=float(model.gated_mlp),
        tied=float(model.tie_word_embeddings),
        dropout=float(max(model.resid_pdrop, model.attn_pdrop) > 0),
        positions=float(positions),
        experts=float(experts),
        experts_per_token=float(model.num_experts_per_tok),
        expert_ffn=float(model.moe_intermediate_size),
        shared_ffn=float(model.n_shared_experts * model.moe_intermediate_size),
        moe_share=float(model.moe_layer_share) if experts else 0.0,
    )


def _layer_parameters(model: ModelSpec) -> tuple[float, float]:
    """Matrices of the attention, and everything that is no matrix, of an average layer."""
    total_vectors, attention = 0.0, 0.0
    kinds = {model.has_experts(layer): layer for layer in range(model.num_hidden_layers)}
    for has_experts, layer in kinds.items():
        share = model.moe_layer_share if has_experts else 1 - model.moe_layer_share
        shapes = model.layer_shapes(layer)
        total_vectors += share * sum(shape[0] for shape in shapes.values() if len(shape) == 1)
        attention += share * sum(
            prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name.startswith("attention.")
        )
    return attention, total_vectors
