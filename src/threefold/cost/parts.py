"""What each part of a job's model costs on one rank: the embedding, a layer, the head with the loss.

Stages are made of parts, so whoever cuts a model into stages starts from these numbers. They come from a profile, from
the cost model where the device is known, or from FLOPs alone, which need no device: then seconds are of a device that
does 10¹² a second, and only their ratios mean something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from threefold.cost.calibration import load_calibration
from threefold.cost.case import Case, Machine
from threefold.cost.estimate import USABLE_MEMORY
from threefold.cost.hardware import build_hardware
from threefold.cost.held import state_bytes_per_parameter
from threefold.cost.layer import PartCost, embedding_cost, head_cost, layer_cost
from threefold.cost.memory import layer_activation_bytes
from threefold.cost.profile import PartProfile, Profile
from threefold.cost.shape import shape_of
from threefold.cost.stages import message_bytes, message_s
from threefold.cost.strategies import ORDER_CODES, PRECISION_CODES, RECOMPUTE_CODES, Strategies
from threefold.cost.traffic import ELEMENT_BYTES
from threefold.job.spec import Job, ModelSpec

NOMINAL_FLOPS_PER_S = 1e12


@dataclass(frozen=True)
class PartCosts:
    """Seconds of one microbatch; ``backward_s`` in one pass, ``input_grad_s`` and ``weight_grad_s`` in two.

    ``step_s`` is the part's share of the optimizer step, ``sync_s`` of the gradients' reduction that nothing hides.
    ``activation_bytes`` are kept for a microbatch, ``static_bytes`` always.
    """

    forward_s: float
    backward_s: float
    input_grad_s: float
    weight_grad_s: float
    step_s: float = 0.0
    sync_s: float = 0.0
    activation_bytes: float = 0.0
    static_bytes: float = 0.0

    def scaled(self, share: Share) -> PartCosts:
        """What a share of the part costs."""
        return PartCosts(
            forward_s=self.forward_s * share.seconds,
            backward_s=self.backward_s * share.seconds,
            input_grad_s=self.input_grad_s * share.seconds,
            weight_grad_s=self.weight_grad_s * share.seconds,
            step_s=self.step_s * share.parameters,
            sync_s=self.sync_s * share.parameters,
            activation_bytes=self.activation_bytes * share.activations,
            static_bytes=self.static_bytes * share.parameters,
        )


@dataclass(frozen=True)
class Share:
    """How much of a layer its attention with its norm is; the feed-forward is the rest. 1 is all."""

    seconds: float = 0.5
    activations: float = 0.5
    parameters: float = 0.5

    @property
    def rest(self) -> Share:
        """The other half's."""
        return Share(1 - self.seconds, 1 - self.activations, 1 - self.parameters)


@dataclass(frozen=True)
class ModelCosts:
    """The parts of a model on one rank.

    ``action_s`` is added to every forward and backward pass of a stage, and ``post_s`` for each message that it sends
    or receives; ``message_s`` is how long one message is under way. ``step_s`` is added to each rank's step.
    ``usable_bytes`` of a device is None where it is not known. ``source`` says in words where the numbers come from.
    ``attention`` is its share of a layer, or None where nothing tells the halves of a layer apart.
    """

    embedding: PartCosts
    layer: PartCosts
    head: PartCosts
    source: str
    action_s: float = 0.0
    post_s: float = 0.0
    message_s: float = 0.0
    step_s: float = 0.0
    usable_bytes: float | None = None
    has_seconds: bool = True
    """Whether seconds are those of a real device."""
    slowness: tuple[float, ...] = ()
    """How many times as long each stage takes for the same passes; empty where all take the same."""
    attention: Share | None = None

    @cached_property
    def halves(self) -> tuple[PartCosts, PartCosts]:
        """A layer's attention and its feed-forward."""
        share = self.attention or Share()
        return self.layer.scaled(share), self.layer.scaled(share.rest)


def model_costs(job: Job, profile: Profile | None = None) -> ModelCosts:
    """The costs of ``job``'s parts: measured, else modelled. Raises JobError for a job without a model."""
    if profile is not None:
        return measured_costs(job, profile)
    if job.is_cpu or job.precision == "fp64" or job.data is None:
        return flops_costs(job)
    return device_costs(job)


# From a profile


