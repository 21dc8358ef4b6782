"""Runs one rank's row of any legal schedule: a table from the kind of an action to the method that does it.

Shapes: B microbatch, S sequence (a rank's part under sequence parallelism), D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from threefold.errors import WorkerError
from threefold.parallel.batch import ReplicaBatch
from threefold.parallel.collectives import Pending
from threefold.parallel.mesh import Mesh
from threefold.parallel.stage import Stage
from threefold.schedule import Action, Kind, Schedule

LossSum = Callable[[Tensor, Tensor], Tensor]
"""(output of the last stage, labels) -> sum of the loss over valid tokens."""

Key = tuple[int, int]
"""(stage, microbatch)."""


@dataclass
class StepState:
    """What lives during one run of a row, by (stage, microbatch)."""

    batch: ReplicaBatch
    num_valid: float
    loss_scale: float = 1.0
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    outputs: dict[Key, Tensor] = field(default_factory=dict)
    received: dict[Key, tuple[Tensor, Pending]] = field(default_factory=dict)
    received_grads: dict[Key, tuple[Tensor, Pending]] = field(default_factory=dict)
    to_send: dict[Key, Tensor] = field(default_factory=dict)
    grads_to_send: dict[Key, Tensor] = field(default_factory=dict)
    sends: list[tuple[Pending, Tensor]] = field(default_factory=list)
    loss_sum: Tensor | None = None
    peak_live: int = 0


@dataclass(frozen=True)
class Hooks:
    """What the schedule's actions mean outside of the pipeline; evaluation uses none of them."""

    before_backward: Callable[[bool], None] = lambda _: None
    after_backward: Callable[[], None] = lambda: None
    sync: Callable[[], None] = lambda: None
    step: Callable[[StepState], None] = lambda _: None


