"""What the numbers of a model say together; ``rules`` applies these among its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from threefold.errors import Problem
from threefold.job.messages import choices, divisors, multiples_around, nearest_number
from threefold.job.model import ModelSpec


def _heads_divide_width(model: ModelSpec) -> Iterator[Problem]:
    hidden, heads = model.hidden_size, model.num_attention_heads
    if hidden % heads and "head_dim" not in model.model_fields_set:
        near = nearest_number(heads, divisors(hidden))
        fix = f"set it to {near}, or model.hidden_size to {choices(multiples_around(hidden, heads))}"
        yield Problem("model.num_attention_heads", f"{heads} heads do not divide hidden_size {hidden}", fix)


def _kv_heads_divide_heads(model: ModelSpec) -> Iterator[Problem]:
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if heads % kv_heads:
        message = f"{kv_heads} key-value heads do not divide {heads} attention heads"
        yield Problem("model.num_key_value_heads", message, f"set it to {choices(divisors(heads))}")


def _rotary_pairs(model: ModelSpec) -> Iterator[Problem]:
    if model.position_embedding_type != "rotary" or model.kv_lora_rank or model.head_dim % 2 == 0:
        return
    hidden, heads = model.hidden_size, model.num_attention_heads
    message = f"heads of width {model.head_dim} can't be rotated: rotary positions turn pairs of numbers"
    if model.head_dim == hidden / heads:
        even = [number for number in divisors(hidden) if hidden // number % 2 == 0]
        near = f"set model.num_attention_heads to {nearest_number(heads, even)}, or " if even else ""
        yield Problem("model.num_attention_heads", message, f"{near}set model.hidden_size to a multiple of {2 * heads}")
    elif "head_dim" in model.model_fields_set:
        yield Problem("model.head_dim", message, f"set it to {choices(multiples_around(model.head_dim, 2))}")


def _scaling_is_of_rotary_positions(model: ModelSpec) -> Iterator[Problem]:
    scaling, positions = model.rope_scaling, model.position_embedding_type
    if scaling is None:
        return
    if positions != "rotary":
        message = f"scales rotary positions, and this model's positions are {positions}"
        yield Problem("model.rope_scaling", message, "set it to null")
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if high <= low:
        message = f"{high:g} is not more than low_freq_factor {low:g}: no frequency lies between fast and slow"
        yield Problem("model.rope_scaling.high_freq_factor", message, f"set it above {low:g}, for example {4 * low:g}")


def _activation_of_mlp(model: ModelSpec) -> Iterator[Problem]:
    allowed = ("silu",) if model.gated_mlp else ("relu", "relu2", "gelu_new", "gelu")
    if model.hidden_act not in allowed:
        gate = "with" if model.gated_mlp else "without"
        message = f"{model.hidden_act} does not belong to an MLP {gate} a gate, which has {choices(allowed)}"
        usual = "silu" if model.gated_mlp else "gelu_new"
        yield Problem("model.hidden_act", message, f'write "{usual}" or leave it out')


def _experts_are_visited(model: ModelSpec) -> Iterator[Problem]:
    experts, visited = model.num_local_experts, model.num_experts_per_tok
    if experts and not visited:
        message = f"{experts} experts, of which each token visits none"
        fix = f'add "num_experts_per_tok": {min(2, experts)}, or remove num_local_experts for a dense model'
        yield Problem("model.num_local_experts", message, fix)
    elif visited > experts:
        message = f"a token can't visit {visited} of {experts} experts"
        fix = f"set it to 1 to {experts}" if experts else "remove it, or set model.num_local_experts"
        yield Problem("model.num_experts_per_tok", message, fix)
    if model.n_shared_experts and not experts:
        message = f"{model.n_shared_experts} shared experts in a model without experts"
        yield Problem("model.n_shared_experts", message, "remove it, or set model.num_local_experts")


def _latent_attention_is_whole(model: ModelSpec) -> Iterator[Problem]:
    widths = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for name in widths:
        if model.kv_lora_rank and not getattr(model, name):
            message = f"is missing: latent attention (kv_lora_rank {model.kv_lora_rank}) states the width of its heads"
            yield Problem(f"model.{name}", message, f'add "{name}", for example {64 if "rope" in name else 128}')
    for name in ("q_lora_rank", *widths):
        if getattr(model, name) and not model.kv_lora_rank:
            message = f"{getattr(model, name)} belongs to latent attention, which needs kv_lora_rank"
            yield Problem(f"model.{name}", message, 'remove it, or add "kv_lora_rank", for example 512')


MODEL_RULES: tuple[tuple[tuple[str, ...], Callable[[ModelSpec], Iterator[Problem]]], ...] = (
    (("model.hidden_size", "model.num_attention_heads"), _heads_divide_width),
    (("model.num_attention_heads", "model.num_key_value_heads"), _kv_heads_divide_heads),
    (("model.hidden_size", "model.num_attention_heads", "model.model_type"), _rotary_pairs),
    (("model.rope_scaling", "model.position_embedding_type"), _scaling_is_of_rotary_positions),
    (("model.model_type", "model.hidden_act", "model.gated_mlp"), _activation_of_mlp),
    (("model.num_local_experts", "model.num_experts_per_tok"), _experts_are_visited),
    (("model",), _latent_attention_is_whole),
)
"""The keys that a judgement reads, and the judgement."""
