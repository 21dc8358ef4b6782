"""What several keys say together: one table of rules, each with the keys it reads.

A rule is silent while one of its keys already has a problem, so that every problem is reported once and all at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from threefold.errors import Problem
from threefold.job.compression_rules import COMPRESSION_RULES
from threefold.job.messages import (
    Findings,
    choices,
    common_divisors,
    multiples_around,
    nearest_word,
    show,
)
from threefold.job.model import FEATURES, style_default
from threefold.job.model_rules import MODEL_RULES
from threefold.job.spec import AXES, CHUNKS_OF, DEFAULT_ORDER, SCHEDULES, Job, JobFile, ModelSpec

TP_SIZE, PP_SIZE = "parallelism.tp.size", "parallelism.pp.size"
PARTITION, SCHEDULE = "parallelism.pp.partition", "parallelism.pp.schedule"
CHUNKS = "parallelism.pp.chunks"


LARGEST_WORLD = 10**6
"""Ten times the largest cluster that has trained one model; a larger world is a slip of the keyboard."""


@dataclass(frozen=True)
class Rule:
    """A judgement over the keys in ``needs``; ``judge`` yields a problem for every way in which they disagree."""

    needs: tuple[str, ...]
    judge: Callable[[JobFile], Iterator[Problem]]


def judge(file: JobFile, findings: Findings) -> list[Problem]:
    """Apply every rule whose keys have no problem in ``findings``, and return what they object to."""
    return [problem for rule in RULES if not findings.concerns(*rule.needs) for problem in rule.judge(file)]


def _of_model(check: Callable[[ModelSpec], Iterator[Problem]]) -> Callable[[JobFile], Iterator[Problem]]:
    """A rule that has nothing to say about a job without a model."""

    def judge_model(file: JobFile) -> Iterator[Problem]:
        if file.model is not None:
            yield from check(file.model)

    return judge_model


def _positions_cover_sequence(file: JobFile) -> Iterator[Problem]:
    if file.model is None or file.data is None or file.model.position_embedding_type != "learned":
        return
    length, positions = file.data.sequence_length, file.model.max_position_embeddings
    if length > positions:
        message = f"{length} is longer than the model's {positions} learned positions"
        fix = f"set it to {positions} or less, or model.max_position_embeddings to {length}"
        yield Problem("data.sequence_length", message, fix)


def _tp_divides(what: str, count: Callable[[ModelSpec], int]) -> Callable[[JobFile], Iterator[Problem]]:
    """The rule that tp splits ``what`` evenly; the fix lists the sizes that split heads, key-value heads and MLP."""

    def check(file: JobFile) -> Iterator[Problem]:
        size = file.parallelism.tp.size
        model = file.model
        if model is None or count(model) % size == 0:
            return
        widths = [width for width in (model.intermediate_size, model.moe_intermediate_size) if width]
        valid = common_divisors(model.num_attention_heads, model.num_key_value_heads, *widths)
        yield Problem(
            TP_SIZE, f"{size} does not divide the model's {count(model)} {what}", f"set it to {choices(valid)}"
        )

    return check


def _grouped_heads(model: ModelSpec) -> int:
    """Key-value heads where they are not simply the heads, of which one problem is enough: every tp divides 0."""
    return model.num_key_value_heads if model.num_key_value_heads != model.num_attention_heads else 0


def _sequence_parallel_divides(file: JobFile) -> Iterator[Problem]:
    tensor = file.parallelism.tp
    if file.data is None or not tensor.sequence_parallel or file.data.sequence_length % tensor.size == 0:
        return
    length = file.data.sequence_length
    message = f"{length} tokens do not divide over tp {tensor.size}, which sequence_parallel splits them over"
    lengths = choices(multiples_around(length, tensor.size))
    fix = f"set it to {lengths}, or parallelism.tp.sequence_parallel to false"
    yield Problem("data.sequence_length", message, fix)


def _a_layer_for_every_stage(file: JobFile) -> Iterator[Problem]:
    chunks, partition = num_chunks(file), file.parallelism.pp.partition
    stages = file.parallelism.pp.size * chunks
    stated = not isinstance(partition, str) and len(partition) == stages  # a list may give a stage no layer
    if file.model is not None and stages > file.model.num_hidden_layers and not stated:
        layers = file.model.num_hidden_layers
        of_chunks = f" ({chunks} chunks on each of {file.parallelism.pp.size} devices)" if chunks > 1 else ""
        message = f"{stages} stages{of_chunks} are more than the model's {layers} layers"
        fewer_chunks = ", or use fewer chunks" if chunks > 1 else ""
        yield Problem(PP_SIZE, message, f"set it to {layers // chunks or 1} or less{fewer_chunks}")


def _partition_counts(file: JobFile) -> Iterator[Problem]:
    pipeline = file.parallelism.pp
    stages, partition = pipeline.size * num_chunks(file), pipeline.partition
    if isinstance(partition, str):
        return
    placed = sum(partition)
    layers = file.model.num_hidden_layers if file.model else math.ceil(placed)
    fix = f"give {stages} counts of 0 or more that sum to {layers}{_even_counts(layers, stages)}"
    shown = show(list(partition))
    if len(partition) != stages:
        yield Problem(PARTITION, f"{shown} has {len(partition)} counts for {stages} stages", fix)
    if any(2 * count != round(2 * count) for count in partition):
        yield Problem(PARTITION, f"{shown} cuts a layer elsewhere than between attention and feed-forward", fix)
    if any(count < 0 for count in partition):  # 0 is a stage of the embedding or the head alone
        yield Problem(PARTITION, f"{shown} gives a stage {min(partition)} layers", fix)
    if placed != layers:
        has = f"the model has {layers}" if file.model else "a model has a whole number of them"
        yield Problem(PARTITION, f"{shown} places {placed:g} layers, but {has}", fix)


def _a_recompute_for_every_stage(file: JobFile) -> Iterator[Problem]:
    modes, stages = file.activation_checkpointing.stages, file.parallelism.pp.size * num_chunks(file)
    if modes is not None and len(modes) != stages:
        message = f"{show(list(modes))} has {len(modes)} modes for {stages} stages"
        fix = f"give one for each, for example {show([*modes, *['none'] * stages][:stages])}, or set mode for all"
        yield Problem("activation_checkpointing.stages", message, fix)


def num_chunks(file: JobFile) -> int:
    """Model chunks of each device: what the schedule has, where it has one number, even if the file doesn't say so."""
    pipeline = file.parallelism.pp
    needed = CHUNKS_OF.get(pipeline.schedule) if pipeline.schedule_file is None else None
    return max(needed or 1, pipeline.chunks)


