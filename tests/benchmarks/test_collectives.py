"""Every candidate for a collective gives what gloo's own gives."""

from __future__ import annotations

import pytest

from benchmarks.collectives import OPERATIONS, candidates, measure
from threefold.measure.worker_pool import WorkerPool


@pytest.mark.parametrize("ranks", [2, 4])
def test_candidates_agree_with_gloo(pool: WorkerPool, ranks: int) -> None:
    results = pool.run(measure, ranks, (4096,), 1, 2)
    measured = {(operation, name) for operation, _, name in results[0]}
    assert measured == {(operation, name) for operation in OPERATIONS for name in candidates(operation, ranks, True)}
