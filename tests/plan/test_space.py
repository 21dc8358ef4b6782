"""The space holds all candidates: every one is legal or has a reason, by the same rules as a job."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.questions import ask, hardware_of, model_of
from threefold.cost.strategies import SCHEDULE_CODES
from threefold.errors import JobError
from threefold.job import parse_job
from threefold.plan.layouts import layouts, refusal
from threefold.plan.plans import predict
from threefold.plan.question import Question, Resort
from threefold.plan.reasons import Reason
from threefold.plan.rungs import on_rungs
from threefold.plan.search import seek
from threefold.plan.space import build_space
from threefold.plan.to_job import replanned_job

LLAMA = model_of(
    model_type="llama", vocab_size=1000, hidden_size=256, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=2, intermediate_size=768,
)  # fmt: skip
QUESTIONS = [
    ask("gpt2", hardware_of(), 64),
    ask(LLAMA, hardware_of(nodes=3, devices_per_node=4), 24),
    ask(LLAMA, hardware_of(nodes=2), 48, schedule="interleaved_1f1b"),
    ask("gpt3-175b", hardware_of(nodes=8), 512, 2048, tp=8),
    ask("gpt2", hardware_of("v100-32gb", nodes=2, devices_per_node=3), 12, cp=2),
]


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("resort", Resort)
def test_every_candidate_is_legal_or_has_a_reason(question: Question, resort: Resort) -> None:
    space = build_space(replace(question, resort=resort))
    assert space.searched == sum(space.rejected.values()) + space.legal.sum() > 0


@pytest.mark.parametrize("question", QUESTIONS)
def test_after_the_search_every_candidate_is_a_plan_or_has_a_reason(question: Question) -> None:
    _, found = seek(question, top=3)
    assert found is not None
    assert found.searched == sum(found.rejected.values()) + len(found.strategies)
    assert all(count > 0 for count in found.rejected.values())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(QUESTIONS[:2]), st.data())
def test_a_legal_candidate_is_a_legal_job(question: Question, data: st.DataObject) -> None:
    space = build_space(replace(question, resort=Resort.OFFLOAD))
    rows, rungs = space.legal.nonzero()
    pick = data.draw(st.integers(0, len(rows) - 1))
    strategy = on_rungs(space.tops.take(rows[[pick]]), space.rungs, rungs[[pick]])
    job = _job(question)
    replanned = parse_job(replanned_job(predict(question, strategy)[0], job))
    assert replanned.train_batch_size == question.global_batch
    assert replanned.world_size == question.num_devices


@pytest.mark.parametrize("question", QUESTIONS[:2])
def test_a_refused_layout_is_refused_as_a_job(question: Question) -> None:
    reasons: Counter[Reason] = Counter()
    for layout in layouts(question):
        reason = refusal(layout, question)
        sizes = {"tp": {"size": layout.tp}, "pp": {"size": layout.pp}, "dp": {"size": layout.dp}}
        settings = {"model": _stated(question), "train_batch_size": question.global_batch, "parallelism": sizes}
        if reason is None:
            assert parse_job(settings).dp == layout.dp
        else:
            reasons[reason] += 1
            with pytest.raises(JobError):
                parse_job(settings)
    assert reasons


def test_tp_stays_in_the_node_unless_it_is_fixed() -> None:
    hardware = hardware_of(nodes=4, devices_per_node=6)
    free = build_space(ask("gpt3-175b", hardware, 96))
    assert set(free.tops.tp[free.tops.tp > 1]) <= {2, 3, 6}
    assert free.rejected[Reason.NODE] > 0
    assert set(build_space(ask("gpt3-175b", hardware, 96, tp=12)).tops.tp) == {12}


def test_every_schedule_is_searched_with_its_chunks() -> None:
    tops = build_space(ask("gpt2", hardware_of(), 64)).tops
    chunks = {name: set(tops.chunks[tops.schedule == code].tolist()) for name, code in SCHEDULE_CODES.items()}
    assert chunks == {
        "naive": set(),  # a rung below 1F1B
        "gpipe": set(),  # dominated by 1F1B
        "1f1b": {1},
        "zb_h1": {1},
        "zb_v": {2},
        "interleaved_1f1b": {2, 3, 6},
    }
    chunked = tops.take(tops.chunks > 1)
    assert all(chunked.num_microbatches >= chunked.pp) and all(chunked.pp * chunked.chunks <= 12)
    assert set(tops.schedule[tops.pp == 1].tolist()) == {SCHEDULE_CODES["1f1b"]}


def test_experts_are_split_over_replicas() -> None:
    model = model_of(preset="mixtral-8x7b")
    space = build_space(ask(model, hardware_of(nodes=2), 64))
    assert set(space.tops.ep) == {1, 2, 4, 8}
    assert all((space.tops.dp * space.tops.cp) % space.tops.ep == 0)


def _stated(question: Question) -> dict[str, Any]:
    return question.model.model_dump(mode="json", exclude_none=True)


def _job(question: Question) -> Any:
    data = {"sequence_length": question.sequence_length}
    return parse_job({"model": _stated(question), "data": data, "train_batch_size": question.global_batch})
