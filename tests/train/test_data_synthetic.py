"""Synthetic tokens: reproducible, and uneven in what they ignore."""

import numpy as np

from threefold.train.data.source import IGNORED, SampleSource
from threefold.train.data.synthetic import SyntheticTokens


def test_samples_depend_on_seed_and_number_alone() -> None:
    source: SampleSource = SyntheticTokens(vocab_size=97, sequence_length=12, seed=4, ignored_fraction=0.3)
    tokens, labels = source.batch(range(20))
    again, labels_again = source.batch([13, 5])
    assert np.array_equal(again, tokens[[13, 5]])
    assert np.array_equal(labels_again, labels[[13, 5]])
    other, _ = SyntheticTokens(97, 12, seed=5).batch(range(20))
    assert not np.array_equal(tokens, other)


def test_labels_are_the_next_tokens_and_all_valid_by_default() -> None:
    tokens, labels = SyntheticTokens(vocab_size=11, sequence_length=8, seed=0).batch(range(50))
    assert tokens.dtype == labels.dtype == np.int64
    assert tokens.shape == labels.shape == (50, 8)
    assert np.array_equal(tokens[:, 1:], labels[:, :-1])
    assert set(np.unique(tokens)) == set(range(11))


def test_each_block_has_an_ignored_and_a_full_sample_and_the_rest_is_uneven() -> None:
    source = SyntheticTokens(vocab_size=11, sequence_length=64, seed=1, ignored_fraction=0.5)
    _, labels = source.batch(range(800))
    shares = (labels == IGNORED).mean(axis=1).reshape(100, 8)
    assert (shares.max(axis=1) == 1.0).all()
    assert (shares.min(axis=1) == 0.0).all()
    assert 0.45 < shares.mean() < 0.55
    assert len(np.unique(shares)) > 20
    assert len(np.unique(shares.argmax(axis=1))) == 8  # the extremes wander over the places


def test_only_valid_leaves_exactly_one_label() -> None:
    source = SyntheticTokens(vocab_size=11, sequence_length=8, seed=1, only_valid=(5, 3))
    tokens, labels = source.batch(range(64))
    assert np.argwhere(labels != IGNORED).tolist() == [[5, 3]]
    assert labels[5, 3] == tokens[5, 4]


def test_numbers_past_the_epoch_begin_again() -> None:
    source = SyntheticTokens(vocab_size=11, sequence_length=8, seed=1, num_samples=4)
    assert np.array_equal(source.batch([1])[0], source.batch([9])[0])