class PipelineExecutor:
    """Runs rows over this rank's ``stages`` (stage index -> module).

    ``boundary_shape`` and ``dtype`` are those of the activations that pass between stages.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        mesh: Mesh,
        boundary_shape: tuple[int, ...],
        dtype: torch.dtype,
        loss_sum: LossSum,
    ) -> None:
        self.stages, self.mesh = stages, mesh
        self.boundary_shape, self.dtype, self.loss_sum = boundary_shape, dtype, loss_sum
        self._methods: dict[Kind, Callable[[StepState, Action, Schedule], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.SEND_F: self._send_output,
            Kind.RECV_F: self._receive_input,
            Kind.SEND_B: self._send_gradient,
            Kind.RECV_B: self._receive_gradient,
        }

    def run(
        self,
        schedule: Schedule,
        batch: ReplicaBatch,
        num_valid: float,
        hooks: Hooks | None = None,
        loss_scale: float = 1.0,
    ) -> StepState:
        """Run this rank's row of a lowered ``schedule``.

        The loss is divided by ``num_valid``, the number of valid tokens in the *global* batch, before backward. Returns
        the sum of the loss over this replica's valid tokens (on the last stage) and the peak of live microbatches.

        Raises WorkerError naming rank, action, stage, microbatch and collective.
        """
        hooks = hooks or Hooks()
        row = schedule.rows[self.mesh.coord.pp]
        last_backward = max((index for index, action in enumerate(row) if action.kind is Kind.B), default=-1)
        state = StepState(batch, num_valid, loss_scale)
        for index, action in enumerate(row):
            self.mesh.activity.begin_action(str(action), action.stage, action.microbatch)
            self.mesh.memory.action = str(action)
            if action.kind is Kind.B:
                hooks.before_backward(index == last_backward)
            if action.kind is Kind.SYNC:
                hooks.sync()
            elif action.kind is Kind.STEP:
                self._finish_sends(state)
                hooks.step(state)
            else:
                self._do(state, action, schedule)
            if action.kind is Kind.B:
                hooks.after_backward()
        self._finish_sends(state)
        return state

    def _do(self, state: StepState, action: Action, schedule: Schedule) -> None:
        try:
            self._methods[action.kind](state, action, schedule)
        except WorkerError as error:
            where = f"stage {action.stage}, microbatch {action.microbatch}, action {action}"
            raise WorkerError(f"{error}; {self.mesh.place} was at {where}") from error

    def _forward(self, state: StepState, action: Action, schedule: Schedule) -> None:
        key, stage = (action.stage, action.microbatch), self.stages[action.stage]
        stage.samples.numbers = state.batch.samples[action.microbatch]
        x = self._stage_input(state, action)
        with torch.set_grad_enabled(not schedule.is_forward_only):
            y = stage(x)
            if action.stage == schedule.num_stages - 1:
                y = self.loss_sum(y, state.batch.labels[action.microbatch])
                loss = y.detach().double()
                state.loss_sum = loss if state.loss_sum is None else state.loss_sum + loss
            else:
                self._check_boundary(action, y)
                state.to_send[key] = y.detach()
        if not schedule.is_forward_only:
            state.inputs[key], state.outputs[key] = x, y
            self.mesh.memory.begin_use(x)
            self.mesh.memory.begin_use(y)
            state.peak_live = max(state.peak_live, len(state.outputs))

    def _stage_input(self, state: StepState, action: Action) -> Tensor:
        if action.stage == 0:
            return state.batch.tokens[action.microbatch]
        buffer, pending = state.received.pop((action.stage, action.microbatch))
        pending.wait()
        self.mesh.memory.add("buffers", -buffer.nbytes)  # an activation from here on
        return buffer.requires_grad_()

    def _check_boundary(self, action: Action, y: Tensor) -> None:
        if tuple(y.shape) != self.boundary_shape or y.dtype != self.dtype:
            raise ValueError(
                f"stage {action.stage} returned {y.dtype} {tuple(y.shape)}; the next stage expects {self.dtype} "
                f"{self.boundary_shape}, the same for every microbatch"
            )

    def _backward(self, state: StepState, action: Action, schedule: Schedule) -> None:
        key = (action.stage, action.microbatch)
        x, y = state.inputs.pop(key), state.outputs.pop(key)
        self.mesh.memory.end_use(x)
        self.mesh.memory.end_use(y)
        self.stages[action.stage].samples.numbers = state.batch.samples[action.microbatch]  # for what is recomputed
        if action.stage == schedule.num_stages - 1:
            # The true gradient, here and not in the logs: sum over valid tokens / valid tokens of the global batch.
            gradient = torch.full_like(y, state.loss_scale / state.num_valid)
        else:
            gradient, pending = state.received_grads.pop(key)
            pending.wait()
            self.mesh.memory.add("buffers", -gradient.nbytes)
        if y.requires_grad:  # not where the first stage has no parameter that is trained
            torch.autograd.backward(y, gradient)
        if action.stage > 0:
            assert x.grad is not None, "the input of a stage requires a gradient"
            state.grads_to_send[key] = x.grad

    def _send_output(self, state: StepState, action: Action, schedule: Schedule) -> None:
        self._send(state, state.to_send.pop((action.stage, action.microbatch)), schedule.stage_rank(action.stage + 1))

    def _send_gradient(self, state: StepState, action: Action, schedule: Schedule) -> None:
        gradient = state.grads_to_send.pop((action.stage, action.microbatch))
        self._send(state, gradient, schedule.stage_rank(action.stage - 1))

    def _receive_input(self, state: StepState, action: Action, schedule: Schedule) -> None:
        received = self._receive(schedule.stage_rank(action.stage - 1))
        state.received[action.stage, action.microbatch] = received

    def _receive_gradient(self, state: StepState, action: Action, schedule: Schedule) -> None:
        received = self._receive(schedule.stage_rank(action.stage + 1))
        state.received_grads[action.stage, action.microbatch] = received

    def _send(self, state: StepState, tensor: Tensor, peer: int) -> None:
        tensor = tensor.contiguous()
        state.sends.append((self.mesh.pp.send(tensor, peer), tensor))
        self.mesh.memory.begin_use(tensor)

    def _receive(self, peer: int) -> tuple[Tensor, Pending]:
        buffer = torch.empty(self.boundary_shape, dtype=self.dtype, device=self.mesh.device)
        self.mesh.memory.add("buffers", buffer.nbytes)
        return buffer, self.mesh.pp.receive(buffer, peer)

    def _finish_sends(self, state: StepState) -> None:
        for pending, tensor in state.sends:
            pending.wait()
            self.mesh.memory.end_use(tensor)
        state.sends.clear()
