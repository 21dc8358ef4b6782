"""The profile of a tiny job: measured by ranks that are busy together, whole, and good for planning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jobs import GPT2, LLAMA, small_job
from threefold.cost.profile import Profile, check_profile
from threefold.job import Job
from threefold.measure.links import Ranks, blocks, fit_link
from threefold.measure.profile import STAGE_LAYERS, Budget, measure_profile, round_schedule
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel.recorder import HostClock
from threefold.plan.balance import resolve_partition
from threefold.schedule import Kind, check_schedule

QUICK = Budget(seconds=0.0, least_rounds=2, most_rounds=2, warm_up=1)


def measure(context: WorkerContext, job: Job) -> Profile:
    return measure_profile(job, context.rank, context.world_size, budget=QUICK)


def block_of(context: WorkerContext, size: int) -> tuple[int, ...] | None:
    import torch

    group = blocks(Ranks(context.rank, context.world_size, torch.device("cpu"), HostClock()), size)
    return None if group is None else group.ranks


def wide(**model: Any) -> dict[str, Any]:
    """A model whose layers take longer than the clock's and the executor's noise."""
    return LLAMA | {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 3000, "num_hidden_layers": 2} | model


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, {}),
        (2, {"pp": 2, "activation_checkpointing": {"mode": "full"}}),
        (2, {"tp": 2, "parallelism": {"tp": {"sequence_parallel": True}}}),
        (4, {"pp": 2, "tp": 2, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}),
    ],
    ids=str,
)
def test_a_profile_is_whole_and_the_same_on_every_rank(pool: WorkerPool, world: int, settings: dict[str, Any]) -> None:
    job = small_job(wide(), **settings)
    profiles = pool.run(measure, world, job)
    assert all(profile == profiles[0] for profile in profiles)
    profile: Profile = profiles[0]
    check_profile(profile, job)
    assert (profile.machine.num_ranks, profile.num_rounds) == (world, 2)
    for part in (profile.embedding, profile.layer, profile.head):
        assert part.forward_s.low <= part.forward_s.median <= part.forward_s.high
        assert part.backward_s.median > 0
        assert part.activation_bytes > 0
    for part in (profile.layer, profile.head):
        assert part.forward_s.median > 0 and part.input_grad_s.median > 0 and part.weight_grad_s.median > 0
    sizes = {(link.operation, link.ranks) for link in profile.links}
    expected = {("p2p", 2)} if world > 1 else set()
    expected |= {(name, job.tp) for name in ("all_reduce", "all_gather", "reduce_scatter") if job.tp > 1}
    assert sizes >= expected
    assert Profile.model_validate_json(profile.to_json()) == profile


def test_parameters_and_activations_are_those_of_the_parts(pool: WorkerPool) -> None:
    model = wide()
    job = small_job(model, tp=2)
    spec = job.model
    assert spec is not None
    (profile, _) = pool.run(measure, 2, job)
    head = spec.vocab_size // 2 * 128 + 128  # its half of the rows, and the norm
    assert profile.head.parameters == head
    assert profile.embedding.parameters == spec.vocab_size // 2 * 128
    (whole,) = pool.run(measure, 1, small_job(model))
    assert whole.layer.parameters == sum(np.prod(shape) for shape in spec.layer_shapes(0).values())
    assert whole.attention is not None and whole.feed_forward is not None
    assert whole.attention.parameters + whole.feed_forward.parameters == whole.layer.parameters
    mlp = {name: shape for name, shape in spec.layer_shapes(0).items() if name.startswith("mlp")}
    assert whole.feed_forward.parameters == sum(np.prod(shape) for shape in mlp.values())
    both = whole.attention.activation_bytes + whole.feed_forward.activation_bytes
    assert both == pytest.approx(whole.layer.activation_bytes, rel=0.2)
    tokens = 12
    # A recomputed layer keeps its input, which is what the stage before has made, and its output.
    (full,) = pool.run(measure, 1, small_job(model, activation_checkpointing={"mode": "full"}))
    assert full.layer.activation_bytes == tokens * 128 * 4
    assert whole.layer.activation_bytes > 6 * full.layer.activation_bytes
    assert whole.head.activation_bytes >= tokens * spec.vocab_size * 4


def test_a_tied_head_counts_its_copy(pool: WorkerPool) -> None:
    (profile,) = pool.run(measure, 1, small_job(GPT2))
    assert profile.head.parameters >= 61 * 32
    assert profile.embedding.parameters == (61 + 16) * 32


def test_a_heavier_head_costs_more_and_moves_layers(pool: WorkerPool) -> None:
    heavy = small_job(wide(vocab_size=60_000, num_hidden_layers=8), pp=2)
    (profile, _) = pool.run(measure, 2, heavy)
    assert profile.head.forward_s.median > 3 * profile.layer.forward_s.median
    resolved, chosen = resolve_partition(heavy, profile)
    assert chosen is not None
    assert resolved.parallelism.pp.partition[0] > 4  # type: ignore[operator]


def test_the_measured_rows_are_legal_schedules() -> None:
    for split in (False, True):
        schedule = round_schedule(len(STAGE_LAYERS), split=split)
        assert check_schedule(schedule) == []
        kinds = {action.kind for action in schedule.rows[0]}
        assert kinds == ({Kind.F, Kind.I, Kind.W} if split else {Kind.F, Kind.B})


def test_blocks_are_neighbours_and_leave_the_rest_out(pool: WorkerPool) -> None:
    assert pool.run(block_of, 3, 2) == [(0, 1), (0, 1), None]
    assert pool.run(block_of, 4, 2) == [(0, 1), (0, 1), (2, 3), (2, 3)]


@pytest.mark.parametrize("seed", range(8))
def test_alpha_and_beta_are_found_again(seed: int) -> None:
    chance = np.random.default_rng(seed)
    alpha, beta = 10 ** chance.uniform(-5, -3), 10 ** chance.uniform(8, 11)
    sizes = [1 << power for power in range(10, 26, 2)]
    noise = chance.uniform(0.95, 1.05, len(sizes))
    found = fit_link([(size, float(n) * (alpha + size / beta)) for size, n in zip(sizes, noise, strict=True)])
    assert found == (pytest.approx(alpha, rel=0.15), pytest.approx(beta, rel=0.15))


def test_a_link_never_starts_before_it_is_asked() -> None:
    alpha, beta = fit_link([(1000, 1e-6), (2000, 3e-6), (4000, 8e-6)])
    assert alpha == 0.0
    assert 0 < beta < 1e9


# The command


def run(place: Path, *words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "threefold", *words], cwd=place, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_the_command_measures_and_its_file_is_used(tmp_path: Path) -> None:
    job = small_job(wide(num_hidden_layers=6), pp=2)
    (tmp_path / "job.json").write_text(job.to_json())
    status, out, err = run(tmp_path, "profile", "job.json", "--seconds", "0.5")
    assert status == 0, err
    assert "wrote profile.json" in err and "two busy ranks" in out and "all_reduce" in out
    profile = Profile.model_validate_json((tmp_path / "profile.json").read_text())
    check_profile(profile, job)
    status, out, err = run(tmp_path, "explain", "job.json", "--profile", "profile.json")
    assert status == 0, err
    assert "by measured costs" in " ".join(out.split())
    status, out, err = run(tmp_path, "plan", "job.json", "--profile", "profile.json", "-o", "planned.json")
    assert status == 0, err
    partition = json.loads((tmp_path / "planned.json").read_text())["parallelism"]["pp"]
    assert partition["size"] in (1, 2)
    status, _, err = run(
        tmp_path, "explain", "job.json", "--profile", "profile.json", "--set", "data.sequence_length=8"
    )
    assert status == 2
    assert "sequence length 12, but the job has 8" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "no/such/directory/profile.json"], "-o: "),
        (["-o", "."], "-o: "),
        (["--set", "model.num_local_experts=4", "--set", "model.num_experts_per_tok=2"], "num_local_experts"),
        (["--set", "data=null"], "data: "),
    ],
    ids=str,
)
def test_what_can_not_be_measured_is_refused_before_anything_starts(
    tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "job.json").write_text(small_job(LLAMA, pp=2).to_json())
    status, _, err = run(tmp_path, "profile", "job.json", *words)
    assert status == 2, err
    assert message in err
    assert "Traceback" not in err and "measuring" not in err
