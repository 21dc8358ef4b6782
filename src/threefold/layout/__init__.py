"""Integers only: rank <-> coordinate, groups, layers -> stages, global slices of shards (pure)."""

from threefold.layout.buckets import fill_buckets
from threefold.layout.compression import GradientCompression, compression_of
from threefold.layout.ranks import AXES, Coord, Layout
from threefold.layout.shards import (
    DECODER_STYLES,
    Shard,
    Slice,
    Style,
    StyleRule,
    decoder_shards,
    parameter_kind,
    qkv_sizes,
    rule_for,
    section_sizes,
    shard,
)
from threefold.layout.stages import (
    Partition,
    balanced_sizes,
    count_halves,
    format_partition,
    halves_of,
    split_halves,
    split_layers,
    stage_of_parameter,
    stage_parameters,
    stage_sizes,
)

__all__ = [
    "AXES",
    "DECODER_STYLES",
    "Coord",
    "GradientCompression",
    "Layout",
    "Partition",
    "Shard",
    "Slice",
    "Style",
    "StyleRule",
    "balanced_sizes",
    "compression_of",
    "count_halves",
    "decoder_shards",
    "fill_buckets",
    "format_partition",
    "halves_of",
    "parameter_kind",
    "qkv_sizes",
    "rule_for",
    "section_sizes",
    "shard",
    "split_halves",
    "split_layers",
    "stage_of_parameter",
    "stage_parameters",
    "stage_sizes",
]
