from __future__ import annotations

from pathlib import Path

import pytest

from tests.cost.published import PUBLISHED, write_runs
from threefold.cost.runs import origin_of, read_runs
from threefold.errors import DataError


def test_the_published_runs_are_read() -> None:
    runs = read_runs(PUBLISHED)
    assert len(runs) == 1247
    assert sum(run.is_oom for run in runs) == 1
    assert len({run.origin for run in runs}) == 10
    assert runs[0]["hidden"] == 8192
    assert runs[0]["iter_time_s"] is None


@pytest.mark.parametrize(
    ("source", "origin"),
    [
        ("VIA-Research/vTrain data/ground_truth_single.csv", "VIA-Research/vTrain"),
        ("VIA-Research/vTrain data/ground_truth_multi.csv", "VIA-Research/vTrain"),
        ("NVIDIA/NeMo docs/a.md @123", "NVIDIA NeMo and Megatron-Bridge"),
        ("NVIDIA-NeMo/Megatron-Bridge docs/b.md [26.04]", "NVIDIA NeMo and Megatron-Bridge"),
        ("Korthikanti et al. 2022 (arXiv 2205.05198) Table 5", "Korthikanti et al. 2022"),
        ("Korthikanti et al. 2022 abstract", "Korthikanti et al. 2022"),
        ("our cluster", "our cluster"),
    ],
)
def test_a_repository_or_a_paper_is_one_source(source: str, origin: str) -> None:
    assert origin_of(source) == origin


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": "many"}, r":2: column layers: 'many' is no number"),
        ({"layers": "1.5"}, r":2: column layers: 1\.5 is not a whole number above 0"),
        ({"tp": "0"}, r":2: column tp: 0 is not a whole number above 0"),
        ({"iter_time_s": "-3"}, r":2: column iter_time_s: -3 is not a number above 0"),
        ({"iter_time_s": "nan"}, r":2: column iter_time_s: nan is not a number above 0"),
        ({"gpu": ""}, r":2: column gpu: the cell is empty"),
        ({"recompute": "some"}, r":2: column recompute: 'some' is not known"),
        ({"status": "crashed"}, r":2: column status: 'crashed' is not known"),
    ],
)
def test_a_wrong_cell_is_named_with_line_and_column(tmp_path: Path, change: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_runs(write_runs(tmp_path / "runs.csv", change))


def test_all_wrong_cells_are_named_at_once(tmp_path: Path) -> None:
    path = write_runs(tmp_path / "runs.csv", {"layers": "many"}, {}, {"tp": "x", "pp": "y"})
    with pytest.raises(DataError) as error:
        read_runs(path)
    assert [f":{line}: column {name}" in str(error.value) for line, name in ((2, "layers"), (4, "tp"), (4, "pp"))] == [
        True,
        True,
        True,
    ]


def test_files_that_are_no_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can't be read"):
        read_runs(tmp_path / "missing.csv")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00gpu")
    with pytest.raises(DataError, match="not a CSV file"):
        read_runs(binary)
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    with pytest.raises(DataError, match="column gpu: the column is missing"):
        read_runs(empty)
    headless = tmp_path / "headless.csv"
    headless.write_text("gpu,n_gpus\n")
    with pytest.raises(DataError, match="the file has no rows"):
        read_runs(headless)
    wide = tmp_path / "wide.csv"
    wide.write_text("gpu,n_gpus\nA100,8,9\n")
    with pytest.raises(DataError, match="more cells than the first line has columns"):
        read_runs(wide)
    twice = tmp_path / "twice.csv"
    twice.write_text("gpu,n_gpus,gpu\nA100,8,A100\n")
    with pytest.raises(DataError, match="the column is there twice"):
        read_runs(twice)
