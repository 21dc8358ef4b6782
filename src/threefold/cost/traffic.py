"""What each axis sends in one optimizer step, when, how often and how many bytes.

Legend: B micro batch, S sequence, D hidden size, M microbatches of a step, H half layers of the stage. The patterns are
those of Megatron-LM: two all-reduces a layer and direction (Shoeybi et al. 2019), each of which sequence parallelism
splits into a reduce-scatter and an all-gather (Korthikanti et al. 2022).

Bytes are the payload: the whole tensor that goes into the collective (all-gather: that comes out of it), not what an
algorithm puts on the wire. A ring all-reduce of n bytes over g ranks sends 2 n (g - 1) / g from every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod

from threefold.job.spec import Job, ModelSpec
from threefold.layout import (
    Shard,
    compression_of,
    decoder_shards,
    fill_buckets,
    split_halves,
    stage_of_parameter,
    stage_parameters,
)
from threefold.layout.compression import factor_elements, sign_bytes
from threefold.layout.stages import EMBEDDING

ELEMENT_BYTES: Mapping[str, int] = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
"""Bytes of one element of activations and gradients, by the job's precision."""


SCALAR_BYTES = 8
"""Counts, losses and norms are summed in float64."""


@dataclass(frozen=True)
class Transfer:
    """One kind of message that a rank takes part in.

    ``axis`` names the group: "tp", "pp", "dp", "world", or "dp+tp" and "dp+pp" for groups over two axes.
    ``payload_bytes`` is the whole tensor that enters (all_gather: leaves) the collective on each rank; for a send the
    message. It happens ``count_per_step`` times in an optimizer step.
    """

    axis: str
    operation: str
    what: str
    when: str
    payload_bytes: int
    count_per_step: int

    @property
    def bytes_per_step(self) -> int:
        """Payload bytes of a step."""
        return self.payload_bytes * self.count_per_step


@dataclass(frozen=True)
class _Stage:
    """The numbers that the patterns need, for all the ``stages`` of one pipeline rank of a job."""

    job: Job
    model: ModelSpec
    sequence_length: int
    stages: tuple[int, ...]

    @property
    def last(self) -> int:
        return self.job.parallelism.pp.num_stages - 1

    @property
    def is_first(self) -> bool:
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        return self.last in self.stages

    @property
    def num_halves(self) -> int:
        return sum(len(self.halves[stage]) for stage in self.stages)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Global shapes of the parameters of these stages, and of both ends of the model."""
        return self.model.parameter_shapes(sorted({half // 2 for stage in self.stages for half in self.halves[stage]}))

    @cached_property
    def halves(self) -> tuple[range, ...]:
        pipeline = self.job.parallelism.pp
        return split_halves(self.model.num_hidden_layers, pipeline.num_stages, pipeline.partition)

    @property
    def holds_both_ends(self) -> bool:
        """Whether a tied embedding is one parameter here, instead of a copy on each of two ranks."""
        return self.is_first and self.is_last

    def users(self, name: str) -> tuple[int, ...]:
        """The stages of this rank that use a parameter."""
        owner = stage_of_parameter(name, self.halves)
        shared = name == EMBEDDING and self.model.tie_word_embeddings
        return tuple(stage for stage in self.stages if stage == owner or (shared and stage == self.last))

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.job.precision]

    @property
    def gradient_bytes(self) -> int:
        """Gradients accumulate in fp32 at least, and are summed so unless the job states another format."""
        stated = self.job.communication_data_type
        return ELEMENT_BYTES[stated] if stated else self.accumulated_bytes

    @property
    def accumulated_bytes(self) -> int:
        """Bytes of a gradient as it is kept."""
        return max(self.element_bytes, ELEMENT_BYTES["fp32"])

    @property
    def forwards(self) -> int:
        """How often half layers' forwards run for a microbatch: again in backward where that is recomputed."""
        return sum(len(self.halves[stage]) * (2 if self._is_recomputed(stage) else 1) for stage in self.stages)

    @property
    def again(self) -> str:
        """What to say of a forward that is recomputed."""
        recomputed = [self._is_recomputed(stage) for stage in self.stages]
        if not any(recomputed):
            return ""
        return " and recomputation" if all(recomputed) else " and recomputation of some stages"

    def _is_recomputed(self, stage: int) -> bool:
        return self.job.activation_checkpointing.of_stage(stage) == "full"

    @property
    def tokens(self) -> int:
        """B·S: tokens of one microbatch."""
        return self.job.micro_batch * self.sequence_length

    @property
    def activation_bytes(self) -> int:
        """B·S·D: the hidden states of one microbatch."""
        return self.tokens * self.model.hidden_size * self.element_bytes

    @property
    def widen(self) -> str:
        """The first matrix of the MLP."""
        return "mlp.gate_up" if self.model.model_type == "llama" else "mlp.up"

    @property
    def sequence_parallel(self) -> bool:
        return self.job.parallelism.tp.sequence_parallel and self.job.tp > 1


