"""How tensor parallelism cuts each kind of parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from threefold.job.spec import ModelSpec
from threefold.layout import DECODER_STYLES, Shard, Style, decoder_shards, rule_for
from threefold.report.facts import Facts, Section, TextTable
from threefold.report.words import count_of

STYLE_WORDS: Mapping[Style, str] = MappingProxyType(
    {
        Style.COLUMN: "outputs split (dim 0), bias too",
        Style.ROW: "inputs split (dim 1), bias whole",
        Style.VOCAB: "tokens split (dim 0), padded to equal parts",
        Style.REPLICATED: "whole on every rank",
    }
)
"""What each style does to a weight [out, in] and its bias."""


def shards_section(facts: Facts) -> Section:
    """The part of each kind of parameter that a tp rank holds."""
    job = facts.job
    if job.tp == 1:
        return Section("Shards", ("tp is 1: every parameter is whole on the ranks of its stage.",))
    words = [f"Each of the {job.tp} ranks of a tp group holds an equal part of every matrix; norms stay whole."]
    if job.parallelism.tp.sequence_parallel:
        words.append(
            "Sequence parallel: between the matrices each tp rank has 1/tp of the tokens, so the gradients of whole "
            "parameters are summed over tp, too (Korthikanti et al. 2022)."
        )
    table = _style_table() if job.model is None else _shard_table(job.model, job.tp)
    return Section("Shards", (*words, table))


def _style_table() -> TextTable:
    rows = tuple((pattern, rule.style.value, STYLE_WORDS[rule.style]) for pattern, rule in DECODER_STYLES.items())
    return TextTable(("module", "style", "how"), rows)


def _shard_table(model: ModelSpec, tp_size: int) -> TextTable:
    """One row a parameter of the first layer and of the ends; other layers are the same."""
    shapes = {name: shape for name, shape in model.parameter_shapes().items() if _is_example(name)}
    heads = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    shards = decoder_shards(shapes, *heads, tp_size, tp_coord=0)
    rows = []
    for name, shape in shapes.items():
        style = rule_for(name.rpartition(".")[0]).style.value
        local = shards[name].local_shape(shape)
        note = _note(shards[name], shape, tp_size)
        rows.append((name.replace("layers.0.", "layers.*."), style, _shape(shape), _shape(local), note))
    return TextTable(("parameter", "style", "whole", "on a rank", "note"), tuple(rows))


def _is_example(name: str) -> bool:
    return not name.startswith("layers.") or name.startswith("layers.0.")


def _note(part: Shard, shape: Sequence[int], tp_size: int) -> str:
    if part.dim is None:
        return ""
    if len(part.slices) > 1:
        return f"{count_of(len(part.slices), 'section')}, each split by itself"
    padded = part.local_size * tp_size
    return f"{shape[part.dim]:,} padded to {padded:,}" if padded != shape[part.dim] else ""


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(f"{size:,}" for size in shape)