def measured_costs(job: Job, profile: Profile) -> ModelCosts:
    """What ``profile`` measured; it must be of the work that ``job`` does."""
    assert job.model is not None and job.data is not None, "a profile is checked against a job with both"
    message = profile.link("p2p", 2)
    num_bytes = job.micro_batch * job.data.sequence_length * job.model.hidden_size * ELEMENT_BYTES[job.precision]
    if job.parallelism.tp.sequence_parallel:
        num_bytes //= job.tp
    tied = job.model.tie_word_embeddings and job.pp > 1
    return ModelCosts(
        embedding=_measured_part(job, profile, profile.embedding, tied),
        layer=_measured_part(job, profile, profile.layer),
        head=_measured_part(job, profile, profile.head, tied),
        source="measured costs",
        action_s=profile.action_s,
        post_s=profile.post_s if job.pp > 1 else 0.0,
        message_s=message.seconds(num_bytes) if message and job.pp > 1 else 0.0,
        step_s=profile.step_s,
        usable_bytes=profile.machine.memory_bytes,
        attention=_measured_share(profile) or attention_share(job),
    )


def _measured_share(profile: Profile) -> Share | None:
    attention, feed_forward = profile.attention, profile.feed_forward
    if attention is None or feed_forward is None:
        return None

    def share(of: Callable[[PartProfile], float]) -> float:
        whole = of(attention) + of(feed_forward)
        return of(attention) / whole if whole else 0.5

    return Share(
        share(lambda part: part.forward_s.median + part.backward_s.median),
        share(lambda part: part.activation_bytes),
        share(lambda part: part.parameters),
    )


def _measured_part(job: Job, profile: Profile, part: PartProfile, tied: bool = False) -> PartCosts:
    shards = job.dp if job.zero_optimization.stage >= 1 else 1
    reduce_s, gather_s = _replica_seconds(job, profile, part.parameters, 2 * job.dp if tied else job.dp)
    # A GPU reduces the first buckets while it computes; on CPUs the reduction takes the cores that compute.
    hidden_s = part.backward_s.median if job.zero_optimization.overlap_comm and profile.machine.device != "cpu" else 0.0
    return PartCosts(
        forward_s=part.forward_s.median,
        backward_s=part.backward_s.median,
        input_grad_s=part.input_grad_s.median,
        weight_grad_s=part.weight_grad_s.median,
        step_s=profile.optimizer_s_per_parameter * part.parameters / shards + gather_s,
        sync_s=max(0.0, reduce_s - hidden_s),
        activation_bytes=part.activation_bytes,
        static_bytes=state_bytes_per_parameter(job) * part.parameters,
    )


def _replica_seconds(job: Job, profile: Profile, parameters: int, ranks: int) -> tuple[float, float]:
    """Seconds to sum gradients over the ranks that hold a copy, and to gather what ZeRO has split."""
    if ranks == 1:
        return 0.0, 0.0
    reduce = profile.link("reduce_scatter" if job.zero_optimization.stage >= 1 else "all_reduce", ranks)
    gather = profile.link("all_gather", ranks) if job.zero_optimization.stage >= 1 else None
    element = max(ELEMENT_BYTES[job.precision], ELEMENT_BYTES["fp32"])
    sent = ELEMENT_BYTES[job.communication_data_type] if job.communication_data_type else element
    return (
        parameters * sent / reduce.bytes_per_s if reduce else 0.0,
        parameters * ELEMENT_BYTES[job.precision] / gather.bytes_per_s if gather else 0.0,
    )


# From FLOPs


def flops_costs(job: Job) -> ModelCosts:
    """Matrix multiplications and attention alone, by the formula that papers count with (see ``cost.flops``)."""
    assert job.model is not None, "there is nothing to count in a job without a model"
    length = job.data.sequence_length if job.data else job.model.max_position_embeddings
    shape = shape_of(job.model, length)
    scores = 4 * length * shape.heads * shape.head_dim
    layer = float(2 * (shape.attention_parameters + shape.active_mlp_parameters) + scores)
    head = float(2 * shape.head_parameters)
    again = {"none": 0.0, "selective": scores, "full": layer}[job.activation_checkpointing.most]
    unit = job.micro_batch * length / job.tp / NOMINAL_FLOPS_PER_S
    return ModelCosts(
        embedding=_flops_part(0.0, 0.0),
        layer=_flops_part(layer * unit, again * unit),
        head=_flops_part(head * unit, 0.0),
        source="FLOPs",
        has_seconds=False,
        attention=attention_share(job),
    )


