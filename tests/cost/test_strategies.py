from __future__ import annotations

import numpy as np
import pytest

from threefold.cost.strategies import Strategies


def test_scalars_are_broadcast_to_the_longest_array() -> None:
    strategies = Strategies.build(dp=[1, 2, 4], tp=2, num_microbatches=3, micro_batch=2)
    assert len(strategies) == 3
    assert strategies.tp.tolist() == [2, 2, 2]
    assert strategies.num_devices.tolist() == [2, 4, 8]
    assert strategies.global_batch.tolist() == [6, 12, 24]


def test_taking_keeps_the_chosen_ones() -> None:
    strategies = Strategies.build(dp=[1, 2, 4], sequence_parallel=[True, False, True])
    assert strategies.take([2, 0]).dp.tolist() == [4, 1]
    assert strategies.take(np.array([False, True, False])).sequence_parallel.tolist() == [False]


def test_an_unknown_field_and_unequal_lengths_are_refused() -> None:
    with pytest.raises(TypeError, match="no field of a strategy is called width"):
        Strategies.build(width=2)
    with pytest.raises(ValueError, match="broadcast"):
        Strategies.build(dp=[1, 2], tp=[1, 2, 4])
