"""What is sent, against counts done by hand."""

from typing import Any

import pytest

from threefold.cost.traffic import Transfer, estimate_traffic, gradient_groups, local_parameters
from threefold.job import Job, parse_job

B, S, D, V, F, LAYERS, M = 2, 8, 16, 31, 64, 3, 4
ACTIVATIONS = B * S * D * 4
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": S,
}
LLAMA: dict[str, Any] = {**GPT2, "model_type": "llama", "num_key_value_heads": 2, "intermediate_size": F}


def make_job(
    model: dict[str, Any] | None = GPT2,
    *,
    dp: int = 1,
    pp: int = 1,
    tp: int = 1,
    sequence_parallel: bool = False,
    **settings: object,
) -> Job:
    parallelism = {"tp": {"size": tp, "sequence_parallel": sequence_parallel}, "pp": {"size": pp}, "dp": {"size": dp}}
    data = {"data": {"sequence_length": S}} if model else {}
    batch = {"train_micro_batch_size_per_gpu": B, "gradient_accumulation_steps": M}
    return parse_job({**({"model": model} if model else {}), **data, **batch, "parallelism": parallelism, **settings})


def total(transfers: tuple[Transfer, ...], axis: str, operation: str | None = None) -> tuple[int, int]:
    """(number of calls, payload bytes) of a step."""
    chosen = [t for t in transfers if t.axis == axis and operation in (None, t.operation)]
    return sum(t.count_per_step for t in chosen), sum(t.bytes_per_step for t in chosen)


def layer_elements(tp: int) -> int:
    """GPT-2 style, by hand: two norms, and four matrices of which row biases stay whole."""
    return 4 * D + (3 * D * D + 3 * D) // tp + (D * D // tp + D) + (4 * D * D + 4 * D) // tp + (4 * D * D // tp + D)


def test_one_rank_sends_nothing():
    assert estimate_traffic(make_job(), 0) == ()


def test_tensor_parallel_all_reduces():
    transfers = estimate_traffic(make_job(tp=2), 0)
    tokens = B * S * 4
    # 4 a layer, 1 for the embedding, 1 for the head's input gradient, and two small ones of the loss
    assert total(transfers, "tp", "all_reduce") == (
        M * (4 * LAYERS + 2) + 2 * M,
        M * (4 * LAYERS + 2) * ACTIVATIONS + 3 * M * tokens,
    )
    assert total(transfers, "tp") == total(transfers, "tp", "all_reduce")


def test_sequence_parallel_splits_each_all_reduce():
    transfers = estimate_traffic(make_job(tp=2, sequence_parallel=True), 0)
    assert total(transfers, "tp", "all_gather") == (M * (6 * LAYERS + 3), M * (6 * LAYERS + 3) * ACTIVATIONS)
    assert total(transfers, "tp", "reduce_scatter") == (M * (4 * LAYERS + 2), M * (4 * LAYERS + 2) * ACTIVATIONS)


def test_only_the_ends_have_embedding_head_and_loss():
    job = make_job(tp=2, pp=3)
    calls = [total(estimate_traffic(job, stage), "tp")[0] for stage in range(3)]
    assert calls == [M * 5, M * 4, M * 7]