def attention_share(job: Job) -> Share:
    """The attention's share of a layer by FLOPs and parameters, and of its activations.

    Those are 13 of 34 bytes for each number of the residual stream (Korthikanti et al. 2022, eq. 1, its norm among
    them and its scores not, which fused kernels don't keep); where all is recomputed each half keeps its input.
    """
    assert job.model is not None, "there is nothing to count in a job without a model"
    length = job.data.sequence_length if job.data else job.model.max_position_embeddings
    shape, recompute = shape_of(job.model, length), job.activation_checkpointing.most
    scores = 4 * length * shape.heads * shape.head_dim
    forward = 2 * shape.attention_parameters + scores
    attention = 3 * forward + {"none": 0, "selective": scores, "full": forward}[recompute]
    feed_forward = 2 * shape.active_mlp_parameters * (4 if recompute == "full" else 3)
    parameters = shape.attention_parameters + shape.dense_mlp_parameters + shape.expert_parameters
    return Share(
        attention / (attention + feed_forward),
        0.5 if recompute == "full" else 13 / 34,
        float(shape.attention_parameters / parameters),
    )


def _flops_part(forward: float, again: float) -> PartCosts:
    return PartCosts(forward, 2 * forward + again, forward + again, forward)


# From the cost model


def device_costs(job: Job) -> ModelCosts:
    """What the cost model predicts for the devices of the job's cluster."""
    assert job.model is not None and job.data is not None and job.cluster is not None, "the caller looks"
    hardware = build_hardware(job.cluster)
    constants = load_calibration(generation=hardware.device.generation)
    case = Case(shape_of(job.model, job.data.sequence_length), Machine.of(hardware), _strategy(job), constants)
    tokens = job.micro_batch * job.data.sequence_length
    full = job.activation_checkpointing.most == "full"
    kept = float((message_bytes(case) if full else layer_activation_bytes(case))[0])
    logits = tokens * job.model.vocab_size / job.tp * float(constants.logit_bytes)
    reserved = float(constants.reserved_bytes) / (1 + float(constants.fragmentation))
    embedding, layer, head = part_parameters(job.model)
    state = state_bytes_per_parameter(job) / job.tp
    return ModelCosts(
        embedding=_modelled_part(embedding_cost(case), 0.0, state * embedding),
        layer=_modelled_part(layer_cost(case), kept, state * layer),
        head=_modelled_part(head_cost(case), logits, state * head),
        source=f"the cost model of {hardware.device.name}",
        message_s=float(message_s(case)[0]),
        usable_bytes=USABLE_MEMORY * hardware.device.memory_bytes / (1 + float(constants.fragmentation)) - reserved,
        attention=attention_share(job),
    )


def _strategy(job: Job) -> Strategies:
    """What of the job decides about the seconds of its parts."""
    return Strategies.build(
        dp=job.dp,
        tp=job.tp,
        pp=job.pp,
        micro_batch=job.micro_batch,
        num_microbatches=job.num_microbatches,
        sequence_parallel=job.parallelism.tp.sequence_parallel,
        recompute=RECOMPUTE_CODES[job.activation_checkpointing.most],
        precision=PRECISION_CODES[job.precision],
        order=ORDER_CODES[job.parallelism.order],
    )


def _modelled_part(cost: PartCost, activation_bytes: float, static_bytes: float) -> PartCosts:
    def first(values: object) -> float:
        return float(values[0])  # type: ignore[index] - arrays of one strategy

    backward_s = first(cost.input_grad_s + cost.tp_backward_s)
    weight_s = first(cost.weight_grad_s)
    return PartCosts(
        forward_s=first(cost.forward_s + cost.tp_forward_s),
        backward_s=backward_s + weight_s,
        input_grad_s=backward_s,
        weight_grad_s=weight_s,
        activation_bytes=activation_bytes,
        static_bytes=static_bytes,
    )


def part_parameters(model: ModelSpec) -> tuple[int, int, int]:
    """Parameters of the embedding, of an average layer, and of the final norm with the head (tied or not)."""
    matrix, norm = model.vocab_size * model.hidden_size, model.hidden_size * (2 if model.norm_bias else 1)
    learned = model.position_embedding_type == "learned"
    embedding = matrix + (model.max_position_embeddings * model.hidden_size if learned else 0)
    ends = embedding + norm + (0 if model.tie_word_embeddings else matrix)
    return embedding, (model.num_parameters - ends) // model.num_hidden_layers, norm + matrix
