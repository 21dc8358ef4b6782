"""The plain decoder: its names and shapes are those of the job, and its parts are the whole."""

from __future__ import annotations

import pytest
import torch

from tests.jobs import GPT2, LLAMA
from threefold.job import ModelSpec
from threefold.models.decoder import Decoder
from threefold.models.init import decoder_initial_value

SPECS = [GPT2, LLAMA, GPT2 | {"tie_word_embeddings": False}, LLAMA | {"tie_word_embeddings": True}]


@pytest.mark.parametrize("keys", SPECS)
def test_names_and_shapes_are_those_that_the_job_lists(keys: dict) -> None:
    spec = ModelSpec(**keys)
    with torch.device("meta"):
        model = Decoder(spec)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == spec.parameter_shapes()
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.num_parameters


@pytest.mark.parametrize("keys", [GPT2, LLAMA])
def test_a_token_sees_only_the_past(keys: dict) -> None:
    torch.manual_seed(0)
    model = Decoder(ModelSpec(**keys))
    ids = torch.randint(0, 61, (2, 12))
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 61
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_attention_with_dropout_written_out_equals_the_fused_kernel() -> None:
    torch.manual_seed(0)
    model = Decoder(ModelSpec.model_validate(LLAMA | {"attn_pdrop": 1e-12}))
    ids = torch.randint(0, 61, (2, 12))
    written_out = model.train()(ids)
    fused = model.eval()(ids)
    torch.testing.assert_close(written_out, fused)


def test_rotary_scores_depend_on_distance_only() -> None:
    from threefold.models.decoder import Rotary

    rotary = Rotary(head_dim=8, theta=10000.0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    rotated_q, rotated_k = rotary(q.expand(1, 1, 10, 8)), rotary(k.expand(1, 1, 10, 8))
    scores = (rotated_q @ rotated_k.transpose(-1, -2))[0, 0]
    torch.testing.assert_close(scores[5, 3], scores[9, 7])
    assert not torch.isclose(scores[5, 3], scores[5, 4])


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    value = decoder_initial_value(ModelSpec(**GPT2), seed=1)
    shape = torch.Size((32, 32))
    first = value("layers.0.attention.out.weight", shape)
    torch.manual_seed(99)
    assert torch.equal(first, value("layers.0.attention.out.weight", shape))
    assert not torch.equal(first, value("layers.1.attention.out.weight", shape))
    assert not torch.equal(
        first, decoder_initial_value(ModelSpec(**GPT2), seed=2)("layers.0.attention.out.weight", shape)
    )


def test_initial_scale_is_gpt2s() -> None:
    value = decoder_initial_value(ModelSpec(**GPT2), seed=1)
    shape = torch.Size((200, 200))
    assert value("layers.0.attention.qkv.weight", shape).std().item() == pytest.approx(0.02, rel=0.05)
    assert value("layers.0.mlp.down.weight", shape).std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert value("final_norm.weight", torch.Size((4,))).tolist() == [1.0] * 4
    assert value("final_norm.bias", torch.Size((4,))).tolist() == [0.0] * 4
