from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cost.models import machines, model
from threefold.cost.calibration import Calibration
from threefold.cost.case import Case, Machine
from threefold.cost.estimate import estimate, judge, stage_costs
from threefold.cost.shape import shape_of
from threefold.cost.strategies import RECOMPUTE_CODES, SCHEDULE_CODES, Strategies
from threefold.layout import split_layers

SPEC = model("gpt3-175b")
HARDWARE = machines(nodes=8)
BASE = {"tp": 8, "pp": 8, "dp": 1, "micro_batch": 1, "num_microbatches": 64, "sequence_parallel": True}


def one(**changes: object) -> Strategies:
    return Strategies.build(**{**BASE, **changes})  # pyright: ignore[reportArgumentType]


def test_the_parts_of_a_step_add_up_to_it() -> None:
    found = estimate(SPEC, 2048, HARDWARE, one(dp=4), replace(Calibration(), step_s=0.0, jitter=0.0))
    parts = found.compute_s + found.bubble_s + found.optimizer_s + sum(found.exposed_comm_s.values())
    assert parts == pytest.approx(found.step_s)


def test_rates_and_intervals_agree_with_the_step() -> None:
    found = estimate(SPEC, 2048, HARDWARE, one())
    assert found.tokens_per_s == pytest.approx(64 * 2048 / found.step_s)
    assert found.mfu == pytest.approx(found.model_flops_per_s_per_device / 312e12)
    assert found.tflops_per_gpu == pytest.approx(found.model_flops_per_s_per_device / 1e12)
    assert np.all((found.step_s_low < found.step_s) & (found.step_s < found.step_s_high))


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(4, 8, 1), (4, 8, 2), (8, 64, 4), (2, 1, 1)])
def test_the_bubble_is_that_of_the_closed_form(stages: int, microbatches: int, chunks: int) -> None:
    """(p - 1) / (m v) of the busy time for equal stages (Narayanan et al. 2021)."""
    spec = model("gpt3-175b", vocab_size=1, max_position_embeddings=1)
    schedule = SCHEDULE_CODES["interleaved_1f1b" if chunks > 1 else "1f1b"]
    strategy = one(pp=stages, num_microbatches=microbatches, chunks=chunks, schedule=schedule)
    constants = replace(Calibration(), launch_s=0.0)
    found = judge(Case(shape_of(spec, 2048), Machine.of(HARDWARE), strategy, constants))
    busy = found.compute_s + sum(found.exposed_comm_s[axis] for axis in ("tp", "cp", "ep"))
    assert found.bubble_s / busy == pytest.approx((stages - 1) / (microbatches * chunks), rel=0.02)


def test_zb_h1_fills_most_of_the_drain() -> None:
    plain = estimate(SPEC, 2048, HARDWARE, one())
    filled = estimate(SPEC, 2048, HARDWARE, one(schedule=SCHEDULE_CODES["zb_h1"]))
    assert filled.bubble_s < 0.6 * plain.bubble_s


def test_a_naive_pipeline_works_one_stage_at_a_time() -> None:
    naive = estimate(SPEC, 2048, HARDWARE, one(schedule=SCHEDULE_CODES["naive"]))
    plain = estimate(SPEC, 2048, HARDWARE, one())
    assert naive.step_s > 6 * plain.step_s


def test_zero_stages_hold_what_rajbhandari_et_al_say() -> None:
    """16 bytes a parameter, of which 12, 14, 16 are split over the replicas; here with fp16 gradients."""
    spec, replicas = model("gpt2-xl"), 64
    strategy = Strategies.build(dp=replicas, zero_stage=[0, 1, 2, 3], precision=1)
    held = estimate(spec, 1024, machines(nodes=8), strategy).memory_bytes
    total, parameters = held["parameters"] + held["gradients"] + held["optimizer"], spec.num_parameters
    expected = [16, 4 + 12 / replicas, 2 + 14 / replicas]
    assert total[:3] / parameters == pytest.approx(expected, rel=0.01)
    assert total[3] < total[2]


def test_zero_3_holds_two_whole_layers_in_a_pipeline_too() -> None:
    """Each microbatch gathers layer by layer, and gradients are reduced as they are made."""
    strategy = Strategies.build(dp=8, pp=4, num_microbatches=8, zero_stage=[2, 3], precision=1)
    held = estimate(model("gpt2-xl"), 1024, machines(nodes=8), strategy).memory_bytes
    assert held["parameters"][1] < 0.4 * held["parameters"][0]
    assert held["gradients"][1] < 2 * held["gradients"][0]


