"""The better of two candidates is the faster one, or the simpler one of equals."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.cost.strategies import Strategies
from threefold.plan.order import NEAR, ranked, rounded

PAIR = Strategies.build(dp=[2, 4], tp=[2, 1])


def test_the_faster_one_is_better() -> None:
    assert list(ranked(PAIR, np.array([1.0, 1.0 + 2 * NEAR]))) == [0, 1]
    assert list(ranked(PAIR, np.array([1.0 + 2 * NEAR, 1.0]))) == [1, 0]


def test_of_those_as_good_as_the_fastest_the_simpler_one_is_better() -> None:
    assert list(ranked(PAIR, np.array([1.0, 1.0 + NEAR / 2]))) == [1, 0]
    zero = Strategies.build(dp=4, zero_stage=[2, 1, 0], recompute=[0, 0, 1])
    assert list(ranked(zero, np.array([1.0, 1.0, 1.0]))) == [2, 1, 0]


def test_nothing_is_ranked_as_nothing() -> None:
    assert list(ranked(PAIR.take([]), np.array([]))) == []


@settings(derandomize=True, deadline=None)
@given(st.lists(st.sampled_from([1.0, 1.0005, 1.002, 2.0]), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_the_rank_does_not_depend_on_the_order(step_s: list[float], random: np.random.Generator) -> None:
    strategies = Strategies.build(dp=np.arange(len(step_s)) + 1, zero_stage=np.arange(len(step_s)) % 3)
    shuffled = list(range(len(step_s)))
    random.shuffle(shuffled)
    best = ranked(strategies, np.array(step_s))
    again = ranked(strategies.take(shuffled), np.array(step_s)[shuffled])
    assert list(best) == [shuffled[index] for index in again]


def test_rounding_keeps_nine_digits() -> None:
    assert rounded(np.array([0.0, 1.0000000001, 123456.78949, np.inf])).tolist() == [0.0, 1.0, 123456.789, np.inf]
