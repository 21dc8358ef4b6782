"""Global slices of every parameter under tensor parallelism.

A table maps module names to a style (Shoeybi et al. 2019, Megatron-LM). For a layer y = x Wᵀ + b with W [out, in]:

========== ============================== =========================================================
style      weight                         bias
========== ============================== =========================================================
COLUMN     split on dim 0 (the outputs)   split on dim 0
ROW        split on dim 1 (the inputs)    replicated, added once after the partial sums are reduced
VOCAB      split on dim 0 (the tokens), every rank the same number of rows, the last rows are padding
REPLICATED whole on every rank            whole on every rank
========== ============================== =========================================================

A fused weight has *sections* (query, key, value; gate, up). Each section is split by itself, so that every rank holds
whole heads of each. The engine, the checkpoint and the cost model read these slices; none of them divides by tp itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import accumulate
from types import MappingProxyType
from typing import Literal

from threefold.errors import JobError, Problem

ParameterKind = Literal["weight", "bias"]


class Style(StrEnum):
    """How tensor parallelism treats a module."""

    COLUMN = "column"
    ROW = "row"
    VOCAB = "vocab"
    REPLICATED = "replicated"


@dataclass(frozen=True)
class StyleRule:
    """A style and the fused sections of the split dimension.

    ``sections`` is None (one section), a number of equal sections, or "qkv": query, key and value heads, whose sizes
    depend on the model.
    """

    style: Style
    sections: int | Literal["qkv"] | None = None


DECODER_STYLES: Mapping[str, StyleRule] = MappingProxyType(
    {
        "embed.tokens": StyleRule(Style.VOCAB),
        "embed.positions": StyleRule(Style.REPLICATED),
        "layers.*.attention_norm": StyleRule(Style.REPLICATED),
        "layers.*.attention.qkv": StyleRule(Style.COLUMN, "qkv"),
        "layers.*.attention.out": StyleRule(Style.ROW),
        "layers.*.mlp_norm": StyleRule(Style.REPLICATED),
        "layers.*.mlp.up": StyleRule(Style.COLUMN),
        "layers.*.mlp.gate_up": StyleRule(Style.COLUMN, 2),
        "layers.*.mlp.down": StyleRule(Style.ROW),
        # Models that are described and counted, but not trained yet: experts, latent attention, further norms.
        "embed.norm": StyleRule(Style.REPLICATED),
        "layers.*.attention.[qk]_norm": StyleRule(Style.REPLICATED),
        "layers.*.attention.q": StyleRule(Style.COLUMN),
        "layers.*.attention.*_down": StyleRule(Style.REPLICATED),
        "layers.*.attention.*_down_norm": StyleRule(Style.REPLICATED),
        "layers.*.attention.*_up": StyleRule(Style.COLUMN),
        "layers.*.mlp.router": StyleRule(Style.REPLICATED),
        "layers.*.mlp.shared_gate": StyleRule(Style.REPLICATED),
        "layers.*.mlp.*.up": StyleRule(Style.COLUMN),
        "layers.*.mlp.*.gate_up": StyleRule(Style.COLUMN, 2),
        "layers.*.mlp.*.down": StyleRule(Style.ROW),
        "final_norm": StyleRule(Style.REPLICATED),
        "head": StyleRule(Style.VOCAB),
    }
)
"""Glob pattern of a module's name -> rule, for the built-in decoder."""


@dataclass(frozen=True)
class Slice:
    """``length`` elements that start at ``global_start`` of the whole tensor and at ``local_start`` of the shard."""

    global_start: int
    local_start: int
    length: int


@dataclass(frozen=True)
class Shard:
    """The part of one parameter that one tp rank holds.

    ``dim`` is the split dimension, ``local_size`` the shard's size there (padding included) and ``slices`` say where
    each piece comes from; local elements that no slice covers are padding. Replicated: ``dim`` is None, there are no
    slices and ``local_size`` is the whole size of dimension 0.
    """

    dim: int | None
    slices: tuple[Slice, ...]
    local_size: int

    def local_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of this rank's tensor, padding included."""
        shape = list(global_shape)
        if self.dim is not None:
            shape[self.dim] = self.local_size
        return tuple(shape)

    @property
    def num_padding(self) -> int:
        """How many local indices of the split dimension hold no global element."""
        return 0 if self.dim is None else self.local_size - sum(piece.length for piece in self.slices)


def rule_for(module_name: str, styles: Mapping[str, StyleRule] = DECODER_STYLES) -> StyleRule:
    """The rule of the first pattern in ``styles`` that matches; KeyError when none does.

    There is no default: a module that is silently treated as replicated would train with wrong gradients.
    """
    for pattern, rule in styles.items():
        if fnmatchcase(module_name, pattern):
            return rule
    raise KeyError(f"no tensor-parallel style for module {module_name!r}; add a pattern to the table of styles")


