"""Weight gradients that wait: a backward pass runs as I (gradient of the input) and, later, W (of the weights).

The previous stage waits for the gradient of this stage's input and nobody for that of its weights, so a schedule may
put the latter where a rank would idle (Qi et al. 2023, Zero Bubble Pipeline Parallelism). Linear layers and embeddings,
which are nearly all of the work, leave a ``WeightTask`` in place of their weight gradient while tasks are collected;
a task keeps only the two tensors whose product it is. Any other parameter, of whatever module, gets its gradient in I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.parallel.counters import Kept, MemoryCounter

Product = Callable[[], Tensor]
"""Computes one microbatch's gradient of a parameter."""


@dataclass(frozen=True, slots=True)
class WeightTask:
    """The gradient of ``parameter`` of one microbatch, still to be computed.

    ``start`` begins to send what the gradient needs of other ranks, and returns what computes it and adds it.
    """

    parameter: Tensor
    start: Callable[[], Callable[[], None]]


class DeferredGradients:
    """Tells the layers of a rank whether weight gradients wait, and collects those that do."""

    def __init__(self, memory: MemoryCounter | None = None) -> None:
        self._memory = memory or MemoryCounter()
        self._tasks: list[WeightTask] | None = None

    @property
    def collecting(self) -> bool:
        """Whether a backward pass for the input's gradient alone is under way."""
        return self._tasks is not None

    @contextmanager
    def collect(self) -> Iterator[list[WeightTask]]:
        """Within the context weight gradients wait; gives the tasks, in the order in which backward meets them."""
        tasks: list[WeightTask] = []
        self._tasks = tasks
        try:
            yield tasks
        finally:
            self._tasks = None

    def add(self, parameter: Tensor, start: Callable[..., Product], *kept: Tensor) -> None:
        """Let the gradient of ``parameter`` wait: ``start(*kept)`` begins it and returns what computes it.

        The tensors count as activations until then.
        """
        held = [Kept(tensor, self._memory) for tensor in kept]

        def begin() -> Callable[[], None]:
            product = start(*(entry.tensor for entry in held))
            # As in an ordinary backward pass: autograd adds it to ``grad`` and calls the hooks.
            return lambda: torch.autograd.backward(parameter, product())

        self.add_task(WeightTask(parameter, begin))

    def add_task(self, task: WeightTask) -> None:
        """Put a task at the end. Only while tasks are collected."""
        assert self._tasks is not None, "asked while nothing is collected"
        self._tasks.append(task)


@torch.no_grad()  # as within backward
def run_weight_tasks(tasks: list[WeightTask]) -> None:
    """Compute what waited, in the order of the list, which is emptied; each task frees what it kept.

    What a task needs of other ranks travels while the one before it computes.
    """
    tasks.reverse()
    following = tasks.pop().start() if tasks else None
    while following is not None:
        finish, following = following, tasks.pop().start() if tasks else None
        finish()
