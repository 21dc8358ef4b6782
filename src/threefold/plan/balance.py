"""Where to cut a model into stages: dynamic programming over what its parts cost, then the best few cuts are played.

The slowest stage sets the pace of a pipeline, so the first cut has the least slowest stage, by dynamic programming over
prefix sums (as for the linear partition problem), and of those the most even one. What else a step takes, the fill, the
drain and the messages, hangs on the schedule: so its neighbours, with a layer moved from one stage to another, are
played with it, and so is the even split. The shortest play wins; the even split stays where nothing gains over 1 %.
Then the same with half layers, for a stage may end between the attention and the feed-forward of a layer: what crosses
is the residual stream there too. Such a cut is taken where it gains over 1 % more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from threefold.cost.parts import ModelCosts, PartCosts, model_costs
from threefold.cost.profile import Profile
from threefold.errors import JobError
from threefold.job import Job
from threefold.job.spec import as_count
from threefold.layout import Partition, count_halves, format_partition, halves_of, stage_sizes
from threefold.plan.wording import format_seconds
from threefold.schedule import Kind, Schedule, job_schedule
from threefold.simulate import StepCosts, Timeline, simulate
from threefold.simulate.search import search

LEAST_GAIN = 0.01
"""Throughput that a cut must gain to be preferred to the even split."""
MOST_ACTIONS = 40_000
"""Plays of a search together; a play has more only where one alone has."""
MOST_ACTIONS_OF_A_PLAY = 8_000
"""A play with more actions is cut to fewer microbatches."""

Floats = NDArray[np.float64]
Fits = Callable[[int, int], bool]
"""(stage, its number of pieces) -> whether a device can hold it."""


def cut_evenly(
    piece_s: Sequence[float],
    first_s: float,
    last_s: float,
    num_stages: int,
    fits: Fits | None = None,
    slowness: Sequence[float] = (),
) -> tuple[int, ...] | None:
    """Pieces of each stage: the slowest is fastest, and of such cuts the sum of squares is least; None if none fits.

    ``piece_s`` are the seconds of layers, or of half layers. ``first_s`` and ``last_s`` are added to the ends.
    ``slowness`` multiplies the seconds of each stage. A stage between the ends has one piece at least.
    """
    seconds = _stage_seconds(piece_s, first_s, last_s, num_stages, fits, slowness or [1.0] * num_stages)
    slowest = _shortest(seconds, np.maximum)[0]
    if not np.isfinite(slowest):
        return None
    # The bound has room for rounding: sums of the same numbers in another order differ in their last bits.
    allowed = [np.where(stage <= slowest * (1 + 1e-9), stage**2, np.inf) for stage in seconds]
    return _shortest(allowed, np.add)[1]


def _stage_seconds(
    piece_s: Sequence[float],
    first_s: float,
    last_s: float,
    num_stages: int,
    fits: Fits | None,
    slowness: Sequence[float],
) -> list[Floats]:
    """For each stage: seconds if it holds pieces i to j - 1, at [i, j]; infinite where it must not."""
    sums = np.array([0.0, *accumulate(piece_s)])
    between = sums[None, :] - sums[:, None]
    counts = np.arange(len(sums))[None, :] - np.arange(len(sums))[:, None]
    found = []
    for stage in range(num_stages):
        is_first, is_last = stage == 0, stage == num_stages - 1
        seconds = between + first_s * is_first + last_s * is_last
        allowed = counts >= (0 if is_first or is_last else 1)
        if fits is not None:
            allowed &= np.array([fits(stage, count) for count in range(len(sums))])[np.maximum(counts, 0)]
        found.append(np.where(allowed, seconds * slowness[stage], np.inf))
    return found


def _shortest(stages: Sequence[Floats], join: Callable[[Floats, Floats], Floats]) -> tuple[float, tuple[int, ...]]:
    """The least value of a path through all stages, joined by sum or maximum, and the pieces of each stage on it."""
    best = stages[0][0]
    came_from = []
    for seconds in stages[1:]:
        totals = join(best[:, None], seconds)
        came_from.append(totals.argmin(axis=0))
        best = totals.min(axis=0)
    ends = [len(best) - 1]
    for previous in reversed(came_from):
        ends.append(int(previous[ends[-1]]))
    bounds = [0, *reversed(ends)]
    return float(best[-1]), tuple(end - start for start, end in pairwise(bounds))


def step_costs(
    costs: ModelCosts, partition: Sequence[float], schedule: Schedule, *, split: bool | None = None
) -> StepCosts:
    """The costs of every stage of ``partition``, as the simulator takes them.

    ``split``: backward passes run as I and W, which together take longer than one; by default as in ``schedule``.
    """
    last = len(partition) - 1
    counts = [count_halves(halves) for halves in halves_of(partition)]
    if split is None:
        split = any(action.kind is Kind.I for row in schedule.rows for action in row)

    sends = [schedule.stage_rank(stage) != schedule.stage_rank(stage + 1) for stage in range(last)]
    posts = [costs.post_s * (before + after) for before, after in zip([0, *sends], [*sends, 0], strict=True)]

    slowness = costs.slowness or (1.0,) * len(partition)

    def each(field: Callable[[PartCosts], float]) -> list[float]:
        ends = [0.0] * len(partition)
        ends[0] += field(costs.embedding)
        ends[last] += field(costs.head)
        layer, attention, feed_forward = (field(part) for part in (costs.layer, *costs.halves))
        return [
            min(a, f) * layer + max(a - f, 0) * attention + max(f - a, 0) * feed_forward + end
            for (a, f), end in zip(counts, ends, strict=True)
        ]

    def passes(field: Callable[[PartCosts], float], each_post: float = 1.0) -> list[float]:
        terms = zip(each(field), posts, slowness, strict=True)
        return [(seconds + costs.action_s + each_post * post) * slow for seconds, post, slow in terms]

    input_grad = passes(lambda part: part.input_grad_s)
    weight_grad = passes(lambda part: part.weight_grad_s, each_post=0.0)
    if not split:  # what a backward pass in one takes, shared out as the two passes would
        whole = passes(lambda part: part.backward_s)
        share = [i / (i + w) if i + w else 0.5 for i, w in zip(input_grad, weight_grad, strict=True)]
        input_grad = [b * s for b, s in zip(whole, share, strict=True)]
        weight_grad = [b * (1 - s) for b, s in zip(whole, share, strict=True)]
    chunks = [len(schedule.stages_of(schedule.stage_rank(stage))) for stage in range(last + 1)]
    return StepCosts(
        forward_s=passes(lambda part: part.forward_s),
        input_grad_s=input_grad,
        weight_grad_s=weight_grad,
        p2p_s=[costs.message_s * crosses for crosses in sends],
        sync_s=each(lambda part: part.sync_s),
        step_s=[a + costs.step_s / b for a, b in zip(each(lambda part: part.step_s), chunks, strict=True)],
        activation_bytes=each(lambda part: part.activation_bytes),
        static_bytes=each(lambda part: part.static_bytes),
    )


def play_partition(costs: ModelCosts, partition: Sequence[float], schedule: Schedule) -> Timeline:
    """One step of ``schedule`` with the stages of ``partition``; all ranks update together, as clipping wants it."""
    return simulate(schedule, step_costs(costs, partition, schedule), step_together=True)


@dataclass(frozen=True)
class Balance:
    """A cut that was chosen: ``step_s`` is the played step, ``even_step_s`` that of the even split.

    ``even`` is None where there is no even split. With more microbatches than are played, steps are those of fewer.
    """

    partition: Partition
    even: Partition | None
    step_s: float
    even_step_s: float
    costs: ModelCosts
    num_microbatches: int
    fits: bool = True

    @property
    def gain(self) -> float:
        """Throughput over that of the even split, minus 1."""
        return self.even_step_s / self.step_s - 1 if self.even is not None and self.step_s else 0.0

    def words(self) -> str:
        """What was chosen and why, in a few sentences."""
        costs = self.costs
        layer_s = costs.layer.forward_s + costs.layer.backward_s
        first, last = ((part.forward_s + part.backward_s) / (layer_s or 1.0) for part in (costs.embedding, costs.head))
        measured = f" (a layer takes {format_seconds(layer_s)} a microbatch)" if costs.has_seconds else ""
        return (
            f"partition auto is {format_partition(self.partition)} by {costs.source}: the embedding costs as much as "
            f"{first:.2f} and the head as {last:.2f} layers{measured}. "
            f"{self._against_even()}{self._halves()}{self._memory()}"
        )

    def _against_even(self) -> str:
        if self.even is None:
            return "There are more stages than layers, so there is no even split."
        if self.partition == self.even:
            return "That is the even split: no other promises 1 % more tokens/s."
        if self.gain < 0:
            return f"The even split {format_partition(self.even)} would be faster, but holds more memory."
        return f"The even split {format_partition(self.even)} would take {self.gain:.1%} longer."

    def _halves(self) -> str:
        if all(size == int(size) for size in self.partition):
            return ""
        return " A half is a layer's attention, or its feed-forward."

    def _memory(self) -> str:
        if self.fits or self.costs.usable_bytes is None:
            return ""
        return " By these costs no split fits into a device; this one holds the least."


def balance(costs: ModelCosts, num_layers: int, schedule: Schedule) -> Balance:
    """The best cut of ``num_layers`` layers for ``schedule``, by its played step.

    A cut that a device can't hold is not taken while another can be held; ``fits`` says whether that was so.
    """
    search = _Search(costs, schedule)
    even = _even(num_layers, schedule.num_stages)
    best = search.best(num_layers, 1)
    if even is not None and search.is_as_good(even, best):
        best = even
    if costs.attention is not None and schedule.num_stages > 1:
        finer = search.best(num_layers, 0.5)
        best = best if search.is_as_good(best, finer) else finer
    step_s, _ = search.judge(best)
    even_s = search.judge(even)[0] if even is not None else step_s
    return Balance(best, even, step_s, even_s, costs, schedule.num_microbatches, search.holds(best))


def _even(num_layers: int, num_stages: int) -> Partition | None:
    try:
        return stage_sizes(num_layers, num_stages, "even")
    except JobError:  # more stages than layers
        return None


class _Search:
    """Plays cuts of one model for one schedule, each once, as long as the number of actions allows."""

    def __init__(self, costs: ModelCosts, schedule: Schedule) -> None:
        self.costs, self.schedule = costs, schedule
        self.played: dict[Partition, tuple[float, float]] = {}
        self.most_plays = max(3, MOST_ACTIONS // sum(map(len, schedule.rows)))
        """Of each search for the best cut."""
        self.live = _live_microbatches(schedule)

    def best(self, num_layers: int, unit: float) -> Partition:
        """The best cut found into stages of whole layers, or of half ones where ``unit`` is 0.5."""
        costs, num_stages = self.costs, self.schedule.num_stages
        pieces = [self.whole_s(part) for part in (costs.halves if unit < 1 else (costs.layer,))] * num_layers
        sums = pieces, self.whole_s(costs.embedding), self.whole_s(costs.head)

        def fits(stage: int, count: int) -> bool:
            return self.fits_alone(stage, count * unit)

        bounded = cut_evenly(*sums, num_stages, fits, costs.slowness)
        start = bounded or cut_evenly(*sums, num_stages, slowness=costs.slowness)
        assert start is not None, "without a limit every model can be cut"
        return self.climb(tuple(as_count(count * unit) for count in start), unit)

    def whole_s(self, part: PartCosts) -> float:
        """Seconds of a step of a part: all microbatches and the optimizer."""
        return self.schedule.num_microbatches * (part.forward_s + part.backward_s) + part.step_s + part.sync_s

    def fits_alone(self, stage: int, count: float) -> bool:
        """Whether a device can hold the stage of ``count`` layers, were it its only one."""
        if self.costs.usable_bytes is None:
            return True
        parts = [(self.costs.layer, count), (self.costs.embedding, stage == 0)]
        parts.append((self.costs.head, stage == self.schedule.num_stages - 1))
        each = sum(part.activation_bytes * number for part, number in parts)
        static = sum(part.static_bytes * number for part, number in parts)
        return static + each * self.live[stage] <= self.costs.usable_bytes

    def judge(self, partition: Partition) -> tuple[float, float]:
        """Seconds of the step, and the most bytes that a rank holds."""
        if partition not in self.played:
            timeline = play_partition(self.costs, partition, self.schedule)
            self.played[partition] = timeline.makespan_s, float(timeline.peak_memory_bytes.max(initial=0.0))
        return self.played[partition]

    def holds(self, partition: Partition) -> bool:
        """Whether every device can hold its part."""
        usable = self.costs.usable_bytes
        return usable is None or self.judge(partition)[1] <= usable

    def key(self, partition: Partition) -> tuple[bool, float]:
        """What is better comes first: what fits, then what is faster; of what doesn't fit, what holds less."""
        step_s, held = self.judge(partition)
        fits = self.holds(partition)
        return not fits, step_s if fits else held

    def climb(self, start: Partition, unit: float) -> Partition:
        """From ``start`` to better neighbours, until there is none or enough has been played."""
        best, limit = start, len(self.played) + self.most_plays
        improved = True
        while improved:
            improved = False
            for neighbour in _neighbours(best, unit):
                if len(self.played) >= limit and neighbour not in self.played:
                    return best
                if self.key(neighbour) < self.key(best):
                    best, improved = neighbour, True
                    break
        return best

    def is_as_good(self, simple: Partition, best: Partition) -> bool:
        """Whether ``best`` gains too little over ``simple`` to be stated; where none fits, whether it holds no less."""
        if not self.holds(best):
            return self.judge(simple)[1] <= self.judge(best)[1]
        if not self.holds(simple):
            return False
        return self.judge(simple)[0] <= self.judge(best)[0] * (1 + LEAST_GAIN)


