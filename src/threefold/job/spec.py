"""The job as types: every key with its type, range and default.

Run settings keep DeepSpeed's names and the model section keeps Hugging Face's. Only what one key says by itself is
judged here; what several keys say together is judged in ``rules`` and ``batch``, so that all problems of a job can be
reported at once. ``JobFile`` is what a file states; ``Job`` is the same with the sizes resolved.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializerFunctionWrapHandler, Strict, model_serializer

from threefold.job.base import (
    Count,
    Degree,
    NonNegative,
    Positive,
    Probability,
    Section,
    Steps,
    StepsOrZero,
    Text,
    Whole,
)
from threefold.job.model import ModelSpec

CHUNKS_OF: Mapping[str, int | None] = MappingProxyType(
    {"naive": 1, "gpipe": 1, "1f1b": 1, "interleaved_1f1b": None, "zb_h1": 1, "zb_v": 2, "searched": None}
)
"""Model chunks that a schedule puts on each device; None stands for any number."""
SCHEDULES = tuple(CHUNKS_OF)
AXES = ("tp", "pp", "dp")
DEFAULT_ORDER = ",".join(AXES)


def _without_spaces(value: object) -> object:
    return value.replace(" ", "") if isinstance(value, str) else value


def _link_bytes_per_s(text: str) -> float:
    """8x200Gb/s is 8 links of 200e9 bits a second, 2x25GB/s two links of 25e9 bytes."""
    speed, count = text.removesuffix("/s"), 1
    if "x" in speed:
        links, speed = speed.split("x")
        count = int(links)
    bits = 1 if speed.endswith("Gb") else 8
    return count * float(speed[:-2]) * 1e9 * bits / 8


class DataSpec(Section):
    """Token directories made by ``threefold data build``, and how long a sample is."""

    train: Text | None = Field(
        default=None, description="Directory with the training tokens.", examples=["data/tokens"]
    )
    validation: Text | None = Field(default=None, description="Directory with held-out tokens; default: that of train.")
    sequence_length: Count = Field(description="Tokens of one sample.", examples=[1024])


class ClusterSpec(Section):
    """The machines: ``nodes`` × ``devices_per_node`` devices of one kind."""

    device: Text = Field(description="Kind of device.", examples=["a100-80gb", "cpu"])
    nodes: Degree = Field(default=1, description="Machines.")
    devices_per_node: Degree = Field(description="Devices in each machine.", examples=[8])
    inter_node: Annotated[str, Field(pattern=r"^([1-9]\d*x)?\d+(\.\d+)?G[bB]/s$")] | None = Field(
        default=None,
        description="Network of one node, LINKSxSPEED; Gb/s counts bits, GB/s counts bytes.",
        examples=["8x200Gb/s"],
    )

    shared_memory: bool | None = Field(
        default=None,
        description="CPU ranks of one machine exchange through shared memory, not sockets; default: where they can.",
        examples=[False],
    )

    @property
    def num_devices(self) -> int:
        """Devices in all nodes together."""
        return self.nodes * self.devices_per_node

    @property
    def inter_node_bytes_per_s(self) -> float | None:
        """What one node sends over all its links together; None where it is not stated."""
        return None if self.inter_node is None else _link_bytes_per_s(self.inter_node)


def as_count(value: float) -> float:
    """4 for 4.0, which is how it is written and shown."""
    return int(value) if float(value).is_integer() else value


LayerCount = Annotated[float, Strict(), Field(le=10**9, allow_inf_nan=False), AfterValidator(as_count)]


class TensorParallel(Section):
    """Each layer's matrices split over ``size`` devices."""

    size: Degree = Field(default=1, description="Devices that share each layer.")
    sequence_parallel: bool = Field(default=False, description="Also split norms and dropout along the sequence.")


