"""Layers -> stages: no layer is ever lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.errors import JobError
from threefold.layout import count_halves, split_halves, split_layers, stage_of_parameter, stage_parameters


def sizes(num_layers: int, num_stages: int, partition="even") -> list[int]:
    return [len(stage) for stage in split_layers(num_layers, num_stages, partition)]


@given(st.integers(1, 130), st.integers(1, 130))
def test_even_split_covers_every_layer_once(num_layers: int, num_stages: int):
    if num_stages > num_layers:
        return
    stages = split_layers(num_layers, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1
    assert len(stages) == num_stages


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_explicit_split_covers_every_layer_once(partition: list[int]):
    stages = split_layers(sum(partition), len(partition), partition)
    assert [layer for stage in stages for layer in stage] == list(range(sum(partition)))
    assert [len(stage) for stage in stages] == partition


def test_spare_layers_go_to_the_middle_then_the_first_then_the_last():
    assert sizes(30, 4) == [7, 8, 8, 7]
    assert sizes(9, 4) == [2, 2, 3, 2]
    assert sizes(11, 4) == [3, 3, 3, 2]
    assert sizes(7, 2) == [4, 3]
    assert sizes(7, 3) == [2, 3, 2]


def test_auto_is_even_for_now():
    assert split_layers(13, 4, "auto") == split_layers(13, 4, "even")


def test_a_stage_may_hold_no_layer_when_asked():
    assert split_layers(4, 3, [0, 4, 0]) == (range(0), range(4), range(4, 4))


def test_more_stages_than_layers_names_the_valid_sizes():
    with pytest.raises(JobError, match="size from 1 to 3") as error:
        split_layers(3, 4)
    assert error.value.problems[0].key == "parallelism.pp.size"


@pytest.mark.parametrize("partition", [[3, 3], [2, 2, 3], [8, -1], [], "by hand"])
def test_bad_partitions_name_the_key(partition):
    with pytest.raises(JobError) as error:
        split_layers(7, 2, partition)
    assert {problem.key for problem in error.value.problems} == {"parallelism.pp.partition"}


def test_no_stages():
    with pytest.raises(JobError, match="use 1 or more"):
        split_layers(3, 0)


NAMES = ["embed.tokens.weight", "layers.0.mlp.up.weight", "layers.1.mlp.up.weight", "final_norm.weight"]


def test_every_parameter_has_a_stage():
    stages = split_halves(2, 2)
    assert [stage_of_parameter(name, stages) for name in NAMES] == [0, 0, 1, 1]
    assert stage_of_parameter("head.weight", stages) == 1
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.up\.weight: no stage holds this layer"):
        stage_of_parameter("layers.2.mlp.up.weight", stages)


def test_a_tied_embedding_is_on_both_ends():
    stages = split_halves(2, 2)
    assert stage_parameters(NAMES, stages, 1, tied=True) == (NAMES[0], NAMES[2], NAMES[3])
    assert stage_parameters(NAMES, stages, 1, tied=False) == (NAMES[2], NAMES[3])
    assert stage_parameters(NAMES, split_halves(2, 1), 0, tied=True) == tuple(NAMES)


# Half layers


@given(st.lists(st.integers(0, 19), min_size=1, max_size=12))
def test_halves_cover_every_layer_once(doubled: list[int]):
    sizes = [count / 2 for count in [*doubled, sum(doubled) % 2]]
    stages = split_halves(round(sum(sizes)), len(sizes), sizes)
    assert [half for stage in stages for half in stage] == list(range(round(2 * sum(sizes))))
    assert [len(stage) / 2 for stage in stages] == sizes
    counts = [count_halves(stage) for stage in stages]
    assert [sum(count) for count in counts] == [len(stage) for stage in stages]
    assert sum(attention for attention, _ in counts) == sum(feed_forward for _, feed_forward in counts) == sum(sizes)


def test_attention_comes_first():
    assert count_halves(range(3)) == (2, 1)
    assert count_halves(range(3, 6)) == (1, 2)
    assert count_halves(range(1, 3)) == (1, 1)
    assert count_halves(range(5, 5)) == (0, 0)


def test_a_cut_layer_is_on_two_stages():
    stages = split_halves(3, 2, [1.5, 1.5])
    names = ["layers.1.attention_norm.weight", "layers.1.attention.qkv.weight", "layers.1.mlp_norm.weight"]
    assert [stage_of_parameter(name, stages) for name in names] == [0, 0, 1]
    assert stage_parameters(names, stages, 0, tied=False) == tuple(names[:2])


def test_who_has_only_whole_layers_says_so():
    with pytest.raises(JobError, match="cuts a layer, which can't be cut here"):
        split_layers(3, 2, [1.5, 1.5])


def test_a_third_of_a_layer_is_no_part():
    with pytest.raises(JobError, match="cuts a layer elsewhere than in the middle"):
        split_halves(3, 2, [1.25, 1.75])
