"""The search finds what judging every candidate finds, in a time that nobody waits for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.plan.questions import ask, brute_force, hardware_of, model_of
from threefold.plan.plans import predict
from threefold.plan.question import Question
from threefold.plan.search import seek

MODELS = st.builds(
    lambda style, heads, width, layers, vocab: model_of(
        model_type=style,
        num_attention_heads=heads,
        hidden_size=heads * width,
        num_hidden_layers=layers,
        vocab_size=vocab,
    ),
    st.sampled_from(["gpt2", "llama"]),
    st.sampled_from([4, 6, 16]),
    st.sampled_from([64, 256]),
    st.integers(1, 9),
    st.sampled_from([1000, 50257]),
)
# Some decisions are fixed, so that all the others can be tried.
DECISIONS: list[dict[str, Any]] = [
    {"order": "tp,pp,dp", "partition": "even"},
    {"schedule": "1f1b", "recompute": "full"},
    {"offload_optimizer": False, "offload_param": False, "order": "tp,dp,pp"},
    {"sequence_parallel": False, "zero_stage": 3, "schedule": "naive"},
    {"sequence_parallel": True, "order": "pp,dp,tp", "partition": "balanced"},
    {"offload_optimizer": True, "recompute": "none", "partition": "even"},
]
QUESTIONS = st.builds(
    lambda model, nodes, devices, memory, batch, name, fixed: ask(
        model, hardware_of(name, nodes, devices, memory), batch, **fixed
    ),
    MODELS,
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([4, 8, 16, 80]),
    st.sampled_from([4, 6, 16]),
    st.sampled_from(["a100-80gb", "v100-32gb", "rtx-4090"]),
    st.sampled_from(DECISIONS),
)


@settings(max_examples=70, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(QUESTIONS)
def test_the_search_finds_the_winner_of_brute_force(question: Question) -> None:
    expected, step_s = brute_force(question)
    event(f"{len(expected)} winners")
    _, found = seek(question, top=1)
    assert (len(found.strategies) if found else 0) == len(expected), "one finds a plan and the other does not"
    if found and len(expected):
        assert predict(question, found.strategies)[0].parallelism == predict(question, expected)[0].parallelism
        assert predict(question, found.strategies)[0].step_s == pytest.approx(step_s, rel=1e-9)
