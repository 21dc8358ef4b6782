"""When nothing fits: the nearest misses, and remedies that do work."""

from __future__ import annotations

import re

import pytest

from tests.plan.questions import ask, hardware_of
from threefold.errors import InfeasibleError
from threefold.plan.misses import NothingFitsError
from threefold.plan.planner import answer
from threefold.plan.question import Question


def refusal(question: Question) -> NothingFitsError:
    with pytest.raises(NothingFitsError) as caught:
        answer(question)
    return caught.value


@pytest.fixture(scope="module")
def article_on_one_node() -> NothingFitsError:
    return refusal(ask("gpt3-175b", hardware_of(), 64, 2048))


def test_the_error_ends_with_status_3_and_has_the_counts(article_on_one_node: NothingFitsError) -> None:
    error = article_on_one_node
    assert isinstance(error, InfeasibleError)
    assert error.exit_status == 3
    result = error.result.to_dict()
    assert result["plans"] == []
    assert result["feasible"] == 0
    assert result["searched"] == sum(result["rejected"].values())


def test_three_misses_of_different_layouts_nearest_first(article_on_one_node: NothingFitsError) -> None:
    lines = str(article_on_one_node).splitlines()
    misses = [line for line in lines if re.match(r"  \d\. ", line)]
    assert len(misses) == 3
    layouts = [re.search(r"tp \d+ × pp \d+ × dp \d+", line) for line in misses]
    assert len({found[0] for found in layouts if found}) == 3
    over = [re.search(r"([\d,.]+) GB more than", line) for line in misses]
    sizes = [float(found[1].replace(",", "")) for found in over if found]
    assert len(sizes) == 3
    assert sizes == sorted(sizes)
    assert "optimizer" in misses[0]


def test_the_nodes_that_are_named_are_enough(article_on_one_node: NothingFitsError) -> None:
    found = re.search(r"(\d+) nodes instead of 1: ", str(article_on_one_node))
    assert found is not None
    assert answer(ask("gpt3-175b", hardware_of(nodes=int(found[1])), 64, 2048)).plans
    refusal(ask("gpt3-175b", hardware_of(nodes=int(found[1]) // 2), 64, 2048))


def test_a_decision_that_is_in_the_way_is_named() -> None:
    question = ask("llama2-13b", hardware_of(memory=40), 64, 2048, zero=0, tp=1, pp=1)
    text = str(refusal(question))
    assert "leave --fix tp out: " in text
    assert "leave --fix zero_stage out: " in text


def test_a_larger_device_is_named() -> None:
    text = str(
        refusal(ask("llama2-7b", hardware_of("a100-40gb", devices_per_node=1), 8, 4096, offload_optimizer=False))
    )
    assert "devices with" in text
    assert answer(ask("llama2-7b", hardware_of("b300", devices_per_node=1), 8, 4096, offload_optimizer=False)).plans


def test_shorter_sequences_are_named_where_activations_are_in_the_way() -> None:
    text = str(refusal(ask("llama3.2-1b", hardware_of(memory=20), 8, 131072, tp=8)))
    assert re.search(r"sequences of \d+ tokens: tp 8", text)
