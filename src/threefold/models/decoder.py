"""One plain decoder, GPT-2 style or Llama style, for a single device.

Not a line here knows about parallelism. Two habits make it easy to split from outside:

- modules read the *number* of heads from the width of what their linear layer returned, so a linear layer that returns
  only some of the heads gives attention over just those;
- ``parts`` names the model's pieces in the order in which data flows, so that a pipeline can take a slice of them.

Shapes: B batch, S sequence, D model width, H query heads, K head width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from threefold.job import ModelSpec


class Decoder(nn.Module):
    """Token ids ``[B, S]`` to logits ``[B, S, V]``.

    GPT-2 style (Radford et al. 2019): LayerNorm, learned positions, GELU, biases, tied embeddings.
    Llama style (Touvron et al. 2023): RMSNorm, rotary positions, SwiGLU, grouped-query attention, untied.
    """

    def __init__(self, spec: ModelSpec, cut: Collection[int] = ()) -> None:
        """``cut`` are the layers whose halves are parts of their own."""
        super().__init__()
        self.cut = frozenset(cut)
        self.embed = Embedding(spec)
        self.layers = nn.ModuleList(Block(spec) for _ in range(spec.num_hidden_layers))
        self.final_norm = build_norm(spec)
        self.head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.tie_word_embeddings:
            self.head.weight = self.embed.tokens.weight

    def parts(self) -> list[tuple[str, nn.Module]]:
        """The pieces of the model in the order of the data flow: applying one after the other is ``forward``."""
        layers = [
            (f"layers.{index}", part)
            for index, layer in enumerate(self.layers)
            for part in ((AttentionHalf(layer), FeedForwardHalf(layer)) if index in self.cut else (layer,))
        ]
        return [("embed", self.embed), *layers, ("final_norm", self.final_norm), ("head", self.head)]

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Logits ``[B, S, V]`` of the token that follows each position."""
        x_BSD = ids_BS
        for _, part in self.parts():
            x_BSD = part(x_BSD)
        return x_BSD


class Embedding(nn.Module):
    """Token embedding, plus learned positions in the GPT-2 style."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.positions = (
            nn.Embedding(spec.max_position_embeddings, spec.hidden_size) if spec.model_type == "gpt2" else None
        )
        self.dropout = nn.Dropout(spec.embd_pdrop)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Vectors ``[B, S, D]``."""
        x_BSD = self.tokens(ids_BS)
        if self.positions is not None:
            x_BSD = x_BSD + self.positions(torch.arange(ids_BS.shape[1], device=ids_BS.device))
        return self.dropout(x_BSD)


class Block(nn.Module):
    """One pre-norm transformer layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = build_norm(spec)
        self.attention = Attention(spec)
        self.mlp_norm = build_norm(spec)
        self.mlp = GeluMlp(spec) if spec.model_type == "gpt2" else SwiGluMlp(spec)
        self.attention_dropout = nn.Dropout(spec.resid_pdrop)
        self.mlp_dropout = nn.Dropout(spec.resid_pdrop)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """``[B, S, D]`` to ``[B, S, D]``."""
        return feed(self, attend(self, x_BSD))


class AttentionHalf(nn.Module):
    """The first half of a layer, whose modules keep their names."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        assert isinstance(layer, Block)
        self.attention_norm, self.attention = layer.attention_norm, layer.attention
        self.attention_dropout = layer.attention_dropout

    def forward(self, x_BSD: Tensor) -> Tensor:
        """``[B, S, D]`` to ``[B, S, D]``."""
        return attend(self, x_BSD)


class FeedForwardHalf(nn.Module):
    """The second half of a layer, whose modules keep their names."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        assert isinstance(layer, Block)
        self.mlp_norm, self.mlp, self.mlp_dropout = layer.mlp_norm, layer.mlp, layer.mlp_dropout

    def forward(self, x_BSD: Tensor) -> Tensor:
        """``[B, S, D]`` to ``[B, S, D]``."""
        return feed(self, x_BSD)


def attend(layer: Block | AttentionHalf, x_BSD: Tensor) -> Tensor:
    """The residual stream after a layer's attention."""
    return x_BSD + layer.attention_dropout(layer.attention(layer.attention_norm(x_BSD)))


def feed(layer: Block | FeedForwardHalf, x_BSD: Tensor) -> Tensor:
    """The residual stream after a layer's feed-forward."""
    return x_BSD + layer.mlp_dropout(layer.mlp(layer.mlp_norm(x_BSD)))


