"""The job as types: every key with its type, range and default.

Run settings keep DeepSpeed's names and the model section keeps Hugging Face's. Only what one key says by itself is
judged here; what several keys say together is judged in ``rules`` and ``batch``, so that all problems of a job can be
reported at once. ``JobFile`` is what a file states; ``Job`` is the same with the sizes resolved.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict

SCHEDULES = ("naive", "gpipe", "1f1b")
PLANNED_SCHEDULES = ("interleaved_1f1b", "zb_h1")
AXES = ("tp", "pp", "dp")
DEFAULT_ORDER = ",".join(AXES)


def _as_whole(value: object) -> object:
    """Read 5e8 as 500000000: DeepSpeed's own examples write whole numbers so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without_spaces(value: object) -> object:
    return value.replace(" ", "") if isinstance(value, str) else value


# Upper bounds keep arithmetic on a mistyped number instant; they lie far above what any machine can train.
Whole = Annotated[int, BeforeValidator(_as_whole)]
Count = Annotated[Whole, Field(ge=1, le=10**9)]
CountOrZero = Annotated[Whole, Field(ge=0, le=10**9)]
Degree = Annotated[Whole, Field(ge=1, le=10**6)]
Steps = Annotated[Whole, Field(ge=1, le=10**12)]
StepsOrZero = Annotated[Whole, Field(ge=0, le=10**12)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1, max_length=4096)]


class Section(BaseModel):
    """Base of every section: immutable, unknown keys refused, no silent conversion, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


def _kv_heads(values: dict[str, Any]) -> int:
    return values["num_attention_heads"]


def _intermediate_size(values: dict[str, Any]) -> int:
    """4 × hidden for GPT-2; for Llama the same parameter count with three matrices: 8/3 × hidden, up to a 256."""
    hidden = values["hidden_size"]
    return 4 * hidden if values["model_type"] == "gpt2" else 256 * math.ceil(8 * hidden // 3 / 256)


def _positions(values: dict[str, Any]) -> int:
    return 1024 if values["model_type"] == "gpt2" else 4096


def _tied(values: dict[str, Any]) -> bool:
    return values["model_type"] == "gpt2"


def _activation(values: dict[str, Any]) -> Literal["gelu", "gelu_new", "silu"]:
    return "gelu_new" if values["model_type"] == "gpt2" else "silu"


def _num_elements(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


class ModelSpec(Section):
    """A decoder by Hugging Face's names: ``gpt2`` style (LayerNorm, learned positions, GELU, biases) or ``llama`` style
    (RMSNorm, rotary positions, SwiGLU, grouped-query attention).

    Left-out numbers follow the style: key-value heads equal the heads; the MLP is 4 × hidden wide (gpt2) or
    8/3 × hidden rounded up to a multiple of 256 (llama). Dropout is 0 unless stated.
    """

    preset: Text | None = Field(
        default=None, description="A known model to start from; other keys here override its numbers."
    )
    hf: Text | None = Field(default=None, description="A directory with Hugging Face's config.json to start from.")
    model_type: Literal["gpt2", "llama"] = Field(description="The style of the decoder.", examples=["gpt2"])
    vocab_size: Count = Field(description="Tokens in the vocabulary; need not divide by tp.", examples=[50257])
    hidden_size: Count = Field(description="Width of the residual stream.", examples=[768])
    num_hidden_layers: Annotated[Whole, Field(ge=1, le=10**5)] = Field(description="Decoder layers.", examples=[12])
    num_attention_heads: Count = Field(description="Query heads.", examples=[12])
    num_key_value_heads: Count = Field(default_factory=_kv_heads, description="Key-value heads; default: all heads.")
    intermediate_size: Count = Field(default_factory=_intermediate_size, description="Inner width of the MLP.")
    max_position_embeddings: Count = Field(default_factory=_positions, description="Longest sequence; gpt2: a table.")
    tie_word_embeddings: bool = Field(default_factory=_tied, description="The output head is the token embedding.")
    hidden_act: Literal["gelu", "gelu_new", "silu"] = Field(
        default_factory=_activation, description="gelu_new is GELU's tanh form, GPT-2's own; llama: silu."
    )
    rope_theta: Positive = Field(default=10000.0, description="Base of the rotary frequencies (llama).")
    norm_eps: Positive = Field(default=1e-5, description="Added to the variance in every norm.")
    initializer_range: Positive = Field(default=0.02, description="Standard deviation of the initial weights.")
    resid_pdrop: Probability = Field(
        default=0.0, description="Dropout on what attention and MLP add to the residual stream."
    )
    embd_pdrop: Probability = Field(default=0.0, description="Dropout on the embeddings.")
    attn_pdrop: Probability = Field(default=0.0, description="Dropout on the attention probabilities.")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Global name -> shape of every parameter, in model order (weights are ``[out, in]`` as torch keeps them)."""
        layer = self._layer_shapes()
        return {
            **self._embedding_shapes(),
            **{f"layers.{i}.{name}": shape for i in range(self.num_hidden_layers) for name, shape in layer.items()},
            **self._head_shapes(),
        }

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; tied embeddings count once."""
        ends = {**self._embedding_shapes(), **self._head_shapes()}
        return self.num_hidden_layers * _num_elements(self._layer_shapes()) + _num_elements(ends)

    def _embedding_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {"embed.tokens.weight": (self.vocab_size, self.hidden_size)}
        if self.model_type == "gpt2":
            shapes["embed.positions.weight"] = (self.max_position_embeddings, self.hidden_size)
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        heads_k = self.num_attention_heads * self.head_dim
        qkv = heads_k + 2 * self.num_key_value_heads * self.head_dim
        widen = ("mlp.up", self.intermediate_size) if self.model_type == "gpt2" else self._gate_up()
        return {
            **self._norm("attention_norm"),
            **self._linear("attention.qkv", qkv, self.hidden_size),
            **self._linear("attention.out", self.hidden_size, heads_k),
            **self._norm("mlp_norm"),
            **self._linear(*widen, self.hidden_size),
            **self._linear("mlp.down", self.hidden_size, self.intermediate_size),
        }

    def _gate_up(self) -> tuple[str, int]:
        return "mlp.gate_up", 2 * self.intermediate_size

    def _head_shapes(self) -> dict[str, tuple[int, ...]]:
        head = {} if self.tie_word_embeddings else {"head.weight": (self.vocab_size, self.hidden_size)}
        return {**self._norm("final_norm"), **head}

    def _norm(self, name: str) -> dict[str, tuple[int, ...]]:
        return {f"{name}.{part}": (self.hidden_size,) for part in self._parts()}

    def _linear(self, name: str, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        shapes = {"weight": (out_features, in_features), "bias": (out_features,)}
        return {f"{name}.{part}": shapes[part] for part in self._parts()}

    def _parts(self) -> tuple[str, ...]:
        return ("weight", "bias") if self.model_type == "gpt2" else ("weight",)


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

    @property
    def num_devices(self) -> int:
        """Devices in all nodes together."""
        return self.nodes * self.devices_per_node


class TensorParallel(Section):
    """Each layer's matrices split over ``size`` devices."""

    size: Degree = Field(default=1, description="Devices that share each layer.")
    sequence_parallel: bool = Field(default=False, description="Also split norms and dropout along the sequence.")


