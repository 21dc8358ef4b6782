"""Fits the cost model's constants to published runs and prints the error of sources that were left out.

    python scripts/fit_cost_model.py RUNS.csv [-o calibration.json]

Without ``-o`` the package's own calibration.json is written. Takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import threefold.cost
from threefold.cost.cross_validation import batch_times, fit_all, interval_table, leave_one_out, with_intervals
from threefold.cost.fitting import constants_of
from threefold.cost.predict import Batch, Predictions, build_batch, predict
from threefold.cost.runs import read_runs
from threefold.plan.validate import Score, document_of, ranked_groups, samples, score, score_runs, spearman

NOISE = 0.04
"""Standard deviation of log time between publications of one configuration (data README: 4-6 % apart)."""

PACKAGED = Path(threefold.cost.__file__).with_name("data") / "calibration.json"


def main() -> None:
    """Fit, cross-validate, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=PACKAGED)
    options = parser.parse_args()
    batch = build_batch(read_runs(options.runs))
    held_out = leave_one_out(batch)
    everything = np.ones(len(batch.runs), dtype=bool)
    table = with_intervals(fit_all(batch, everything), interval_table(batch, held_out, everything))
    options.output.write_text(json.dumps(rounded(table), indent=2) + "\n", encoding="utf-8")
    print("## Each source left out\n")
    print("\n".join(markdown(batch, held_out)))
    print("\n## What noise leaves of a ranking\n")
    print("\n".join(ceilings(batch, held_out)))
    print("\n## With all sources\n")
    print("\n".join(markdown(batch, predict(batch, constants_of(table)))))


def ceilings(batch: Batch, found: Predictions) -> Iterator[str]:
    """What a model without any error would reach in each group whose ranking is scored.

    The same configuration is published 4 % apart (standard deviation). True times are taken to be the measured ones,
    drawn together by what that noise adds to their spread, and measured again 1,000 times.
    """
    draw = np.random.default_rng(0)
    yield "| group | runs | spread | rank correlation | of a perfect model | regret | of a perfect model |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for members in ranked_groups(batch.runs, np.flatnonzero(np.isfinite(found.ratio))):
        logs = np.log(found.observed_s[members] / samples(batch.runs, members))
        predicted = logs + np.log(found.ratio[members])
        shrunk = np.sqrt(max(1 - (NOISE / logs.std()) ** 2, 0.0))
        true = logs.mean() + (logs - logs.mean()) * shrunk
        measured = true + draw.normal(0.0, NOISE, (1000, len(members)))
        perfect = np.mean([spearman(true, one) or 0.0 for one in measured])
        lost = np.mean(np.exp(measured[:, true.argmin()] - measured.min(axis=1)) - 1)
        regret = np.exp(logs[predicted.argmin()] - logs.min()) - 1
        run = batch.runs[members[0]]
        name = f"{document_of(run.source).split('/')[-1]}, hidden {run['hidden']:.0f}, {run['n_gpus']:.0f} GPUs"
        yield (
            f"| {name} | {len(members)} | {logs.std():.1%} | {spearman(predicted, logs) or 0:.2f} | {perfect:.2f} "
            f"| {regret:.1%} | {lost:.1%} |"
        )


def rounded(value: Any) -> Any:
    """Floats to five digits, and a note where the numbers come from."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def markdown(batch: Batch, found: Predictions) -> Iterator[str]:
    """The table of docs/accuracy.md."""
    yield "| runs of | n | error | bias | in the 90 % interval | rank correlation | regret | memory |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for name, members in groups(batch).items():
        yield line(name, score(batch.runs, found, members))
    report = score_runs(batch, found)
    yield ""
    yield f"Verdict on memory: {report.fits}."


def groups(batch: Batch) -> dict[str, Any]:
    """Names and run numbers: every document, whole repositories of several, bf16 dense runs, all."""
    runs, numbers = batch.runs, np.arange(len(batch.runs))
    documents = np.array([document_of(run.source) for run in runs])
    timed = np.isfinite(batch_times(batch)) | np.array([run["memory_GB"] is not None for run in runs])
    found = {str(name): numbers[(documents == name) & timed] for name in dict.fromkeys(documents[timed])}
    bf16 = np.array([run.text["precision"] == "bf16" and run.text["arch_kind"] == "dense" for run in runs])
    return {**found, "all bf16 dense runs": numbers[bf16], "all": numbers}


def line(name: str, value: Score) -> str:
    """One row of the table."""

    def percent(share: float | None, sign: str = "") -> str:
        return "" if share is None else f"{100 * share:{sign}.1f} %"

    ranks = "" if value.rank_correlation is None else f"{value.rank_correlation:.2f}"
    cells = [name, str(value.n), percent(value.mape), percent(value.bias, "+"), percent(value.coverage90), ranks]
    return f"| {' | '.join([*cells, percent(value.regret), percent(value.memory_mape)])} |"


if __name__ == "__main__":
    main()
