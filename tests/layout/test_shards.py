"""Global slices under tensor parallelism: every element on exactly one rank, or on all."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.errors import JobError
from threefold.layout import Shard, Slice, Style, StyleRule, decoder_shards, qkv_sizes, rule_for, section_sizes, shard
from threefold.layout.shards import parameter_kind

PRIMES = [2, 3, 5, 7, 31, 97, 251, 503]


def decoder_shapes(vocab: int, hidden: int, qkv: int, heads_width: int, ffn: int) -> dict[str, tuple[int, ...]]:
    """Both styles at once: biases, learned positions, a fused gate and an untied head."""
    return {
        "embed.tokens.weight": (vocab, hidden),
        "embed.positions.weight": (16, hidden),
        "layers.0.attention_norm.weight": (hidden,),
        "layers.0.attention_norm.bias": (hidden,),
        "layers.0.attention.qkv.weight": (qkv, hidden),
        "layers.0.attention.qkv.bias": (qkv,),
        "layers.0.attention.out.weight": (hidden, heads_width),
        "layers.0.attention.out.bias": (hidden,),
        "layers.0.mlp_norm.weight": (hidden,),
        "layers.0.mlp.up.weight": (ffn, hidden),
        "layers.0.mlp.up.bias": (ffn,),
        "layers.0.mlp.gate_up.weight": (2 * ffn, hidden),
        "layers.0.mlp.down.weight": (hidden, ffn),
        "layers.0.mlp.down.bias": (hidden,),
        "final_norm.weight": (hidden,),
        "head.weight": (vocab, hidden),
    }


@given(st.integers(1, 8), st.sampled_from(PRIMES), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_slices_of_all_ranks_cover_every_element_once(
    tp: int, vocab: int, per_kv: int, kv_per_rank: int, head_dim: int
):
    num_kv_heads = kv_per_rank * tp
    num_heads = per_kv * num_kv_heads
    qkv = sum(qkv_sizes(num_heads, num_kv_heads, head_dim))
    shapes = decoder_shapes(vocab, 6, qkv, num_heads * head_dim, 3 * tp)
    ranks = [decoder_shards(shapes, num_heads, num_kv_heads, head_dim, tp, coord) for coord in range(tp)]
    for name, shape in shapes.items():
        parts = [rank[name] for rank in ranks]
        assert len({part.local_shape(shape) for part in parts}) == 1, "collectives need equal shapes"
        if parts[0].dim is None:
            assert parts[0].local_shape(shape) == shape
            continue
        covered = sorted(
            i for part in parts for s in part.slices for i in range(s.global_start, s.global_start + s.length)
        )
        assert covered == list(range(shape[parts[0].dim]))
        for part in parts:
            local = [i for s in part.slices for i in range(s.local_start, s.local_start + s.length)]
            assert local == list(range(len(local))), "padding comes last"
            assert part.num_padding == part.local_size - len(local) >= 0


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("embed.tokens.weight", 0),
        ("embed.positions.weight", None),
        ("layers.11.attention.qkv.weight", 0),
        ("layers.11.attention.qkv.bias", 0),
        ("layers.11.attention.out.weight", 1),
        ("layers.11.attention.out.bias", None),
        ("layers.11.mlp.up.bias", 0),
        ("layers.11.mlp.gate_up.weight", 0),
        ("layers.11.mlp.down.weight", 1),
        ("layers.11.mlp.down.bias", None),
        ("layers.11.mlp_norm.bias", None),
        ("final_norm.weight", None),
        ("head.weight", 0),
    ],
)
def test_the_split_dimension_of_each_parameter(name: str, dim: int | None):
    shape = (12,) if name.endswith("bias") or "norm" in name else (12, 8)
    rule = rule_for(name.rpartition(".")[0])
    assert shard(rule, parameter_kind(name), shape, 2, 0, qkv=(4, 4, 4)).dim == dim


def test_query_key_and_value_are_split_each_by_itself():
    part = shard(rule_for("layers.0.attention.qkv"), "weight", (64, 32), 2, 1, qkv_sizes(4, 2, 8))
    assert part == Shard(0, (Slice(16, 0, 16), Slice(40, 16, 8), Slice(56, 24, 8)), 32)


def test_gate_and_up_are_split_each_by_itself():
    part = shard(rule_for("layers.0.mlp.gate_up"), "weight", (12, 4), 3, 2)
    assert part == Shard(0, (Slice(4, 0, 2), Slice(10, 2, 2)), 4)


def test_a_rank_may_hold_only_vocabulary_padding():
    parts = [shard(StyleRule(Style.VOCAB), "weight", (5, 2), 4, coord) for coord in range(4)]
    assert [part.slices for part in parts] == [(Slice(0, 0, 2),), (Slice(2, 0, 2),), (Slice(4, 0, 1),), ()]
    assert [part.num_padding for part in parts] == [0, 0, 1, 2]
    assert {part.local_size for part in parts} == {2}


def test_gpt2s_vocabulary_on_two_ranks():
    parts = [shard(StyleRule(Style.VOCAB), "weight", (50257, 768), 2, coord) for coord in range(2)]
    assert [prod(part.local_shape((50257, 768))) for part in parts] == [25129 * 768] * 2
    assert sum(piece.length for part in parts for piece in part.slices) == 50257


def test_heads_that_dont_divide_name_the_valid_sizes():
    with pytest.raises(JobError, match="use one of 1, 2, 4") as error:
        decoder_shards({}, 8, 4, 16, 3, 0)
    assert error.value.problems[0].key == "parallelism.tp.size"


def test_features_that_dont_divide_name_the_valid_sizes():
    with pytest.raises(JobError, match=r"dimension of 30 evenly\n    fix: use one of 1, 2, 3, 5, 6, 10, 15, 30"):
        shard(StyleRule(Style.COLUMN), "weight", (30, 8), 4, 0)


def test_unknown_modules_and_sections_are_refused():
    with pytest.raises(KeyError, match=r"layers\.0\.experts"):
        rule_for("layers.0.experts")
    with pytest.raises(ValueError, match="don't sum to 10"):
        section_sizes(StyleRule(Style.COLUMN, "qkv"), 10, (4, 2, 2))
    with pytest.raises(ValueError, match="equal sections"):
        section_sizes(StyleRule(Style.COLUMN, 2), 9)