def _neighbours(partition: Partition, unit: float) -> Iterator[Partition]:
    """Cuts with one layer, or half of one, moved from a stage to another; neighbouring stages first."""
    stages = range(len(partition))
    moves = sorted(((a, b) for a in stages for b in stages if a != b), key=lambda move: abs(move[0] - move[1]))
    for source, target in moves:
        least = 0 if source in (0, len(partition) - 1) else unit
        if partition[source] > least:
            changed = list(partition)
            changed[source] -= unit
            changed[target] += unit
            yield tuple(map(as_count, changed))


def _live_microbatches(schedule: Schedule) -> list[int]:
    """The most microbatches whose activations each stage keeps at once."""
    live, peak = [0] * schedule.num_stages, [0] * schedule.num_stages
    for action in (action for row in schedule.rows for action in row):
        if action.kind is Kind.F:
            live[action.stage] += 1
            peak[action.stage] = max(peak[action.stage], live[action.stage])
        elif action.kind in (Kind.B, Kind.W):
            live[action.stage] -= 1
    return peak


def balance_job(job: Job, profile: Profile | None = None) -> Balance:
    """The best cut of ``job``'s model for its schedule. Raises JobError where ``profile`` is of other work."""
    assert job.model is not None, "a job without a model has nothing to cut"
    return balance(model_costs(job, profile), job.model.num_hidden_layers, schedule_to_play(job))


