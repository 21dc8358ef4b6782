"""The packaged constants against the published runs; docs/accuracy.md has the errors of sources that were left out."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cost.published import PUBLISHED
from threefold.cost.cross_validation import leave_one_out
from threefold.cost.predict import Batch, build_batch, predict
from threefold.cost.runs import read_runs


@pytest.fixture(scope="module")
def published() -> Batch:
    return build_batch(read_runs(PUBLISHED))


def errors(batch: Batch, ratio: np.ndarray, source: str) -> float:
    chosen = [index for index, run in enumerate(batch.runs) if source in run.source and np.isfinite(ratio[index])]
    assert chosen
    return float(np.mean(np.abs(ratio[chosen] - 1)))


@pytest.mark.parametrize(
    ("source", "most"),
    [
        ("ground_truth_single", 0.08),
        ("ground_truth_multi", 0.10),
        ("Narayanan", 0.06),
        ("Korthikanti", 0.06),
        ("llm-foundry", 0.08),
        ("NVIDIA", 0.18),
        ("SimuMax", 0.12),
        ("Llama Team", 0.10),
    ],
)
def test_the_packaged_constants_explain_the_published_runs(published: Batch, source: str, most: float) -> None:
    assert errors(published, predict(published).ratio, source) <= most


def test_nine_of_ten_runs_are_inside_the_stated_interval(published: Batch) -> None:
    found = predict(published)
    timed = np.isfinite(found.ratio)
    ratio = found.ratio[timed]
    assert np.mean((1 / ratio >= found.low[timed]) & (1 / ratio <= found.high[timed])) >= 0.85


def test_every_run_is_predicted_or_has_a_reason(published: Batch) -> None:
    found = predict(published)
    for index, run in enumerate(published.runs):
        predicted = bool(np.isfinite(found.step_s[index]))
        assert predicted == (published.reasons[index] is None), run.line


@pytest.mark.slow
def test_sources_left_out_are_predicted_as_docs_say(published: Batch) -> None:
    ratio = leave_one_out(published).ratio
    bounds = {"ground_truth_single": 0.10, "Narayanan": 0.06, "Korthikanti": 0.08, "llm-foundry": 0.10}
    assert {source: errors(published, ratio, source) <= most for source, most in bounds.items()} == dict.fromkeys(
        bounds, True
    )