class PipelineParallel(Section):
    """The layers split over ``size`` devices, that work on different microbatches at the same time."""

    size: Degree = Field(default=1, description="Devices in a pipeline.")
    schedule: Text = Field(default="1f1b", description=f"Order of forwards and backwards: {', '.join(SCHEDULES)}.")
    schedule_file: Text | None = Field(
        default=None,
        description="A schedule as text, as `threefold schedule -o FILE` writes it, instead of a name.",
        examples=["schedule.txt"],
    )
    chunks: Degree = Field(
        default=1, description="Model chunks on each device: more than 1 for interleaved_1f1b; zb_v has 2."
    )
    partition: Literal["auto", "even"] | Annotated[tuple[LayerCount, ...], Strict(False)] = Field(
        default="auto",
        description="Layers of each stage (pp × chunks of them): auto (balanced by costs), even, or a list of counts; "
        "a half is a layer's attention or feed-forward.",
        examples=["auto"],
    )

    @property
    def num_stages(self) -> int:
        """Stages over all devices, each of their chunks counted."""
        return self.size * self.chunks

    @model_serializer(mode="wrap")
    def _without_a_second_schedule(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A file excludes a name, also where the name is only the default."""
        written = write(self)
        if self.schedule_file is not None:
            written.pop("schedule", None)
        return written


class DataParallel(Section):
    """Copies of the model that work on different samples; left out, they fill the world."""

    size: Degree | None = Field(default=None, description="Copies; default: world / (tp × pp).", examples=[1])


class Parallelism(Section):
    """The three axes and which of them varies fastest over the ranks."""

    order: Annotated[str, BeforeValidator(_without_spaces)] = Field(
        default=DEFAULT_ORDER, description="Axes from the innermost (neighbouring ranks) to the outermost."
    )
    tp: TensorParallel = TensorParallel()
    pp: PipelineParallel = PipelineParallel()
    dp: DataParallel = DataParallel()

    @property
    def axes(self) -> tuple[str, ...]:
        """The order as a tuple, innermost first."""
        return tuple(self.order.split(","))


class Offload(Section):
    """Where a ZeRO state lives when it is not on the device."""

    device: Literal["none", "cpu"] = Field(default="cpu", description="cpu, or none for no offload.")
    pin_memory: bool = Field(default=False, description="Page-locked host memory, for faster copies.")


class ZeroOptimization(Section):
    """What data-parallel copies split instead of repeat: 1 optimizer states, 2 also gradients, 3 also parameters."""

    stage: Annotated[Whole, Field(ge=0, le=3)] = Field(
        default=0, description="ZeRO stage; 0 is plain data parallelism."
    )
    offload_optimizer: Offload | None = Field(default=None, description="Keep optimizer states off the device.")
    offload_param: Offload | None = Field(default=None, description="Keep parameters off the device (stage 3).")
    reduce_bucket_size: Count = Field(default=4_000_000, description="Elements of one gradient bucket.")
    overlap_comm: bool = Field(default=True, description="Reduce buckets while the backward still runs.")


class Fp16(Section):
    """Half precision with loss scaling, by DeepSpeed's names."""

    enabled: bool = Field(default=False, description="Train in float16.")
    loss_scale: NonNegative = Field(default=0.0, description="Fixed loss scale; 0 adapts it.")
    initial_scale_power: Annotated[Whole, Field(ge=0, le=64)] = Field(
        default=16, description="The first scale is 2^this."
    )
    loss_scale_window: Count = Field(default=1000, description="Steps without overflow before the scale doubles.")
    hysteresis: Count = Field(default=2, description="Overflows that are tolerated before the scale halves.")
    min_loss_scale: Positive = Field(default=1.0, description="The scale never falls below this.")


class Bf16(Section):
    """bfloat16 with fp32 master weights."""

    enabled: bool = Field(default=False, description="Train in bfloat16.")


Recompute = Literal["none", "selective", "full"]
_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


class ActivationCheckpointing(Section):
    """What the backward recomputes instead of keeping."""

    mode: Recompute = Field(default="none", description="none, selective or full.")
    stages: Annotated[tuple[Recompute, ...], Strict(False)] | None = Field(
        default=None,
        description="A mode for each stage (pp × chunks of them), in place of one for all.",
        examples=[["full", "selective"]],
    )

    def of_stage(self, stage: int) -> Recompute:
        """What ``stage`` recomputes."""
        return self.mode if self.stages is None else self.stages[stage]

    @property
    def most(self) -> Recompute:
        """The most that any stage recomputes, for estimates that know one mode only."""
        return max(self.stages or (self.mode,), key=_RECOMPUTES.index)


class OptimizerParams(Section):
    """Numbers of the optimizer; what is left out has DeepSpeed's default."""

    lr: Positive = Field(default=1e-3, description="Peak learning rate.")
    betas: Annotated[tuple[Annotated[Probability, Strict()], Annotated[Probability, Strict()]], Strict(False)] = Field(
        default=(0.9, 0.999), description="AdamW's decay rates."
    )
    eps: Positive = Field(default=1e-8, description="AdamW's denominator offset.")
    weight_decay: NonNegative = Field(default=0.0, description="Decoupled weight decay.")
    momentum: Probability = Field(default=0.0, description="SGD's momentum.")
    freeze_step: Steps | None = Field(
        default=None, description="OneBitAdam's steps of plain Adam, before only signs travel.", examples=[100]
    )


class Optimizer(Section):
    """The optimizer: AdamW, SGD, or Adam whose momentum travels as one bit an element."""

    type: Literal["AdamW", "SGD", "OneBitAdam"] = Field(default="AdamW", description="AdamW, SGD or OneBitAdam.")
    params: OptimizerParams = OptimizerParams()


class GradientCompression(Section):
    """Gradients of matrices sent between replicas as two thin factors (PowerSGD), the rest fed back later."""

    type: Literal["none", "powersgd"] = Field(default="none", description="none or powersgd.")
    rank: Count = Field(default=4, description="Columns of the factors.")
    start_step: StepsOrZero = Field(default=10, description="Steps whose gradients travel whole before it starts.")


class Scheduler(Section):
    """The learning rate over the steps: warm-up to the peak, then constant, linear or cosine down to a floor."""

    type: Literal["constant", "linear", "cosine"] = Field(default="constant", description="Shape after the warm-up.")
    warmup_steps: StepsOrZero = Field(default=0, description="Steps from 0 to the peak.")
    warmup_type: Literal["linear", "log"] = Field(
        default="linear", description="Shape of the warm-up; log is DeepSpeed's."
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, description="Floor as a fraction of the peak."
    )
    total_steps: Steps | None = Field(
        default=None, description="Step of the floor; default: the job's steps.", examples=[1000]
    )
    batch_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="Scale the peak by train_batch_size / reference_batch_size, or by its root."
    )
    reference_batch_size: Count | None = Field(default=None, description="Batch that lr was tuned for.", examples=[256])