def _even_counts(layers: int, stages: int) -> str:
    if layers < stages or stages > 64:
        return ""
    counts = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    return f", such as {counts}"


def _schedule_is_known(file: JobFile) -> Iterator[Problem]:
    name = file.parallelism.pp.schedule
    if name not in SCHEDULES:
        meant = nearest_word(name, SCHEDULES, cutoff=0.4) or "1f1b"
        yield Problem(SCHEDULE, f"{show(name)} is not one of {choices(SCHEDULES)}", f'write "{meant}"')


def _one_schedule(file: JobFile) -> Iterator[Problem]:
    pipeline = file.parallelism.pp
    if pipeline.schedule_file is not None and "schedule" in pipeline.model_fields_set:
        message = f"{show(pipeline.schedule_file)} and the schedule {show(pipeline.schedule)} are both stated"
        yield Problem("parallelism.pp.schedule_file", message, "leave one of them out")


def _chunks_suit_the_schedule(file: JobFile) -> Iterator[Problem]:
    pipeline = file.parallelism.pp
    if pipeline.schedule_file is not None or pipeline.schedule not in SCHEDULES:
        return
    name, chunks, needed = pipeline.schedule, pipeline.chunks, CHUNKS_OF[pipeline.schedule]
    if name == "interleaved_1f1b" and chunks == 1:
        message = "interleaved_1f1b works on several chunks of layers on each device, and 1 is 1f1b"
        yield Problem(CHUNKS, message, 'set it to 2 or more, or parallelism.pp.schedule to "1f1b"')
    if needed == 1 and chunks > 1:
        message = f"{chunks} chunks need an interleaved schedule; {name} has 1 chunk on each device"
        yield Problem(CHUNKS, message, 'set it to 1, or parallelism.pp.schedule to "interleaved_1f1b"')
    if needed not in (None, 1, chunks) and "chunks" in pipeline.model_fields_set:
        message = f"{chunks} is not the number of chunks of {name}, which has {needed} on each device"
        yield Problem(CHUNKS, message, f"set it to {needed} or leave it out")


def _order_is_a_permutation(file: JobFile) -> Iterator[Problem]:
    order = file.parallelism.order
    if sorted(order.split(",")) != sorted(AXES):
        message = f"{show(order)} does not name each of tp, pp and dp once"
        yield Problem(
            "parallelism.order", message, f'write them from the innermost outwards, such as "{DEFAULT_ORDER}"'
        )


def _shared_memory_is_for_cpus(file: JobFile) -> Iterator[Problem]:
    if file.cluster is not None and file.cluster.shared_memory and file.cluster.device != "cpu":
        message = f"is for CPU processes, but cluster.device is {show(file.cluster.device)}"
        yield Problem("cluster.shared_memory", message, "remove it: NCCL uses the devices' own links")


