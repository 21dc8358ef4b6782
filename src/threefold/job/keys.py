"""The names of a job: every dotted key, and the known key that a wrong one was meant to be."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, get_args

from pydantic.fields import FieldInfo

from threefold.job.messages import nearest_word
from threefold.job.spec import JobFile, Section

MISSING = object()

# Names that people bring from other tools, by their last part; difflib can't see these.
SYNONYMS: Mapping[str, str] = {
    "lr": "optimizer.params.lr",
    "learning_rate": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "max_steps": "steps",
    "train_iters": "steps",
    "train_steps": "steps",
    "batch_size": "train_batch_size",
    "global_batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "num_microbatches": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "dropout": "model.resid_pdrop",
    "clip_grad": "gradient_clipping",
    "grad_clip": "gradient_clipping",
    "max_grad_norm": "gradient_clipping",
    "seq_length": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "max_seq_len": "data.sequence_length",
    "tensor_model_parallel_size": "parallelism.tp.size",
    "tensor_parallel_size": "parallelism.tp.size",
    "pipeline_model_parallel_size": "parallelism.pp.size",
    "pipeline_parallel_size": "parallelism.pp.size",
    "data_parallel_size": "parallelism.dp.size",
    "world_size": "parallelism.dp.size",
    "num_layers": "model.num_hidden_layers",
    "num_heads": "model.num_attention_heads",
    "ffn_hidden_size": "model.intermediate_size",
    "num_experts": "model.num_local_experts",
    "n_routed_experts": "model.num_local_experts",
    "moe_router_topk": "model.num_experts_per_tok",
    "num_query_groups": "model.num_key_value_heads",
    "kv_channels": "model.head_dim",
    "gpus_per_node": "cluster.devices_per_node",
    "num_nodes": "cluster.nodes",
    "nnodes": "cluster.nodes",
    "warmup": "scheduler.warmup_steps",
    "lr_scheduler": "scheduler",
    "zero": "zero_optimization",
    "zero_stage": "zero_optimization.stage",
    "tp": "parallelism.tp",
    "pp": "parallelism.pp",
    "dp": "parallelism.dp",
}


def section_of(annotation: Any) -> type[Section] | None:
    """The section class in an annotation such as ``ModelSpec | None``; None for a plain value."""
    candidates = (annotation, *get_args(annotation))
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, Section)), None)


@cache
def known_fields() -> Mapping[str, FieldInfo]:
    """Every dotted key of a job file, sections too, with its field."""
    return dict(_walk(JobFile, ""))


def _walk(section: type[Section], prefix: str) -> list[tuple[str, FieldInfo]]:
    found: list[tuple[str, FieldInfo]] = []
    for name, field in section.model_fields.items():
        found.append((f"{prefix}{name}", field))
        inner = section_of(field.annotation)
        found += _walk(inner, f"{prefix}{name}.") if inner else []
    return found


def siblings(key: str) -> list[str]:
    """The dotted keys in the same section as ``key``."""
    parent = key.rpartition(".")[0]
    return [known for known in known_fields() if known.rpartition(".")[0] == parent]


def suggestion(key: str) -> str | None:
    """The known key that an unknown one was probably meant to be: the same name elsewhere, a synonym, or one alike."""
    parent, _, leaf = key.rpartition(".")
    elsewhere = [known for known in known_fields() if known.rpartition(".")[2] == leaf]
    if len(elsewhere) == 1:
        return elsewhere[0]
    if leaf.lower() in SYNONYMS:
        return SYNONYMS[leaf.lower()]
    beside = nearest_word(leaf, [known.rpartition(".")[2] for known in siblings(key)])
    if beside:
        return f"{parent}.{beside}" if parent else beside
    return nearest_word(key, known_fields(), cutoff=0.75)


def lookup(settings: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key; MISSING where there is none."""
    value: Any = settings
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def assign(settings: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of ``settings`` with the value at a dotted key, sections made on the way. A scalar there is a KeyError."""
    part, _, rest = key.partition(".")
    if rest:
        below = settings.get(part)
        if below is not None and not isinstance(below, Mapping):
            raise KeyError(part)
        value = assign(below or {}, rest, value)
    return {**settings, part: value}


def remove(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A copy of ``settings`` without a dotted key; the same where there is none."""
    part, _, rest = key.partition(".")
    if part not in settings:
        return dict(settings)
    if rest and isinstance(settings[part], Mapping):
        return {**settings, part: remove(settings[part], rest)}
    return dict(settings) if rest else {name: value for name, value in settings.items() if name != part}
