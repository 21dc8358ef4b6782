"""Gradient buckets."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from threefold.layout import fill_buckets


def test_a_bucket_closes_before_it_overflows():
    assert fill_buckets([3, 3, 4, 1, 20, 2, 2], 10) == ((0, 1, 2), (3,), (4,), (5, 6))
    assert fill_buckets([], 10) == ()


@given(st.lists(st.integers(1, 50)), st.integers(1, 60))
def test_every_parameter_is_in_one_bucket_within_the_limit(sizes: list[int], limit: int):
    buckets = fill_buckets(sizes, limit)
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    for bucket in buckets:
        assert len(bucket) == 1 or sum(sizes[index] for index in bucket) <= limit
    for bucket, following in pairwise(buckets):
        assert sum(sizes[index] for index in bucket) + sizes[following[0]] > limit