class Evaluation(Section):
    """Loss on held-out tokens."""

    every: StepsOrZero = Field(default=0, description="Steps between evaluations; 0 is never.")
    batches: Count = Field(default=8, description="Global batches in each evaluation.")


class Checkpoint(Section):
    """Saved states."""

    every: StepsOrZero = Field(default=0, description="Steps between checkpoints; 0 is never.")
    keep_last: Count | None = Field(default=None, description="Checkpoints to keep; default: all.", examples=[2])


class Logging(Section):
    """What is written while training, beside metrics.jsonl."""

    tensorboard: bool = Field(default=False, description="Write TensorBoard events into the run directory.")
    every: Steps = Field(default=1, description="Steps between two lines of metrics.")


class ReplicaCheck(Section):
    """The proof that replicas are still equal: a hash of the parameters, compared over them."""

    every: StepsOrZero = Field(default=100, description="Steps between comparisons; 0 is never.")


class Compile(Section):
    """``torch.compile`` of each layer, what communicates and dropouts left out."""

    enabled: bool = Field(default=False, description="Compile the layers in the first step.")
    backend: Literal["inductor", "cudagraphs", "aot_eager", "eager"] = Field(
        default="inductor", description="Backend of torch.compile; the eager ones are for finding faults."
    )


class Watchdog(Section):
    """How long a silent wait may be."""

    timeout_s: Annotated[float, Field(ge=1, le=30 * 86400)] = Field(
        default=300.0, description="Seconds without progress after which a rank ends the job."
    )