def schedule_to_play(job: Job) -> Schedule:
    """The job's schedule, with fewer microbatches where it has very many: three rounds of the pipeline at least."""
    stages = job.parallelism.pp.num_stages
    most = max(3 * job.pp, MOST_ACTIONS_OF_A_PLAY // (2 * stages) // job.pp * job.pp)
    if job.num_microbatches <= most or job.parallelism.pp.schedule_file is not None:
        return job_schedule(job)
    return job_schedule(job.model_copy(update={"gradient_accumulation_steps": most}))


def resolve_partition(job: Job, profile: Profile | None = None) -> tuple[Job, Balance | None]:
    """The job with its partition ``auto`` replaced by a list of layers, and why; unchanged where it states another.

    A pipeline of one stage has nothing to cut, and a job without a model nothing to count.
    """
    pipeline = job.parallelism.pp
    if pipeline.partition != "auto" or pipeline.num_stages == 1 or job.model is None:
        return job, None
    chosen = balance_job(job, profile)
    return with_partition(job, chosen.partition), chosen


def with_partition(job: Job, partition: Sequence[float] | Literal["auto", "even"]) -> Job:
    """The job with these layers on its stages."""
    stated = partition if isinstance(partition, str) else tuple(partition)
    pipeline = job.parallelism.pp.model_copy(update={"partition": stated})
    return job.model_copy(update={"parallelism": job.parallelism.model_copy(update={"pp": pipeline})})


@dataclass(frozen=True)
class SearchedSchedule:
    """A schedule that was searched by measured costs: its step, and that of the one that unit costs would give."""

    schedule: Schedule
    step_s: float
    unit_step_s: float

    def words(self) -> str:
        """What was found."""
        gain = self.unit_step_s / self.step_s - 1
        return (
            f"schedule searched by measured costs: a step of {format_seconds(self.step_s)}, {gain:+.1%} tokens/s "
            "over the schedule that is best where all passes take the same."
        )


def search_job(job: Job, profile: Profile) -> SearchedSchedule:
    """The shortest schedule found for the job's stages, which must be settled, in the memory that 1F1B takes."""
    assert job.model is not None, "a profile is of a model"
    pipeline = job.parallelism.pp
    sizes = stage_sizes(job.model.num_hidden_layers, pipeline.num_stages, pipeline.partition)
    unit = job_schedule(job)
    costs = step_costs(model_costs(job, profile), sizes, unit, split=True)
    found = search(costs, job.pp, job.num_microbatches)
    # The search plays without waiting for all ranks before the optimizer; both are judged with it.
    lengths = [simulate(one, costs, step_together=True).makespan_s for one in (found.schedule, unit)]
    best = found.schedule if lengths[0] <= lengths[1] else unit
    return SearchedSchedule(best, min(lengths), lengths[1])