def rank_stages(job: Job, pp_coord: int) -> tuple[int, ...]:
    """The stages of pipeline rank ``pp_coord``: they go round the ranks, but those of zb_v go down and come back up."""
    pipeline = job.parallelism.pp
    turns_back = pipeline.schedule == "zb_v" and pipeline.schedule_file is None
    places = (job.pp - 1 - pp_coord if turns_back and turn % 2 else pp_coord for turn in range(pipeline.chunks))
    return tuple(turn * job.pp + place for turn, place in enumerate(places))


def estimate_traffic(
    job: Job,
    pp_coord: int,
    sequence_length: int | None = None,
    *,
    compressed: bool = True,
    stages: tuple[int, ...] | None = None,
) -> tuple[Transfer, ...]:
    """Everything that a rank sends in one optimizer step; all ranks with this pipeline coordinate send the same.

    ``stages`` are those that it holds, for a schedule of which ``rank_stages`` can't know. ``sequence_length`` defaults
    to the job's data section. ``compressed`` tells a step with the job's compression from one of the steps before it
    starts. Collectives over one rank are not sent and not listed. Evaluation, replica checks and the start of a run are
    not counted. Raises ValueError for a job without a model or without a sequence length.
    """
    if sequence_length is None and job.data is not None:
        sequence_length = job.data.sequence_length
    if job.model is None or sequence_length is None:
        raise ValueError("bytes are known only for a job with a model and a sequence length")
    stage = _Stage(job, job.model, sequence_length, stages or rank_stages(job, pp_coord))
    found = [*_tensor(stage), *_pipeline(stage), *_gradients(stage, compressed), *_scalars(stage)]
    return tuple(transfer for transfer in found if transfer.count_per_step and transfer.payload_bytes)


# Tensor parallel


def _tensor(stage: _Stage) -> Iterator[Transfer]:
    if stage.job.tp == 1:
        return
    yield from _sequence_parallel(stage) if stage.sequence_parallel else _all_reduced(stage)
    if stage.is_last:
        yield from _cross_entropy(stage)


def _all_reduced(stage: _Stage) -> Iterator[Transfer]:
    M, H = stage.job.num_microbatches, stage.num_halves

    def all_reduce(what: str, when: str, count: int) -> Transfer:
        return Transfer("tp", "all_reduce", what, when, stage.activation_bytes, count)

    when = f"forward{stage.again}, 2 a layer and microbatch"
    yield all_reduce("outputs of attention.out and mlp.down", when, M * stage.forwards)
    yield all_reduce(f"input gradients of attention.qkv and {stage.widen}", "backward, 2 a layer and microbatch", H * M)
    if stage.is_first:
        yield all_reduce("token embeddings", "forward, 1 a microbatch", M)
    if stage.is_last:
        yield all_reduce("input gradient of the head", "backward, 1 a microbatch", M)


