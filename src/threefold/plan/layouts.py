"""The layouts of a question: how many devices share a layer, the depth, the sequence, the experts, the batch.

The rules are those that ``job`` judges a job file by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from threefold.job.messages import divisors
from threefold.plan.question import Question
from threefold.plan.reasons import Reason


@dataclass(frozen=True, order=True)
class Layout:
    """Sizes of the axes: tp × pp × cp × dp devices; ep lies inside dp × cp."""

    tp: int
    pp: int
    cp: int
    ep: int
    dp: int

    def micro_batches(self, question: Question) -> list[int]:
        """Micro batches that divide what one replica gets of the global batch; none where dp does not divide it."""
        share, rest = divmod(question.global_batch, self.dp)
        return [] if rest else [size for size in divisors(share) if self._suits(size, share // size, question)]

    def _suits(self, micro_batch: int, num_microbatches: int, question: Question) -> bool:
        fixed = question.fixed
        return (
            fixed.get("micro_batch", micro_batch) == micro_batch
            and fixed.get("num_microbatches", num_microbatches) == num_microbatches
        )


def layouts(question: Question) -> Iterator[Layout]:
    """All ways to use all devices, legal or not, except for sizes that the question fixes otherwise.

    Context parallelism is tried only where it is fixed, and expert parallelism only for a model with experts.
    """
    fixed, devices = question.fixed, question.num_devices
    for tp in divisors(devices):
        for pp in divisors(devices // tp):
            rest = devices // (tp * pp)
            cp = fixed.get("cp", 1)
            if rest % cp:
                continue
            for ep in _expert_sizes(question, rest):
                layout = Layout(tp=tp, pp=pp, cp=cp, ep=ep, dp=rest // cp)
                if all(fixed.get(axis, getattr(layout, axis)) == getattr(layout, axis) for axis in ("tp", "pp", "dp")):
                    yield layout


def _expert_sizes(question: Question, replicas: int) -> list[int]:
    experts = question.model.num_local_experts
    if "ep" in question.fixed:
        return [question.fixed["ep"]]
    return [size for size in divisors(experts) if replicas % size == 0] if experts else [1]


def refusal(layout: Layout, question: Question) -> Reason | None:
    """Why no job can have this layout, whatever its other settings; None where one can."""
    model = question.model
    checks = (
        (Reason.HEADS, model.num_attention_heads % layout.tp == 0),
        (Reason.KV_HEADS, model.num_key_value_heads % layout.tp == 0),
        (Reason.WIDTH, model.intermediate_size % layout.tp == 0 and model.moe_intermediate_size % layout.tp == 0),
        (Reason.LAYERS, layout.pp <= model.num_hidden_layers),
        (Reason.SEQUENCE, question.sequence_length % layout.cp == 0),
        (Reason.EXPERTS, layout.ep == 1 or _experts_divide(model.num_local_experts, layout)),
        (Reason.BATCH, question.global_batch % layout.dp == 0),
        (Reason.MICRO_BATCH, bool(layout.micro_batches(question))),
    )
    return next((reason for reason, holds in checks if not holds), None)


def _experts_divide(num_experts: int, layout: Layout) -> bool:
    return num_experts > 0 and num_experts % layout.ep == 0 and (layout.dp * layout.cp) % layout.ep == 0
