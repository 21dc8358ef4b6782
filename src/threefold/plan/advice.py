"""The decision in words, in the order in which an engineer thinks. Every sentence states numbers of this answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from threefold.cost.strategies import RECOMPUTE_CODES, SCHEDULE_CODES
from threefold.job.messages import choices
from threefold.layout import balanced_sizes
from threefold.plan.diagnosis import Diagnosis, diagnose
from threefold.plan.learning_rate import learning_rate_hint
from threefold.plan.limits import limits, link_words, stays_in_node
from threefold.plan.options import even_layers
from threefold.plan.plans import Plan
from threefold.plan.prediction_only import prediction_only
from threefold.plan.question import Question, Resort
from threefold.plan.what_if import best_with, changed
from threefold.plan.wording import (
    format_gigabytes,
    format_seconds,
    layout_words,
    longer,
    loss_words,
    percent,
    settings_words,
)
from threefold.report.words import count_of, format_count

WORTH = 0.02
"""A simpler setting that costs less than this share of the step is mentioned: the prediction is not that exact."""


_FILLS: Mapping[str, str] = {
    "interleaved_1f1b": "a microbatch goes round the devices chunk by chunk, which fills the pipeline sooner",
    "zb_h1": "gradients of weights, which no other device waits for, fill what would be the bubble",
    "zb_v": "each device has a stage near both ends of the pipeline, and gradients of weights fill what would be the "
    "bubble",
}
"""What schedules other than 1F1B do about the bubble."""


def advise(question: Question, plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """The plans with their reasons: the first one's why, and of the others what they lose against it."""
    if not plans:
        return ()
    best, *others = plans
    advice = _Advice(question, best, diagnose(question), others)
    told = replace(best, reasons=tuple(advice.sentences()))
    return (told, *(replace(other, reasons=tuple(_loses(question, best, other))) for other in others))


def _loses(question: Question, best: Plan, other: Plan) -> Iterator[str]:
    yield f"takes {longer(best, other)}: {loss_words(best, other)}"
    yield from prediction_only(other)


