from __future__ import annotations

from pathlib import Path

import pytest

from tests.cost.published import write_runs
from threefold.cost.completion import (
    DEEPSPEED,
    DEEPSPEED_SERIAL,
    EAGER,
    FSDP,
    FSDP2,
    MEGATRON,
    MODERN,
    Configuration,
    NotModelledError,
    complete,
)
from threefold.cost.runs import read_runs


def completed(path: Path, **change: str) -> list[Configuration]:
    return complete(read_runs(write_runs(path / "runs.csv", change))[0])


def test_a_run_that_says_everything_has_one_configuration(tmp_path: Path) -> None:
    (found,) = completed(tmp_path, n_gpus="8")
    assert found.weight == 1
    assert found.shape["hidden"] == 4096
    assert (found.strategy["dp"], found.strategy["num_microbatches"]) == (2, 64)


def test_what_is_not_said_has_several_values_with_weights(tmp_path: Path) -> None:
    found = completed(tmp_path, n_gpus="8", recompute="", seq_len="")
    assert {(one.strategy["recompute"], one.shape["sequence"]) for one in found} == {
        (recompute, sequence) for recompute in (0, 1, 2) for sequence in (1024, 2048)
    }
    assert sum(one.weight for one in found) == pytest.approx(1)


def test_the_network_is_that_of_the_text_or_one_of_the_usual_ones(tmp_path: Path) -> None:
    (stated,) = completed(tmp_path, note="8 GPUs a node; 800 Gbps inter-node")
    assert stated.nic_bytes_per_s == 800e9 / 8 / 8
    assert sorted(one.nic_bytes_per_s for one in completed(tmp_path)) == [6.25e9, 12.5e9, 25e9]


def test_unknown_heads_are_what_a_fused_softmax_takes_at_any_micro_batch(tmp_path: Path) -> None:
    """120 heads of 120 are nearer to the usual width, but 15 a device are no multiple of four."""
    unsaid = {"hidden": "14400", "ffn": "57600", "heads": "", "tp": "8"}
    assert {one.shape["heads"] for one in completed(tmp_path, **unsaid)} == {96, 160}
    assert {one.shape["heads"] for one in completed(tmp_path, **unsaid, gpu="H100")} == {96, 120}


def test_a_model_that_is_only_named_has_the_shape_of_its_preset(tmp_path: Path) -> None:
    unsaid = dict.fromkeys(("layers", "hidden", "heads", "ffn", "vocab"), "")
    found = completed(tmp_path, model_name="LLAMA2-13B", n_gpus="8", gpu="H100", **unsaid)
    assert {(one.shape["hidden"], one.shape["layers"]) for one in found} == {(5120, 40)}


def test_a_mixture_of_experts_has_the_shape_of_its_preset(tmp_path: Path) -> None:
    unsaid = dict.fromkeys(("layers", "hidden", "heads", "ffn", "vocab"), "")
    found = completed(tmp_path, model_name="DeepSeekV3 (tokendrop)", arch_kind="moe", gpu="H100", n_gpus="8", **unsaid)
    assert {(one.shape["experts"], one.shape["experts_per_token"]) for one in found} == {(256, 8)}


def test_the_vocabulary_follows_from_the_parameter_count(tmp_path: Path) -> None:
    dims = {"layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "32", "ffn": "14336", "vocab": ""}
    found = completed(tmp_path, params_B="8.86", gpu="H100", n_gpus="8", **dims)
    assert {(one.shape["vocab"], one.shape["tied"]) for one in found} == {(131072, 0)}


@pytest.mark.parametrize(
    ("change", "software"),
    [
        ({}, MEGATRON),
        ({"note": "measured with Megatron-DeepSpeed"}, DEEPSPEED),
        ({"gpu": "H100", "precision": "bf16"}, MODERN),
        ({"gpu": "H100", "source": "huggingface/nanotron x"}, EAGER),
        ({"zero_stage": "3", "tp": "1"}, FSDP),
        ({"zero_stage": "3", "gpu": "H100", "note": "FSDP2"}, FSDP2),
        ({"gpu": "H100", "note": "FSDP=0", "zero_stage": ""}, MODERN),
        ({"software": "mine"}, "mine"),
    ],
)
def test_the_software_generation_is_seen_from_the_row(tmp_path: Path, change: dict[str, str], software: str) -> None:
    assert {one.software for one in completed(tmp_path, **change)} == {software}


def test_sparse_and_odd_rows_are_predicted_or_refused_never_a_crash(tmp_path: Path) -> None:
    for change in (
        {"recompute": "FULL"},
        {"precision": "int8"},
        {"schedule": "dualpipe"},
        {"heads": "7"},
        {"global_batch": "1"},
        {"global_batch": "", "micro_batch": ""},
        {"vpp": "99", "pp": "8", "tp": "1"},
        {"zero_stage": "9"},
        {"params_B": "7.5", "layers": "", "heads": "", "vocab": ""},
    ):
        assert sum(one.weight for one in completed(tmp_path, **change)) == pytest.approx(1), change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arch_kind": "moe"}, "mixture of experts without stated dimensions"),
        ({"arch_kind": "moe", "model_name": "deepseekv3 (4 layers)", "layers": "4"}, "mixture of experts"),
        ({"arch_kind": "hybrid/moe"}, "hybrid"),
        ({"gpu": "abacus"}, "device abacus is not in the table"),
        ({"hidden": ""}, "hidden size is not stated"),
        ({"layers": ""}, "layers are not stated"),
        ({"tp": "", "pp": ""}, "degrees of parallelism are not stated"),
        ({"dp": "3"}, "not n_gpus"),
    ],
)
def test_what_the_model_lacks_is_said(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    with pytest.raises(NotModelledError, match=reason):
        completed(tmp_path, **change)


def test_the_machine_of_a_well_known_run_is_looked_up(tmp_path: Path) -> None:
    """Jean Zay: four Omni-Path links of 100 Gb/s for eight GPUs; kernels were started one by one."""
    (found,) = completed(tmp_path, source="bigscience-workshop/bigscience chronicles", gpu="A100-80GB", n_gpus="64")
    assert found.nic_bytes_per_s == pytest.approx(4 * 100e9 / 8 / 8)
    assert found.software == DEEPSPEED_SERIAL


def test_a_stated_network_counts_more_than_a_known_one(tmp_path: Path) -> None:
    said = {"source": "bigscience-workshop/bigscience", "note": "800 Gbps inter-node"}
    (found,) = completed(tmp_path, gpu="A100-80GB", n_gpus="64", **said)
    assert found.nic_bytes_per_s == pytest.approx(800e9 / 8 / 8)


def test_fsdp2_has_constants_of_its_own(tmp_path: Path) -> None:
    sharded = {"tp": "1", "pp": "1", "zero_stage": "3", "n_gpus": "8"}
    assert completed(tmp_path, note="FSDP2; compiled", **sharded)[0].software == FSDP2
    assert completed(tmp_path, note="PyTorch FSDP", **sharded)[0].software == FSDP
