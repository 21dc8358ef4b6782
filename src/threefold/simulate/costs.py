"""What one step of one pipeline costs, stage by stage: all that a play needs to know besides the schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

PerStage = Sequence[float]


@dataclass(frozen=True)
class StepCosts:
    """Seconds and bytes of every stage. A rank that holds several stages pays the sum of what is theirs.

    A fused backward pass (B) takes ``input_grad_s + weight_grad_s``. Raises ValueError when the lengths disagree, or a
    cost is negative or not finite.
    """

    forward_s: PerStage
    """Forward pass of one microbatch."""
    input_grad_s: PerStage
    """Backward pass of one microbatch for the gradient of the stage's input (I)."""
    weight_grad_s: PerStage
    """Backward pass of one microbatch for the gradients of the stage's weights (W)."""
    p2p_s: PerStage
    """Transfer of one microbatch between stage i and stage i + 1, either way; one number less than there are stages."""
    sync_s: PerStage
    """What is left of the gradient reduction when the last backward pass has ended."""
    step_s: PerStage
    """Optimizer step."""
    activation_bytes: PerStage
    """What one microbatch keeps from its forward pass until the end of its backward pass (of W, where it is split)."""
    static_bytes: PerStage
    """What stays all the time: parameters, gradients, optimizer states, buffers."""

    def __post_init__(self) -> None:
        for field in fields(self):
            values = getattr(self, field.name)
            wanted = self.num_stages - (field.name == "p2p_s")
            if len(values) != wanted:
                raise ValueError(f"{field.name} has {len(values)} values where {wanted} are needed")
            if not all(math.isfinite(value) and value >= 0 for value in values):
                raise ValueError(f"{field.name} has a cost that is negative or not finite: {list(values)}")

    @property
    def num_stages(self) -> int:
        """Pipeline stages, over all ranks."""
        return len(self.forward_s)

    @property
    def backward_s(self) -> tuple[float, ...]:
        """Whole backward pass of one microbatch, by stage."""
        return tuple(one + other for one, other in zip(self.input_grad_s, self.weight_grad_s, strict=True))

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward_s: float = 1.0,
        backward_s: float = 2.0,
        p2p_s: float = 0.0,
        sync_s: float = 0.0,
        step_s: float = 0.0,
        activation_bytes: float = 0.0,
        static_bytes: float = 0.0,
    ) -> StepCosts:
        """Equal stages, with a backward pass that halves into I and W; the defaults are the unit costs of schedules."""

        def every(value: float) -> tuple[float, ...]:
            return (value,) * num_stages

        return cls(
            forward_s=every(forward_s),
            input_grad_s=every(backward_s / 2),
            weight_grad_s=every(backward_s / 2),
            p2p_s=(p2p_s,) * (num_stages - 1),
            sync_s=every(sync_s),
            step_s=every(step_s),
            activation_bytes=every(activation_bytes),
            static_bytes=every(static_bytes),
        )