def test_pipeline_sends_a_microbatch_over_each_border():
    job = make_job(pp=3)
    assert [total(estimate_traffic(job, stage), "pp") for stage in range(3)] == [
        (M, M * ACTIVATIONS),
        (2 * M, 2 * M * ACTIVATIONS),
        (M, M * ACTIVATIONS),
    ]
    part = make_job(pp=3, tp=2, sequence_parallel=True)
    assert total(estimate_traffic(part, 0), "pp") == (M, M * ACTIVATIONS // 2)


@pytest.mark.parametrize("tp", [1, 2])
def test_data_parallel_reduces_every_local_element_once(tp: int):
    job = make_job(dp=2, tp=tp)
    vocab_rows = -(-V // tp)
    elements = vocab_rows * D + S * D + LAYERS * layer_elements(tp) + 2 * D
    assert local_parameters(job, 0) == elements
    assert total(estimate_traffic(job, 0), "dp") == (1 + 1, 4 * elements + 8)


def test_buckets_are_filled_from_the_last_parameter():
    job = make_job(dp=2, zero_optimization={"reduce_bucket_size": 1000})
    plain = gradient_groups(job, 0)[0]
    assert plain.bucket_elements[0] == 2 * D + D, "final norm and the last mlp bias; mlp.down.weight is too large"
    assert max(plain.bucket_elements) == 4 * D * D
    transfers = [t for t in estimate_traffic(job, 0) if t.what == "gradients"]
    assert sum(t.count_per_step for t in transfers) == len(plain.bucket_elements)
    assert sum(t.bytes_per_step for t in transfers) == 4 * local_parameters(job, 0)


def test_replicated_parameters_are_summed_over_tp_under_sequence_parallel():
    job = make_job(dp=1, tp=2, sequence_parallel=True)
    replicated = S * D + LAYERS * (4 * D + 2 * D) + 2 * D
    transfers = estimate_traffic(job, 0)
    assert total(transfers, "dp+tp") == (1, 4 * replicated)
    assert total(transfers, "dp") == (0, 0), "dp is 1"


def test_a_tied_embedding_is_summed_over_both_ends():
    job = make_job(pp=3, tp=2)
    for stage, calls in enumerate([1, 0, 1]):
        assert total(estimate_traffic(job, stage), "dp+pp") == (calls, calls * 16 * D * 4)
    untied = make_job(LLAMA, pp=3)
    assert all(total(estimate_traffic(untied, stage), "dp+pp") == (0, 0) for stage in range(3))


def test_every_parameter_is_in_one_group():
    for model in (GPT2, LLAMA):
        job = make_job(model, dp=2, tp=2, pp=2, sequence_parallel=True)
        for stage in range(2):
            elements = sum(sum(group.bucket_elements) for group in gradient_groups(job, stage))
            assert elements == local_parameters(job, stage)


def test_scalars():
    job = make_job(dp=2, pp=2)
    counts = [[t.what for t in estimate_traffic(job, stage) if t.payload_bytes <= 32] for stage in range(2)]
    loss = "loss sum, valid tokens, squared gradient norm, stop flag"
    assert counts == [[loss], ["number of valid tokens", loss]]


@pytest.mark.parametrize(("stage", "reduce_scatters", "all_gathers"), [(1, 1, 1), (2, M, 1), (3, M, 2 * M)])
def test_zero_splits_the_all_reduce(stage: int, reduce_scatters: int, all_gathers: int):
    job = make_job(dp=2, zero_optimization={"stage": stage})
    size = 4 * local_parameters(job, 0)
    transfers = estimate_traffic(job, 0)
    buckets = gradient_groups(job, 0)[0].bucket_elements
    num_buckets = len(buckets)
    # The tied embedding, last to be filled, is gathered for the head too.
    twice, more = (2 * M, 2 * M * 4 * buckets[-1]) if stage == 3 else (0, 0)
    assert num_buckets == (1 if stage < 3 else 5)  # under stage 3 each part of the model has its own
    assert total(transfers, "dp", "reduce_scatter") == (reduce_scatters * num_buckets, reduce_scatters * size)
    assert total(transfers, "dp", "all_gather") == (all_gathers * num_buckets + twice, all_gathers * size + more)


def test_element_sizes():
    whole = total(estimate_traffic(make_job(pp=2), 0), "pp")[1]
    assert total(estimate_traffic(make_job(pp=2, dtype="float64"), 0), "pp")[1] == 2 * whole
    assert total(estimate_traffic(make_job(pp=2, bf16={"enabled": True}), 0), "pp")[1] == whole // 2


def test_without_a_model_there_are_no_bytes():
    job = make_job(None)
    for ask in (estimate_traffic, gradient_groups, local_parameters):
        with pytest.raises(ValueError, match="only for a job with a model"):
            ask(job, 0)
