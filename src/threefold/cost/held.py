"""Bytes of parameters, gradients and optimizer state that one rank of the runtime holds, exactly.

Per element of a bucket, with g ranks in its group, p bytes of a parameter and a = max(p, 4) of a gradient (Rajbhandari
et al. 2020, with buckets padded to a multiple of g):

    parameters   p, from ZeRO stage 3 on p/g          gradients   a, from stage 2 on a/g
    optimizer    AdamW 2a, plus a for a master copy in half precision or offload; from stage 1 on all of it /g
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from threefold.cost.traffic import ELEMENT_BYTES, GradientGroup, gradient_groups
from threefold.job.spec import Job, Offload
from threefold.layout.compression import chunk_elements

STATES: Mapping[str, int] = {"AdamW": 2, "OneBitAdam": 2, "SGD": 0}
"""Numbers that an optimizer keeps for an element; SGD keeps one more with momentum."""


@dataclass(frozen=True)
class HeldStates:
    """Bytes between two steps; what is offloaded is in host memory and counts in ``host``, not in the others."""

    parameters: int
    gradients: int
    optimizer: int
    host: int

    @property
    def device(self) -> int:
        """Bytes on the device."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class _Policy:
    """What decides about the bytes of a bucket."""

    job: Job

    @property
    def parameter_bytes(self) -> int:
        return ELEMENT_BYTES[self.job.precision]

    @property
    def gradient_bytes(self) -> int:
        return max(self.parameter_bytes, ELEMENT_BYTES["fp32"])

    @property
    def states(self) -> int:
        optimizer = self.job.optimizer
        return STATES[optimizer.type] + (optimizer.params.momentum > 0)

    @property
    def has_copy(self) -> bool:
        return self.parameter_bytes != self.gradient_bytes or self.offloads_optimizer

    @property
    def offloads_optimizer(self) -> bool:
        return _is_on(self.job.zero_optimization.offload_optimizer)

    @property
    def offloads_parameters(self) -> bool:
        return _is_on(self.job.zero_optimization.offload_param)


def _is_on(offload: Offload | None) -> bool:
    return offload is not None and offload.device != "none"


def estimate_held(job: Job, pp_coord: int, stages: tuple[int, ...] | None = None) -> HeldStates:
    """What each rank of stage ``pp_coord`` holds between two steps, after the first one (and after compression began).

    ``stages`` are those that it holds, where the job's schedule has no name that tells. Raises
    ValueError for a job without a model.
    """
    policy = _Policy(job)
    ranks = {"dp": job.dp, "dp+tp": job.dp * job.tp, "dp+pp": 2 * job.dp}
    found = [
        _bucket(policy, group, elements, ranks[group.axis])
        for group in gradient_groups(job, pp_coord, stages)
        for elements in group.bucket_elements
    ]
    names = ("parameters", "gradients", "optimizer", "host")
    return HeldStates(*(sum(getattr(held, name) for held in found) for name in names))


def state_bytes_per_parameter(job: Job) -> float:
    """Bytes on the device for each parameter that a rank holds a part of, padding and sums over more than dp apart."""
    policy, stage = _Policy(job), job.zero_optimization.stage
    parameters = policy.parameter_bytes / (job.dp if stage >= 3 else 1)
    gradients = policy.gradient_bytes / (job.dp if stage >= 2 else 1)
    optimizer = policy.gradient_bytes * (policy.states + policy.has_copy) / (job.dp if stage >= 1 else 1)
    if policy.offloads_parameters and stage >= 3:
        parameters = 0.0
    return parameters + gradients + (0.0 if policy.offloads_optimizer else optimizer)


def _bucket(policy: _Policy, group: GradientGroup, elements: int, ranks: int) -> HeldStates:
    stage, over_dp = policy.job.zero_optimization.stage, group.axis == "dp"
    shard = -(-elements // ranks) if stage >= 1 else elements
    whole = shard * ranks if stage >= 1 else elements
    parameters = policy.parameter_bytes * (shard if stage >= 3 and over_dp else whole)
    gradients = policy.gradient_bytes * (shard if stage >= 2 and over_dp else whole)
    kept = policy.states + policy.has_copy
    optimizer = policy.gradient_bytes * (kept * shard + _errors(policy.job, group, elements, ranks))
    to_host = (
        parameters * (policy.offloads_parameters and stage >= 3 and over_dp),
        optimizer * policy.offloads_optimizer,
    )
    return HeldStates(parameters - to_host[0], gradients, optimizer - to_host[1], sum(to_host))


def _errors(job: Job, group: GradientGroup, elements: int, ranks: int) -> int:
    """Elements of 1-bit Adam's two errors: of all that a rank sends, and of the chunk that it sums."""
    if job.optimizer.type != "OneBitAdam" or not group.compressed or ranks == 1:
        return 0
    return (ranks + 1) * chunk_elements(elements, ranks)