def _one_number_format(file: JobFile) -> Iterator[Problem]:
    halves = [name for name in ("fp16", "bf16") if getattr(file, name).enabled]
    if len(halves) == 2:
        yield Problem("fp16.enabled", "fp16 and bf16 are both on; a run has one format", "set one of them to false")
    if halves and file.dtype == "float64":
        message = f"float64 contradicts {halves[0]}.enabled"
        yield Problem("dtype", message, f'write "float32" or leave it out, or set {halves[0]}.enabled to false')


def _offload_has_shards(file: JobFile) -> Iterator[Problem]:
    zero = file.zero_optimization
    for name, stage in (("offload_optimizer", 1), ("offload_param", 3)):
        offload = getattr(zero, name)
        if offload is not None and offload.device != "none" and zero.stage < stage:
            key = f"zero_optimization.{name}"
            message = f"needs ZeRO stage {stage} or more, but zero_optimization.stage is {zero.stage}"
            yield Problem(key, message, f"set zero_optimization.stage to {stage}, or remove {name}")


def _momentum_is_for_sgd(file: JobFile) -> Iterator[Problem]:
    if file.optimizer.type != "SGD" and file.optimizer.params.momentum > 0:
        message = f"{file.optimizer.type} has no momentum {file.optimizer.params.momentum}; its decay rates are betas"
        yield Problem("optimizer.params.momentum", message, 'remove it, or set optimizer.type to "SGD"')


def _warmup_fits(file: JobFile) -> Iterator[Problem]:
    scheduler = file.scheduler
    total = scheduler.total_steps or file.steps
    if total is not None and scheduler.warmup_steps > total:
        source = "scheduler.total_steps" if scheduler.total_steps else "steps"
        message = f"{scheduler.warmup_steps} warm-up steps are more than {source} {total}"
        yield Problem("scheduler.warmup_steps", message, f"set it to {total} or less, for example {total // 10}")


def _scaling_has_a_reference(file: JobFile) -> Iterator[Problem]:
    scheduler = file.scheduler
    if scheduler.batch_scaling != "none" and scheduler.reference_batch_size is None:
        message = f"{scheduler.batch_scaling} scaling needs the batch size that optimizer.params.lr was tuned for"
        fix = 'add it, for example "reference_batch_size": 256, or set scheduler.batch_scaling to "none"'
        yield Problem("scheduler.reference_batch_size", message, fix)


def _world_exists(file: JobFile) -> Iterator[Problem]:
    parallelism = file.parallelism
    ranks = parallelism.tp.size * parallelism.pp.size * (parallelism.dp.size or 1)
    if ranks > LARGEST_WORLD:
        message = f"dp × tp × pp makes {ranks:,} ranks, more than any machine has"
        yield Problem(TP_SIZE, message, f"set sizes whose product is {LARGEST_WORLD:,} or less")


RULES: tuple[Rule, ...] = (
    Rule(("parallelism.tp.size", PP_SIZE, "parallelism.dp.size"), _world_exists),
    *(Rule(needs, _of_model(check)) for needs, check in MODEL_RULES),
    Rule(("model.max_position_embeddings", "data.sequence_length"), _positions_cover_sequence),
    Rule((TP_SIZE, "model"), _tp_divides("attention heads", lambda model: model.num_attention_heads)),
    Rule((TP_SIZE, "model"), _tp_divides("key-value heads", _grouped_heads)),
    Rule((TP_SIZE, "model"), _tp_divides("intermediate_size", lambda model: model.intermediate_size)),
    Rule((TP_SIZE, "model"), _tp_divides("moe_intermediate_size", lambda model: model.moe_intermediate_size)),
    Rule(("parallelism.tp", "data.sequence_length"), _sequence_parallel_divides),
    Rule((PP_SIZE, CHUNKS, "model.num_hidden_layers"), _a_layer_for_every_stage),
    Rule((PP_SIZE, CHUNKS, PARTITION, "model.num_hidden_layers"), _partition_counts),
    Rule((PP_SIZE, CHUNKS, "activation_checkpointing"), _a_recompute_for_every_stage),
    Rule((SCHEDULE,), _schedule_is_known),
    Rule((SCHEDULE, "parallelism.pp.schedule_file"), _one_schedule),
    Rule((SCHEDULE, CHUNKS), _chunks_suit_the_schedule),
    Rule(("parallelism.order",), _order_is_a_permutation),
    Rule(("fp16.enabled", "bf16.enabled", "dtype"), _one_number_format),
    Rule(("cluster",), _shared_memory_is_for_cpus),
    Rule(("zero_optimization",), _offload_has_shards),
    Rule(("optimizer.type", "optimizer.params.momentum"), _momentum_is_for_sgd),
    *(Rule(needs, check) for needs, check in COMPRESSION_RULES),
    Rule(("scheduler.warmup_steps", "scheduler.total_steps", "steps"), _warmup_fits),
    Rule(("scheduler.batch_scaling", "scheduler.reference_batch_size"), _scaling_has_a_reference),
)


