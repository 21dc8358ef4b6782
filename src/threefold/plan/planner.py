"""From a question to its answer: enumerate, search, play the best, explain."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from threefold.cost.hardware import Hardware
from threefold.job import ModelSpec
from threefold.plan.advice import advise
from threefold.plan.misses import NothingFitsError, nothing_fits
from threefold.plan.nothing_legal import nothing_legal
from threefold.plan.plans import PlanResult, predict
from threefold.plan.play import played
from threefold.plan.question import Question, read_fixed
from threefold.plan.reasons import Reason
from threefold.plan.search import search
from threefold.plan.space import build_space

DEFAULT_TOP = 5


def plan(
    model: ModelSpec,
    sequence_length: int,
    hardware: Hardware,
    global_batch: int,
    fixed: Mapping[str, object] | None = None,
    top: int = DEFAULT_TOP,
) -> PlanResult:
    """The ``top`` best layouts for training ``model`` on all devices of ``hardware``, the best with advice in words.

    ``global_batch`` is in sequences. ``fixed`` holds what is decided, like ``{"tp": 8, "schedule": "1f1b"}``. Raises
    JobError when no candidate is legal, InfeasibleError when none fits.
    """
    return answer(Question(model, sequence_length, hardware, global_batch, read_fixed(fixed or {})), top)


def answer(question: Question, top: int = DEFAULT_TOP) -> PlanResult:
    """The answer to ``question``; see ``plan``."""
    start_s = time.perf_counter()
    space = build_space(question)
    if not space.legal.any():
        raise nothing_legal(question)
    found = search(question, space, top)
    plans = [played(question, one) for one in predict(question, found.strategies)]
    kept = [one for one in plans if one.fits]
    rejected = found.rejected
    rejected[Reason.MEMORY] += len(plans) - len(kept)
    result = PlanResult(
        question, advise(question, kept), space.searched, found.feasible, 0.0, {str(k): n for k, n in rejected.items()}
    )
    result = replace(result, seconds=time.perf_counter() - start_s)
    if not kept:
        raise NothingFitsError(nothing_fits(question, found.misses), result)
    return result