def _sequence_parallel(stage: _Stage) -> Iterator[Transfer]:
    M, H = stage.job.num_microbatches, stage.num_halves

    def of(operation: str, what: str, when: str, count: int) -> Transfer:
        return Transfer("tp", operation, what, when, stage.activation_bytes, count)

    per_layer = "2 a layer and microbatch"
    forward = f"forward{stage.again}, {per_layer}"
    yield of("all_gather", f"inputs of attention.qkv and {stage.widen}", forward, M * stage.forwards)
    yield of("reduce_scatter", "outputs of attention.out and mlp.down", forward, M * stage.forwards)
    yield of("all_gather", "output gradients of attention.out and mlp.down", f"backward, {per_layer}", H * M)
    # The gathered inputs are not kept: memory for them is what sequence parallelism saves.
    yield of("all_gather", f"inputs of attention.qkv and {stage.widen} again", f"backward, {per_layer}", H * M)
    yield of("reduce_scatter", f"input gradients of attention.qkv and {stage.widen}", f"backward, {per_layer}", H * M)
    if stage.is_first:
        yield of("reduce_scatter", "token embeddings", "forward, 1 a microbatch", M)
        yield of("all_gather", "gradient of the token embeddings", "backward, 1 a microbatch", M)
    if stage.is_last:
        yield of("all_gather", "input of the head", "forward, 1 a microbatch", M)
        yield of("all_gather", "input of the head again", "backward, 1 a microbatch", M)
        yield of("reduce_scatter", "input gradient of the head", "backward, 1 a microbatch", M)


def _cross_entropy(stage: _Stage) -> Iterator[Transfer]:
    """Logits stay split over the vocabulary; only a maximum, a sum and the label's logit a token are shared."""
    M = stage.job.num_microbatches
    # A loss in half precision would lose the small differences that training lives on: it is computed in fp32.
    element_bytes = max(stage.element_bytes, ELEMENT_BYTES["fp32"])
    when = "forward, 1 a microbatch"
    yield Transfer("tp", "all_reduce", "largest logit of each token", when, stage.tokens * element_bytes, M)
    what = "sum of exponentials and label's logit of each token"
    yield Transfer("tp", "all_reduce", what, when, 2 * stage.tokens * element_bytes, M)


# Pipeline parallel


def _pipeline(stage: _Stage) -> Iterator[Transfer]:
    # Under sequence parallelism every tp rank has, and sends, its own part of the sequence.
    message_bytes = stage.activation_bytes // (stage.job.tp if stage.sequence_parallel else 1)
    M = stage.job.num_microbatches
    # Between two stages of one rank nothing is sent.
    on = sum(index != stage.last and index + 1 not in stage.stages for index in stage.stages)
    back = sum(index != 0 and index - 1 not in stage.stages for index in stage.stages)
    each = "1 a microbatch" if stage.last < stage.job.pp else "1 a stage and microbatch"
    yield Transfer("pp", "send", "activations to the next stage", f"forward, {each}", message_bytes, M * on)
    what = "gradient of the activations to the previous stage"
    yield Transfer("pp", "send", what, f"backward, {each}", message_bytes, M * back)


# Data parallel


@dataclass(frozen=True)
class GradientGroup:
    """Gradients that are summed over the same ``axis``: local shapes in each bucket, in the order of filling.

    ``uses`` says on how many parts of the model a bucket's parameters are used (a tied embedding on two), ``backwards``
    in the backward passes of how many stages. ``compressed`` ones are those that the job's compression takes.
    """

    axis: str
    what: str
    bucket_shapes: tuple[tuple[tuple[int, ...], ...], ...]
    uses: tuple[int, ...]
    backwards: tuple[int, ...]
    compressed: bool = False

    @property
    def bucket_elements(self) -> tuple[int, ...]:
        """Local elements of each bucket."""
        return tuple(sum(map(prod, shapes)) for shapes in self.bucket_shapes)


