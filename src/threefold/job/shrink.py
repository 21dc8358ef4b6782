"""A small model of the same kind, to try a large job on a laptop."""

from __future__ import annotations

import math

from threefold.job.spec import Job

LAYERS = 8
HEAD_DIM = 8
KEY_VALUE_HEADS = 8
QUERIES_PER_KEY = 4
VOCAB_SIZE = 509
SEQUENCE_LENGTH = 32
BATCH_SIZE = 32


def shrink_job(job: Job) -> Job:
    """The job with its style, schedule and switches, but few layers, few and narrow heads, few tokens, a small batch.

    Every structure that can go wrong stays: grouped heads, ties, dropout, a vocabulary (of a prime size) to split. The
    feed-forward width is twice the hidden size at most, so that it splits as the heads do.
    """
    changes: dict[str, object] = {}
    if job.model is not None:
        spec = job.model
        # The greatest common divisor keeps every tp up to 8 that the large model could have.
        num_keys = math.gcd(spec.num_key_value_heads, KEY_VALUE_HEADS)
        num_heads = num_keys * min(spec.num_attention_heads // spec.num_key_value_heads, QUERIES_PER_KEY)
        hidden = num_heads * min(spec.head_dim, HEAD_DIM)
        changes["model"] = spec.model_copy(
            update={
                "preset": None,
                "hf": None,
                "num_hidden_layers": min(spec.num_hidden_layers, max(LAYERS, job.parallelism.pp.num_stages)),
                "hidden_size": hidden,
                "num_attention_heads": num_heads,
                "num_key_value_heads": num_keys,
                "head_dim": min(spec.head_dim, HEAD_DIM),
                "intermediate_size": min(spec.intermediate_size, 2 * hidden),
                "vocab_size": min(spec.vocab_size, VOCAB_SIZE),
                "max_position_embeddings": min(spec.max_position_embeddings, SEQUENCE_LENGTH),
            }
        )
    if job.data is not None:
        shorter = min(job.data.sequence_length, SEQUENCE_LENGTH)
        changes["data"] = job.data.model_copy(update={"sequence_length": shorter})
    if job.train_batch_size > BATCH_SIZE:
        changes |= _small_batch(job)
    partition = job.parallelism.pp.partition
    if not isinstance(partition, str):
        pipeline = job.parallelism.pp.model_copy(update={"partition": "even"})
        changes["parallelism"] = job.parallelism.model_copy(update={"pp": pipeline})
    return job.model_copy(update=changes)


def _small_batch(job: Job) -> dict[str, object]:
    """The same number of replicas with fewer and smaller microbatches."""
    written = job.parallelism.pp.schedule_file is not None  # for this number of microbatches and no other
    accumulation = job.num_microbatches if written else max(1, BATCH_SIZE // job.dp)
    return {
        "train_batch_size": job.dp * accumulation,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
    }