@dataclass(frozen=True)
class _Advice:
    """All sentences about the best plan."""

    question: Question
    best: Plan
    diagnosis: Diagnosis
    others: Sequence[Plan]

    def sentences(self) -> Iterator[str]:
        """In order: one card, wide or deep, tp, pp, schedule, dp, micro batch, ZeRO, recompute, offload, limits, the
        next best, batch.
        """
        yield self._one_card()
        if not self.diagnosis.fits_on_card:
            yield self._wide_or_deep()
        yield self._tensor()
        yield self._pipeline()
        yield from self._schedule()
        yield self._replicas()
        yield self._micro_batch()
        yield self._zero()
        yield from self._savings()
        yield from self._later_resort()
        yield from limits(self.question, self.best)
        yield from self._next_best()
        yield self._batch()
        yield from prediction_only(self.best)

    def _one_card(self) -> str:
        alone, thrifty, device = self.diagnosis.alone, self.diagnosis.thrifty, self.question.hardware.device.name
        usable = format_gigabytes(alone.usable_memory_bytes)
        size = f"{format_count(self.question.model.num_parameters)} parameters"
        if alone.fits:
            needs = format_gigabytes(alone.peak_memory_bytes)
            return f"One card: {size} fit on one {device} ({needs} of {usable} at micro batch 1){self._plain_words()}."
        needs = format_gigabytes(thrifty.peak_memory_bytes)
        if thrifty.fits:
            return (
                f"One card: {size} fit on one {device} when all activations are recomputed ({needs} of "
                f"{usable} at micro batch 1){self._plain_words()}."
            )
        return (
            f"One card: {size} with gradients and optimizer states do not fit on one {device}: {needs} at micro batch "
            f"1, even with all activations recomputed, and {usable} are usable."
        )

    def _plain_words(self) -> str:
        """What data parallelism alone is worth, where it is possible."""
        if self._is_plain:
            return ", so data parallelism alone is enough"
        plain = self._best_with(tp=1, pp=1)
        if plain is None:
            return f", but dp {self.question.num_devices} alone does not suit the global batch or the memory"
        return f"; data parallelism alone takes {longer(self.best, plain)}: {loss_words(self.best, plain)}"

    @property
    def _is_plain(self) -> bool:
        return all(self.best.size(axis) == 1 for axis in ("tp", "pp", "cp", "ep"))

    def _wide_or_deep(self) -> str:
        found, layers = self.diagnosis, self.question.model.num_hidden_layers
        if found.layers_on_card == 0:
            return (
                f"Wide or deep: too wide. Not even a pipeline with one of the {layers} layers on each card would fit, "
                f"so layers must be split; widest is the {found.widest} ({format_count(found.widest_elements)})."
            )
        count = found.layers_on_card
        return (
            f"Wide or deep: too deep. A card holds {count} of the {layers} layers with their training state, so the "
            f"layers fill {-(-layers // count)} cards; the widest part is the {found.widest}."
        )

    def _tensor(self) -> str:
        size, devices = self.best.size("tp"), self.question.hardware.devices_per_node
        alternatives = self._alternatives("tp", [size * 2, size // 2] if size > 1 else [2])
        if size == 1:
            return f"tp 1: layers stay whole.{alternatives}"
        inside = f"inside the node of {devices}" if stays_in_node(self.question, self.best, "tp") else "across nodes"
        cost = percent(self.best.exposed_comm_s["tp"] / self.best.step_s)
        spread = "; sequence parallelism splits norms and residuals too" if self.best.size("sequence_parallel") else ""
        return (
            f"tp {size}: {size} devices {inside} share every layer, first of all the {self.diagnosis.widest}; its "
            f"communication over {link_words(self.question, self.best, 'tp')} takes {cost} of the step{spread}."
            f"{alternatives}"
        )

    def _pipeline(self) -> str:
        stages, layers = self.best.size("pp"), self.question.model.num_hidden_layers
        if stages == 1:
            return f"pp 1: all {layers} layers on every device.{self._alternatives('pp', [2])}"
        bubble = percent(self.best.bubble_fraction)
        microbatches = self.best.size("num_microbatches")
        chunks = self.best.size("chunks")
        each = f" ({count_of(chunks, 'chunk')} on each device)" if chunks > 1 else ""
        return (
            f"pp {stages}: the depth that is left, {layers} layers, in {stages * chunks} stages{each} of "
            f"{self._stage_sizes()}; with "
            f"{count_of(microbatches, 'microbatch', 'microbatches')} the bubble is {bubble} of the step."
            f"{self._alternatives('pp', [stages * 2, stages // 2])}"
        )

    def _schedule(self) -> Iterator[str]:
        """Why not 1F1B, where the plan has another schedule."""
        name = str(self.best.parallelism["schedule"])
        if "schedule" in self.question.fixed or "chunks" in self.question.fixed or name not in _FILLS:
            return
        plain = changed(self.question, self.best, schedule=SCHEDULE_CODES["1f1b"], chunks=1)
        if plain.fits:
            instead = f"1f1b takes {longer(self.best, plain)}: {loss_words(self.best, plain)}"
        else:
            instead = f"1f1b needs {format_gigabytes(plain.peak_memory_bytes)}, which does not fit"
        yield f"Schedule {name}: {_FILLS[name]}. {instead}."

    def _stage_sizes(self) -> str:
        layers, stages = self.question.model.num_hidden_layers, self.best.size("pp") * self.best.size("chunks")
        split = balanced_sizes if self.best.parallelism["partition"] == "balanced" else even_layers
        return choices(sorted(set(split(layers, stages))))

    def _alternatives(self, axis: str, sizes: Sequence[int]) -> str:
        return "".join(self._alternative(axis, size) for size in sizes)

    def _alternative(self, axis: str, size: int) -> str:
        if axis in self.question.fixed or self.question.num_devices % size:
            return ""
        other = self._best_with(**{axis: size})
        if other is None:
            return f" {axis} {size} is not legal, or does not fit."
        took = f"{longer(self.best, other)} ({layout_words(other)}): {loss_words(self.best, other)}"
        return f" {axis} {size} takes at best {took}."

    def _best_with(self, **decisions: int) -> Plan | None:
        """The best plan with other sizes, from the list where it is there."""
        for plan in self.others:
            if all(plan.size(name) == value for name, value in decisions.items()):
                return plan
        return best_with(self.question, **decisions)

    def _replicas(self) -> str:
        size, per_replica = self.best.size("dp"), self.best.size("tp") * self.best.size("pp") * self.best.size("cp")
        if size == 1:
            return f"dp 1: one replica takes {'all' if per_replica > 1 else 'the'} {self._devices(per_replica)}."
        sent = format_gigabytes(self.best.communication_bytes["dp"])
        share = self.best.exposed_comm_s["dp"] / self.best.step_s
        exposed = f"{percent(share)} of the step is not hidden" if share else "computation hides all of it"
        rest = f"{self._devices(self.question.num_devices)}, {per_replica} in a replica"
        return (
            f"dp {size}: {rest}. Each device sends {sent} a step to keep replicas equal, over "
            f"{link_words(self.question, self.best, 'dp')}; {exposed}."
        )

    def _devices(self, number: int) -> str:
        return f"{number:,} device{'s' * (number != 1)}"

    def _micro_batch(self) -> str:
        size, microbatches = self.best.size("micro_batch"), self.best.size("num_microbatches")
        text = f"Micro batch {size}: {count_of(microbatches, 'microbatch', 'microbatches')} a replica."
        for other in self._micro_batches(size, microbatches):
            plan = changed(self.question, self.best, micro_batch=other, num_microbatches=size * microbatches // other)
            name = f" Micro batch {other}"
            if plan.fits:
                text += f"{name} takes {longer(self.best, plan)}."
            else:
                text += f"{name} needs {format_gigabytes(plan.peak_memory_bytes)}, which does not fit."
        return text

    def _micro_batches(self, size: int, microbatches: int) -> list[int]:
        if "micro_batch" in self.question.fixed or "num_microbatches" in self.question.fixed:
            return []
        share = size * microbatches
        return [other for other in (size * 2, size // 2) if other >= 1 and share % other == 0]

    def _zero(self) -> str:
        stage = self.best.size("zero_stage")
        if self.best.size("dp") * self.best.size("cp") == 1:
            return "ZeRO: there are no replicas to share states with."
        if stage == 0:
            return f"ZeRO 0: every replica keeps all its states; they fit. {self._stage(1)}"
        return f"ZeRO {stage}. {self._stage(0)}" + (f" {self._stage(1)}" if stage > 1 else "")

    def _stage(self, stage: int) -> str:
        other = changed(self.question, self.best, zero_stage=stage)
        if not other.fits:
            return f"Stage {stage} needs {format_gigabytes(other.peak_memory_bytes)}, which does not fit."
        is_close = other.step_s < (1 + WORTH) * self.best.step_s
        is_simpler = stage < self.best.size("zero_stage")
        hint = f", and is simpler: --fix zero={stage}" if is_close and is_simpler else ""
        return f"Stage {stage} takes {longer(self.best, other)}{hint}."

    def _savings(self) -> Iterator[str]:
        recompute = self.best.parallelism["recompute"]
        if recompute == "none":
            kept = format_gigabytes(self.best.memory_bytes["activations"])
            yield f"Recompute: none; the {kept} of activations fit."
        else:
            yield f"Recompute: {recompute}. Without it {self._without(recompute=RECOMPUTE_CODES['none'])}."
        for name, what in (("offload_optimizer", "optimizer states"), ("offload_param", "parameters")):
            if self.best.size(name):
                yield f"Offload: {what} live in host memory. Without that {self._without(**{name: 0})}."

    def _later_resort(self) -> Iterator[str]:
        """What ZeRO stage 3, which was not needed, would promise."""
        if self.question.resort >= Resort.ZERO_3 or "zero_stage" in self.question.fixed:
            return
        other = best_with(replace(self.question, resort=Resort.ZERO_3), zero_stage=3)
        if other is not None and other.step_s < (1 - WORTH) * self.best.step_s:
            yield (
                f"Not needed: ZeRO 3 promises {format_seconds(other.step_s)} ({layout_words(other)}, "
                f"{settings_words(other)}) if its transfers hide behind computation as well as predicted: --fix zero=3."
            )

    def _without(self, **settings: int) -> str:
        other = changed(self.question, self.best, **settings)
        needs = f"a device needs {format_gigabytes(other.peak_memory_bytes)}"
        return f"{needs}, and {format_gigabytes(other.usable_memory_bytes)} are usable" if not other.fits else needs

    def _next_best(self) -> Iterator[str]:
        if self.others:
            other = self.others[0]
            yield (
                f"Next best: {layout_words(other)} ({settings_words(other)}) takes {longer(self.best, other)}: "
                f"{loss_words(self.best, other)}."
            )

    def _batch(self) -> str:
        best, batch = self.best, self.question.global_batch
        tokens = batch * self.question.sequence_length
        rate = learning_rate_hint(self.question.model.num_parameters, tokens)
        equation = (
            f"{batch} = micro batch {best.size('micro_batch')} × accumulation {best.size('num_microbatches')} × dp "
            f"{best.size('dp')}"
        )
        return (
            f"Batch: {equation}, {format_count(tokens)} tokens a step. Learning rate to start tuning from: {rate:.1e} "
            "(GPT-3's for this size, scaled by the root of the batch); a batch k times as large takes √k times that."
        )
