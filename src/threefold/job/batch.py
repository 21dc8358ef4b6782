"""The two equations of a layout, solved or refused with the nearest numbers that work.

World: ``dp × tp × pp = devices``. Batch triangle: ``train_batch_size = micro batch × accumulation × dp``: the factor is
dp, not the number of devices, because the tp × pp devices of one replica work on the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from threefold.job.messages import Findings, choices, divisors, multiples_around, nearest_number
from threefold.job.spec import JobFile

TOTAL, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
EQUATION = f"{TOTAL} = {MICRO} × {ACCUMULATION} × dp"
LARGEST = 10**9


@dataclass(frozen=True)
class Sizes:
    """The solved equations: replicas, samples of a step, samples of a microbatch, microbatches of a step."""

    dp: int
    train_batch_size: int
    micro_batch: int
    accumulation: int


def resolve_sizes(file: JobFile, world_size: int | None, findings: Findings) -> Sizes | None:
    """Solve both equations for ``file`` on ``world_size`` processes; None when one has no answer (see ``findings``)."""
    dp = _resolve_dp(file, world_size, findings)
    if dp is None or findings.concerns(TOTAL, MICRO, ACCUMULATION):
        return None
    return _Triangle(file, dp, findings).solve()


def _resolve_dp(file: JobFile, world_size: int | None, findings: Findings) -> int | None:
    sizes = {axis: getattr(file.parallelism, axis).size for axis in ("dp", "tp", "pp")}
    if findings.concerns(*(f"parallelism.{axis}.size" for axis in sizes)):
        return None
    world = _resolve_world(file, world_size, findings)
    if world is None:
        return sizes["dp"] or (None if findings.concerns("cluster") else 1)
    others = sizes["tp"] * sizes["pp"]
    if world % (others * (sizes["dp"] or 1)) == 0 and sizes["dp"] in (None, world // others):
        return world // others
    _refuse_layout(sizes, world, file, findings)
    return sizes["dp"]


def _resolve_world(file: JobFile, world_size: int | None, findings: Findings) -> int | None:
    cluster = file.cluster
    if findings.concerns("cluster"):
        return None
    if cluster and world_size not in (None, cluster.num_devices):
        message = f"{_devices(file, cluster.num_devices)}, but the job runs in {world_size} processes"
        fix = f"start {cluster.num_devices} processes, or state a cluster of {world_size} devices"
        findings.problem("cluster", message, fix)
        return None
    return cluster.num_devices if cluster else world_size


def _devices(file: JobFile, world: int) -> str:
    if file.cluster is None:
        return f"{world} process{'es' * (world != 1)}"
    nodes, each = file.cluster.nodes, file.cluster.devices_per_node
    return f"{nodes} node{'s' * (nodes != 1)} × {each} = {world} device{'s' * (world != 1)}"


def _refuse_layout(sizes: Mapping[str, int | None], world: int, file: JobFile, findings: Findings) -> None:
    stated = {axis: size for axis, size in sizes.items() if size is not None}
    used = math.prod(stated.values())
    product = " × ".join(f"{axis} {size}" for axis, size in stated.items())
    fits = {axis: _fitting(axis, stated, world) for axis in stated}
    # Blame the axis that can be repaired alone; of several, one that was asked for: larger than 1.
    repairable = sorted((axis for axis in stated if fits[axis]), key=lambda axis: stated[axis] == 1)
    key = f"parallelism.{repairable[0]}.size" if repairable else "parallelism"
    repairs = [f"parallelism.{axis}.size to {choices(fits[axis])}" for axis in repairable]
    enough = used if "dp" in stated else used * max(1, round(world / used))
    world_key = "cluster.nodes × cluster.devices_per_node" if file.cluster else "the number of processes"
    repairs.append(f"{world_key} to {enough}")
    needed = f"{used} devices" if "dp" in stated else f"{used} devices or a multiple"
    message = f"{product} = {needed}, but this job has {_devices(file, world)}"
    findings.problem(key, message, f"set {', or '.join(repairs)}")


def _fitting(axis: str, stated: Mapping[str, int], world: int) -> list[int]:
    """Sizes of ``axis`` that suit the world while the other stated sizes stay."""
    others = math.prod(size for other, size in stated.items() if other != axis)
    if world % others:
        return []
    return [world // others] if "dp" in stated else divisors(world // others)


class _Triangle:
    """The batch equation of one job: which sides are stated decides how the others follow."""

    def __init__(self, file: JobFile, dp: int, findings: Findings) -> None:
        self.total = file.train_batch_size
        self.micro = file.train_micro_batch_size_per_gpu
        self.accumulation = file.gradient_accumulation_steps
        self.dp = dp
        self.pp = file.parallelism.pp.size
        self.replica_devices = file.parallelism.tp.size * self.pp
        self.findings = findings

    def solve(self) -> Sizes | None:
        solvers: Mapping[tuple[bool, bool, bool], Callable[[], tuple[int, int] | None]] = {
            (True, True, True): self._check,
            (True, True, False): self._derive_accumulation,
            (True, False, True): self._derive_micro,
            (True, False, False): self._derive_both,
            (False, True, True): lambda: (self.micro or 1, self.accumulation or 1),
            (False, True, False): lambda: (self.micro or 1, 1),
            (False, False, True): self._ask,
            (False, False, False): self._ask,
        }
        stated = (self.total is not None, self.micro is not None, self.accumulation is not None)
        pair = solvers[stated]()
        if pair is None:
            return None
        total = pair[0] * pair[1] * self.dp
        if total > LARGEST:
            self._refuse(f"{pair[0]} × {pair[1]} × {self.dp} = {total} samples a step", f"keep it below {LARGEST}")
            return None
        return Sizes(self.dp, total, *pair)

    def _check(self) -> tuple[int, int] | None:
        total, micro, accumulation = self.total or 1, self.micro or 1, self.accumulation or 1
        product = micro * accumulation * self.dp
        if total == product:
            return micro, accumulation
        message = f"{total} is not {micro} × {accumulation} × {self.dp} = {product}"
        if total == product * self.replica_devices and self.replica_devices > 1:
            message += f" (the last factor is dp {self.dp}, not all {self.dp * self.replica_devices} devices)"
        self._refuse(message, f"set {self._repairs(product)}, or leave one of the three out")
        return None

    def _repairs(self, product: int) -> str:
        """The batch size that the other two make, and the nearest ones that other accumulations would."""
        total, unit = self.total or 1, (self.micro or 1) * self.dp
        if total % unit == 0:
            return f"{TOTAL} to {product}, or {ACCUMULATION} to {total // unit}"
        near = [multiple for multiple in multiples_around(total, unit) if multiple != product]
        pairs = choices(f"{multiple} with {ACCUMULATION} {multiple // unit}" for multiple in near)
        return f"{TOTAL} to {product}, or to {pairs}"

    def _derive_accumulation(self) -> tuple[int, int] | None:
        total, micro = self.total or 1, self.micro or 1
        unit = micro * self.dp
        if total % unit == 0:
            return micro, total // unit
        fix = f"set {TOTAL} to {choices(multiples_around(total, unit))}"
        if total % self.dp == 0:
            fix += f", or {MICRO} to {nearest_number(micro, divisors(total // self.dp))}"
        self._refuse(f"no whole accumulation makes {total} = {micro} × accumulation × {self.dp}", fix)
        return None

    def _derive_micro(self) -> tuple[int, int] | None:
        total, accumulation = self.total or 1, self.accumulation or 1
        unit = accumulation * self.dp
        if total % unit == 0:
            return total // unit, accumulation
        fix = f"set {TOTAL} to {choices(multiples_around(total, unit))}"
        if total % self.dp == 0:
            fix += f", or {ACCUMULATION} to {nearest_number(accumulation, divisors(total // self.dp))}"
        self._refuse(f"no whole micro batch makes {total} = micro batch × {accumulation} × {self.dp}", fix)
        return None

    def _derive_both(self) -> tuple[int, int] | None:
        """As DeepSpeed: one microbatch. A pipeline needs many, so there each sample is a microbatch of its own."""
        total = self.total or 1
        if total % self.dp == 0:
            return (1, total // self.dp) if self.pp > 1 else (total // self.dp, 1)
        fix = f"set {TOTAL} to {choices(multiples_around(total, self.dp))}"
        near = nearest_number(self.dp, divisors(total))
        self._refuse(f"{total} samples do not divide over dp {self.dp}", f"{fix}, or use {near} replicas")
        return None

    def _ask(self) -> None:
        fix = f"add {TOTAL}, for example {8 * self.dp} for dp {self.dp}, or {MICRO}, for example 1"
        self._refuse("no batch size is stated", fix)

    def _refuse(self, message: str, fix: str) -> None:
        self.findings.problem(TOTAL, f"{message} ({EQUATION})", fix)
