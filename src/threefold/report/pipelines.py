"""Stages, what each holds and keeps, and the schedule's grid."""

from __future__ import annotations

from threefold.report.facts import Facts, Grid, Section, TextTable
from threefold.report.words import count_of, format_count, format_integers, sentence
from threefold.schedule import Schedule, bubble_share, peak_live_microbatches

MOST_GRID_ACTIONS = 1000
"""A schedule with more actions is not drawn."""


def stages_section(facts: Facts) -> Section:
    """The layers of each stage, and the microbatches that it keeps."""
    rows = []
    for stage in range(facts.job.pp):
        parameters = [format_count(facts.parameters[stage])] if facts.parameters else []
        live = str(peak_live_microbatches(facts.schedule, stage))
        rows.append((str(stage), _layer_words(facts, stage), _ends(facts, stage), *parameters, live))
    parameters_header = ["parameters a device"] if facts.parameters else []
    header = ("stage", "layers", "also holds", *parameters_header, "live microbatches")
    note = (
        "Live microbatches are those whose activations a stage must keep at once: stages that hold equal parameters "
        "can need very different memory."
    )
    return Section("Stages", (TextTable(header, tuple(rows)), note))


def _layer_words(facts: Facts, stage: int) -> str:
    if facts.stages is None:
        return f"L ({facts.job.parallelism.pp.partition} split)"
    layers = facts.stages[stage]
    return f"{format_integers(layers)} ({len(layers)})" if layers else "none"


def _ends(facts: Facts, stage: int) -> str:
    tied = facts.job.model is not None and facts.job.model.tie_word_embeddings and facts.job.pp > 1
    head = "head (a copy of the embedding) and loss" if tied else "head and loss"
    ends = [*(["embedding"] if stage == 0 else []), *([head] if stage == facts.job.pp - 1 else [])]
    return ", ".join(ends)


def schedule_section(facts: Facts, width: int) -> Section:
    """The bubble, and the grid where it fits into ``width`` columns."""
    name, p, m = facts.job.parallelism.pp.schedule, facts.job.pp, facts.job.num_microbatches
    if p == 1:
        return Section("Schedule", ("pp is 1: one stage runs forward and backward of each microbatch; nothing idles.",))
    if name == "naive":
        share = f"1 - 1/p = {1 - 1 / p:.1%} of the step: only one rank works at any moment"
    else:
        share = f"(p - 1)/(m + p - 1) = {p - 1}/{m + p - 1} = {bubble_share(p, m):.1%} of the step"
    intro = f"{name} with p = {p} stages and m = {m} microbatches: each rank idles {share}. That is the bubble."
    return Section("Schedule", (intro, *_grid_parts(facts.schedule, width)))


def _grid_parts(schedule: Schedule, width: int) -> list[str | Grid]:
    if sum(map(len, schedule.rows)) > MOST_GRID_ACTIONS:
        return []
    grid = schedule.grid()
    if max(map(len, grid.splitlines())) > width:
        return [f"(The grid of the step is wider than the {width} columns here.)"]
    legend = "F0 is forward of microbatch 0, B0 its backward (twice as long), '.' an idle moment; rank 0 has stage 0."
    return [Grid(grid), legend]


def schedule_warnings(facts: Facts) -> list[str]:
    """What about the schedule costs time or memory, and what to do about it."""
    return [*_few_microbatches(facts), *_many_live(facts)]


def _few_microbatches(facts: Facts) -> list[str]:
    p, m, name = facts.job.pp, facts.job.num_microbatches, facts.job.parallelism.pp.schedule
    if p == 1 or name == "naive" or m >= 4 * p:
        return []
    microbatches = count_of(m, "microbatch", "microbatches")
    leave = "leaves" if m == 1 else "leave"
    return [
        f"{sentence(microbatches)} on {count_of(p, 'stage')} {leave} {bubble_share(p, m):.0%} of the step idle. Fix: "
        "a larger gradient_accumulation_steps, with a smaller micro batch if train_batch_size must stay; "
        f"{4 * p} or more leave at most {bubble_share(p, 4 * p):.0%}."
    ]


def _many_live(facts: Facts) -> list[str]:
    p, m, name = facts.job.pp, facts.job.num_microbatches, facts.job.parallelism.pp.schedule
    if name != "gpipe" or p == 1 or m <= p:
        return []
    return [
        f"gpipe keeps the activations of all {m} microbatches on every stage; 1f1b takes as long and keeps at most "
        f"{p}. Fix: set parallelism.pp.schedule to 1f1b."
    ]
