"""Runs one rank's row of any legal schedule: a table from the kind of an action to the method that does it.

Shapes: B microbatch, S sequence (a rank's part under sequence parallelism), D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from threefold.errors import WorkerError
from threefold.parallel.batch import ReplicaBatch
from threefold.parallel.collectives import Pending
from threefold.parallel.deferred import WeightTask
from threefold.parallel.mesh import Mesh
from threefold.parallel.row import BACKWARD, Row, plan_row
from threefold.parallel.stage import Stage
from threefold.schedule import Action, Kind, Schedule
from threefold.schedule.actions import COMPUTE

LossSum = Callable[[Tensor, Tensor], Tensor]
"""(output of the last stage, labels) -> sum of the loss over valid tokens."""

Key = tuple[int, int]
"""(stage, microbatch)."""


@dataclass
class StepState:
    """What lives during one run of a row, by (stage, microbatch).

    ``live`` are those whose activations are held, or what is left of them while weight gradients wait.
    """

    batch: ReplicaBatch
    num_valid: float
    loss_scale: float = 1.0
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    outputs: dict[Key, Tensor] = field(default_factory=dict)
    waiting: dict[Key, list[WeightTask]] = field(default_factory=dict)
    received: dict[Key, Arrival] = field(default_factory=dict)
    received_grads: dict[Key, Arrival] = field(default_factory=dict)
    to_send: dict[Key, Tensor] = field(default_factory=dict)
    grads_to_send: dict[Key, Tensor] = field(default_factory=dict)
    sends: dict[Action, tuple[Pending, Tensor]] = field(default_factory=dict)
    live: set[Key] = field(default_factory=set)
    loss_sum: Tensor | None = None
    peak_live: int = 0


@dataclass(frozen=True)
class Arrival:
    """What a stage needs of its neighbour. Only what comes from another rank waits in a buffer of its own."""

    tensor: Tensor
    pending: Pending = field(default_factory=Pending)
    is_buffer: bool = False


@dataclass(frozen=True)
class Hooks:
    """What the schedule's actions mean outside of the pipeline; evaluation uses none of them.

    ``before_backward`` sees a B, I or W, whether it is the last B or W of its stage in this step, and the weight
    gradients that it computes if it is a W. ``after_compute`` sees an F, B, I or W and the one that comes next.
    """

    before_backward: Callable[[Action, bool, Sequence[WeightTask]], None] = lambda action, is_last, tasks: None
    after_compute: Callable[[Action, Action | None], None] = lambda action, following: None
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
        self._planned: tuple[Schedule, Row] | None = None
        self._methods: dict[Kind, Callable[[StepState, Action, Schedule], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward_input,
            Kind.W: self._backward_weights,
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
        row = self._row_of(schedule)
        state, recorder = StepState(batch, num_valid, loss_scale), self.mesh.recorder
        recorder.begin_row(len(row.actions))
        for index, action in enumerate(row.actions):
            recorder.begin(index, action)
            self.mesh.activity.begin_action(str(action), action.stage, action.microbatch)
            self.mesh.memory.action = str(action)
            if action.kind in BACKWARD:
                tasks = state.waiting[_key(action)] if action.kind is Kind.W else ()
                hooks.before_backward(action, index in row.completing, tasks)
            if action.kind is Kind.SYNC:
                hooks.sync()
            elif action.kind is Kind.STEP:
                self._finish_sends(state, tuple(state.sends))
                hooks.step(state)
            else:
                self._do(state, action, schedule)
            if action.kind in COMPUTE:
                self._finish_sends(state, row.settled[index])
                hooks.after_compute(action, row.following[index])
            recorder.end()
        self._finish_sends(state, tuple(state.sends))
        return state

    def _row_of(self, schedule: Schedule) -> Row:
        if self._planned is None or self._planned[0] is not schedule:
            self._planned = schedule, plan_row(schedule, self.mesh.coord.pp)
        return self._planned[1]

    def _do(self, state: StepState, action: Action, schedule: Schedule) -> None:
        try:
            self._methods[action.kind](state, action, schedule)
        except WorkerError as error:
            where = f"stage {action.stage}, microbatch {action.microbatch}, action {action}"
            raise WorkerError(f"{error}; {self.mesh.place} was at {where}") from error

    def _forward(self, state: StepState, action: Action, schedule: Schedule) -> None:
        key, stage = _key(action), self.stages[action.stage]
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
                self._pass_on(y.detach(), key, action.stage + 1, state.to_send, state.received)
        if not schedule.is_forward_only:
            state.inputs[key], state.outputs[key] = x, y
            self.mesh.memory.begin_use(x)
            self.mesh.memory.begin_use(y)
            state.live.add(key)
            state.peak_live = max(state.peak_live, len(state.live))

    def _pass_on(
        self, tensor: Tensor, key: Key, to_stage: int, to_send: dict[Key, Tensor], arrived: dict[Key, Arrival]
    ) -> None:
        """Keep what the neighbour needs until it is sent, or hand it over where this rank is the neighbour."""
        if to_stage in self.stages:
            arrived[to_stage, key[1]] = Arrival(tensor)
            self.mesh.memory.begin_use(tensor)
        else:
            to_send[key] = tensor

    def _stage_input(self, state: StepState, action: Action) -> Tensor:
        if action.stage == 0:
            return state.batch.tokens[action.microbatch]
        return self._take(state.received, _key(action)).requires_grad_()

    def _take(self, arrived: dict[Key, Arrival], key: Key) -> Tensor:
        arrival = arrived.pop(key)
        if arrival.is_buffer:  # an activation from here on
            arrival.pending.wait()
            self.mesh.recorder.ready()
            self.mesh.memory.add("buffers", -arrival.tensor.nbytes)
        else:
            self.mesh.memory.end_use(arrival.tensor)
        return arrival.tensor

    def _check_boundary(self, action: Action, y: Tensor) -> None:
        if tuple(y.shape) != self.boundary_shape or y.dtype != self.dtype:
            raise ValueError(
                f"stage {action.stage} returned {y.dtype} {tuple(y.shape)}; the next stage expects {self.dtype} "
                f"{self.boundary_shape}, the same for every microbatch"
            )

    def _backward(self, state: StepState, action: Action, schedule: Schedule) -> None:
        x, y, gradient = self._backward_inputs(state, action, schedule)
        self.stages[action.stage].backward(y, gradient)
        self._hand_gradient(state, action, x)
        state.live.discard(_key(action))

    def _backward_input(self, state: StepState, action: Action, schedule: Schedule) -> None:
        x, y, gradient = self._backward_inputs(state, action, schedule)
        state.waiting[_key(action)] = self.stages[action.stage].backward_input(y, gradient)
        self._hand_gradient(state, action, x)

    def _backward_weights(self, state: StepState, action: Action, schedule: Schedule) -> None:
        self.stages[action.stage].backward_weights(state.waiting.pop(_key(action)))
        state.live.discard(_key(action))

    def _backward_inputs(self, state: StepState, action: Action, schedule: Schedule) -> tuple[Tensor, Tensor, Tensor]:
        """The stage's input, its output, and the gradient of that; the state holds none of them any more."""
        key = _key(action)
        x, y = state.inputs.pop(key), state.outputs.pop(key)
        self.mesh.memory.end_use(x)
        self.mesh.memory.end_use(y)
        self.stages[action.stage].samples.numbers = state.batch.samples[action.microbatch]  # for what is recomputed
        if action.stage < schedule.num_stages - 1:
            return x, y, self._take(state.received_grads, key)
        # The true gradient, here and not in the logs: sum over valid tokens / valid tokens of the global batch.
        return x, y, torch.full_like(y, state.loss_scale / state.num_valid)

    def _hand_gradient(self, state: StepState, action: Action, x: Tensor) -> None:
        if action.stage > 0:
            assert x.grad is not None, "the input of a stage requires a gradient"
            gradient, x.grad = x.grad, None
            self._pass_on(gradient, _key(action), action.stage - 1, state.grads_to_send, state.received_grads)

    def _send_output(self, state: StepState, action: Action, schedule: Schedule) -> None:
        self._send(state, action, state.to_send.pop(_key(action)), schedule.stage_rank(action.stage + 1))

    def _send_gradient(self, state: StepState, action: Action, schedule: Schedule) -> None:
        self._send(state, action, state.grads_to_send.pop(_key(action)), schedule.stage_rank(action.stage - 1))

    def _receive_input(self, state: StepState, action: Action, schedule: Schedule) -> None:
        state.received[_key(action)] = self._receive(schedule.stage_rank(action.stage - 1))

    def _receive_gradient(self, state: StepState, action: Action, schedule: Schedule) -> None:
        state.received_grads[_key(action)] = self._receive(schedule.stage_rank(action.stage + 1))

    def _send(self, state: StepState, action: Action, tensor: Tensor, peer: int) -> None:
        tensor = tensor.contiguous()
        state.sends[action] = self.mesh.pp.send(tensor, peer), tensor
        self.mesh.memory.begin_use(tensor)

    def _receive(self, peer: int) -> Arrival:
        buffer = torch.empty(self.boundary_shape, dtype=self.dtype, device=self.mesh.device)
        self.mesh.memory.add("buffers", buffer.nbytes)
        return Arrival(buffer, self.mesh.pp.receive(buffer, peer), is_buffer=True)

    def _finish_sends(self, state: StepState, actions: Sequence[Action]) -> None:
        for action in actions:
            pending, tensor = state.sends.pop(action)
            pending.wait()
            self.mesh.memory.end_use(tensor)


def _key(action: Action) -> Key:
    return action.stage, action.microbatch
