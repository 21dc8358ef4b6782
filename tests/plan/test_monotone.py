"""Better machines never make the plan worse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.questions import ask, hardware_of
from threefold.cost.hardware import Hardware
from threefold.plan.order import NEAR
from threefold.plan.plans import Plan, predict
from threefold.plan.question import Question, Resort
from threefold.plan.search import seek

MODELS = ["gpt2-xl", "gpt3-6.7b", "llama2-13b"]
RATES = ["nvlink_bytes_per_s", "memory_bytes_per_s", "pcie_bytes_per_s", "matmul_flops_per_s"]


def best(question: Question) -> tuple[Resort, Plan] | None:
    asked, found = seek(question, top=1)
    assert found is not None
    return (asked.resort, predict(asked, found.strategies)[0]) if len(found.strategies) else None


def faster(hardware: Hardware, rate: str, factor: float) -> Hardware:
    if rate == "inter_node_bytes_per_s":
        return replace(hardware, inter_node_bytes_per_s=hardware.inter_node_bytes_per_s * factor)
    device = hardware.device
    return replace(hardware, device=replace(device, **{rate: getattr(device, rate) * factor}))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.sampled_from(MODELS),
    st.sampled_from([*RATES, "inter_node_bytes_per_s"]),
    st.sampled_from([1.1, 2.0, 5.0]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([32, 64]),
    st.sampled_from([24.0, 80.0]),
)
def test_a_faster_link_is_never_worse(
    model: str, rate: str, factor: float, nodes: int, batch: int, memory: float
) -> None:
    hardware = hardware_of(nodes=nodes, memory=memory)
    slow, fast = (best(ask(model, one, batch)) for one in (hardware, faster(hardware, rate, factor)))
    assert (slow is None) == (fast is None)
    if slow and fast:
        assert fast[0] == slow[0]
        assert fast[1].step_s <= slow[1].step_s * (1 + NEAR)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.sampled_from(MODELS),
    st.lists(st.floats(6.0, 200.0), min_size=2, max_size=2).map(sorted),
    st.sampled_from([1, 2]),
)
def test_more_memory_is_never_worse(model: str, memory: list[float], nodes: int) -> None:
    small, large = (best(ask(model, hardware_of(nodes=nodes, memory=size), 32)) for size in memory)
    if small is None:
        return
    assert large is not None
    assert large[0] <= small[0], "more memory needs no later resort"
    if large[0] == small[0]:
        assert large[1].step_s <= small[1].step_s * (1 + NEAR)


@pytest.mark.parametrize("names", [("a100-40gb", "a100-80gb"), ("h100", "h200"), ("v100-32gb", "h100")])
def test_a_better_device_is_faster(names: tuple[str, str]) -> None:
    worse, better = (best(ask("gpt3-6.7b", hardware_of(name, nodes=2), 64, 2048)) for name in names)
    assert worse is not None
    assert better is not None
    assert better[1].step_s < worse[1].step_s
