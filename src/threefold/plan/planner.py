"""From a question to its answer: enumerate, search, play the best, explain."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from threefold.cost.hardware import Hardware
from threefold.job import ModelSpec
from threefold.plan.advice import advise
from threefold.plan.misses import NothingFitsError, nothing_fits
from threefold.plan.nothing_legal import nothing_legal
from threefold.plan.plans import PlanResult, predict
from threefold.plan.play import played
from threefold.plan.question import Question, Resort, read_fixed
from threefold.plan.reasons import Reason
from threefold.plan.search import Found, seek
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
    question, found = seek(question, top)
    if found is None:
        raise nothing_legal(question)
    plans = [played(question, one) for one in predict(question, found.strategies)]
    kept = [one for one in plans if one.fits]
    searched, rejected = _counts(question, found, len(plans) - len(kept))
    advised = advise(question, kept)
    result = PlanResult(question, advised, searched, found.feasible, time.perf_counter() - start_s, rejected)
    if not kept:
        misses = found.misses if len(found.misses) else found.strategies
        raise NothingFitsError(nothing_fits(question, misses), result)
    return result


def _counts(question: Question, found: Found, num_dropped: int) -> tuple[int, Mapping[str, int]]:
    """All candidates, and the rejected ones by reason, those of resorts that were not needed among them."""
    searched = build_space(replace(question, resort=Resort.OFFLOAD)).searched
    rejected = found.rejected + Counter({Reason.RESORT: searched - found.searched, Reason.MEMORY: num_dropped})
    return searched, {str(reason): count for reason, count in rejected.items()}
