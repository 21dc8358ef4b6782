"""What a run's stages really took, and what cutting them elsewhere would gain: said only where it is worth it.

Passes of whole stages are all that a run tells. Stages between the ends hold layers alone, so they say what a layer
takes, and, where they differ in that, how slow each is. What the ends take over their layers is the embedding's and the
head's. Without such stages a layer is what the first stage takes for each of its own, with the embedding at the
share that it has in the costs that are known beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from threefold.cost.parts import ModelCosts, PartCosts, Share, model_costs
from threefold.cost.profile import Profile
from threefold.job import Job
from threefold.layout import Partition, count_halves, halves_of, stage_sizes
from threefold.plan.balance import balance, play_partition, schedule_to_play
from threefold.schedule import Schedule

LEAST_GAIN = 0.03
"""Throughput that advice must promise."""
_SAME = 0.03
"""Stages whose layers differ by less than this are equally fast: repeated steps differ as much."""


@dataclass(frozen=True)
class StagePasses:
    """Seconds that a stage took for one microbatch: medians over microbatches and steps, waiting left out.

    ``backward_s`` is of the whole backward pass, both of its halves where they ran apart.
    """

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        """Both."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Imbalance:
    """The slowest rank takes ``over_mean`` more than the mean; ``partition`` would give ``gain`` more tokens/s.

    ``what`` is what a rank is called: a stage, where it holds one.
    """

    stages_s: tuple[float, ...]
    what: str
    rank: int
    over_mean: float
    partition: Partition
    gain: float

    def words(self) -> str:
        """The advice in a sentence."""
        counts = ",".join(f"{size:g}" for size in self.partition)
        return (
            f"{self.what} {self.rank} is {self.over_mean:.0%} slower than the mean: --partition {counts} "
            f"(parallelism.pp.partition {list(self.partition)}) would give {self.gain:+.0%} tokens/s"
        )

    def to_dict(self) -> dict[str, Any]:
        """For summary.json."""
        return {
            "stages_s": list(self.stages_s),
            "slowest_rank": self.rank,
            "over_mean": self.over_mean,
            "partition": list(self.partition),
            "gain": self.gain,
            "advice": self.words(),
        }


def find_imbalance(
    job: Job, passes: Sequence[StagePasses], step_s: float = 0.0, profile: Profile | None = None
) -> Imbalance | None:
    """Whether another cut of ``job``'s model promises more than 3 %; ``passes`` are those of every stage.

    ``job`` states its partition as a list, or takes the even one. ``step_s`` is what a rank's step takes besides its
    passes: the optimizer. None where nothing is to be gained, or nothing is known.
    """
    sizes = current_partition(job)
    if sizes is None or len(sizes) != len(passes) or len(passes) < 2 or not all(p.total_s > 0 for p in passes):
        return None
    schedule = schedule_to_play(job)
    costs = replace(fit_costs(sizes, passes, model_costs(job, profile)), step_s=step_s)
    now_s = play_partition(costs, sizes, schedule).makespan_s
    best = balance(costs, round(sum(sizes)), schedule)
    gain = now_s / best.step_s - 1
    if gain <= LEAST_GAIN:
        return None
    rank, over_mean = _slowest(schedule, passes)
    what = "stage" if schedule.num_stages == schedule.num_ranks else "rank"
    return Imbalance(tuple(p.total_s for p in passes), what, rank, over_mean, best.partition, gain)


def current_partition(job: Job) -> Partition | None:
    """Layers of each stage as the job has them; None for a job without a model, or that was not cut yet."""
    stated = job.parallelism.pp.partition
    if job.model is None or stated == "auto":
        return None
    return stage_sizes(job.model.num_hidden_layers, job.parallelism.pp.num_stages, stated)


def _slowest(schedule: Schedule, passes: Sequence[StagePasses]) -> tuple[int, float]:
    totals = [sum(passes[stage].total_s for stage in schedule.stages_of(rank)) for rank in range(schedule.num_ranks)]
    slowest = max(range(len(totals)), key=totals.__getitem__)
    return slowest, totals[slowest] / fmean(totals) - 1


def fit_costs(sizes: Sequence[float], passes: Sequence[StagePasses], known: ModelCosts) -> ModelCosts:
    """Costs of parts that explain what each stage took; ``known`` gives what the stages alone can't tell."""
    sizes = _weights(sizes, known)
    embedding_share, head_share = _shares(known)
    layer_s = _layer_seconds(sizes, [p.total_s for p in passes], embedding_share, head_share)
    slowness = [1.0] * len(sizes)
    for stage in range(1, len(sizes) - 1):
        if sizes[stage]:
            slowness[stage] = _unless_same(passes[stage].total_s / sizes[stage] / layer_s)
    ends = []
    for stage in (0, len(sizes) - 1):
        rest = passes[stage].total_s - sizes[stage] * layer_s
        if rest < 0:  # its layers alone should take longer: the device is faster
            slowness[stage] = _unless_same(passes[stage].total_s / (sizes[stage] * layer_s))
        ends.append(max(0.0, rest))
    forward = fmean(p.forward_s / p.total_s for p in passes)
    return ModelCosts(
        embedding=_part(ends[0], forward),
        layer=_part(layer_s, forward, known.layer),
        head=_part(ends[1], forward, known.head),
        source="what the stages took",
        usable_bytes=known.usable_bytes,
        slowness=tuple(slowness) if any(slow != 1 for slow in slowness) else (),
        attention=known.attention,
    )


def _weights(sizes: Sequence[float], known: ModelCosts) -> list[float]:
    """Layers of each stage by what they take: an attention and a feed-forward together are 1, each its share."""
    share = known.attention or Share()
    counts = [count_halves(halves) for halves in halves_of(sizes)]
    return [min(a, f) + max(a - f, 0) * share.seconds + max(f - a, 0) * share.rest.seconds for a, f in counts]


def _shares(known: ModelCosts) -> tuple[float, float]:
    """What the embedding and the head take, in layers."""
    layer_s = known.layer.forward_s + known.layer.backward_s
    if not layer_s:
        return 0.0, 0.0
    return tuple((part.forward_s + part.backward_s) / layer_s for part in (known.embedding, known.head))  # pyright: ignore[reportReturnType]


def _layer_seconds(sizes: Sequence[float], totals: Sequence[float], embedding: float, head: float) -> float:
    """Seconds of one layer: from the stages that hold nothing else, else from the first, else from the last."""
    between = [total / size for size, total in zip(sizes[1:-1], totals[1:-1], strict=True) if size]
    if between:
        return median(between)
    if sizes[0]:
        return totals[0] / (sizes[0] + embedding)
    return totals[-1] / (sizes[-1] + head)


def _unless_same(ratio: float) -> float:
    return ratio if abs(ratio - 1) > _SAME else 1.0


def _part(total_s: float, forward: float, known: PartCosts | None = None) -> PartCosts:
    """A part of so many seconds, split into passes as stages are on average; bytes are those that are known."""
    backward_s = total_s * (1 - forward)
    activation = known.activation_bytes if known else 0.0
    static = known.static_bytes if known else 0.0
    return PartCosts(
        total_s * forward,
        backward_s,
        backward_s / 2,
        backward_s / 2,
        activation_bytes=activation,
        static_bytes=static,
    )
