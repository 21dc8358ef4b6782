"""The comparison with peers compares like with like, and gives no number to what computes something else."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest

from benchmarks.peers.compare import Result, compare, single_losses
from benchmarks.peers.hosts import Host, PeerError
from benchmarks.peers.report import table, write_results
from benchmarks.peers.systems import BOUNDS, MODES, SYSTEMS, System, bubble_share, systems_of
from benchmarks.peers.work import SIZES, balanced_cut, job_of
from threefold.schedule import NAMED

TINY = SIZES["tiny"]


def options(**given: object) -> argparse.Namespace:
    defaults = {"modes": list(MODES), "peers": ["ddp", "threefold"], "systems": None, "rounds": 1, "steps": 1}
    return argparse.Namespace(**{**defaults, "ranks": 2, "timeout": 60.0, "verbose": True, **given})


def test_every_mode_has_one_bound_and_threefold() -> None:
    assert set(BOUNDS) == set(MODES)
    for mode in MODES:
        assert any(system.mode == mode and system.peer == "threefold" for system in SYSTEMS)


def test_every_builder_exists() -> None:
    for system in (*SYSTEMS, *BOUNDS.values()):
        module, _, function = system.build.partition(":")
        if system.interpreter == "own":
            assert callable(getattr(importlib.import_module(f"benchmarks.peers.{module}"), function))


@pytest.mark.parametrize("size", ["small", "large"])
def test_shares_are_the_whole(size: str) -> None:
    work = SIZES[size]
    tp, pp = work.split(tp=2), work.split(pp=2)
    assert 2 * tp.heads * tp.head_dim == work.heads * work.head_dim == work.hidden
    assert (2 * tp.intermediate, tp.layers, 2 * tp.vocab) == (work.intermediate, work.layers, work.vocab)
    assert (pp.intermediate, 2 * pp.layers, 2 * pp.vocab) == (work.intermediate, work.layers, work.vocab)
    assert tp.tokens == pp.tokens == work.tokens


def test_cut_weighs_the_head() -> None:
    work = SIZES["small"]
    assert balanced_cut(work, [0, 1]) == [5, 3]
    assert sum(balanced_cut(work, [0, 1, 0, 1])) == work.layers
    first, second, third, last = balanced_cut(work, [0, 1, 1, 0])  # the head is on rank 0
    assert first + last < second + third


@pytest.mark.parametrize("schedule", sorted(NAMED))
def test_jobs_run_the_work_as_stated(schedule: str) -> None:
    job = job_of(SIZES["small"], pp=2, schedule=schedule)
    assert (job.num_microbatches, job.micro_batch, job.train_batch_size) == (8, 2, 16)
    assert job.parallelism.pp.schedule == schedule


def test_bubble_is_the_closed_form() -> None:
    assert bubble_share("1f1b", 2, 8) == pytest.approx(8 / 9)
    assert bubble_share("interleaved_1f1b", 2, 8) == pytest.approx(8 / 8.5)
    assert bubble_share("zb_h1", 2, 8) == pytest.approx(24 / 25)
    assert bubble_share(None, 2, 8) is None


def test_choice_of_systems() -> None:
    chosen = systems_of("zero3", ["fsdp2", "threefold"])
    assert [system.name for system in chosen] == ["FSDP2", "threefold"]


def test_table_shows_medians_and_keeps_failures() -> None:
    own, peer, broken = (System("dp", name, name, "bounds:replica") for name in ("threefold", "ddp", "deepspeed"))
    results = [
        Result(own, TINY, seconds=[1.0, 2.0, 4.0], bounds=[1.0, 1.0, 1.0]),
        Result(peer, TINY, seconds=[2.0, 2.0, 2.0], bounds=[1.0, 1.0, 1.0]),
        Result(broken, TINY, error="no such thing"),
    ]
    lines = table(results).splitlines()
    assert "| threefold | 2.000 | 128 | 0.500 | 0.250-1.000 |" in lines[2]
    assert lines[3].endswith("| 1.000 |  |")
    assert "no such thing" in lines[4]


def test_results_replace_those_of_the_same_mode_size_and_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.peers.report.RESULTS", tmp_path / "RESULTS.md")
    own = System("dp", "threefold", "threefold", "threefolds:train")
    for ranks, seconds in ((2, 1.0), (4, 2.0), (2, 3.0)):
        results = [Result(BOUNDS["dp"], TINY, [1.0], [1.0], [0.0]), Result(own, TINY, [seconds], [1.0], [0.0])]
        write_results(options(ranks=ranks, size="tiny"), TINY, results)
    sections = (tmp_path / "RESULTS.md").read_text().split("\n## ")
    assert [section.splitlines()[0] for section in sections[1:]] == [
        "data parallel, tiny, 2 ranks",
        "data parallel, tiny, 4 ranks",
    ]
    assert "| threefold | 3.000 |" in sections[1] and "| threefold | 2.000 |" in sections[2]


def test_a_system_whose_process_died_ends_with_its_error() -> None:
    with Host(BOUNDS["dp"], TINY, 1, {"own": sys.executable}, 60.0) as host:
        host.ready()
        host.workers[0].kill()
        host.workers[0].wait()
        with pytest.raises(PeerError, match="died"):
            host.losses(1)
    assert not Path(host.place.name).exists()


def test_disturbed_rounds_count_only_without_better_ones() -> None:
    system = System("dp", "threefold", "threefold", "threefolds:train")
    result = Result(system, TINY, seconds=[1.0, 9.0, 2.0], bounds=[1.0, 1.0, 1.0], others=[0.0, 0.5, 0.01])
    assert result.shares == [1.0, 0.5] and result.step_s == 1.5
    result.others[2] = 0.5
    assert result.quiet == [0, 1, 2] and result.disturbance == 0.5


def test_times_count_only_with_the_right_loss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = System("dp", "ddp", "another model", "bounds:shard")
    missing = System("dp", "ddp", "not there", "torches:nothing")
    right = System("dp", "threefold", "threefold", "threefolds:train", {"axis": "dp"})
    monkeypatch.setattr("benchmarks.peers.systems.SYSTEMS", (wrong, missing, right))
    python = {"own": sys.executable}
    results = compare("dp", options(), TINY, python, single_losses(options(), TINY, python))
    assert [result.system.name for result in results] == ["no communication", "another model", "not there", "threefold"]
    assert "losses are off" in results[1].error and not results[1].seconds
    assert "nothing" in results[2].error and not results[2].seconds
    assert not results[3].error and len(results[3].shares) == 1
    assert "another model" in capsys.readouterr().err