class PipelineParallel(Section):
    """The layers split over ``size`` devices, that work on different microbatches at the same time."""

    size: Degree = Field(default=1, description="Devices in a pipeline.")
    schedule: Text = Field(default="1f1b", description=f"Order of forwards and backwards: {', '.join(SCHEDULES)}.")
    chunks: Degree = Field(
        default=1, description="Model chunks on each device; more than 1 only in interleaved schedules."
    )
    partition: Literal["auto", "even"] | Annotated[tuple[Annotated[Whole, Strict()], ...], Strict(False)] = Field(
        default="even", description="Layers of each stage: even, auto, or a list of counts.", examples=["even"]
    )


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


class ActivationCheckpointing(Section):
    """What the backward recomputes instead of keeping."""

    mode: Literal["none", "selective", "full"] = Field(default="none", description="none, selective or full.")


class OptimizerParams(Section):
    """Numbers of the optimizer; what is left out has DeepSpeed's default."""

    lr: Positive = Field(default=1e-3, description="Peak learning rate.")
    betas: Annotated[tuple[Annotated[Probability, Strict()], Annotated[Probability, Strict()]], Strict(False)] = Field(
        default=(0.9, 0.999), description="AdamW's decay rates."
    )
    eps: Positive = Field(default=1e-8, description="AdamW's denominator offset.")
    weight_decay: NonNegative = Field(default=0.0, description="Decoupled weight decay.")
    momentum: Probability = Field(default=0.0, description="SGD's momentum.")


class Optimizer(Section):
    """The optimizer: AdamW or SGD."""

    type: Literal["AdamW", "SGD"] = Field(default="AdamW", description="AdamW or SGD.")
    params: OptimizerParams = OptimizerParams()


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


class Watchdog(Section):
    """How long a silent wait may be."""

    timeout_s: Positive = Field(default=300.0, description="Seconds without progress after which a rank ends the job.")


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
    gradient_clipping: NonNegative = Field(default=0.0, description="Largest global gradient norm; 0 is off.")
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
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

    def to_json(self) -> str:
        """A job file with every number written out, that loads to a Job equal to this one."""
        return self.model_dump_json(indent=2, exclude_none=True) + "\n"