def gradient_groups(job: Job, pp_coord: int, stages: tuple[int, ...] | None = None) -> tuple[GradientGroup, ...]:
    """How the gradients of pipeline rank ``pp_coord`` are put into buckets; parameters in reverse model order.

    Most are summed over dp. Under sequence parallelism each tp rank sees a part of the tokens, so the gradients of
    replicated parameters are summed over dp and tp. A tied embedding is summed over dp and the ranks of the first and
    the last stage, unless one rank holds both. A bucket over dp never spans two stages, and under ZeRO stage 3 never
    two parts of the model. ``stages`` as in ``estimate_traffic``.
    """
    if job.model is None:
        raise ValueError("gradient buckets are known only for a job with a model")
    stage = _Stage(job, job.model, 1, stages or rank_stages(job, pp_coord))
    shards = _shards(stage)
    shapes = _local_shapes(stage, shards)
    tied = {EMBEDDING} if job.model.tie_word_embeddings and not stage.holds_both_ends else set()
    partial = _replicated(shapes, shards) - tied if job.parallelism.tp.sequence_parallel else set()
    plain = set(shapes) - tied - partial
    kinds = _kinds(job, shapes, shards, partial)
    used_twice = {EMBEDDING} if job.model.tie_word_embeddings and stage.holds_both_ends else set()

    def groups(axis: str, what: str, names: Set[str]) -> Iterator[GradientGroup]:
        for kind in sorted({kinds[name] for name in names & kinds.keys()} | {_WHOLE}):
            mine = {name: shape for name, shape in shapes.items() if name in names and kinds[name] == kind}
            by_part = axis == "dp" and job.zero_optimization.stage == 3

            def apart(name: str, over_dp: bool = axis == "dp", by_part: bool = by_part) -> tuple[object, ...]:
                return stage.users(name) if over_dp else (), _part_of(name) if by_part else ""

            buckets = _fill(mine, job.zero_optimization.reduce_bucket_size, apart)
            uses = tuple(1 + bool(used_twice & set(bucket)) for bucket in buckets)
            backwards = tuple(max(len(stage.users(name)) for name in bucket) for bucket in buckets)
            held = tuple(tuple(shapes[name] for name in bucket) for bucket in buckets)
            yield GradientGroup(axis, what, held, uses, backwards, compressed=kind != _WHOLE)

    return (
        *groups("dp", "gradients", plain),
        *groups("dp+tp", "gradients of replicated parameters", partial),
        *groups("dp+pp", "gradient of the tied embedding", tied),
    )


_WHOLE = 2


def _kinds(
    job: Job, shapes: Mapping[str, tuple[int, ...]], shards: Mapping[str, Shard], partial: Set[str]
) -> dict[str, int]:
    """What shares buckets: compressed shards (0), compressed copies that tp makes (1), what is not compressed."""
    settings, copied = compression_of(job), _replicated(shapes, shards) - partial if job.tp > 1 else set()
    return {
        name: int(name in copied) if settings is not None and settings.compresses(shape) else _WHOLE
        for name, shape in shapes.items()
    }


def _fill(
    shapes: Mapping[str, Sequence[int]], limit: int, apart: Callable[[str], tuple[object, ...]]
) -> list[list[str]]:
    """The names in each bucket; ``apart`` tells what must not share one."""
    buckets = []
    for _, run in groupby(shapes, key=apart):
        part = list(run)
        filled = fill_buckets([prod(shapes[name]) for name in part], limit)
        buckets += [[part[index] for index in bucket] for bucket in filled]
    return buckets


def _part_of(name: str) -> str:
    """The part of the model that a parameter belongs to: ``embed``, ``layers.3``, ``final_norm`` or ``head``."""
    words = name.split(".")
    return ".".join(words[:2]) if words[0] == "layers" else words[0]


def _replicated(names: Iterable[str], shards: Mapping[str, Shard]) -> set[str]:
    return {name for name in names if shards[name].dim is None}


def _shards(stage: _Stage) -> dict[str, Shard]:
    """The shard of each of the rank's parameters, the last one of the model first."""
    model, shapes = stage.model, stage.shapes
    held = (stage_parameters(shapes, stage.halves, index, tied=model.tie_word_embeddings) for index in stage.stages)
    names = dict.fromkeys(name for names in held for name in names)
    mine = {name: shapes[name] for name in reversed(names)}
    return decoder_shards(
        mine, model.num_attention_heads, model.num_key_value_heads, model.head_dim, stage.job.tp, tp_coord=0
    )


def _local_shapes(stage: _Stage, shards: Mapping[str, Shard]) -> dict[str, tuple[int, ...]]:
    """What each tp rank holds of the stage's parameters, vocabulary padding included."""
    return {name: tuple(part.local_shape(stage.shapes[name])) for name, part in shards.items()}


def local_parameters(job: Job, pp_coord: int, stages: tuple[int, ...] | None = None) -> int:
    """Parameters that one device holds, vocabulary padding and a tied copy included; ``stages`` as above."""
    if job.model is None:
        raise ValueError("parameters are known only for a job with a model")
    stage = _Stage(job, job.model, 1, stages or rank_stages(job, pp_coord))
    return sum(map(prod, _local_shapes(stage, _shards(stage)).values()))


