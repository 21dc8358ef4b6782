"""The numbers of a model that decide what it costs, as scalars or as one array a field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from threefold.job.spec import ModelSpec

Number = float | NDArray[Any]
"""A scalar that holds for every strategy, or one value each."""


@dataclass(frozen=True)
class Shape:
    """L ``layers``, D ``hidden``, H ``heads``, KV ``kv_heads``, K ``head_dim``, F ``ffn``, V ``vocab``, S ``sequence``.

    ``gated`` is 1 for an MLP with a gate (three matrices), 0 for two. ``tied``: the head is the embedding. With
    ``experts`` > 0 a share ``moe_share`` of the layers has, instead of the MLP, experts of width ``expert_ffn`` of which
    each token visits ``experts_per_token``, beside shared ones of width ``shared_ffn`` in all. ``dropout`` is 1 where
    dropout masks are kept. ``positions`` are learned position embeddings, 0 for none. ``biases``: vectors beside the
    matrices (LayerNorm and linear biases) are kept, 1 or 0.
    """

    layers: Number
    hidden: Number
    heads: Number
    kv_heads: Number
    head_dim: Number
    ffn: Number
    vocab: Number
    sequence: Number
    gated: Number = 0.0
    tied: Number = 0.0
    dropout: Number = 0.0
    positions: Number = 0.0
    biases: Number = 0.0
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
    def attention_parameters(self) -> Number:
        """Of one layer: queries, keys, values, output: D·K·(2·H + 2·KV)."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def vector_parameters(self) -> Number:
        """Norms (2 a layer) and biases of one layer; all but nothing beside the matrices."""
        bias = self.head_dim * (self.heads + 2 * self.kv_heads) + self.ffn * (1 + self.gated) + 2 * self.hidden
        return 2 * self.hidden * (1 + self.biases) + self.biases * bias

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
        layer = (
            self.attention_parameters + self.dense_mlp_parameters + self.expert_parameters + self.vector_parameters
        )
        ends = self.embedding_parameters + (1 - self.tied) * self.head_parameters + self.hidden * (1 + self.biases)
        return self.layers * layer + ends

    @property
    def active_mlp_parameters(self) -> Number:
        """Matrices that one token visits in the MLP of a layer, averaged over the layers."""
        routed = self.moe_share * self.experts_per_token * self.mlp_matrices * self.hidden * self.expert_ffn
        return self.dense_mlp_parameters + routed


def shape_of(model: ModelSpec, sequence_length: int) -> Shape:
    """The shape of ``model`` on sequences of ``sequence_length`` tokens."""
    gpt2 = model.model_type == "gpt2"
    experts = getattr(model, "num_experts", None) or getattr(model, "num_local_experts", None) or 0
    dropped = max(model.resid_pdrop, model.attn_pdrop)
    return Shape(
        layers=float(model.num_hidden_layers),
        hidden=float(model.hidden_size),
        heads=float(model.num_attention_heads),
        kv_heads=float(model.num_key_value_heads),
        head_dim=float(model.head_dim),
        ffn=float(model.intermediate_size),
        vocab=float(model.vocab_size),
        sequence=float(sequence_length),
        gated=0.0 if gpt2 else 1.0,
        tied=float(model.tie_word_embeddings),
        dropout=float(dropped > 0),
        positions=float(model.max_position_embeddings) if gpt2 else 0.0,
        biases=float(gpt2),
        experts=float(experts),
        experts_per_token=float(getattr(model, "num_experts_per_tok", 0) or 0),
        expert_ffn=float(getattr(model, "moe_intermediate_size", 0) or model.intermediate_size) if experts else 0.0,
        shared_ffn=_shared_ffn(model) if experts else 0.0,
        moe_share=_moe_share(model) if experts else 0.0,
    )


def _shared_ffn(model: ModelSpec) -> float:
    width = getattr(model, "moe_intermediate_size", 0) or model.intermediate_size
    return float((getattr(model, "n_shared_experts", 0) or 0) * width)


def _moe_share(model: ModelSpec) -> float:
    share = getattr(model, "moe_layer_share", None)
    return 1.0 if share is None else float(share)


def as_array(value: Number) -> NDArray[Any]:
    """``value`` as a float array."""
    return np.asarray(value, dtype=float)