def qkv_sizes(num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Rows of the query, key and value sections of a fused projection."""
    return num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim


def shard(
    rule: StyleRule,
    kind: ParameterKind,
    global_shape: Sequence[int],
    tp_size: int,
    tp_coord: int,
    qkv: Sequence[int] | None = None,
) -> Shard:
    """The part of a parameter of shape ``global_shape`` that the rank at ``tp_coord`` holds.

    ``qkv`` gives the sizes of the sections of a rule with sections "qkv". Only a vocabulary is padded: raises JobError
    naming ``parallelism.tp.size`` when a section doesn't divide evenly.
    """
    dim = _split_dim(rule.style, kind)
    if dim is None:
        return Shard(dim=None, slices=(), local_size=global_shape[0])
    if rule.style is Style.VOCAB:
        return _vocab_shard(global_shape[dim], tp_size, tp_coord)
    return _section_shard(dim, section_sizes(rule, global_shape[dim], qkv), tp_size, tp_coord)


def _split_dim(style: Style, kind: ParameterKind) -> int | None:
    if style is Style.REPLICATED or (style is Style.ROW and kind == "bias"):
        return None
    return 1 if style is Style.ROW else 0


def _vocab_shard(vocab_size: int, tp_size: int, tp_coord: int) -> Shard:
    # Every rank holds ceil(V / tp) rows so that collectives see equal shapes; late ranks may hold nothing but padding.
    per_rank = -(-vocab_size // tp_size)
    start = min(tp_coord * per_rank, vocab_size)
    length = min(start + per_rank, vocab_size) - start
    slices = (Slice(start, 0, length),) if length else ()
    return Shard(dim=0, slices=slices, local_size=per_rank)


def section_sizes(rule: StyleRule, size: int, qkv: Sequence[int] | None = None) -> tuple[int, ...]:
    """The sizes of the sections of a split dimension of ``size``; they sum to it. Raises ValueError when they don't."""
    if rule.sections == "qkv":
        if qkv is None or sum(qkv) != size:
            raise ValueError(f"the query, key and value sizes {qkv} don't sum to {size}")
        return tuple(qkv)
    num_sections = rule.sections or 1
    if size % num_sections:
        raise ValueError(f"{size} rows don't make {num_sections} equal sections")
    return (size // num_sections,) * num_sections


def _section_shard(dim: int, sizes: Sequence[int], tp_size: int, tp_coord: int) -> Shard:
    uneven = [size for size in sizes if size % tp_size]
    if uneven:
        valid = [size for size in range(1, min(sizes) + 1) if all(section % size == 0 for section in sizes)]
        message = f"{tp_size} ranks can't share a dimension of {uneven[0]} evenly"
        raise JobError([Problem("parallelism.tp.size", message, f"use one of {_shorten(valid)}")])
    starts = [0, *accumulate(sizes)]
    lengths = [size // tp_size for size in sizes]
    local_starts = [0, *accumulate(lengths)]
    slices = tuple(
        Slice(start + tp_coord * length, local_start, length)
        for start, local_start, length in zip(starts, local_starts, lengths, strict=False)
    )
    return Shard(dim=dim, slices=slices, local_size=local_starts[-1])


def _shorten(values: Sequence[int], limit: int = 8) -> str:
    text = ", ".join(map(str, values[:limit]))
    return f"{text}, ..." if len(values) > limit else text


def parameter_kind(name: str) -> ParameterKind:
    """Whether the last part of a parameter's name says bias; everything else splits like a weight."""
    return "bias" if name.rsplit(".", 1)[-1] == "bias" else "weight"


def decoder_shards(
    parameter_shapes: Mapping[str, Sequence[int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    tp_size: int,
    tp_coord: int,
) -> dict[str, Shard]:
    """The shard of every parameter of the decoder, by its global name, for the rank at ``tp_coord``.

    Raises JobError naming ``parallelism.tp.size`` when heads or features don't divide; heads are never cut.
    """
    _require_whole_heads(num_heads, num_kv_heads, tp_size)
    qkv = qkv_sizes(num_heads, num_kv_heads, head_dim)
    return {
        name: shard(rule_for(name.rpartition(".")[0]), parameter_kind(name), shape, tp_size, tp_coord, qkv)
        for name, shape in parameter_shapes.items()
    }


def _require_whole_heads(num_heads: int, num_kv_heads: int, tp_size: int) -> None:
    valid = [size for size in range(1, num_kv_heads + 1) if num_heads % size == 0 and num_kv_heads % size == 0]
    if tp_size not in valid:
        message = f"{tp_size} ranks can't share {num_heads} attention heads and {num_kv_heads} key-value heads evenly"
        raise JobError([Problem("parallelism.tp.size", message, f"use one of {_shorten(valid)}")])
