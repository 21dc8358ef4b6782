"""Data parallelism: when gradients are reduced, and when parameters are gathered and freed.

One engine for plain data parallelism and ZeRO 1-3; the buckets know what this rank keeps, the engine knows when. In a
backward pass whose gradients must travel (the last of a step, or every one from ZeRO stage 2 on), a hook counts a
bucket's gradients; when the last one is there its reduction starts, and backward goes on (Li et al. 2020). Where a
backward pass is split, the weight gradients (W) complete it. Gradients are *summed*: the loss was already divided by
the number of valid tokens in the global batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from threefold.parallel.buckets import Bucket, Piece, ShardingPolicy, build_buckets
from threefold.parallel.collectives import Group, Pending
from threefold.parallel.compression import build_compression
from threefold.parallel.counters import MemoryCounter
from threefold.parallel.deferred import WeightTask
from threefold.parallel.stage import Stage
from threefold.schedule import Action, Kind

NORM_RUN = 16384
"""Elements whose squares are summed in the format of the gradients."""


class DataParallel:
    """Owns the parameters' storage and the gradients of one rank, over all of its ``stages``."""

    def __init__(
        self, stages: Sequence[Stage], dp: Group, policy: ShardingPolicy, memory: MemoryCounter | None = None
    ) -> None:
        self.stages, self.policy, self.memory = tuple(stages), policy, memory or MemoryCounter()
        self.buckets = build_buckets(stages, dp, policy, self.memory)
        self.compression = build_compression(policy.compression, self.buckets)
        self.used_by = {
            stage.index: [bucket for bucket in self.buckets if stage.index in bucket.stages] for stage in stages
        }
        self._bucket_of = {id(entry.parameter): bucket for bucket in self.buckets for entry in bucket.entries}
        self._deferred = stages[0].deferred
        self._to_start: list[Bucket] = []
        self._afterwards: list[Bucket] = []
        for number, bucket in enumerate(self.buckets):
            for index, entry in enumerate(bucket.entries):
                entry.parameter.register_post_accumulate_grad_hook(_gradient_hook(weakref.ref(self), number, index))
        self._gathered: dict[int, _GatheredParts] = {}
        if policy.stage >= 3:
            self._gathered = {stage.index: _GatheredParts(stage, self.buckets) for stage in stages}
            for stage in stages:
                stage.run_part = self._gathered[stage.index].run

    # A step

    def begin_step(self) -> None:
        """Zero all gradients."""
        self._to_start, self._afterwards = [], []
        self.compression.begin_step()
        for bucket in self.buckets:
            bucket.begin_step()

    def before_backward(self, action: Action, is_last: bool, tasks: Sequence[WeightTask] = ()) -> None:
        """A backward pass begins; ``is_last`` says whether it is the last B or W of its stage in this step.

        I leaves no bucket complete. W completes all of its stage's, by the gradients of ``tasks`` and those of I.
        """
        mine = self.used_by[action.stage]
        for bucket in mine:
            bucket.missing = 0 if action.kind is Kind.W else len(bucket.entries)
        for task in tasks:
            if id(task.parameter) in self._bucket_of:
                self._bucket_of[id(task.parameter)].missing += 1
        if action.kind is not Kind.I:
            travels = self.policy.overlap and (is_last or self.policy.stage >= 2)
            self._to_start = [bucket for bucket in mine if travels and self._starts_early(bucket)]
            self._afterwards = [bucket for bucket in mine if bucket.shards_gradients and bucket not in self._to_start]
            self._start_complete()

    def _starts_early(self, bucket: Bucket) -> bool:
        """What several stages use waits for all of them, and what is compressed for the step's end."""
        return bucket.over_dp and len(bucket.stages) == 1 and not self.compression.takes(bucket)

    def after_compute(self, action: Action, following: Action | None) -> None:
        """Reduce what stage 2 must not keep, and what backward left incomplete, as unused parameters do.

        Stage 3: free what is still there, and gather what the next action begins with.
        """
        # All of a stage's buckets have started before the next stage's first one, on every rank.
        for bucket in (*self._to_start, *self._afterwards):
            bucket.reduce()
        self._to_start, self._afterwards = [], []
        for bucket in self.used_by[action.stage]:
            bucket.free()
        if following is not None and following.stage in self._gathered:
            self._gathered[following.stage].begin(following.kind)

    def finish(self) -> None:
        """Start what has not started yet, in an order that is the same on every rank, and wait for all of it."""
        for bucket in self.buckets:
            if self.compression.takes(bucket):
                self.compression.reduce(bucket)
            elif bucket.pending is None and not bucket.shards_gradients:
                bucket.reduce()
        for bucket in self.buckets:
            bucket.finish_reduce()

    def take_gradient(self, number: int, index: int) -> None:
        """Parameter ``index`` of bucket ``number`` has a gradient: keep it, and start what is now complete."""
        bucket = self.buckets[number]
        if bucket.shards_gradients and self._deferred.collecting:
            self._put_off(number, index)
            return
        bucket.take_gradient(index)
        self._start_complete()

    def _put_off(self, number: int, index: int) -> None:
        """Keep a gradient that I made until W: the whole bucket, which stage 2 does not keep, must not live as long."""
        parameter = self.buckets[number].entries[index].parameter
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:  # its task is there already
            return

        def put_back() -> None:
            parameter.grad = gradient
            self.take_gradient(number, index)

        self._deferred.add_task(WeightTask(parameter, lambda: put_back))

    def _start_complete(self) -> None:
        # Buckets start in order, never as they happen to complete, so that all ranks post the same collectives.
        while self._to_start and self._to_start[0].missing <= 0:
            self._to_start.pop(0).reduce()

    # What the optimizer sees

    @property
    def masters(self) -> list[nn.Parameter]:
        """The tensors that the optimizer updates: one for each bucket, this rank's shard of it."""
        return [bucket.master for bucket in self.buckets]

    def hand_gradients(self, factor: float) -> None:
        """Give each master its gradient, multiplied by ``factor``, in the memory where the optimizer works."""
        for bucket in self.buckets:
            gradient = bucket.grad_shard
            if factor != 1.0:
                gradient.mul_(factor)
            bucket.master.grad = gradient.to(bucket.master.device, non_blocking=True)
        self._synchronize_copies()

    def publish(self) -> None:
        """Bring the updated values to where the model reads them."""
        pending = [bucket.publish() for bucket in self.buckets]
        for entry in pending:
            entry.wait()
        self._synchronize_copies()

    def _synchronize_copies(self) -> None:
        """The CPU optimizer must not read a gradient before its copy has arrived, nor write what is being copied."""
        if (self.policy.offload_optimizer or self.policy.offload_parameters) and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def gradient_pieces(self) -> Iterator[Piece]:
        """The reduced gradients that this rank keeps, by parameter."""
        for bucket in self.buckets:
            yield from bucket.pieces(bucket.grad_shard)

    def master_pieces(self) -> Iterator[Piece]:
        """The values that the optimizer updates on this rank, by parameter."""
        for bucket in self.buckets:
            yield from bucket.pieces(bucket.master.data)

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Within the context every parameter is whole on this rank; all ranks must enter it together."""
        gathered = [bucket for bucket in self.buckets if not bucket.present]
        for bucket in gathered:
            bucket.gather().wait()
        try:
            yield
        finally:
            for bucket in gathered:
                bucket.free()

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared gradient norm: each element of the model counts once.

        Runs of ``NORM_RUN`` elements are squared and summed in the gradients' format, and their sums in float64: on a
        CPU a float32 sum of ten million squares is off by 7e-4, and by more or less where ZeRO cuts the tensor.

        What is not finite anywhere makes the sum so, even in a copy that another rank counts. Where a compression never
        sums the gradients, each rank counts its own part of them: the result is then the norm of independent parts.
        """
        device = self.buckets[0].device if self.buckets else None
        total = torch.zeros((), dtype=torch.float64, device=device)
        for bucket in self.buckets:
            if bucket.counts_in_norm or (self.compression.leaves_local and self.compression.takes(bucket)):
                pieces = [
                    (run, float(piece.entry.owns_norm))
                    for piece in bucket.pieces(bucket.grad_shard)
                    for run in (piece.values.split(NORM_RUN) if piece.values.is_cpu else (piece.values,))
                ]
                norms = torch._foreach_norm([values for values, _ in pieces])  # pyright: ignore[reportPrivateImportUsage]
                owned = torch.tensor([owns for _, owns in pieces], dtype=torch.float64)
                if pieces:
                    total += (torch.stack(norms).double().square() * owned.to(total.device)).sum()  # 0 * inf is nan
        return total


