"""Other answers, to compare with: the best plan under another decision, and a plan with one setting changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from threefold.plan.plans import Plan, predict
from threefold.plan.question import Question
from threefold.plan.search import search, seek
from threefold.plan.space import build_space


def best_with(question: Question, **decisions: int) -> Plan | None:
    """The best plan when ``decisions`` are fixed too, by the same resort; None when no legal candidate fits."""
    asked = replace(question, fixed={**question.fixed, **decisions})
    space = build_space(asked)
    if not space.legal.any():
        return None
    found = predict(asked, search(asked, space, 1).strategies)
    return found[0] if found else None


def best_of(question: Question) -> Plan | None:
    """The best plan for another question, by any resort; None when no legal candidate fits."""
    asked, found = seek(question, 1)
    plans = predict(asked, found.strategies) if found else []
    return plans[0] if plans else None


def changed(question: Question, plan: Plan, **settings: int) -> Plan:
    """The same plan with some settings changed, legal or not."""
    arrays = {name: np.array([value]).astype(getattr(plan.strategy, name).dtype) for name, value in settings.items()}
    return predict(question, replace(plan.strategy, **arrays))[0]
