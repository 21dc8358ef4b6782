"""The order of samples: each epoch visits each sample once, whatever the layout is."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.train.data.order import microbatch_samples, permute, sample_indices

seeds = st.integers(min_value=0, max_value=2**63 - 1)


@settings(deadline=None)
@given(num_samples=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 10**6))
def test_each_epoch_visits_each_sample_exactly_once(num_samples: int, seed: int, epoch: int) -> None:
    numbers = epoch * num_samples + np.arange(num_samples)
    assert sorted(sample_indices(numbers, num_samples, seed)) == list(range(num_samples))


@settings(deadline=None)
@given(num_samples=st.integers(1, 300), seed=seeds, numbers=st.lists(st.integers(0, 10**9), max_size=20))
def test_a_sample_depends_on_its_number_alone_not_on_its_batch(num_samples: int, seed: int, numbers: list[int]) -> None:
    together = sample_indices(numbers, num_samples, seed)
    assert together.tolist() == [int(sample_indices([number], num_samples, seed)[0]) for number in numbers]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(sample_indices(epoch * 50 + np.arange(50), 50, seed).tolist()) for seed in range(5) for epoch in range(5)
    }
    assert len(orders) == 25


def test_the_order_looks_random() -> None:
    order = sample_indices(np.arange(10_007), 10_007, seed=3)
    mean_distance = np.abs(np.diff(order)).mean() / 10_007
    assert abs(mean_distance - 1 / 3) < 0.01  # of two random points on a line of length 1
    assert abs(np.corrcoef(order, np.arange(10_007))[0, 1]) < 0.05


def test_the_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    """A run that is resumed under another release must not see samples again: change this only with a new format."""
    assert sample_indices(range(10), 10, seed=0).tolist() == GOLDEN_ORDER


def test_without_shuffling_samples_come_in_order_and_again_in_the_next_epoch() -> None:
    assert sample_indices(range(7), 3, seed=1, shuffle=False).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_huge_corpora_need_no_memory() -> None:
    length = 10**15
    images = permute(np.arange(5), length, 1, np.zeros(5, dtype=np.int64))
    assert len(set(images.tolist())) == 5
    assert all(0 <= image < length for image in images)


@given(
    step=st.integers(0, 10**6),
    dp=st.integers(1, 6),
    micro_batch=st.integers(1, 5),
    num_microbatches=st.integers(1, 6),
)
def test_a_step_covers_the_same_samples_in_every_layout(
    step: int, dp: int, micro_batch: int, num_microbatches: int
) -> None:
    size = dp * micro_batch * num_microbatches
    seen = [
        number
        for coord in range(dp)
        for k in range(num_microbatches)
        for number in microbatch_samples(step, size, micro_batch, num_microbatches, coord, k)
    ]
    assert seen == list(range(step * size, (step + 1) * size))


GOLDEN_ORDER = [7, 9, 1, 0, 6, 8, 5, 4, 3, 2]
