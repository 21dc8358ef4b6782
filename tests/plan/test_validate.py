from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.cost.published import PUBLISHED, write_runs
from threefold.cli.validate import validate
from threefold.cost.predict import build_batch, predict
from threefold.cost.runs import read_runs
from threefold.errors import DataError
from threefold.plan.validate import document_of, score_runs, spearman, validate_runs


def test_the_json_has_the_promised_keys_and_nothing_else_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    validate(PUBLISHED, json_=True)
    report = json.loads(capsys.readouterr().out)
    assert set(report["all"]) == {"n", "mape", "bias", "coverage90"}
    assert set(report["sources"][0]) == {
        "source",
        "n",
        "mape",
        "bias",
        "coverage90",
        "rank_correlation",
        "regret",
        "memory_mape",
    }
    assert set(report["fits"]) == {"true_fit", "false_fit", "true_oom", "false_oom"}
    assert len(report["rows"]) == 1247
    assert report["all"]["n"] == sum(source["n"] for source in report["sources"])
    assert sum(report["not_modelled"].values()) == sum(not row["modelled"] for row in report["rows"])
    assert 0 < report["all"]["mape"] < 0.2


def test_the_tables_name_every_source_and_count_what_is_not_modelled(capsys: pytest.CaptureFixture[str]) -> None:
    validate(PUBLISHED, json_=False)
    printed = capsys.readouterr().out
    assert "VIA-Research/vTrain" in printed
    assert "Not modelled: 34 runs: mixture of experts without stated dimensions." in printed


def test_a_wrong_file_is_refused_with_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"runs\.csv:2: column tp") as error:
        validate(write_runs(tmp_path / "runs.csv", {"tp": "four"}), json_=True)
    assert error.value.exit_status == 2


def test_a_run_is_scored_by_its_own_numbers(tmp_path: Path) -> None:
    batch = build_batch(read_runs(write_runs(tmp_path / "runs.csv", {"n_gpus": "8"}, {"n_gpus": "8"})))
    exact = predict(replace(batch, observed_s=np.ones(len(batch.row))))
    measured = np.array([exact.step_s[0], exact.step_s[0] / 1.5])
    report = score_runs(batch, predict(replace(batch, observed_s=measured)))
    assert report.overall.n == 2
    assert report.overall.mape == pytest.approx(0.25)
    assert report.overall.bias == pytest.approx(0.25)
    assert report.overall.coverage90 == 0.5
    assert [row["inside90"] for row in report.rows] == [True, False]
    assert [row["error"] for row in report.rows] == pytest.approx([0.0, 0.5])


def test_a_step_without_a_time_is_taken_from_what_is_published(tmp_path: Path) -> None:
    rate = 512 * 2048 / 8 / 40.0
    times = [{"iter_time_s": "40"}, {"iter_time_s": "", "tokens_per_s_per_gpu": f"{rate:.6f}"}]
    path = write_runs(tmp_path / "runs.csv", *({"n_gpus": "8", **each} for each in times))
    measured = [row["measured_s"] for row in validate_runs(path).rows]
    assert measured == pytest.approx([40.0, 40.0], rel=1e-4)


def test_hardware_flops_count_recompute_and_model_flops_do_not(tmp_path: Path) -> None:
    kinds = [{"tflops_kind": kind, "iter_time_s": "", "tflops_per_gpu": "140"} for kind in ("model", "hardware")]
    path = write_runs(tmp_path / "runs.csv", *({"n_gpus": "8", **each} for each in kinds))
    model, hardware = (row["measured_s"] for row in validate_runs(path).rows)
    assert 1.3 < hardware / model < 4 / 3


def test_memory_verdicts_fill_the_confusion_table(tmp_path: Path) -> None:
    small = {"n_gpus": "8", "status": "ok"}
    huge = {"n_gpus": "8", "layers": "400", "status": "OOM", "iter_time_s": ""}
    path = write_runs(tmp_path / "runs.csv", small, huge, {**small, "status": "OOM"}, {**huge, "status": "ok"})
    fits = validate_runs(path).fits
    assert (fits.true_fit, fits.true_oom, fits.false_fit, fits.false_oom) == (1, 1, 1, 1)


def test_a_group_of_ten_is_ranked_and_the_best_pick_costs_its_regret(tmp_path: Path) -> None:
    sizes = [{"n_gpus": "8", "micro_batch": str(size), "global_batch": "512"} for size in (1, 2, 4, 8, 16)] * 2
    batch = build_batch(read_runs(write_runs(tmp_path / "runs.csv", *sizes)))
    truth = predict(batch).step_s
    perfect = score_runs(batch, predict(replace(batch, observed_s=truth))).overall
    assert (perfect.rank_correlation, perfect.regret) == (pytest.approx(1.0), 0.0)
    reversed_ = score_runs(batch, predict(replace(batch, observed_s=1 / truth))).overall
    assert reversed_.rank_correlation == pytest.approx(-1.0)
    assert reversed_.regret == pytest.approx(truth.max() / truth.min() - 1)


def test_ties_share_their_rank() -> None:
    assert spearman(np.array([1.0, 2.0, 2.0, 3.0]), np.array([1.0, 2.0, 2.0, 3.0])) == pytest.approx(1.0)
    assert spearman(np.array([1.0, 1.0]), np.array([1.0, 2.0])) is None


@pytest.mark.parametrize(
    ("source", "document"),
    [
        ("a/b docs/x.md [one section]", "a/b docs/x.md"),
        ("a/b docs/x.md @1234", "a/b docs/x.md"),
        ("Paper 2021 Table 1, as copied in c/d", "Paper 2021 Table 1"),
    ],
)
def test_sections_and_revisions_of_a_document_are_one_source(source: str, document: str) -> None:
    assert document_of(source) == document
