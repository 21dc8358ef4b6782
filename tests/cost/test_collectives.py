from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.cost.models import machines, model
from threefold.cost.calibration import Calibration
from threefold.cost.case import Case, Machine
from threefold.cost.collectives import all_reduce_s, all_to_all_s, scatter_s, send_s
from threefold.cost.shape import shape_of
from threefold.cost.strategies import ORDER_CODES, Strategies

IDEAL = replace(Calibration(), nvlink_efficiency=1.0, nic_efficiency=1.0, nvlink_latency_s=0.0, nic_latency_s=0.0)


def case(nodes: int = 4, **strategy: object) -> Case:
    machine = Machine.of(machines(nodes=nodes))
    return Case(shape_of(model("gpt2"), 1024), machine, Strategies.build(**strategy), IDEAL)  # pyright: ignore[reportArgumentType]


def test_a_ring_moves_its_share_of_the_bytes() -> None:
    found = scatter_s(case(), 8e9, np.array([8]), np.array([8.0]))
    assert found[0] == pytest.approx(8e9 * 7 / 8 / 300e9)


def test_a_group_of_one_costs_nothing() -> None:
    assert scatter_s(case(), 8e9, np.array([1]), np.array([1.0]))[0] == 0
    assert all_to_all_s(case(), 8e9, np.array([1]), np.array([1.0]))[0] == 0


def test_an_all_reduce_inside_a_node_is_a_scatter_and_a_gather() -> None:
    found = all_reduce_s(case(), 8e9, np.array([8]), np.array([8.0]))
    assert found[0] == pytest.approx(2 * scatter_s(case(), 8e9, np.array([8]), np.array([8.0]))[0])
    assert all_reduce_s(case(), 8e9, np.array([1]), np.array([1.0]))[0] == 0


def test_between_two_nodes_an_all_reduce_sends_the_tensor_once() -> None:
    found = all_reduce_s(case(), 8e9, np.array([16]), np.array([8.0]))
    assert found[0] == pytest.approx(2 * 8e9 * 7 / 8 / 300e9 + 8e9 / 200e9)


@pytest.mark.parametrize(("in_node", "rate"), [(1, 25e9), (4, 100e9), (8, 200e9)])
def test_between_nodes_each_rank_of_a_node_drives_its_own_network(in_node: int, rate: float) -> None:
    found = scatter_s(case(), 1e9, np.array([32]), np.array([float(in_node)]))
    assert found[0] == pytest.approx(1e9 * 31 / 32 / rate)


def test_a_message_takes_the_link_between_its_ends() -> None:
    assert send_s(case(), 3e9, np.array([False, True])).tolist() == pytest.approx([3e9 / 300e9, 3e9 / 25e9])


@pytest.mark.parametrize(
    ("order", "tp", "pp", "dp"),
    [("tp,pp,dp", 4, 2, 1), ("tp,dp,pp", 4, 1, 2), ("dp,pp,tp", 1, 1, 8), ("pp,tp,dp", 2, 4, 1)],
)
def test_the_order_of_the_axes_decides_who_shares_a_node(order: str, tp: int, pp: int, dp: int) -> None:
    placed = case(tp=4, pp=4, dp=8, order=ORDER_CODES[order], nodes=16)
    assert [placed.in_node(axis)[0] for axis in ("tp", "pp", "dp")] == [tp, pp, dp]


def test_context_parallel_ranks_follow_tensor_parallel_ones() -> None:
    placed = case(tp=2, cp=2, pp=2, dp=4)
    assert [placed.in_node(axis)[0] for axis in ("tp", "cp", "pp", "dp")] == [2, 2, 2, 1]
