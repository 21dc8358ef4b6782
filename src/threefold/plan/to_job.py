"""Between plans and job files: a plan as a job that ``train`` obeys as written, and a job's strategy as it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from threefold.cost.case import Cut
from threefold.cost.hardware import build_hardware
from threefold.cost.measured import measured_hardware
from threefold.cost.profile import Profile, check_profile
from threefold.cost.strategies import (
    ORDER_CODES,
    PARTITION_CODES,
    PRECISION_CODES,
    RECOMPUTE_CODES,
    SCHEDULE_CODES,
    Strategies,
)
from threefold.errors import JobError, Problem
from threefold.job import ClusterSpec, Job, ModelSpec, parse_job
from threefold.layout import balanced_sizes
from threefold.plan.balance import resolve_partition, with_partition
from threefold.plan.learning_rate import learning_rate_hint
from threefold.plan.options import even_layers
from threefold.plan.plans import Plan
from threefold.plan.prediction_only import prediction_only
from threefold.plan.question import Question, read_fixed
from threefold.schedule import Kind, Placement, job_schedule

_PLANNED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "parallelism",
    "fp16",
    "bf16",
    "activation_checkpointing",
)
"""Sections of a job that a plan decides whole."""


def new_job(plan: Plan, model: ModelSpec, cluster: ClusterSpec, sequence_length: int) -> dict[str, Any]:
    """A job file that trains ``model`` by ``plan``; what it lacks is the data and the number of steps.

    Raises JobError for a plan that can be predicted only.
    """
    settings = _settings(plan, model)
    rate = learning_rate_hint(model.num_parameters, settings["train_batch_size"] * sequence_length)
    return {
        "model": _stated(model),
        "data": {"sequence_length": sequence_length},
        "cluster": cluster.model_dump(mode="json", exclude_none=True),
        **settings,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": float(f"{rate:.1e}"), "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
    }


def replanned_job(plan: Plan, job: Job) -> dict[str, Any]:
    """``job`` with the strategy of ``plan``; everything else stays, buckets of ZeRO among it.

    Raises JobError for a plan that can be predicted only.
    """
    if job.model is None:
        raise JobError([Problem("model", "is missing, and a plan is made for one", 'add "model": {"preset": "gpt2"}')])
    kept = job.model_dump(mode="json", exclude_none=True, exclude=set(_PLANNED) | {"model"})
    settings = _settings(plan, job.model)
    buckets = {key: value for key, value in kept["zero_optimization"].items() if key not in _ZERO_KEYS}
    settings["zero_optimization"] = {**buckets, **settings["zero_optimization"]}
    return {"model": _stated(job.model), **kept, **settings}


def balanced_job(planned: Mapping[str, Any], profile: Profile) -> dict[str, Any]:
    """A planned job with its stages cut by measured costs, where ``profile`` is of the work that the plan does."""
    job = parse_job(planned)
    try:
        check_profile(profile, job)
    except JobError:  # another tp or micro batch than was measured: the plan's own partition stays
        return dict(planned)
    _, balance = resolve_partition(with_partition(job, "auto"), profile)
    if balance is None:
        return dict(planned)
    parallelism = planned["parallelism"]
    pipeline = {**parallelism["pp"], "partition": list(balance.partition)}
    return {**planned, "parallelism": {**parallelism, "pp": pipeline}}


_ZERO_KEYS = ("stage", "offload_optimizer", "offload_param")


def _stated(model: ModelSpec) -> dict[str, Any]:
    return model.model_dump(mode="json", exclude_none=True)


def _settings(plan: Plan, model: ModelSpec) -> dict[str, Any]:
    unknown = list(prediction_only(plan))
    if unknown:
        fix = "plan without the --fix that asks for it, or leave -o out"
        raise JobError([Problem("-o", f"the best plan can't be written as a job: {text}", fix) for text in unknown])
    words = plan.parallelism
    micro_batch, accumulation, dp = (plan.size(name) for name in ("micro_batch", "num_microbatches", "dp"))
    formats = {name: {"enabled": True} for name in ("fp16", "bf16") if words["precision"] == name}
    return {
        "train_batch_size": micro_batch * accumulation * dp,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "parallelism": {
            "order": words["order"],
            "tp": {"size": words["tp"], "sequence_parallel": words["sequence_parallel"]},
            "pp": _pipeline(plan, model),
            "dp": {"size": dp},
        },
        "zero_optimization": _zero(words),
        **formats,
        "activation_checkpointing": {"mode": words["recompute"]},
    }


def _pipeline(plan: Plan, model: ModelSpec) -> dict[str, Any]:
    words, stages = plan.parallelism, plan.size("pp") * plan.size("chunks")
    balanced = words["partition"] == "balanced" and stages > 1
    partition = list(balanced_sizes(model.num_hidden_layers, stages)) if balanced else "even"
    chunks = {"chunks": plan.size("chunks")} if plan.size("chunks") > 1 else {}
    return {"size": plan.size("pp"), "schedule": words["schedule"], **chunks, "partition": partition}


def _zero(words: Mapping[str, object]) -> dict[str, Any]:
    offloads = {name: {"device": "cpu"} for name in ("offload_optimizer", "offload_param") if words[name]}
    return {"stage": words["zero_stage"], **offloads}


def question_of(job: Job, profile: Profile | None = None) -> Question:
    """What ``job`` asks: its model, machines and batch; with a profile the machines are those that it measured.

    Raises JobError for sections that are missing.
    """
    measured = profile is not None
    if job.model is None or job.data is None or (job.cluster is None and not measured):
        raise JobError(_missing(job, measured))
    hardware = build_hardware(job.cluster) if profile is None and job.cluster else None
    if profile is not None:
        hardware = measured_hardware(job, profile)
    assert hardware is not None, "a job without a profile has a cluster, or is refused above"
    fixed = read_fixed({"precision": job.precision}) if measured and job.precision != "fp64" else {}
    return Question(job.model, job.data.sequence_length, hardware, job.train_batch_size, fixed)


def _missing(job: Job, measured: bool) -> list[Problem]:
    examples = {
        "model": '"model": {"preset": "gpt3-175b"}',
        "data": '"data": {"sequence_length": 2048}',
        "cluster": '"cluster": {"device": "a100-80gb", "nodes": 8, "devices_per_node": 8}',
    }
    return [
        Problem(key, "is missing, and a prediction needs it", f"add it, for example {example}")
        for key, example in examples.items()
        if getattr(job, key) is None and not (measured and key == "cluster")
    ]


def strategy_of(job: Job) -> Strategies:
    """The strategy that ``job`` states. Raises JobError for what the cost model does not know."""
    if job.precision == "fp64":
        raise JobError([Problem("dtype", "float64 is for comparing, and is not predicted", 'write "float32"')])
    parallelism, zero = job.parallelism, job.zero_optimization
    return Strategies.build(
        dp=job.dp,
        tp=job.tp,
        pp=job.pp,
        chunks=parallelism.pp.chunks,
        micro_batch=job.micro_batch,
        num_microbatches=job.num_microbatches,
        zero_stage=zero.stage,
        sequence_parallel=parallelism.tp.sequence_parallel,
        recompute=RECOMPUTE_CODES[job.activation_checkpointing.most],
        schedule=SCHEDULE_CODES[schedule_like(job)],
        offload_optimizer=_is_offloaded(zero.offload_optimizer),
        offload_param=_is_offloaded(zero.offload_param),
        precision=PRECISION_CODES[job.precision],
        order=ORDER_CODES[parallelism.order],
        partition=PARTITION_CODES[_named_partition(job) or "even"],
    )


def schedule_like(job: Job) -> str:
    """The schedule whose closed form is nearest to the job's: itself, unless it is searched or written by hand."""
    pipeline = job.parallelism.pp
    if pipeline.schedule_file is None and pipeline.schedule in SCHEDULE_CODES:
        return pipeline.schedule
    schedule = job_schedule(job)
    if schedule.num_chunks > 1:
        return "zb_v" if schedule.placement is Placement.V else "interleaved_1f1b"
    return "zb_h1" if any(action.kind is Kind.W for row in schedule.rows for action in row) else "1f1b"


def _is_offloaded(offload: Any) -> bool:
    return offload is not None and offload.device != "none"


def cut_of(job: Job) -> Cut | None:
    """The job's stages, where they are neither even nor balanced, which its strategy says; ``auto`` must be settled."""
    stated = job.parallelism.pp.partition
    if isinstance(stated, str) or job.model is None or _named_partition(job) is not None:
        return None
    schedule = job_schedule(job)
    return Cut(tuple(stated), tuple(schedule.stage_rank(stage) for stage in range(schedule.num_stages)))


def _named_partition(job: Job) -> str | None:
    """What the job's partition is called, "even" or "balanced"; None for any other."""
    stated = job.parallelism.pp.partition
    if isinstance(stated, str) or job.model is None:
        return "even"
    for name, split in (("even", even_layers), ("balanced", balanced_sizes)):
        try:
            if tuple(stated) == split(job.model.num_hidden_layers, job.parallelism.pp.num_stages):
                return name
        except JobError:  # more stages than layers
            continue
    return None
