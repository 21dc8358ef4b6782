from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.cost.published import write_runs
from threefold.cost.calibration import calibration_from, load_calibration, software_names
from threefold.cost.completion import DEEPSPEED, DEEPSPEED_SERIAL, EAGER, FSDP, FSDP2, MEGATRON, MODERN
from threefold.cost.cross_validation import weighted_quantile
from threefold.cost.fitting import Knob, constants_of, fit, table_with
from threefold.cost.knobs import BASE, KNOBS, MEMORY_KNOBS
from threefold.cost.predict import build_batch, predict
from threefold.cost.runs import read_runs


def test_constants_depend_on_software_and_device_generation_only() -> None:
    """Never on a source: every constant is a default, or one of a generation of devices, of software, or of both."""
    assert {knob.section for knob in (*KNOBS, *MEMORY_KNOBS)} == {
        "defaults",
        "generations",
        "software",
        "software_on_generation",
    }
    known = {MEGATRON, DEEPSPEED, DEEPSPEED_SERIAL, FSDP, FSDP2, EAGER, MODERN}
    assert set(software_names()) == known
    keys = {key for knob in KNOBS if knob.section == "software" for key in knob.key.split("|")}
    assert keys <= known
    assert len(KNOBS) < 45


def test_a_constant_that_explains_the_runs_is_found(tmp_path: Path) -> None:
    batches = [{"n_gpus": "8", "micro_batch": str(size), "global_batch": "64"} for size in (1, 2, 4, 8)]
    batch = build_batch(read_runs(write_runs(tmp_path / "runs.csv", *batches)))
    knob = Knob("generations", "ampere", "matmul_efficiency", 0.9, 1.0)
    truth = predict(batch, constants_of(table_with(BASE, [knob], np.log([0.6])))).step_s
    measured = replace(batch, observed_s=truth[batch.row])
    table = fit(measured, BASE, [knob], np.ones(4, dtype=bool))
    assert table["generations"]["ampere"]["matmul_efficiency"] == pytest.approx(0.6, rel=0.02)


def test_a_knob_of_shared_kernels_sets_all_of_them() -> None:
    table = table_with(BASE, [Knob("software", f"{MEGATRON}|{DEEPSPEED}", "score_bytes", 1.0, 1.0)], np.log([20.0]))
    assert table["software"][MEGATRON]["score_bytes"] == pytest.approx(20)
    assert table["software"][DEEPSPEED]["score_bytes"] == pytest.approx(20)
    assert "score_bytes" not in BASE["software"][MEGATRON]


def test_the_more_special_constant_wins() -> None:
    table = {
        "defaults": {"launch_s": 1.0, "step_s": 1.0},
        "generations": {"hopper": {"launch_s": 2.0, "jitter": 2.0}},
        "software": {"mine": {"launch_s": 3.0}},
        "software_on_generation": {"mine hopper": {"jitter": 4.0}},
    }
    found = calibration_from(table, "mine", "hopper")
    assert (found.launch_s, found.step_s, found.jitter) == (3.0, 1.0, 4.0)


def test_unknown_software_gets_the_defaults() -> None:
    assert (
        load_calibration("never heard of", "hopper").matmul_efficiency
        == load_calibration(MODERN, "hopper").matmul_efficiency
    )


def test_a_weighted_quantile_counts_weight() -> None:
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0])
    assert weighted_quantile(values, weights, np.array([0.5]))[0] == pytest.approx(2.0)
