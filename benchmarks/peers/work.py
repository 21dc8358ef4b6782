"""The work that every system does, and what each rank would do of it if nobody had to talk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from threefold.job import Job, parse_job
from threefold.plan.balance import resolve_partition
from threefold.schedule import build_schedule

LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
CHECKED_STEPS = 3
"""The first steps, whose losses must be those of a single process; they also warm up."""
LOSS_TOLERANCE = 2e-5
"""Relative. fp32 has 6e-8, a sum in another order a few times that; AdamW's first steps divide noise by noise."""


@dataclass(frozen=True)
class Work:
    """One step: ``microbatches`` of ``micro_batch`` samples over all replicas together."""

    hidden: int = 256
    intermediate: int = 704
    layers: int = 8
    heads: int = 8
    head_dim: int = 32
    vocab: int = 4096
    sequence: int = 256
    micro_batch: int = 2
    microbatches: int = 8

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.micro_batch * self.microbatches

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.samples * self.sequence

    def to_dict(self) -> dict[str, int]:
        """For the command line of a worker."""
        return asdict(self)

    def split(self, *, tp: int = 1, pp: int = 1) -> Work:
        """A model that is a rank's share of this one: 1/tp of all widths but D, 1/pp of layers and vocabulary.

        Half of the layers and half of the vocabulary are half of the work, whichever layers a real cut gives a rank.
        """
        return replace(
            self,
            intermediate=self.intermediate // tp,
            heads=self.heads // tp,
            layers=self.layers // pp,
            vocab=self.vocab // (tp * pp),
        )


SIZES: Mapping[str, Work] = {
    "small": Work(),
    "large": Work(hidden=512, intermediate=1408, head_dim=64),
    "tiny": Work(hidden=32, intermediate=64, layers=4, heads=4, head_dim=8, vocab=64, sequence=16),
}
"""``tiny`` is for tests."""


def balanced_cut(work: Work, ranks_of_stages: Sequence[int]) -> list[int]:
    """Layers of every stage, so that the slowest rank is as fast as can be; all systems are cut like this.

    The costs are those of matrix products.
    """
    layer = 4 * work.hidden**2 + 3 * work.hidden * work.intermediate
    head = 1.2 * work.hidden * work.vocab  # softmax and loss pass over memory as nothing in a layer does
    last = len(ranks_of_stages) - 1
    cut = [1] * len(ranks_of_stages)

    def cost(rank: int) -> float:
        mine = [stage for stage, owner in enumerate(ranks_of_stages) if owner == rank]
        return layer * sum(cut[stage] for stage in mine) + (head if last in mine else 0.0)

    for _ in range(work.layers - len(cut)):
        stage = min(range(len(cut)), key=lambda stage: (cost(ranks_of_stages[stage]), cut[stage]))
        cut[stage] += 1
    return cut


def job_of(work: Work, *, dp: int = 1, tp: int = 1, pp: int = 1, **parallel: Any) -> Job:
    """Threefold's job for this work. ``parallel``: zero, sequence_parallel, schedule, partition, compiled.

    Without a ``partition`` the stages are cut as those of all systems; "auto" is how threefold cuts them by itself.
    """
    pipeline: dict[str, Any] = {"size": pp}
    if pp > 1:
        schedule = build_schedule(parallel["schedule"], pp, work.microbatches // dp)
        cut = balanced_cut(work, [schedule.stage_rank(stage) for stage in range(schedule.num_stages)])
        partition = parallel.get("partition", cut)
        pipeline |= {"schedule": parallel["schedule"], "chunks": schedule.num_chunks, "partition": partition}
    job = parse_job(
        {
            "model": {
                "model_type": "llama",
                "hidden_size": work.hidden,
                "intermediate_size": work.intermediate,
                "num_hidden_layers": work.layers,
                "num_attention_heads": work.heads,
                "head_dim": work.head_dim,
                "vocab_size": work.vocab,
            },
            "data": {"sequence_length": work.sequence},
            "cluster": {"device": "cpu", "nodes": 1, "devices_per_node": dp * tp * pp},
            "steps": 1_000_000,
            "train_batch_size": work.samples,
            "train_micro_batch_size_per_gpu": work.micro_batch,
            "parallelism": {
                "dp": {"size": dp},
                "tp": {"size": tp, "sequence_parallel": parallel.get("sequence_parallel", False)},
                "pp": pipeline,
            },
            "zero_optimization": {"stage": parallel.get("zero", 0)},
            "compile": {"enabled": parallel.get("compiled", False)},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY},
            },
            "scheduler": {"type": "constant"},
            "gradient_clipping": 0.0,
            "replica_check": {"every": 0},
        }
    )
    return resolve_partition(job)[0]
