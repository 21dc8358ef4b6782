from __future__ import annotations

import numpy as np
import pytest

from tests.cost.models import model
from threefold.cost.flops import forward_flops_per_token
from threefold.cost.shape import shape_of
from threefold.job.presets import presets


@pytest.mark.parametrize("preset", sorted(presets()))
def test_parameters_are_those_of_the_model(preset: str) -> None:
    spec = model(preset)
    assert float(np.asarray(shape_of(spec, 2048).parameters)) == pytest.approx(spec.num_parameters, rel=0.002)


def test_flops_are_those_of_narayanan_et_al() -> None:
    """Equation 3 without recompute: 72 B S L D² (1 + S / 6 D + V / 12 L D), forward and backward."""
    spec = model("gpt3-175b")
    depth, width, vocab, length = spec.num_hidden_layers, spec.hidden_size, spec.vocab_size, 2048
    paper = 72 * depth * width**2 * (1 + length / (6 * width) + vocab / (12 * depth * width))
    assert 3 * float(np.asarray(forward_flops_per_token(shape_of(spec, length)))) == pytest.approx(paper, rel=1e-6)


def test_a_token_meets_only_its_experts() -> None:
    shape = shape_of(model("mixtral-8x7b"), 4096)
    active = float(np.asarray(shape.layers * (shape.attention_parameters + shape.active_mlp_parameters)))
    assert active == pytest.approx(12.6e9, rel=0.02)
