"""Profiles that nobody measured."""

from __future__ import annotations

from threefold.cost.profile import FORMAT, LinkProfile, Machine, PartProfile, Profile, Spread, Workload
from threefold.job import Job


def spread(seconds: float) -> Spread:
    return Spread(median=seconds, low=0.9 * seconds, high=1.2 * seconds)


def part(seconds: float, parameters: int, activation_bytes: int = 1000) -> PartProfile:
    """``seconds`` of forward and backward, a third each of forward, input and weight gradient."""
    third = spread(seconds / 3)
    return PartProfile(
        forward_s=third,
        backward_s=spread(2 * seconds / 3),
        input_grad_s=third,
        weight_grad_s=third,
        activation_bytes=activation_bytes,
        parameters=parameters,
    )


def small_profile(job: Job, embedding_s: float = 0.0, layer_s: float = 0.3, head_s: float = 0.6) -> Profile:
    """A profile of ``job``'s work on an imaginary machine of two cores."""
    workload = Workload.of(job)
    return Profile(
        format=FORMAT,
        torch="2.9.0",
        machine=Machine(host="imaginary", device="cpu", cores=2, threads=1, num_ranks=2, memory_bytes=8e9),
        workload=workload,
        fingerprint=workload.fingerprint,
        num_rounds=5,
        embedding=part(embedding_s, 32_000),
        layer=part(layer_s, 7_000),
        head=part(head_s, 32_000),
        action_s=1e-4,
        post_s=1e-5,
        step_s=1e-3,
        optimizer_s_per_parameter=1e-8,
        links=(
            LinkProfile(operation="p2p", ranks=2, alpha_s=1e-4, bytes_per_s=1e9),
            LinkProfile(operation="all_reduce", ranks=2, alpha_s=2e-4, bytes_per_s=5e8),
            LinkProfile(operation="all_reduce", ranks=4, alpha_s=4e-4, bytes_per_s=4e8),
        ),
    )
