"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from threefold.measure.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Eight workers that all distributed tests share; each call gets a fresh process group of the size it asks for."""
    with WorkerPool(8, timeout_s=90) as pool:
        yield pool
