"""Generated malformed job files: each is refused with keys and fixes, and nothing else escapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.job.malformed import BASE, File, malformed_jobs
from threefold.errors import JobError
from threefold.job import load_job, parse_job
from threefold.job.keys import known_fields

COUNT, SEED = 200, 2024
JOBS = malformed_jobs(COUNT, SEED)


def test_the_job_that_is_mutated_is_right() -> None:
    assert parse_job(BASE).world_size == 8


def test_the_generator_is_reproducible_and_varied() -> None:
    assert malformed_jobs(COUNT, SEED) == JOBS
    assert len({description for description, _, _ in JOBS}) > COUNT * 0.8


@pytest.mark.parametrize("file", JOBS, ids=[f"{number}" for number in range(COUNT)])
def test_a_malformed_job_is_refused_with_its_key_and_a_fix(file: File, tmp_path: Path) -> None:
    description, name, content = file
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert caught.value.problems, description
    for problem in caught.value.problems:
        assert _names_a_key(problem.key, path, content), (description, problem)
        assert problem.message and problem.fix, (description, problem)
        assert "pydantic" not in str(problem) and "errors.pydantic.dev" not in str(problem)
        assert all(line.isprintable() for line in str(problem).splitlines()), (description, problem)


def _names_a_key(key: str, path: Path, content: bytes) -> bool:
    """Whether ``key`` is the file, a known key, or a key that the file has."""
    leaf = key.rpartition(".")[2].encode()
    return str(path) in key or key in known_fields() or b'"' + leaf + b'"' in content or key == "the job"
