"""The advice decides as an engineer does, and says only what the numbers say."""

from __future__ import annotations

import re

import pytest

from tests.plan.questions import ask, hardware_of, model_of
from threefold.plan.learning_rate import learning_rate_hint
from threefold.plan.planner import answer
from threefold.plan.plans import Plan
from threefold.plan.question import Question

WIDE = model_of(
    model_type="gpt2", vocab_size=50257, hidden_size=24576, num_hidden_layers=4, num_attention_heads=192,
    max_position_embeddings=2048,
)  # fmt: skip
DEEP = model_of(
    model_type="gpt2", vocab_size=50257, hidden_size=2048, num_hidden_layers=600, num_attention_heads=16,
    max_position_embeddings=2048,
)  # fmt: skip


def best(question: Question) -> Plan:
    return answer(question, top=3).plans[0]


def sentence(plan: Plan, beginning: str) -> str:
    found = [reason for reason in plan.reasons if reason.startswith(beginning)]
    assert len(found) == 1, plan.reasons
    return found[0]


@pytest.mark.parametrize(
    ("model", "nodes", "batch"), [("gpt2", 1, 64), ("gpt2-xl", 8, 512), ("llama3.2-1b", 4, 256), ("gpt3-1.3b", 2, 128)]
)
def test_what_fits_on_one_card_is_trained_with_data_parallelism_alone(model: str, nodes: int, batch: int) -> None:
    plan = best(ask(model, hardware_of(nodes=nodes), batch, 1024))
    assert [plan.size(axis) for axis in ("tp", "pp", "dp")] == [1, 1, 8 * nodes]
    assert "data parallelism alone is enough" in sentence(plan, "One card")
    assert not any(reason.startswith("Wide or deep") for reason in plan.reasons)


@pytest.mark.parametrize("batch", [32, 64, 256, 1536])
def test_the_articles_model_is_split_inside_the_nodes_of_its_64_cards(batch: int) -> None:
    plan = best(ask("gpt3-175b", hardware_of(nodes=8), batch, 2048))
    assert 2 <= plan.size("tp") <= 8
    assert plan.size("pp") > 1
    assert plan.parallelism["order"] in ("tp,pp,dp", "tp,dp,pp")
    assert "do not fit on one a100-80gb" in sentence(plan, "One card")
    assert "inside the node of 8" in sentence(plan, "tp ")


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_model_that_is_too_wide_gets_tp(nodes: int) -> None:
    plan = best(ask(WIDE, hardware_of(nodes=nodes), 64, 2048))
    assert plan.size("tp") > plan.size("pp")
    assert "too wide" in sentence(plan, "Wide or deep")
    assert "24,576 × 98,304" in sentence(plan, "tp ")


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_model_that_is_too_deep_gets_pp(nodes: int) -> None:
    plan = best(ask(DEEP, hardware_of(nodes=nodes), 64, 2048))
    assert plan.size("pp") > plan.size("tp")
    assert "too deep" in sentence(plan, "Wide or deep")
    assert "600 layers" in sentence(plan, "pp ")


def test_the_sentences_come_in_the_order_of_the_decision() -> None:
    plan = best(ask("gpt3-175b", hardware_of(nodes=8), 512, 2048))
    order = [
        "One card",
        "Wide or deep",
        "tp ",
        "pp ",
        "Schedule ",
        "dp ",
        "Micro batch",
        "ZeRO",
        "Recompute",
        "What binds",
    ]
    order += ["Next best", "Batch"]
    places = [plan.reasons.index(sentence(plan, beginning)) for beginning in order]
    assert places == sorted(places)


def test_the_numbers_in_the_words_are_those_of_the_plan() -> None:
    result = answer(ask("gpt3-175b", hardware_of(nodes=8), 512, 2048), top=2)
    plan, other = result.plans
    batch = f"micro batch {plan.size('micro_batch')} × accumulation {plan.size('num_microbatches')}"
    assert f"Batch: 512 = {batch} × dp {plan.size('dp')}" in sentence(plan, "Batch")
    share = re.search(r"(\d+) % of the usable memory", sentence(plan, "What binds"))
    assert share is not None
    assert int(share[1]) == round(100 * plan.peak_memory_bytes / plan.usable_memory_bytes)
    assert f"tp {other.size('tp')} × pp {other.size('pp')} × dp {other.size('dp')}" in sentence(plan, "Next best")
    assert "longer" in other.reasons[0]


@pytest.mark.parametrize("model", ["gpt3-175b", "gpt2", "llama3-70b"])
def test_a_plan_that_hardly_fits_says_so(model: str) -> None:
    plan = best(ask(model, hardware_of(nodes=8), 512, 2048))
    tight = plan.peak_memory_bytes > 0.93 * plan.usable_memory_bytes
    assert any(reason.startswith("A tight fit") for reason in plan.reasons) == tight


def test_a_setting_that_is_fixed_is_not_argued_about() -> None:
    plan = best(ask("gpt3-175b", hardware_of(nodes=8), 512, 2048, tp=8, micro_batch=1))
    assert "takes at best" not in sentence(plan, "tp 8")
    assert sentence(plan, "Micro batch 1").endswith("a replica.")


def test_the_last_resorts_are_taken_one_after_the_other() -> None:
    roomy = best(ask("llama2-13b", hardware_of(memory=80), 64, 2048))
    assert roomy.size("zero_stage") < 3
    only_zero_3 = {"tp": 1, "pp": 1}
    tight = best(ask("llama2-13b", hardware_of(memory=54), 64, 2048, **only_zero_3))
    assert tight.size("zero_stage") == 3
    assert not tight.size("offload_optimizer")
    tightest = best(ask("llama2-13b", hardware_of(memory=24), 64, 2048, **only_zero_3))
    assert tightest.size("offload_optimizer")
    assert "Offload: optimizer states" in sentence(tightest, "Offload: optimizer")


def test_the_learning_rate_follows_the_table_and_the_root_of_the_batch() -> None:
    assert learning_rate_hint(175e9, 3.2e6) == pytest.approx(0.6e-4)
    assert learning_rate_hint(1.3e9, 4e6) == pytest.approx(2 * 2e-4)
    assert 1.2e-4 < learning_rate_hint(4e9, 1.4e6) < 1.6e-4
    assert learning_rate_hint(1e6, 0.5e6) == learning_rate_hint(125e6, 0.5e6)
    assert learning_rate_hint(1e12, 3.2e6) == learning_rate_hint(175e9, 3.2e6)