def _gradient_hook(engine: weakref.ref[DataParallel], number: int, index: int) -> Callable[[Tensor], None]:
    """The hook of one parameter; it must not keep the engine alive, since torch holds hooks where gc sees no cycle."""

    def on_gradient(_parameter: Tensor) -> None:
        data = engine()
        if data is not None:
            data.take_gradient(number, index)

    return on_gradient


class _GatheredParts:
    """ZeRO stage 3: each part's parameters are gathered before it runs, in forward and backward, and freed after.

    The part that comes next is gathered while this one computes, and the first of an action after the action before.
    """

    def __init__(self, stage: Stage, buckets: tuple[Bucket, ...]) -> None:
        self.stage, self.parts = stage, list(stage.parts)
        held = {id(entry.parameter): bucket for bucket in buckets for entry in bucket.entries}
        self.buckets_of = [_buckets_of(part, held) for part in self.parts]
        self.arriving: dict[int, list[Pending]] = {}

    def run(self, index: int, x: Tensor) -> Tensor:
        """Run one part."""
        self._need(index, then=index + 1)
        if x.requires_grad:
            x = _OnBackward.apply(x, lambda: self._free(index))  # type: ignore[assignment]
        y = self.stage.compute_part(index, x)
        if y.requires_grad:
            y = _OnBackward.apply(y, lambda: self._need(index, then=index - 1))  # type: ignore[assignment]
        self._free(index)
        return y

    def begin(self, kind: Kind) -> None:
        """Start to gather what a pass of that kind needs first; weight gradients need no weight."""
        if self.parts and kind is not Kind.W:
            self._start(0 if kind is Kind.F else len(self.parts) - 1)

    def _need(self, index: int, then: int) -> None:
        self._start(index)
        for pending in self.arriving.pop(index):
            pending.wait()
        if 0 <= then < len(self.parts):
            self._start(then)

    def _start(self, index: int) -> None:
        if index not in self.arriving:
            self.arriving[index] = [bucket.gather() for bucket in self.buckets_of[index]]

    def _free(self, index: int) -> None:
        awaited = {id(bucket) for other in self.arriving for bucket in self.buckets_of[other]}  # parts may share one
        for bucket in self.buckets_of[index]:
            if id(bucket) not in awaited:
                bucket.free()


def _buckets_of(part: nn.Module, held: dict[int, Bucket]) -> list[Bucket]:
    found = {id(held[id(p)]): held[id(p)] for p in part.parameters() if id(p) in held}
    return [bucket for bucket in found.values() if bucket.shards_parameters]


class _OnBackward(torch.autograd.Function):
    """Identity that calls a function when the gradient passes back through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.call()
        return grad, None