def test_activations_are_those_of_korthikanti_et_al() -> None:
    """34 B S D a layer without scores, all over t with sequence parallelism (equation 4); 2 B S D with full
    recompute."""
    spec = model("gpt3-175b", resid_pdrop=0.1)
    each = 34 * 2048 * spec.hidden_size / 8
    strategy = one(pp=1, num_microbatches=1)
    held = estimate(spec, 2048, HARDWARE, strategy).memory_bytes["activations"]
    assert held[0] == pytest.approx(each * spec.num_hidden_layers, rel=0.01)
    full = one(pp=1, num_microbatches=1, recompute=RECOMPUTE_CODES["full"])
    kept = 2 * 2048 * spec.hidden_size / 8 * spec.num_hidden_layers
    assert estimate(spec, 2048, HARDWARE, full).memory_bytes["activations"][0] == pytest.approx(kept + each, rel=0.01)


def test_the_first_stage_keeps_as_many_microbatches_as_there_are_stages() -> None:
    few = estimate(SPEC, 2048, HARDWARE, one(num_microbatches=2)).memory_bytes["activations"]
    many = estimate(SPEC, 2048, HARDWARE, one(num_microbatches=64)).memory_bytes["activations"]
    gpipe = estimate(SPEC, 2048, HARDWARE, one(schedule=SCHEDULE_CODES["gpipe"])).memory_bytes["activations"]
    assert many == pytest.approx(4 * few)
    assert gpipe == pytest.approx(8 * many)


def test_recompute_trades_time_for_memory() -> None:
    found = estimate(SPEC, 2048, HARDWARE, one(recompute=[0, 1, 2]))
    assert np.all(np.diff(found.step_s) > 0)
    assert found.peak_memory_bytes[2] < found.peak_memory_bytes[0]
    assert 1.2 < found.step_s[2] / found.step_s[0] < 1.4


def test_offloading_frees_the_device_and_costs_time() -> None:
    found = estimate(SPEC, 2048, HARDWARE, one(offload_optimizer=[False, True]))
    assert found.memory_bytes["optimizer"][1] == 0
    assert found.optimizer_s[1] > found.optimizer_s[0]


def test_stage_costs_are_the_estimate_taken_apart() -> None:
    strategy = one(chunks=3, schedule=SCHEDULE_CODES["interleaved_1f1b"])
    costs, found = stage_costs(SPEC, 2048, HARDWARE, strategy), estimate(SPEC, 2048, HARDWARE, strategy)
    assert len(costs.forward_s) == 8 * 3
    last = sum(costs.forward_s[7::8]) + sum(costs.input_grad_s[7::8]) + sum(costs.weight_grad_s[7::8])
    stage = found.stages["last"]
    assert last == pytest.approx(float((stage.forward_s + stage.input_grad_s + stage.weight_grad_s)[0]))
    with pytest.raises(ValueError, match="one strategy, not 2"):
        stage_costs(SPEC, 2048, HARDWARE, one(dp=[1, 2]))


def test_no_strategies_cost_nothing() -> None:
    assert len(estimate(SPEC, 2048, HARDWARE, one().take([])).step_s) == 0


def test_bytes_sent_by_tensor_parallelism_are_counted() -> None:
    """Four all-reduces of B·S·D a layer and microbatch, each 2 (t - 1) / t of the tensor on the wire."""
    found = estimate(SPEC, 2048, HARDWARE, one(sequence_parallel=False))
    tensor = 2048 * SPEC.hidden_size * 2
    assert found.communication_bytes["tp"][0] == pytest.approx(64 * 12 * 4 * 2 * tensor * 7 / 8)
    assert found.communication_bytes["pp"][0] == 64 * 2 * tensor


RATES = (
    "matmul_flops_per_s",
    "memory_bytes",
    "memory_bytes_per_s",
    "nvlink_bytes_per_s",
    "nic_bytes_per_s",
    "pcie_bytes_per_s",
)
SMALL = st.sampled_from([1, 2, 4, 8])


