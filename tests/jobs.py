"""Small jobs that the tests share."""

from __future__ import annotations

from typing import Any

from threefold.job import Job, parse_job

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
}


def small_job(model: dict[str, Any] | None = None, dp: int = 1, tp: int = 1, pp: int = 1, **settings: Any) -> Job:
    """A job of a tiny model: 8 samples of 12 tokens a step. Keys that name a dict are merged into it."""
    data: dict[str, Any] = {
        "model": dict(model or GPT2),
        "data": {"sequence_length": 12},
        "steps": 4,
        "seed": 3,
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "parallelism": {"tp": {"size": tp}, "pp": {"size": pp}, "dp": {"size": dp}},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return parse_job(merge(data, settings))


def merge(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``extra`` laid over it, section by section."""
    merged = dict(base)
    for key, value in extra.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
