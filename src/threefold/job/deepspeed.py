"""DeepSpeed's config files as starts: its forms are translated, its other keys are named with what to do instead.

A key that only tunes DeepSpeed's own engine can't change what is computed, so it is dropped with a note. A key that
asks for something that threefold does not do is refused, unless its value switches it off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from threefold.job.keys import MISSING, assign, lookup, remove
from threefold.job.messages import Findings, choices, show

Settings = dict[str, Any]

# Keys of DeepSpeed's engine that threefold has no counterpart of: they change speed or memory there, never results.
TUNING: Mapping[str, str] = {
    "zero_optimization.allgather_partitions": "gathers are always whole buckets",
    "zero_optimization.allgather_bucket_size": "gathers follow reduce_bucket_size",
    "zero_optimization.reduce_scatter": "the collective follows from the stage",
    "zero_optimization.contiguous_gradients": "gradients always live in flat buckets",
    "zero_optimization.round_robin_gradients": "buckets are split evenly",
    "zero_optimization.use_multi_rank_bucket_allreduce": "buckets are split evenly",
    "zero_optimization.sub_group_size": "the optimizer steps over whole shards",
    "zero_optimization.ignore_unused_parameters": "every parameter of the model is used",
    "zero_optimization.legacy_stage1": "there is one engine",
    "zero_optimization.memory_efficient_linear": "layers keep only what their backward needs",
    "zero_optimization.log_trace_cache_warnings": "there is no trace cache",
    "zero_optimization.stage3_prefetch_bucket_size": "prefetching follows the schedule",
    "zero_optimization.stage3_param_persistence_threshold": "every parameter is split",
    "zero_optimization.stage3_model_persistence_threshold": "every parameter is split",
    "zero_optimization.stage3_max_live_parameters": "what lives follows from the schedule",
    "zero_optimization.stage3_max_reuse_distance": "what lives follows from the schedule",
    "zero_optimization.stage3_module_granularity_threshold": "parameters are gathered a layer at a time",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "any layout loads any checkpoint",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "any layout loads any checkpoint",
    "zero_optimization.offload_optimizer.buffer_count": "host memory is taken as needed",
    "zero_optimization.offload_optimizer.fast_init": "host memory is taken as needed",
    "zero_optimization.offload_param.buffer_count": "host memory is taken as needed",
    "zero_optimization.offload_param.buffer_size": "host memory is taken as needed",
    "zero_optimization.offload_param.max_in_cpu": "host memory is taken as needed",
    "bf16.immediate_grad_update": "gradients accumulate in flat buckets",
    "tensorboard.output_path": "events go to the run directory",
    "tensorboard.job_name": "events go to the run directory",
    "wall_clock_breakdown": "every step's time is in metrics.jsonl",
    "memory_breakdown": "memory is a report, not a setting of the job",
    "zero_allow_untested_optimizer": "both optimizers work with every stage",
    "zero_force_ds_cpu_optimizer": "there is one implementation of each optimizer",
    "optimizer.legacy_fusion": "there is one implementation of each optimizer",
    "optimizer.params.cuda_aware": "the backend follows from the device",
    "optimizer.params.comm_backend_name": "the backend follows from the device",
    "optimizer.params.torch_adam": "there is one implementation of each optimizer",
    "checkpoint.tag_validation": "checkpoints are checked when they are read",
    "checkpoint.load_universal": "any layout loads any checkpoint",
    "checkpoint.parallel_write": "every rank writes its own part",
    "scheduler.params.last_batch_iteration": "a resumed run knows its step",
}

# Keys that ask for what threefold does not do, with what to do instead. Switched off they are harmless.
UNSUPPORTED: Mapping[str, str] = {
    "activation_checkpointing.partition_activations": 'use activation_checkpointing.mode "selective" or "full"',
    "activation_checkpointing.cpu_checkpointing": 'use activation_checkpointing.mode "full"',
    "activation_checkpointing.contiguous_memory_optimization": "remove it",
    "activation_checkpointing.number_checkpoints": 'use activation_checkpointing.mode "selective" or "full"',
    "activation_checkpointing.synchronize_checkpoint_boundary": "remove it",
    "activation_checkpointing.profile": "remove it; step times are in metrics.jsonl",
    "aio": "remove it: there is no NVMe offload; the cpu is the only device to offload to",
    "amp": "use bf16 or fp16 instead",
    "autotuning": "remove it; measure layouts by training a few steps of each",
    "bf16.bf16_master_weights_and_grads": "remove it: master weights are in float32",
    "bf16.bf16_optimizer_states": "remove it: optimizer states are in float32",
    "bf16.check_grad_overflow": "remove it: a gradient that is not finite ends the step anyway",
    "checkpoint.use_node_local_storage": "name a run directory on the disk that you want",
    "comet": "remove it; metrics are in metrics.jsonl and TensorBoard",
    "comms_logger": "remove it; `threefold explain` lists what each axis communicates",
    "compression_training": "remove it: weights are trained as they are",
    "csv_monitor": "remove it; metrics are in metrics.jsonl",
    "curriculum_learning": "remove it and set data.sequence_length to one length",
    "data_efficiency": "remove it: each sample is seen as it is, once an epoch",
    "data_types": "remove it: gradients accumulate in float32",
    "disable_allgather": "remove it",
    "dump_state": "remove it; `threefold check` prints the resolved job",
    "eigenvalue": "remove it",
    "elasticity": "state train_batch_size: on any number of devices the accumulation follows from it",
    "flops_profiler": "remove it; step times are in metrics.jsonl",
    "fp16.auto_cast": "remove it: the whole model runs in the format",
    "fp16.consecutive_hysteresis": "remove it: any overflow counts",
    "fp16.fp16_master_weights_and_grads": "remove it: master weights are in float32",
    "fp32_allreduce": 'use communication_data_type "fp32" instead',
    "gradient_predivide_factor": "remove it: gradients are divided by the tokens of the global batch",
    "hybrid_engine": "remove it: threefold trains only",
    "moe": "remove it: models are dense",
    "nebula": "remove it",
    "optimizer.params.amsgrad": "remove it: AdamW has no AMSGrad form",
    "optimizer.params.dampening": "remove it: SGD has momentum only",
    "optimizer.params.nesterov": "remove it: SGD has momentum only",
    "pipeline": "use parallelism.pp instead",
    "prescale_gradients": "remove it: gradients are divided by the tokens of the global batch",
    "progressive_layer_drop": "remove it: every layer runs",
    "quantize_training": "remove it: weights are trained as they are",
    "sequence_parallel_size": "use parallelism.tp.sequence_parallel instead",
    "sparse_attention": "remove it: attention is dense and causal",
    "sparse_gradients": "remove it: gradients are dense",
    "tensor_parallel": "use parallelism.tp.size instead",
    "torch_autocast": "use bf16 or fp16 instead",
    "use_data_before_expert_parallelism": "remove it: models are dense",
    "wandb": "remove it; metrics are in metrics.jsonl and TensorBoard",
    "weight_quantization": "remove it: weights are trained as they are",
    "zero_optimization.cpu_offload": 'use zero_optimization.offload_optimizer {"device": "cpu"} instead',
    "zero_optimization.cpu_offload_param": 'use zero_optimization.offload_param {"device": "cpu"} instead',
    "zero_optimization.cpu_offload_use_pin_memory": "use zero_optimization.offload_optimizer.pin_memory instead",
    "zero_optimization.elastic_checkpoint": "remove it: any layout loads any checkpoint",
    "zero_optimization.load_from_fp32_weights": "remove it: checkpoints hold float32 weights",
    "zero_optimization.mics_hierarchical_params_gather": "remove it: shards span all of dp",
    "zero_optimization.mics_shard_size": "remove it: shards span all of dp",
    "zero_optimization.offload_optimizer.nvme_path": 'remove it and offload to "cpu"',
    "zero_optimization.offload_optimizer.pipeline_read": 'remove it and offload to "cpu"',
    "zero_optimization.offload_optimizer.pipeline_write": 'remove it and offload to "cpu"',
    "zero_optimization.offload_optimizer.ratio": "remove it: all of the optimizer is offloaded, or nothing",
    "zero_optimization.offload_param.nvme_path": 'remove it and offload to "cpu"',
    "zero_optimization.override_module_apply": "remove it",
    "zero_optimization.pipeline_loading_checkpoint": "remove it",
    "zero_optimization.use_all_reduce_for_fetch_params": "remove it",
    "zero_optimization.zero_hpz_partition_size": "remove it: shards span all of dp",
    "zero_optimization.zero_quantized_gradients": "remove it: gradients travel in their own format",
    "zero_optimization.zero_quantized_nontrainable_weights": "remove it: weights travel in their own format",
    "zero_optimization.zero_quantized_weights": "remove it: weights travel in their own format",
    "zero_optimization.zeropp_loco_param": "remove it: gradients travel in their own format",
}

# Values, other than false, null, {} and {"enabled": false}, with which an unsupported key asks for nothing.
_ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "zero_optimization.load_from_fp32_weights": (True,),
    "zero_optimization.mics_shard_size": (-1,),
    "zero_optimization.zero_hpz_partition_size": (1,),
    "zero_optimization.offload_optimizer.ratio": (1, 1.0),
    "zero_optimization.override_module_apply": (True,),
    "zero_optimization.pipeline_loading_checkpoint": (False,),
    "gradient_predivide_factor": (1, 1.0),
    "optimizer.params.dampening": (0, 0.0),
    "data_types": ({"grad_accum_dtype": None}, {"grad_accum_dtype": "fp32"}),
    "sequence_parallel_size": (1,),
}

# Keys for which Hugging Face's "auto" is answered here, with the answer. Elsewhere "auto" is refused by name.
_AUTO: Mapping[str, str] = {
    "train_batch_size": "derived from the other two batch sizes",
    "train_micro_batch_size_per_gpu": "derived from the other two batch sizes",
    "gradient_accumulation_steps": "derived from the other two batch sizes",
    "parallelism.dp.size": "the world divided by tp × pp",
    "zero_optimization.reduce_bucket_size": "the default",
    "optimizer.params.betas": "the default, which is Trainer's",
    "optimizer.params.eps": "the default, which is Trainer's",
    "optimizer.params.weight_decay": "the default, which is Trainer's",
    "scheduler.params.total_num_steps": "the job's steps",
    "scheduler.params.warmup_min_lr": "0",
    "scheduler.params.warmup_max_lr": "optimizer.params.lr",
    "scheduler.params.warmup_type": "linear",
}
_OWN_SECTIONS = ("model", "data", "cluster")

_OPTIMIZERS: Mapping[str, str] = {"adamw": "AdamW", "adam": "AdamW", "sgd": "SGD", "onebitadam": "OneBitAdam"}
_SCHEDULERS: Mapping[str, Mapping[str, Any]] = {
    "WarmupLR": {"type": "constant"},
    "WarmupDecayLR": {"type": "linear", "min_lr_ratio": 0.0},
    "WarmupCosineLR": {"type": "cosine", "min_lr_ratio": 1e-4},
}
_WARMUP_DEFAULTS: Mapping[str, Any] = {"warmup_num_steps": 1000, "warmup_type": "log"}
_SCHEDULER_PARAMS: Mapping[str, str] = {
    "warmup_num_steps": "warmup_steps",
    "warmup_type": "warmup_type",
    "total_num_steps": "total_steps",
    "cos_min_ratio": "min_lr_ratio",
}


def translate_settings(settings: Mapping[str, Any], findings: Findings) -> Settings:
    """``settings`` with DeepSpeed's forms and keys in threefold's; what can't be translated goes to ``findings``."""
    translated = dict(settings)
    for step in (_resolve_auto, _drop_foreign, _rename, _translate_optimizer, _translate_scheduler):
        translated = step(translated, findings)
    return translated