@dataclass(frozen=True)
class NotYet:
    """Something a job may state and be explained with, that this version's training does not do."""

    key: str
    asked: Callable[[Job], bool]
    message: str
    fix: str


def _has(name: str) -> Callable[[Job], bool]:
    """Whether the model has a feature that models have only when they say so."""
    return lambda job: job.model is not None and getattr(job.model, name) != FEATURES[name]


def _unlike_style(name: str, what: str) -> Callable[[Job], bool]:
    """Whether the model differs in ``name`` from a model of its style that states nothing."""

    def differs(job: Job) -> bool:
        return job.model is not None and getattr(job.model, name) != style_default(job.model.model_type, what)

    return differs


def _has_own_qkv_bias(job: Job) -> bool:
    return job.model is not None and job.model.qkv_bias != job.model.use_bias


_DESCRIBED = "it can be explained and planned; to train, take a model without it"

MODEL_NOT_YET: tuple[NotYet, ...] = (
    NotYet("model.num_local_experts", _has("num_local_experts"), "training does not run experts yet", _DESCRIBED),
    NotYet("model.kv_lora_rank", _has("kv_lora_rank"), "training does not run latent attention yet", _DESCRIBED),
    NotYet("model.qk_norm", _has("qk_norm"), "training does not norm queries and keys yet", _DESCRIBED),
    NotYet("model.embedding_norm", _has("embedding_norm"), "training does not norm the embedding yet", _DESCRIBED),
    NotYet(
        "model.rope_scaling",
        _has("rope_scaling"),
        "training does not stretch rotary frequencies yet",
        "it can be explained and planned; to train without it, set it to null",
    ),
    NotYet(
        "model.qkv_bias",
        _has_own_qkv_bias,
        "training does not give biases to query, key and value alone, or to all but them, yet",
        _DESCRIBED,
    ),
    NotYet(
        "model.use_bias",
        _unlike_style("use_bias", "use_bias"),
        "training runs gpt2 with biases and llama without",
        _DESCRIBED,
    ),
    NotYet(
        "model.norm_bias",
        _unlike_style("norm_bias", "use_bias"),
        "training runs gpt2's norms with biases and llama's without",
        _DESCRIBED,
    ),
    NotYet(
        "model.gated_mlp",
        _unlike_style("gated_mlp", "gated_mlp"),
        "training runs gpt2's MLP without a gate and llama's with one",
        _DESCRIBED,
    ),
    NotYet(
        "model.position_embedding_type",
        _unlike_style("position_embedding_type", "position_embedding_type"),
        "training runs gpt2 with learned positions and llama with rotary ones",
        _DESCRIBED,
    ),
    NotYet(
        "model.hidden_act",
        lambda job: job.model is not None and job.model.hidden_act in ("relu", "relu2"),
        "training does not run ReLU yet",
        _DESCRIBED,
    ),
)

NOT_YET: tuple[NotYet, ...] = (
    *MODEL_NOT_YET,
    NotYet(
        "checkpoint.every",
        lambda job: job.checkpoint.every > 0,
        "training does not write checkpoints yet",
        "set it to 0",
    ),
)
_NEEDED: tuple[tuple[str, Callable[[Job], bool], str], ...] = (
    ("model", lambda job: job.model is not None, 'add a model, for example "model": {"preset": "gpt2"}'),
    (
        "data",
        lambda job: job.data is not None,
        'add "data": {"train": "DIR", "sequence_length": 1024} with a DIR made by `threefold data build`',
    ),
    (
        "data.train",
        lambda job: job.data is None or job.data.train is not None,
        'add "train": "DIR" with a DIR made by `threefold data build`',
    ),
    ("steps", lambda job: job.steps is not None, 'add the optimizer steps to run, for example "steps": 1000'),
)


def check_trainable(job: Job) -> list[Problem]:
    """What training needs beyond a valid job: sections that are missing and settings that are not done yet."""
    missing = [Problem(key, "is missing, and training needs it", fix) for key, given, fix in _NEEDED if not given(job)]
    return missing + [Problem(item.key, item.message, item.fix) for item in NOT_YET if item.asked(job)]