class Subject(Section):
    """What is trained, on what. All may be missing: explaining a layout needs none of them."""

    model: ModelSpec | None = None
    data: DataSpec | None = None
    cluster: ClusterSpec | None = None
    steps: Steps | None = Field(default=None, description="Optimizer steps.", examples=[1000])
    seed: Annotated[Whole, Field(ge=0, lt=2**63)] = Field(default=0, description="Of weights, data order and dropout.")


class StatedBatch(Section):
    """The batch triangle as stated: train_batch_size = micro batch × accumulation × dp; what is missing is derived."""

    train_batch_size: Count | None = Field(
        default=None, description="Samples of one step, over all replicas.", examples=[8]
    )
    train_micro_batch_size_per_gpu: Count | None = Field(
        default=None, description="Samples of one microbatch of one replica.", examples=[1]
    )
    gradient_accumulation_steps: Count | None = Field(
        default=None, description="Microbatches of one step on each replica.", examples=[1]
    )


class Batch(Section):
    """The batch triangle with all three sides."""

    train_batch_size: Count
    train_micro_batch_size_per_gpu: Count
    gradient_accumulation_steps: Count


class Settings(Section):
    """How it is trained; everything has a default."""

    parallelism: Parallelism = Parallelism()
    zero_optimization: ZeroOptimization = ZeroOptimization()
    dtype: Literal["float32", "float64"] = Field(
        default="float32", description="Number format when fp16 and bf16 are off."
    )
    fp16: Fp16 = Fp16()
    bf16: Bf16 = Bf16()
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = Field(
        default=None,
        description="Number format in which gradients are summed over ranks; default: that in which they accumulate.",
        examples=["bf16"],
    )
    gradient_compression: GradientCompression = GradientCompression()
    gradient_clipping: NonNegative = Field(default=0.0, description="Largest global gradient norm; 0 is off.")
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    compile: Compile = Compile()
    optimizer: Optimizer = Optimizer()
    scheduler: Scheduler = Scheduler()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    replica_check: ReplicaCheck = ReplicaCheck()
    watchdog: Watchdog = Watchdog()


# pydantic collects fields from the last base to the first, which gives files their reading order.
class JobFile(Settings, StatedBatch, Subject):
    """What a job file states, each key judged for itself."""


class Job(Settings, Batch, Subject):
    """A judged job: batch triangle and data-parallel size are resolved, every rule holds. Made by ``load_job``."""

    @property
    def dp(self) -> int:
        """Data-parallel copies."""
        size = self.parallelism.dp.size
        assert size is not None, "a Job is made by load_job, which resolves the data-parallel size"
        return size

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.parallelism.tp.size

    @property
    def pp(self) -> int:
        """Pipeline size."""
        return self.parallelism.pp.size

    @property
    def world_size(self) -> int:
        """Ranks: dp × tp × pp."""
        return self.dp * self.tp * self.pp

    @property
    def micro_batch(self) -> int:
        """Samples of one microbatch."""
        return self.train_micro_batch_size_per_gpu

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one step on each replica."""
        return self.gradient_accumulation_steps

    @property
    def precision(self) -> Literal["fp32", "fp16", "bf16", "fp64"]:
        """Number format of the computation."""
        if self.fp16.enabled:
            return "fp16"
        if self.bf16.enabled:
            return "bf16"
        return "fp64" if self.dtype == "float64" else "fp32"

    @property
    def is_cpu(self) -> bool:
        """Whether the ranks compute on CPUs."""
        return self.cluster is None or self.cluster.device == "cpu"

    @property
    def shared_memory(self) -> bool:
        """Whether ranks exchange through shared memory where they can."""
        return self.is_cpu and (self.cluster is None or self.cluster.shared_memory is not False)

    def to_json(self) -> str:
        """A job file with every number written out, that loads to a Job equal to this one."""
        return self.model_dump_json(indent=2, exclude_none=True) + "\n"