def _gradients(stage: _Stage, compressed: bool) -> Iterator[Transfer]:
    job = stage.job
    group_size = {"dp": job.dp, "dp+tp": job.dp * job.tp, "dp+pp": 2 * job.dp}
    for group in gradient_groups(job, 0, stage.stages):
        size = group_size[group.axis]
        # ZeRO cuts a bucket into equal shards, so it is padded to a multiple of the group.
        multiple = size if job.zero_optimization.stage else 1
        padded = [-(-elements // multiple) * multiple for elements in group.bucket_elements]
        takes = group.compressed and compressed and size > 1
        if takes:
            yield from (
                _in_factors(stage, group) if job.gradient_compression.type == "powersgd" else _in_signs(group, size)
            )
        buckets = Counter(zip(padded, group.uses, group.backwards, strict=True))
        for (elements, uses, backwards), count in buckets.items():
            if size > 1:
                sent = _reduced(stage, group, elements, uses, backwards, count)
                yield from (transfer for transfer in sent if not (takes and "gradient" in transfer.what))


def _in_factors(stage: _Stage, group: GradientGroup) -> Iterator[Transfer]:
    """PowerSGD: two all-reduces a bucket (Vogels et al. 2019)."""
    for shapes in group.bucket_shapes:
        left, right = factor_elements(shapes, stage.job.gradient_compression.rank)
        for name, elements in (("left", left), ("right", right)):
            payload_bytes = elements * stage.accumulated_bytes
            yield Transfer(
                group.axis, "all_reduce", f"{name} factors of {group.what}", "after backward", payload_bytes, 1
            )


def _in_signs(group: GradientGroup, size: int) -> Iterator[Transfer]:
    """1-bit Adam: signs to the rank that sums a chunk, and signs of the sum to all (Tang et al. 2021)."""
    what = f"signs of the momentum, in place of {group.what}"
    for elements in group.bucket_elements:
        for operation in ("all_to_all", "all_gather"):
            yield Transfer(group.axis, operation, what, "in the optimizer step", sign_bytes(elements, size), 1)


def _reduced(
    stage: _Stage, group: GradientGroup, elements: int, uses: int, backwards: int, count: int
) -> Iterator[Transfer]:
    """Stage 0 all-reduces; ZeRO splits that into a reduce-scatter and all-gathers (Rajbhandari et al. 2020).

    Stages 2 and 3 do so for buckets over dp alone; the few others are gathered as in stage 1.
    """
    zero, M = stage.job.zero_optimization.stage, stage.job.num_microbatches
    axis, early = group.axis, group.axis == "dp"
    gradient_bytes, parameter_bytes = elements * stage.gradient_bytes, elements * stage.element_bytes
    # Only dp buckets start while backward runs: two communicators in flight could lock each other up.
    when = "backward of the last microbatch" if early else "after backward"
    if zero == 0:
        yield Transfer(axis, "all_reduce", group.what, when, gradient_bytes, count)
        return
    if zero >= 2 and early:
        number = backwards * count * M
        yield Transfer(axis, "reduce_scatter", group.what, "backward of each microbatch", gradient_bytes, number)
    else:
        yield Transfer(axis, "reduce_scatter", group.what, when, gradient_bytes, count)
    if zero == 3 and early:
        when = "before forward and again before backward of each microbatch"
        yield Transfer(axis, "all_gather", "parameters", when, parameter_bytes, 2 * uses * count * M)
    else:
        yield Transfer(axis, "all_gather", "updated parameters", "after the optimizer step", parameter_bytes, count)


def _scalars(stage: _Stage) -> Iterator[Transfer]:
    if stage.is_last and stage.job.dp > 1:
        yield Transfer("dp", "all_reduce", "number of valid tokens", "once a step", SCALAR_BYTES, 1)
    if stage.job.world_size > 1:
        what = "loss sum, valid tokens, squared gradient norm, stop flag"
        yield Transfer("world", "all_reduce", what, "once a step", 4 * SCALAR_BYTES, 1)
