"""Rank <-> coordinate, groups and nodes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.errors import JobError
from threefold.layout import AXES, Layout

ORDERS = list(itertools.permutations(AXES))
layouts = st.builds(
    Layout, dp=st.integers(1, 5), pp=st.integers(1, 5), tp=st.integers(1, 5), order=st.sampled_from(ORDERS)
)
axis_sets = st.sets(st.sampled_from(AXES), min_size=1).map(tuple)


@given(layouts)
def test_coordinate_and_rank_are_inverse(layout: Layout):
    coords = [layout.coord(rank) for rank in range(layout.world_size)]
    assert len(set(coords)) == layout.world_size
    assert [layout.rank(c.dp, c.pp, c.tp) for c in coords] == list(range(layout.world_size))


@given(layouts, axis_sets)
def test_groups_are_a_partition_of_the_world(layout: Layout, axes: tuple[str, ...]):
    groups = layout.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for group in groups:
        assert all(layout.group(axes, rank) == group for rank in group)
        coords = [layout.coord(rank) for rank in group]
        assert coords == sorted(coords)
        others = {tuple(getattr(coord, axis) for axis in AXES if axis not in axes) for coord in coords}
        assert len(others) == 1


def test_the_first_axis_varies_fastest():
    layout = Layout(dp=2, pp=3, tp=4, order=("tp", "pp", "dp"))
    assert [layout.stride(axis) for axis in ("tp", "pp", "dp")] == [1, 4, 12]
    assert layout.coord(1).tp == 1
    assert Layout(dp=2, pp=3, tp=4, order=("dp", "pp", "tp")).coord(1).dp == 1


def test_the_articles_64_devices():
    """8 nodes of 8: node n is tp group n, nodes 2k and 2k + 1 are pipeline k, and there are four pipelines."""
    layout = Layout(dp=4, pp=2, tp=8, order=("tp", "pp", "dp"))
    nodes = [tuple(range(8 * node, 8 * node + 8)) for node in range(8)]
    assert list(layout.groups("tp")) == nodes
    pipelines = layout.groups(("pp", "tp"))
    assert len(pipelines) == 4
    assert [sorted({layout.node(rank, 8) for rank in ranks}) for ranks in pipelines] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.group("pp", 5) == (5, 13)
    assert layout.group("dp", 5) == (5, 21, 37, 53)


def test_another_order_puts_a_pipeline_into_a_node():
    layout = Layout(dp=2, pp=4, tp=2, order=("pp", "tp", "dp"))
    assert layout.groups("pp")[0] == (0, 1, 2, 3)
    assert layout.group("tp", 0) == (0, 4)


def test_world_group_and_one_rank():
    layout = Layout(dp=2, pp=2, tp=2)
    assert sorted(layout.group(AXES, 5)) == list(range(8))
    assert Layout().groups("dp") == ((0,),)


def test_bad_layouts_name_every_key():
    with pytest.raises(JobError) as error:
        Layout(dp=0, tp=-1, order=("tp", "tp", "dp"))
    keys = [problem.key for problem in error.value.problems]
    assert keys == ["parallelism.dp.size", "parallelism.tp.size", "parallelism.order"]


def test_outside_the_world():
    layout = Layout(dp=2)
    with pytest.raises(ValueError, match="rank 2 is outside"):
        layout.coord(2)
    with pytest.raises(ValueError, match="dp coordinate 2"):
        layout.rank(dp=2)
    with pytest.raises(ValueError, match="unknown axes"):
        layout.group("ep", 0)