class Attention(nn.Module):
    """Causal self-attention; grouped-query (Ainslie et al. 2023) where there are fewer key-value heads than heads.

    Query, key and value share one linear layer: one large matrix product instead of three small ones.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        bias = spec.model_type == "gpt2"
        self.head_dim = spec.head_dim
        self.queries_per_key = spec.num_attention_heads // spec.num_key_value_heads
        width = (spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim
        self.qkv = nn.Linear(spec.hidden_size, width, bias=bias)
        self.out = nn.Linear(spec.num_attention_heads * spec.head_dim, spec.hidden_size, bias=bias)
        self.rotary = Rotary(spec.head_dim, spec.rope_theta) if spec.model_type == "llama" else None
        self.core = AttentionCore(spec)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """``[B, S, D]`` to ``[B, S, D]``."""
        q_BHSK, k_BHSK, v_BHSK = self._split_heads(self.qkv(x_BSD))
        if self.rotary is not None:
            q_BHSK, k_BHSK = self.rotary(q_BHSK), self.rotary(k_BHSK)
        return self.out(self.core(q_BHSK, k_BHSK, v_BHSK).transpose(1, 2).flatten(2))

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The linear layer may return only some of the heads; the proportion of queries to keys is what stays.
        heads = qkv.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        num_keys = heads.shape[1] // (self.queries_per_key + 2)
        q_BHSK, k_BHSK, v_BHSK = heads.split([self.queries_per_key * num_keys, num_keys, num_keys], dim=1)
        return q_BHSK, k_BHSK, v_BHSK


class AttentionCore(nn.Module):
    """What happens between the two linear layers of attention: softmax(q kᵀ / sqrt(K)) v, over the past only."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.queries_per_key = spec.num_attention_heads // spec.num_key_value_heads
        self.dropout = nn.Dropout(spec.attn_pdrop)

    def forward(self, q_BHSK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor) -> Tensor:
        """Mixed values ``[B, H, S, K]``; keys and values may have fewer heads."""
        if self.dropout.p > 0 and self.training:
            return self._attend_with_dropout(q_BHSK, k_BHSK, v_BHSK)
        grouped = self.queries_per_key > 1
        return F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, is_causal=True, enable_gqa=grouped)

    def _attend_with_dropout(self, q_BHSK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor) -> Tensor:
        # Written out, since the fused kernels draw their own masks, which then depend on the layout.
        k_BHSK = k_BHSK.repeat_interleave(self.queries_per_key, dim=1)
        v_BHSK = v_BHSK.repeat_interleave(self.queries_per_key, dim=1)
        scores = q_BHSK @ k_BHSK.transpose(-1, -2) * self.head_dim**-0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return self.dropout(weights) @ v_BHSK


class Rotary(nn.Module):
    """Rotary positions (Su et al. 2021), halves paired as in Llama's published weights."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self._cached: tuple[Tensor, Tensor] | None = None

    def forward(self, x_BHSK: Tensor) -> Tensor:
        """Rotate each pair of channels by ``position * theta^(-2i/K)``."""
        cos_SK, sin_SK = self.angles(x_BHSK)
        first, second = x_BHSK.chunk(2, dim=-1)
        return x_BHSK * cos_SK + torch.cat((-second, first), dim=-1) * sin_SK

    def angles(self, x_BHSK: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[S, K]`` of the positions, kept for the next call."""
        length = x_BHSK.shape[-2]
        cached = self._cached
        if cached is not None:
            cos_SK = cached[0]
            if cos_SK.shape[0] == length and cos_SK.dtype == x_BHSK.dtype and cos_SK.device == x_BHSK.device:
                return cached
        # float64 costs nothing here and keeps large positions exact.
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        angles_SK = torch.outer(torch.arange(length, dtype=torch.float64), self.theta**-exponents).repeat(1, 2)
        self._cached = (angles_SK.cos().to(x_BHSK), angles_SK.sin().to(x_BHSK))
        return self._cached


class GeluMlp(nn.Module):
    """GPT-2's feed-forward: up, GELU, down."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.hidden_size, spec.intermediate_size)
        self.down = nn.Linear(spec.intermediate_size, spec.hidden_size)
        # GPT-2's weights were trained with the tanh form, which Hugging Face calls gelu_new.
        self.approximate = "tanh" if spec.hidden_act == "gelu_new" else "none"

    def forward(self, x_BSD: Tensor) -> Tensor:
        """``[B, S, D]`` to ``[B, S, D]``."""
        return self.down(F.gelu(self.up(x_BSD), approximate=self.approximate))


class SwiGluMlp(nn.Module):
    """Llama's feed-forward (SwiGLU, Shazeer 2020): ``down(silu(gate(x)) * up(x))``; gate and up share one product."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_up = nn.Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=False)
        self.down = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """``[B, S, D]`` to ``[B, S, D]``."""
        gate_BSF, up_BSF = self.gate_up(x_BSD).chunk(2, dim=-1)
        return self.down(F.silu(gate_BSF) * up_BSF)


def build_norm(spec: ModelSpec) -> nn.Module:
    """LayerNorm for the GPT-2 style, RMSNorm (Zhang & Sennrich 2019) for the Llama style."""
    if spec.model_type == "gpt2":
        return nn.LayerNorm(spec.hidden_size, eps=spec.norm_eps)
    return nn.RMSNorm(spec.hidden_size, eps=spec.norm_eps)