def _resolve_auto(settings: Settings, findings: Findings) -> Settings:
    for key in list(_keys_with_auto(settings, "")):
        if key in _AUTO:
            findings.notes.append(f'{key}: "auto" is {_AUTO[key]}')
        elif key not in TUNING:
            message = '"auto" is filled in by Hugging Face\'s Trainer, and there is none here'
            findings.problem(key, message, "write the value that you mean, or remove the key for the default")
        settings = remove(settings, key)
    return settings


def _keys_with_auto(settings: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in _OWN_SECTIONS:
            yield from _keys_with_auto(value, f"{key}.")
        elif value == "auto" and key != "parallelism.pp.partition":
            yield key


def _drop_foreign(settings: Settings, findings: Findings) -> Settings:
    for key, reason in TUNING.items():
        if lookup(settings, key) is not MISSING:
            findings.notes.append(f"{key}: has no effect: {reason}")
            settings = remove(settings, key)
    for key, advice in UNSUPPORTED.items():
        value = lookup(settings, key)
        if value is MISSING:
            continue
        if not _asks_nothing(key, value):
            findings.problem(key, f"{show(value)}: a DeepSpeed key that threefold does not support", advice)
        settings = remove(settings, key)
    return settings


def _asks_nothing(key: str, value: Any) -> bool:
    if isinstance(value, Mapping) and not value.get("enabled", True):
        return True
    return value is None or value is False or value == {} or value in _ASKS_NOTHING.get(key, ())


def _rename(settings: Settings, findings: Findings) -> Settings:
    for old, new in (
        ("bfloat16", "bf16"),
        ("steps_per_print", "logging.every"),
        ("tensorboard.enabled", "logging.tensorboard"),
    ):
        settings = _move(settings, old, new, findings)
    return remove(settings, "tensorboard") if settings.get("tensorboard") == {} else settings


def _move(settings: Settings, old: str, new: str, findings: Findings) -> Settings:
    """Give the value of DeepSpeed's key ``old`` to ``new``; both with different values contradict each other."""
    value, present = lookup(settings, old), lookup(settings, new)
    if value is MISSING:
        return settings
    if present not in (MISSING, value):
        message = f"{show(value)} contradicts {new} {show(present)}; they are the same setting"
        findings.problem(old, message, f"keep one of the two: remove {old} or {new}")
        return remove(settings, old)
    try:
        return assign(remove(settings, old), new, value)
    except KeyError:  # the section of ``new`` is no section, which validation says
        return remove(settings, old)


def _translate_optimizer(settings: Settings, findings: Findings) -> Settings:
    name, mode = lookup(settings, "optimizer.type"), lookup(settings, "optimizer.params.adam_w_mode")
    settings = remove(settings, "optimizer.params.adam_w_mode")
    if not isinstance(name, str) or name.lower() not in _OPTIMIZERS:
        return settings
    if mode is False and lookup(settings, "optimizer.params.weight_decay") not in (MISSING, 0, 0.0):
        message = "false asks for Adam with an L2 penalty, but the weight decay here is decoupled (AdamW)"
        fix = "set it to true, or optimizer.params.weight_decay to 0"
        findings.problem("optimizer.params.adam_w_mode", message, fix)
    elif name.lower() == "adam":
        findings.notes.append("optimizer.type: Adam is AdamW, as in DeepSpeed: its weight decay is decoupled")
    settings = remove(settings, "optimizer.params.bias_correction") if _corrects_bias(settings) else settings
    return assign(settings, "optimizer.type", _OPTIMIZERS[name.lower()])


def _corrects_bias(settings: Settings) -> bool:
    return lookup(settings, "optimizer.params.bias_correction") is True


def _translate_scheduler(settings: Settings, findings: Findings) -> Settings:
    name, params = lookup(settings, "scheduler.type"), lookup(settings, "scheduler.params")
    if params is not MISSING and (not isinstance(name, str) or name not in _SCHEDULERS):
        message = f"only DeepSpeed's schedulers have params, and of those {choices(_SCHEDULERS)} are read"
        findings.problem("scheduler.params", message, "write its keys into scheduler itself, such as warmup_steps")
        return remove(settings, "scheduler.params")
    if not isinstance(name, str) or name not in _SCHEDULERS:
        return settings
    stated = dict(params) if isinstance(params, Mapping) else {}
    settings = _peak_to_optimizer(settings, stated, findings)
    _check_warmup_start(stated, findings)
    known = {_SCHEDULER_PARAMS[key]: value for key, value in {**_WARMUP_DEFAULTS, **stated}.items() if key in _KNOWN}
    unknown = {key: value for key, value in stated.items() if key not in _KNOWN and key not in _HANDLED}
    own = {key: value for key, value in settings["scheduler"].items() if key not in ("type", "params")}
    return {**settings, "scheduler": {**_SCHEDULERS[name], **known, **own, **({"params": unknown} if unknown else {})}}


_KNOWN = frozenset(_SCHEDULER_PARAMS)
_HANDLED = frozenset({"warmup_max_lr", "warmup_min_lr", "warmup_min_ratio"})


def _peak_to_optimizer(settings: Settings, stated: Mapping[str, Any], findings: Findings) -> Settings:
    """DeepSpeed's warm-up ends at its own warmup_max_lr; here the one peak is optimizer.params.lr."""
    if "warmup_max_lr" not in stated:
        return settings
    with_key = assign(settings, "scheduler.params.warmup_max_lr", stated["warmup_max_lr"])
    return _move(with_key, "scheduler.params.warmup_max_lr", "optimizer.params.lr", findings)


def _check_warmup_start(stated: Mapping[str, Any], findings: Findings) -> None:
    start = stated.get("warmup_min_lr", 0)
    if start != 0:
        key, message = "scheduler.params.warmup_min_lr", f"{show(start)}: the warm-up here starts from 0"
        findings.problem(key, message, "set it to 0 or remove it")
    if "warmup_min_ratio" in stated:
        findings.notes.append("scheduler.params.warmup_min_ratio: has no effect: the warm-up starts from 0")
