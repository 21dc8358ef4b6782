"""``profile.json``: what a job's parts took on a machine, measured, and for which work that holds (pure).

``threefold profile`` writes it, ``plan``, ``train`` and ``explain`` read it. Seconds hold for one microbatch on one
rank, with tensor-parallel communication inside, while as many ranks were busy as the job runs on that machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from threefold.errors import JobError, Problem
from threefold.job import Job, ModelSpec
from threefold.job.base import Count, CountOrZero, NonNegative, Positive, Section, Text
from threefold.job.spec import Recompute

FORMAT = 1
LARGEST_FILE = 10_000_000
_KEY = "--profile"
_NOT_OF_A_LAYER = frozenset({"num_hidden_layers", "preset"})
"""Fields of a model that leave its layers, embedding and head as they are."""

Operation = Literal["p2p", "all_reduce", "all_gather", "reduce_scatter"]


class Spread(Section):
    """A median of repeated measurements, and their quartiles."""

    median: NonNegative
    low: NonNegative
    high: NonNegative


class PartProfile(Section):
    """One kind of part: seconds of a microbatch, the bytes that it keeps until backward, and its parameters on a rank.

    ``backward_s`` is the whole backward pass in one; ``input_grad_s`` and ``weight_grad_s`` are its two passes run
    apart, which together take longer.
    """

    forward_s: Spread
    backward_s: Spread
    input_grad_s: Spread
    weight_grad_s: Spread
    activation_bytes: int
    parameters: int


class LinkProfile(Section):
    """Seconds of an operation on n payload bytes among ``ranks`` ranks are ``alpha_s`` + n / ``bytes_per_s``.

    Payload is the full tensor: what enters an all-reduce or reduce-scatter, what leaves an all-gather, one message.
    """

    operation: Operation
    ranks: Count
    alpha_s: NonNegative
    bytes_per_s: Positive

    def seconds(self, num_bytes: float) -> float:
        """What ``num_bytes`` take."""
        return self.alpha_s + num_bytes / self.bytes_per_s


class Workload(Section):
    """What was computed: seconds of other work would be other seconds. The number of layers is of no account."""

    model: ModelSpec
    sequence_length: Count
    micro_batch: Count
    tp: Count
    sequence_parallel: bool
    recompute: Recompute
    precision: Literal["fp32", "fp16", "bf16", "fp64"]

    @classmethod
    def of(cls, job: Job) -> Workload:
        """The work of one rank of ``job``. Raises JobError for a job without a model or data."""
        if job.model is None or job.data is None:
            missing = [name for name in ("model", "data") if getattr(job, name) is None]
            raise JobError([Problem(name, "is missing, and a profile is of one", f"add {name}") for name in missing])
        return cls(
            model=job.model,
            sequence_length=job.data.sequence_length,
            micro_batch=job.micro_batch,
            tp=job.tp,
            sequence_parallel=job.parallelism.tp.sequence_parallel,
            recompute=job.activation_checkpointing.most,
            precision=job.precision,
        )

    @property
    def layer_shape(self) -> dict[str, Any]:
        """Fields of the model that decide about a layer, the embedding and the head."""
        return self.model.model_dump(mode="json", exclude=set(_NOT_OF_A_LAYER))

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that two workloads share when their parts are the same."""
        stated = self.model_dump(mode="json", exclude={"model"}) | {"model": self.layer_shape}
        return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()[:12]


class Machine(Section):
    """Where it was measured; ``threads`` are those of a rank's computation, ``num_ranks`` were busy at once."""

    host: Text
    device: Text
    cores: Count
    threads: Count
    num_ranks: Count
    memory_bytes: Positive
    """Of one device; for CPUs the machine's, over ``num_ranks``."""


class Profile(Section):
    """The measurements of one workload on one machine.

    ``action_s`` is what the executor adds to each forward and each backward pass, ``post_s`` what a rank spends to
    start a send or a receive; ``step_s`` is what a step takes besides its passes and the optimizer,
    ``optimizer_s_per_parameter`` what zeroing, norm and update take for each parameter.
    """

    format: Literal[1]
    torch: Text
    machine: Machine
    workload: Workload
    fingerprint: Text
    num_rounds: CountOrZero
    embedding: PartProfile
    layer: PartProfile
    head: PartProfile
    attention: PartProfile | None = None
    feed_forward: PartProfile | None = None
    """The halves of a layer; None where the device could not hold enough layers to measure them."""
    action_s: NonNegative
    post_s: NonNegative
    step_s: NonNegative
    optimizer_s_per_parameter: NonNegative
    links: tuple[LinkProfile, ...]

    def link(self, operation: Operation, ranks: int) -> LinkProfile | None:
        """The link of an operation among ``ranks`` ranks, or of the number of ranks nearest to it."""
        found = [link for link in self.links if link.operation == operation]
        return min(found, key=lambda link: abs(link.ranks - ranks), default=None)

    def to_json(self) -> str:
        """The file."""
        return self.model_dump_json(indent=1, exclude_none=True) + "\n"


def read_profile(path: Path, job: Job | None = None) -> Profile:
    """The profile in a file. Raises JobError when it can't be read, or is not of the work that ``job`` does."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise JobError([_unreadable(path, f"is larger than {LARGEST_FILE:,} bytes")])
        profile = Profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise JobError([_unreadable(path, f"can't be read: {error.strerror}")]) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        message = f"is no profile of format {FORMAT}: {where}: {first['msg']}"
        raise JobError([_unreadable(path, message)]) from None
    if profile.fingerprint != profile.workload.fingerprint:
        raise JobError([_unreadable(path, "states another workload than it was measured with")])
    if not profile.layer.forward_s.median + profile.layer.backward_s.median:
        raise JobError([_unreadable(path, "states that a layer takes no time")])
    if job is not None:
        check_profile(profile, job)
    return profile


def _unreadable(path: Path, message: str) -> Problem:
    return Problem(_KEY, f"{str(path)!r} {message}", f"make one: threefold profile JOB -o {path.name}")


def check_profile(profile: Profile, job: Job) -> None:
    """Refuse a profile of other work than ``job``'s. Raises JobError with every difference."""
    wanted = Workload.of(job)
    problems = [_difference(*found) for found in _differences(profile.workload, wanted)]
    if problems:
        raise JobError(problems)


def _differences(measured: Workload, wanted: Workload) -> Iterator[tuple[str, object, object]]:
    ours, theirs = wanted.layer_shape, measured.layer_shape
    for name in ours:
        if ours[name] != theirs.get(name):
            yield f"model.{name}", theirs.get(name), ours[name]
    for name in Workload.model_fields:
        if name != "model" and getattr(measured, name) != getattr(wanted, name):
            yield name.replace("_", " "), getattr(measured, name), getattr(wanted, name)


def _difference(name: str, measured: object, wanted: object) -> Problem:
    message = f"was measured with {name} {measured}, but the job has {wanted}"
    return Problem(_KEY, message, "measure this job: threefold profile JOB")
