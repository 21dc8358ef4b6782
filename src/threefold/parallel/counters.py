"""How many bytes one rank holds, by category, and the most that it held at once.

Parameters, gradients, optimizer state and messages are counted by those who make them, always. Activations are counted
while a step is ``measured``: every tensor that autograd saves, each storage once, and what the pipeline keeps between a
forward and its backward. What lives within one operation, or while a layer is computed again, is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Category = Literal["parameters", "gradients", "optimizer", "activations", "buffers"]
CATEGORIES: tuple[Category, ...] = ("parameters", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class Peak:
    """The most bytes held at once, by category, and when that was."""

    held: Mapping[str, int]
    step: int
    action: str

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.held.values())


@dataclass
class MemoryCounter:
    """Bytes ``held`` now on the device, those that offloading keeps in ``host`` memory, and the peak of the former.

    The first ``measured_steps`` steps count activations too; an engine's owner who wants a peak sets it.
    """

    measured_steps: int = 0
    held: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    host: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    peak: Peak = Peak({}, 0, "")
    step: int = 0
    action: str = ""
    _users: dict[int, int] = field(default_factory=dict)
    _not_activations: set[int] = field(default_factory=set)

    def add(self, category: Category, num_bytes: int, *, on_host: bool = False) -> None:
        """Note that ``num_bytes`` more (or, negative, fewer) are held."""
        counts = self.host if on_host else self.held
        counts[category] += num_bytes
        if num_bytes > 0 and sum(self.held.values()) > self.peak.total:
            self.peak = Peak(dict(self.held), self.step, self.action)

    def is_no_activation(self, tensor: Tensor) -> None:
        """Never count what lies in this tensor's storage as an activation: it is a parameter."""
        self._not_activations.add(_storage(tensor))

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Within the context, a step, activations are counted if it is one of the first."""
        self.step += 1
        if self.step > self.measured_steps:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: Kept(tensor, self), lambda kept: kept.tensor):
            yield

    def begin_use(self, tensor: Tensor) -> None:
        """Count the tensor's storage, unless somebody else has counted it already."""
        storage = _storage(tensor)
        if storage in self._not_activations:
            return
        self._users[storage] = self._users.get(storage, 0) + 1
        if self._users[storage] == 1:
            self.add("activations", tensor.untyped_storage().nbytes())

    def end_use(self, tensor: Tensor) -> None:
        """Take it back."""
        storage = _storage(tensor)
        if storage not in self._users:
            return
        self._users[storage] -= 1
        if self._users[storage] == 0:
            del self._users[storage]
            self.add("activations", -tensor.untyped_storage().nbytes())


class Kept:
    """A tensor that is held for backward; it counts for as long as this object lives."""

    __slots__ = ("memory", "tensor")

    def __init__(self, tensor: Tensor, memory: MemoryCounter) -> None:
        self.tensor, self.memory = tensor, memory
        memory.begin_use(tensor)

    def __del__(self) -> None:
        self.memory.end_use(self.tensor)


def _storage(tensor: Tensor) -> int:
    """What tells one storage from all others that are alive; its address changes when it is resized."""
    return tensor.untyped_storage()._cdata
