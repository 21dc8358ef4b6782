"""Stages, what each holds and keeps, and the schedule's grid."""

from __future__ import annotations

from collections.abc import Sequence

from threefold.plan.balance import Balance
from threefold.report.facts import Facts, Grid, Section, TextTable
from threefold.report.words import count_of, format_count, format_integers, sentence
from threefold.schedule import Kind, Schedule, bubble_share, idle_share, peak_live_microbatches

MOST_GRID_ACTIONS = 1000
"""A schedule with more actions is not drawn."""


def stages_section(facts: Facts, balance: Balance | None = None) -> Section:
    """The layers of each stage, and the microbatches that it keeps; ``balance`` is how they were cut, if they were.

    With several chunks a row is a rank with all its stages.
    """
    schedule, chunked = facts.schedule, facts.schedule.num_chunks > 1
    rows = []
    for rank in range(facts.job.pp):
        held = schedule.stages_of(rank)
        stages = [format_integers(held)] if chunked else []
        parameters = [format_count(facts.parameters[rank])] if facts.parameters else []
        live = f"{peak_live_microbatches(schedule, rank) / len(held):g}"
        rows.append((str(rank), *stages, _layer_words(facts, held), _ends(facts, held), *parameters, live))
    parameters_header = ["parameters a device"] if facts.parameters else []
    who = ["rank", "stages"] if chunked else ["stage"]
    header = (*who, "layers", "also holds", *parameters_header, "live microbatches")
    note = (
        "Live microbatches are those whose activations a stage must keep at once: stages that hold equal parameters "
        "can need very different memory."
    )
    if chunked:
        note += " A microbatch in one of the stages of a rank counts as a part."
    cut = [] if balance is None else [sentence(balance.words())]
    return Section("Stages", (TextTable(header, tuple(rows)), *cut, note))


def _layer_words(facts: Facts, stages: Sequence[int]) -> str:
    if facts.stages is None:
        return f"L ({facts.job.parallelism.pp.partition} split)"
    held = [facts.stages[stage] for stage in stages]
    words = "; ".join(_half_words(halves) for halves in held if halves)
    return f"{words} ({sum(map(len, held)) / 2:g})" if words else "none"


def _half_words(halves: range) -> str:
    """``0-3``, and what the stage has of a layer that is cut: ``0-3, attention of 4``."""
    whole = range(-(-halves.start // 2), halves.stop // 2)
    words = [
        f"feed-forward of {halves.start // 2}" if halves.start % 2 else "",
        format_integers(whole) if whole else "",
        f"attention of {halves.stop // 2}" if halves.stop % 2 else "",
    ]
    return ", ".join(word for word in words if word)


def _ends(facts: Facts, stages: Sequence[int]) -> str:
    first, last = 0 in stages, facts.schedule.num_stages - 1 in stages
    tied = facts.job.model is not None and facts.job.model.tie_word_embeddings and not first
    head = "head (a copy of the embedding) and loss" if tied else "head and loss"
    return ", ".join([*(["embedding"] if first else []), *([head] if last else [])])


def schedule_section(facts: Facts, width: int) -> Section:
    """The bubble, and the grid where it fits into ``width`` columns."""
    schedule, p, m = facts.schedule, facts.job.pp, facts.job.num_microbatches
    if p == 1:
        words = "pp is 1: one rank runs forward and backward of each microbatch; nothing idles."
        return Section("Schedule", (words,))
    chunks = f" of {count_of(schedule.num_chunks, 'chunk')} each" if schedule.num_chunks > 1 else ""
    ranks = f"{p} ranks{chunks}" if chunks else f"{p} stages"
    intro = f"{schedule.name} with p = {ranks} and m = {m} microbatches: {_bubble_words(schedule)}. That is the bubble."
    return Section("Schedule", (intro, *_grid_parts(schedule, width)))


def _bubble_words(schedule: Schedule) -> str:
    p, m, v = schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks
    if schedule.name == "naive":
        return f"each rank idles 1 - 1/p = {1 - 1 / p:.1%} of the step: only one rank works at any moment"
    # Numerator is p - 1, the denominator is this many more; each for as many microbatches as the form holds for.
    forms = {
        "gpipe": ("m", m, 1),
        "1f1b": ("m", m, 1),
        "interleaved_1f1b": (f"{v}m", v * m, p),
        "zb_h1": ("3m", 3 * m, p),
        "zb_v": ("6m", 6 * m, 2 * p),
    }
    words, busy, fewest = forms.get(schedule.name, ("", 0, m + 1))
    split = schedule.name not in ("gpipe", "1f1b", "interleaved_1f1b")
    when = " where F, I and W take equal times" if split else ""
    if m < fewest:
        return f"each rank idles {idle_share(schedule.rows, schedule.num_stages):.1%} of the step{when}"
    whole = busy + p - 1
    return f"each rank idles (p - 1)/({words} + p - 1) = {p - 1}/{whole} = {(p - 1) / whole:.1%} of the step{when}"


def _grid_parts(schedule: Schedule, width: int) -> list[str | Grid]:
    if sum(map(len, schedule.rows)) > MOST_GRID_ACTIONS:
        return []
    grid = schedule.grid()
    if max(map(len, grid.splitlines())) > width:
        return [f"(The grid of the step is wider than the {width} columns here.)"]
    return [Grid(grid), grid_legend(schedule)]


def grid_legend(schedule: Schedule) -> str:
    """What the cells of the grid mean."""
    kinds = {action.kind for row in schedule.rows for action in row}
    words = ["F0 is forward of microbatch 0"]
    if Kind.B in kinds:
        words.append("B0 its backward (twice as long)")
    if Kind.I in kinds:
        words.append("I0 and W0 its backward for the gradients of the input and of the weights")
    alone = schedule.num_chunks == 1
    number = "rank 0 has stage 0" if alone else "the number before a letter is the stage"
    return f"{', '.join(words)}, '.' an idle moment; {number}."


def schedule_warnings(facts: Facts) -> list[str]:
    """What about the schedule costs time or memory, and what to do about it."""
    return [*_few_microbatches(facts), *_many_live(facts)]


def _few_microbatches(facts: Facts) -> list[str]:
    schedule, p, m = facts.schedule, facts.job.pp, facts.job.num_microbatches
    if p == 1 or schedule.name == "naive" or m >= 4 * p:
        return []
    share, enough = idle_share(schedule.rows, schedule.num_stages), bubble_share(p, 4 * p)
    if share <= enough:
        return []
    microbatches = count_of(m, "microbatch", "microbatches")
    leave = "leaves" if m == 1 else "leave"
    filling = "" if _fills_the_bubble(schedule) else ", or parallelism.pp.schedule zb_h1, which fills a part of it"
    return [
        f"{sentence(microbatches)} on {count_of(p, 'stage' if schedule.num_chunks == 1 else 'rank')} {leave} "
        f"{share:.0%} of the step idle. Fix: a larger gradient_accumulation_steps, with a smaller micro batch if "
        f"train_batch_size must stay; {4 * p} or more leave at most {enough:.0%}{filling}."
    ]


def _fills_the_bubble(schedule: Schedule) -> bool:
    return schedule.num_chunks > 1 or any(action.kind is Kind.W for row in schedule.rows for action in row)


def _many_live(facts: Facts) -> list[str]:
    p, m, name = facts.job.pp, facts.job.num_microbatches, facts.schedule.name
    if name != "gpipe" or p == 1 or m <= p:
        return []
    return [
        f"gpipe keeps the activations of all {m} microbatches on every stage; 1f1b takes as long and keeps at most "
        f"{p}. Fix: set parallelism.pp.schedule to 1f1b."
    ]
