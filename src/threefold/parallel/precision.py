"""Loss scaling for float16, agreed by all ranks because all of them see the same gradient norm.

float16 gradients below 6e-8 vanish. So the loss is multiplied by a large scale before backward and the gradients are
divided by it after (Micikevicius et al. 2018, section 3.2). Where a gradient overflows, the global norm is not finite
on every rank, all skip the same step, and the scale shrinks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from threefold.errors import WorkerError
from threefold.job.spec import Fp16

_DIVERGED = "lower optimizer.params.lr, set gradient_clipping, or use bf16"


@dataclass
class LossScaler:
    """The scale, and its rule of change by DeepSpeed's names.

    After ``window`` steps without overflow the scale doubles. An overflow halves it, except that the first
    ``hysteresis - 1`` overflows in a row are tolerated. ``fixed`` scales never change.
    """

    scale: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    fixed: bool = True
    _good_steps: int = 0
    _tolerance: int = 2

    @classmethod
    def of_job(cls, fp16: Fp16) -> LossScaler:
        """The job's scaler; the scale is 1 and fixed without fp16."""
        if not fp16.enabled:
            return cls()
        return cls(
            scale=fp16.loss_scale or 2.0**fp16.initial_scale_power,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            minimum=fp16.min_loss_scale,
            fixed=fp16.loss_scale > 0,
            _tolerance=fp16.hysteresis,
        )

    def skips(self, grad_norm: float) -> bool:
        """Note a step's gradient norm; True when it overflowed and the step must be skipped.

        Raises WorkerError when it overflows at the smallest scale: then it is no overflow, the training has diverged.
        """
        if math.isfinite(grad_norm):
            self._note_good_step()
            return False
        if self.fixed or self.scale <= self.minimum:
            raise WorkerError(
                f"fp16: gradients overflow at loss scale {self.scale:g}, which can't shrink any further\n    fix: "
                + ("lower fp16.loss_scale, or set it to 0, which adapts it" if self.fixed else _DIVERGED)
            )
        self._tolerance -= 1
        if self._tolerance <= 0:
            self.scale = max(self.scale / 2, self.minimum)
        self._good_steps = 0
        return True

    def _note_good_step(self) -> None:
        if self.fixed:
            return
        self._good_steps += 1
        if self._good_steps % self.window == 0:
            self.scale *= 2
            self._tolerance = self.hysteresis
