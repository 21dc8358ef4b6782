from __future__ import annotations

import pytest

from threefold.cost.hardware import build_hardware, device_names, find_device, parse_link_bytes_per_s
from threefold.errors import JobError
from threefold.job.spec import ClusterSpec


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("a100-80gb", "a100-80gb"),
        ("A100-80GB SXM", "a100-80gb"),
        ("A100", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("AMD Instinct MI300X", "mi300x"),
        ("h100", "h100"),
        ("H100 SXM", "h100"),
        ("H100-96GB-HBM2e", "h100-96gb-hbm2e"),
        ("h200", "h200"),
        ("b200", "b200"),
        ("GB300", "gb300"),
        ("v100-32gb", "v100-32gb"),
        ("rtx-4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
    ],
)
def test_a_device_is_found_by_any_usual_spelling(name: str, known: str) -> None:
    assert find_device(name).name == known


def test_every_device_of_the_table_has_sound_numbers() -> None:
    assert len(device_names()) == 21
    for name in device_names():
        device = find_device(name)
        half = device.peak_flops_per_s.get("bf16", device.peak_flops_per_s["fp16"])
        assert 0.4 * half < device.matmul_flops_per_s <= half
        assert device.memory_bytes > 15e9
        assert device.nic_bytes_per_s > 1e9
        assert device.source


def test_an_a100_is_as_its_maker_says() -> None:
    device = find_device("a100-80gb")
    assert device.peak_flops_per_s["bf16"] == 312e12
    assert device.memory_bytes == 80 * 2**30
    assert device.nic_bytes_per_s == 25e9
    assert "fp8" not in device.peak_flops_per_s


def test_an_unknown_device_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(JobError, match=r"cluster\.device: no device is known as 'h10'") as error:
        find_device("h10")
    assert "h100" in error.value.problems[0].fix


def test_the_network_of_a_node_is_shared_by_its_devices() -> None:
    cluster = ClusterSpec(device="a100-80gb", nodes=4, devices_per_node=8, inter_node="4x200Gb/s")
    hardware = build_hardware(cluster)
    assert hardware.inter_node_bytes_per_s == pytest.approx(4 * 200e9 / 8 / 8)
    assert hardware.num_devices == 32
    typical = build_hardware(ClusterSpec(device="a100-80gb", nodes=4, devices_per_node=8))
    assert typical.inter_node_bytes_per_s == 25e9


@pytest.mark.parametrize(("text", "rate"), [("8x200Gb/s", 200e9), ("25GB/s", 25e9), ("1x12.5Gb/s", 1.5625e9)])
def test_a_link_counts_bits_or_bytes(text: str, rate: float) -> None:
    assert parse_link_bytes_per_s(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["fast", "0Gb/s", "200", ""])
def test_a_link_that_is_no_speed_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="is no network speed"):
        parse_link_bytes_per_s(text)
