"""What a model asks of one card: does it fit, and if not, is it too wide or too deep?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from threefold.cost.shape import Shape, shape_of
from threefold.cost.strategies import RECOMPUTE_CODES, Strategies
from threefold.plan.plans import Plan, predict
from threefold.plan.question import Question


@dataclass(frozen=True)
class Diagnosis:
    """``alone`` is plain data parallelism at micro batch 1, ``thrifty`` the same with everything recomputed.

    ``layers_on_card`` is how many layers fit on one card with all their training state at micro batch 1: 0 means that
    the model is too wide, fewer than it has that it is too deep. ``widest`` names the largest matrix of a layer.
    """

    alone: Plan
    thrifty: Plan
    layers_on_card: int
    widest: str
    widest_elements: int

    @property
    def fits_on_card(self) -> bool:
        """Whether data parallelism alone is possible."""
        return self.alone.fits or self.thrifty.fits


def diagnose(question: Question) -> Diagnosis:
    """Judge one card for ``question``."""
    share = max(question.global_batch // question.num_devices, 1)
    alone = Strategies.build(
        dp=question.num_devices,
        num_microbatches=share,
        recompute=[RECOMPUTE_CODES["none"], RECOMPUTE_CODES["full"]],
        precision=question.precision,
    )
    plain, thrifty = predict(question, alone)
    name, elements = _widest(shape_of(question.model, question.sequence_length))
    return Diagnosis(plain, thrifty, _layers_on_card(question), name, elements)


def _layers_on_card(question: Question) -> int:
    """Layers of the fullest stage of the shortest pipeline that fits, one microbatch at a time."""
    layers = question.model.num_hidden_layers
    depths = np.arange(1, layers + 1)
    plans = predict(question, Strategies.build(pp=depths, precision=question.precision))
    return next((-(-layers // int(pp)) for pp, plan in zip(depths, plans, strict=True) if plan.fits), 0)


def _widest(shape: Shape) -> tuple[str, int]:
    """The largest matrix of a decoder layer; gate and up, and queries, keys and values, are one each."""
    hidden = int(shape.hidden)
    widths = {
        "MLP": max(int(shape.ffn), int(shape.shared_ffn), int(shape.expert_ffn)) * (1 + int(shape.gated)),
        "attention": int(shape.head_dim * (shape.heads + 2 * shape.kv_heads)),
    }
    name = max(widths, key=lambda part: widths[part])
    return f"{name} matrix of {hidden:,} × {widths[name]:,}", hidden * widths[name]