@settings(max_examples=150, deadline=None)
@given(
    rate=st.sampled_from(RATES),
    factor=st.floats(1.0, 20.0),
    degrees=st.tuples(SMALL, SMALL, SMALL),
    zero=st.integers(0, 3),
    recompute=st.integers(0, 2),
    chunks=st.sampled_from([1, 2, 4]),
    batch=st.tuples(SMALL, SMALL),
    order=st.integers(0, 5),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_a_better_machine_is_never_worse(
    rate: str,
    factor: float,
    degrees: tuple[int, int, int],
    zero: int,
    recompute: int,
    chunks: int,
    batch: tuple[int, int],
    order: int,
    flags: tuple[bool, bool],
) -> None:
    dp, tp, pp = degrees
    strategy = Strategies.build(
        dp=dp,
        tp=tp,
        pp=pp,
        zero_stage=zero,
        recompute=recompute,
        chunks=chunks,
        schedule=SCHEDULE_CODES["interleaved_1f1b" if chunks > 1 and pp > 1 else "1f1b"],
        micro_batch=batch[0],
        num_microbatches=batch[1],
        order=order,
        sequence_parallel=flags[0],
        offload_optimizer=flags[1],
    )
    machine = Machine.of(machines(nodes=64))
    better = replace(machine, **{rate: getattr(machine, rate) * factor})
    constants = replace(Calibration(), dp_overlap=0.5, tp_exposed=0.5, pp_exposed=0.3)
    before, after = (judge(Case(shape_of(SPEC, 2048), each, strategy, constants)) for each in (machine, better))
    assert after.step_s[0] <= before.step_s[0] * (1 + 1e-12)
    assert after.fits[0] >= before.fits[0]


@pytest.mark.parametrize("microbatches", [1, 4, 8, 64])
def test_zero_bubble_is_never_shorter_than_a_step_can_be(microbatches: int) -> None:
    """Every microbatch still goes through all stages, and the busiest device does all its work."""
    names = ("1f1b", "zb_h1", "zb_v", "interleaved_1f1b")
    chunks = {"zb_v": 2, "interleaved_1f1b": 2}
    steps = {}
    for name in names:
        strategy = one(num_microbatches=microbatches, schedule=SCHEDULE_CODES[name], chunks=chunks.get(name, 1))
        found = estimate(SPEC, 2048, HARDWARE, strategy)
        steps[name] = float(found.step_s[0])
        assert float(found.bubble_s[0]) > 0
    assert steps["zb_h1"] < steps["1f1b"]
    if microbatches == 1:
        assert steps["interleaved_1f1b"] > 0.95 * steps["1f1b"], "one microbatch can't overlap with itself"
        assert steps["zb_h1"] > 0.75 * steps["1f1b"]


def test_the_head_is_where_the_last_stage_is() -> None:
    """Under ZB-V that is the first device: its stages are the first and the last."""
    spec = model("gpt3-175b", vocab_size=400_000)
    for partition in (0, 1):
        strategy = one(chunks=2, schedule=SCHEDULE_CODES["zb_v"], partition=partition)
        stages = estimate(spec, 2048, HARDWARE, strategy).stages
        costs = stage_costs(spec, 2048, HARDWARE, strategy, rank_of=[*range(8), *range(7, -1, -1)])
        for rank, name in ((0, "first"), (1, "middle"), (7, "last")):
            mine = (rank, 15 - rank)
            assert sum(costs.forward_s[stage] for stage in mine) == pytest.approx(float(stages[name].forward_s[0]))
            assert sum(costs.activation_bytes[stage] for stage in mine) == pytest.approx(
                float(stages[name].activation_bytes[0])
            )
        assert costs.forward_s[15] > 1.2 * costs.forward_s[0]
        assert costs.static_bytes[0] == costs.static_bytes[15] > costs.static_bytes[7]


def test_chunks_have_the_layers_that_the_job_gives_them() -> None:
    """96 layers over 30 stages do not divide: spare layers go to the middle ones."""
    strategy = one(pp=6, chunks=5, num_microbatches=60, schedule=SCHEDULE_CODES["interleaved_1f1b"])
    costs = stage_costs(SPEC, 2048, HARDWARE, strategy)
    layers = [round(each / min(costs.activation_bytes) * 3) for each in costs.activation_bytes]
    assert layers == [len(stage) for stage in split_layers(96, 30)]
