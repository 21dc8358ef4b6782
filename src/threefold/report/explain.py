"""The explanation of a job: where every rank is, what it holds, what it sends, when and how often, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from threefold.cost.traffic import local_parameters
from threefold.job import check_trainable
from threefold.job.spec import Job, ModelSpec
from threefold.layout import (
    DECODER_STYLES,
    Layout,
    Style,
    decoder_shards,
    rule_for,
    split_layers,
)
from threefold.report.communication import TextTable, symbolic_table, traffic_rows, traffic_table
from threefold.report.placement import NodeRow, Placement, describe_placement, node_rows, placement_warnings
from threefold.report.words import count_of, format_bytes, format_count, format_integers, sentence
from threefold.schedule import Schedule, bubble_share, build_schedule, peak_live_microbatches

ASSUMED_DEVICES_PER_NODE = 8
"""Devices of a node where the job states no cluster: what most GPU servers have."""

MOST_NODE_ROWS = 16
MOST_GRID_ACTIONS = 1000
MIN_WIDTH = 120
"""Columns of the text when it doesn't go to a terminal."""


@dataclass(frozen=True)
class Grid:
    """Lines that must not be wrapped."""

    text: str


@dataclass(frozen=True)
class Section:
    """A title, and the paragraphs, tables and grids under it."""

    title: str
    body: tuple[str | TextTable | Grid, ...]


def print_explanation(job: Job, console: Console | None = None) -> None:
    """Print the explanation of ``job``; plain text where stdout is no terminal."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=MIN_WIDTH, color_system=None)
    for section in explain_sections(job, console.width):
        console.print(Text(section.title, style="bold"))
        console.print(Text("-" * len(section.title), style="dim"))
        for part in section.body:
            console.print(_renderable(part), soft_wrap=isinstance(part, Grid))
        console.print()


def _renderable(part: str | TextTable | Grid) -> Text | Table:
    if isinstance(part, str):
        return Text(part)
    if isinstance(part, Grid):
        return Text(part.text, no_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in part.header:
        table.add_column(name, overflow="fold")
    for row in part.rows:
        table.add_row(*map(Text, row))
    return table


def explain_sections(job: Job, width: int = MIN_WIDTH) -> list[Section]:
    """The explanation as data. ``width`` (columns) decides whether the schedule's grid is shown."""
    facts = _facts(job)
    sections = [
        _job_section(facts),
        _map_section(facts),
        _groups_section(facts),
        _stages_section(facts),
        _traffic_section(facts),
        _schedule_section(facts, width),
        _shards_section(facts),
        _reading_section(facts),
        _warnings_section(facts),
    ]
    return [section for section in sections if section.body]


@dataclass(frozen=True)
class _Facts:
    """What the sections share: the job, where its ranks are, and its schedule."""

    job: Job
    placement: Placement
    schedule: Schedule
    sequence_length: int | None

    @property
    def layout(self) -> Layout:
        return self.placement.layout

    @property
    def stages(self) -> tuple[range, ...] | None:
        """The layers of each stage; None when the job states neither a model nor a list of layers."""
        partition = self.job.parallelism.pp.partition
        if self.job.model is not None:
            return split_layers(self.job.model.num_hidden_layers, self.job.pp, partition)
        return None if isinstance(partition, str) else split_layers(sum(partition), self.job.pp, partition)


def _facts(job: Job) -> _Facts:
    layout = Layout(dp=job.dp, pp=job.pp, tp=job.tp, order=job.parallelism.axes)
    devices = job.cluster.devices_per_node if job.cluster else min(ASSUMED_DEVICES_PER_NODE, layout.world_size)
    schedule = build_schedule(job.parallelism.pp.schedule, job.pp, job.num_microbatches)
    sequence_length = None
    if job.model is not None:
        sequence_length = job.data.sequence_length if job.data else job.model.max_position_embeddings
    return _Facts(job, Placement(layout, devices), schedule, sequence_length)


# The job


def _job_section(facts: _Facts) -> Section:
    job = facts.job
    devices = f"{job.world_size:,} device{'s' if job.world_size > 1 else ''}"
    axes = (
        f"{count_of(job.dp, 'replica')} of the model (dp) × {count_of(job.pp, 'pipeline stage')} (pp) × "
        f"{count_of(job.tp, 'tensor slice')} of each layer (tp)"
    )
    ranks = f"dp × pp × tp = {job.dp} × {job.pp} × {job.tp} = {job.world_size} ranks, one a device."
    body = [f"{devices}: {axes}. {ranks}", _batch_words(facts), _model_words(facts), *_settings_words(job)]
    return Section("The job", tuple(body))


def _batch_words(facts: _Facts) -> str:
    job = facts.job
    equation = (
        "One optimizer step: train_batch_size = micro batch × accumulation × dp = "
        f"{job.micro_batch} × {job.num_microbatches} × {job.dp} = {job.train_batch_size:,} sequences"
    )
    if facts.sequence_length is not None:
        tokens = job.train_batch_size * facts.sequence_length
        equation += f" of {facts.sequence_length:,} tokens, {tokens:,} tokens in all"
        if job.data is None:
            equation += " (the job states no sequence length; the model's longest is assumed)"
    each = f"{job.num_microbatches} microbatches" if job.num_microbatches > 1 else "one microbatch"
    return f"{equation}. Each replica sends its share through the pipeline as {each} of {job.micro_batch}."


def _model_words(facts: _Facts) -> str:
    model = facts.job.model
    if model is None:
        return (
            "The job states no model: map, groups and frequencies follow from the layout alone, and sizes stay symbols: "
            "S tokens a sequence, D hidden size, L layers of a stage, P parameters of the model."
        )
    held = [local_parameters(facts.job, stage) for stage in range(facts.job.pp)]
    most, least = format_count(max(held)), format_count(min(held))
    amount = most if most == least else f"{least} to {most}"
    return (
        f"The model: {model.model_type} style, {model.num_hidden_layers} layers, hidden size {model.hidden_size:,}, "
        f"{model.num_attention_heads} heads, vocabulary {model.vocab_size:,}: {format_count(model.num_parameters)} "
        f"parameters, of which a device holds {amount}."
    )


def _settings_words(job: Job) -> Iterator[str]:
    zero = job.zero_optimization
    meaning = {
        0: "every replica keeps whole gradients and optimizer states (ZeRO stage 0)",
        1: "ZeRO stage 1 splits the optimizer states over the replicas",
        2: "ZeRO stage 2 splits gradients and optimizer states over the replicas",
        3: "ZeRO stage 3 splits parameters, gradients and optimizer states over the replicas: each parameter is gathered "
        "before forward and again before backward, and gradients are reduce-scattered to the replica that owns them",
    }
    offload = "; optimizer states live in host memory" if _offloaded(job) else ""
    yield f"Numbers are {job.precision}; {meaning[zero.stage]}{offload}."
    missing = check_trainable(job)
    if missing:
        lines = "\n".join(f"  {problem.key}: {problem.message}" for problem in missing)
        yield f"This explains the plan. Training it needs more than the job states or this version runs yet:\n{lines}"


def _offloaded(job: Job) -> bool:
    offload = job.zero_optimization.offload_optimizer
    return offload is not None and offload.device != "none"


# Where the ranks are


def _map_section(facts: _Facts) -> Section:
    placement, cluster = facts.placement, facts.job.cluster
    order = facts.layout.order
    intro = f"Ranks count up along {order[0]} first, then {order[1]}, then {order[2]} (parallelism.order)."
    if cluster is None:
        intro += f" The job states no cluster: {placement.devices_per_node} devices a node are assumed."
    else:
        intro += f" A node has {count_of(cluster.devices_per_node, 'device')} ({cluster.device})."
    rows = node_rows(placement)
    return Section("Where the ranks are", (intro, *describe_placement(placement), _node_table(rows), *_left_out(rows)))


def _node_table(rows: Sequence[NodeRow]) -> TextTable:
    shown = rows if len(rows) <= MOST_NODE_ROWS else [*rows[: MOST_NODE_ROWS - 2], rows[-1]]
    cells = tuple(
        (
            str(row.node),
            format_integers(row.ranks),
            format_integers(row.tp_groups),
            format_integers(row.stages),
            format_integers(row.pipelines),
        )
        for row in shown
    )
    return TextTable(("node", "ranks", "tp group", "stage", "pipeline (replica)"), cells)


def _left_out(rows: Sequence[NodeRow]) -> list[str]:
    num_left_out = len(rows) - MOST_NODE_ROWS + 1
    return [f"({num_left_out} nodes before the last are left out.)"] if len(rows) > MOST_NODE_ROWS else []


def _groups_section(facts: _Facts) -> Section:
    purposes = {
        "tp": "share each layer",
        "pp": "hand activations on",
        "dp": "sum gradients",
    }
    rows = tuple(
        (axis, purpose, *_group_cells(facts.layout, axis), facts.placement.links(axis))
        for axis, purpose in purposes.items()
    )
    header = ("axis", "its ranks", "groups", "ranks each", "step", "for example", "links")
    return Section("Groups", (TextTable(header, rows),))


def _group_cells(layout: Layout, axis: str) -> tuple[str, str, str, str]:
    groups = layout.groups(axis)
    shown = "  ".join(f"({format_integers(group)})" for group in groups[:2])
    more = "  ..." if len(groups) > 2 else ""
    step = str(layout.stride(axis)) if layout.size(axis) > 1 else "-"
    return str(len(groups)), str(len(groups[0])), step, shown + more


# Stages and schedule


def _stages_section(facts: _Facts) -> Section:
    rows = []
    for stage in range(facts.job.pp):
        cells = [str(stage), _layer_words(facts, stage), _ends(facts, stage)]
        if facts.job.model is not None:
            cells.append(format_count(local_parameters(facts.job, stage)))
        rows.append((*cells, str(peak_live_microbatches(facts.schedule, stage))))
    header = [
        "stage",
        "layers",
        "also holds",
        *(["parameters a device"] if facts.job.model else []),
        "live microbatches",
    ]
    note = (
        "Live microbatches are those whose activations a stage must keep at once; they, not the parameters, decide which "
        "stage needs most memory."
    )
    return Section("Stages", (TextTable(tuple(header), tuple(rows)), note))


def _layer_words(facts: _Facts, stage: int) -> str:
    if facts.stages is None:
        return f"L ({facts.job.parallelism.pp.partition})"
    layers = facts.stages[stage]
    return f"{format_integers(layers)} ({len(layers)})" if layers else "none"


def _ends(facts: _Facts, stage: int) -> str:
    first, last = stage == 0, stage == facts.job.pp - 1
    tied = facts.job.model is not None and facts.job.model.tie_word_embeddings and facts.job.pp > 1
    head = "head and loss (a copy of the embedding)" if tied else "head and loss"
    return ", ".join([*(["embedding"] if first else []), *([head] if last else [])])


def _schedule_section(facts: _Facts, width: int) -> Section:
    job, name = facts.job, facts.job.parallelism.pp.schedule
    p, m = job.pp, job.num_microbatches
    if p == 1:
        return Section("Schedule", ("pp is 1: one stage runs forward and backward of each microbatch; nothing idles.",))
    if name == "naive":
        bubble = f"each rank idles 1 - 1/p = {1 - 1 / p:.1%} of the step: only one works at any moment"
    else:
        bubble = f"each rank idles (p - 1) / (m + p - 1) = {p - 1}/{m + p - 1} = {bubble_share(p, m):.1%} of the step"
    intro = f"{name} with p = {count_of(p, 'stage')} and m = {count_of(m, 'microbatch', 'microbatches')}: {bubble}."
    return Section("Schedule", (intro, *_grid_parts(facts.schedule, width)))


def _grid_parts(schedule: Schedule, width: int) -> list[str | Grid]:
    if sum(map(len, schedule.rows)) > MOST_GRID_ACTIONS:
        return []
    grid = schedule.grid()
    if max(map(len, grid.splitlines())) > width:
        return [f"(The grid of the step is wider than the {width} columns here.)"]
    legend = (
        "F0 is forward of microbatch 0, B0 its backward (twice as long), '.' an idle moment. Rank here is the stage."
    )
    return [Grid(grid), legend]


# What is sent


def _traffic_section(facts: _Facts) -> Section:
    if facts.job.world_size == 1:
        return Section("What is sent", ("One rank sends nothing.",))
    if facts.sequence_length is None:
        return Section("What is sent", (symbolic_table(facts.job, facts.placement),))
    table = traffic_table(facts.job, facts.placement, facts.sequence_length)
    note = (
        "Counts and bytes are those of one rank in one optimizer step. Bytes are the whole tensor that enters a "
        "collective; a ring all_reduce over g ranks puts 2(g - 1)/g times that on the wire."
    )
    return Section("What is sent", (table, note))


def _reading_section(facts: _Facts) -> Section:
    """The order of the article: tp often and inside the node, pp between stages, dp rarest and largest."""
    parts = [
        words(facts)
        for axis, words in (("tp", _tensor_words), ("pp", _pipeline_words), ("dp", _data_words))
        if facts.layout.size(axis) > 1
    ]
    return Section("How to read this", tuple(parts))


def _tensor_words(facts: _Facts) -> str:
    M = facts.job.num_microbatches
    times = "eight times" if facts.job.parallelism.tp.sequence_parallel else "four times"
    return (
        f"tp talks most often: {times} in every layer, for each of the {M} microbatches{_amount(facts, 'tp')}. A layer "
        f"can't go on before its sum is there, so tp belongs on the fastest links: {_where(facts, 'tp')}."
    )


def _pipeline_words(facts: _Facts) -> str:
    M = facts.job.num_microbatches
    return (
        f"pp talks less: only at the borders between stages, once forward and once backward for each of the {M} "
        f"microbatches{_amount(facts, 'pp')}. A send goes from one rank to one other and can hide behind the next "
        f"microbatch, so pp stands slower links: {_where(facts, 'pp')}."
    )


def _data_words(facts: _Facts) -> str:
    zero = facts.job.zero_optimization.stage
    if zero >= 2:
        often = f"ZeRO stage {zero} makes dp talk in each of the {facts.job.num_microbatches} microbatches"
    else:
        often = "dp talks most rarely: once a step, while the last backward still runs"
    return (
        f"{often}{_amount(facts, 'dp')}. It moves the most at once, a gradient for every parameter of the stage, and all "
        f"replicas wait for it, so it decides how far more replicas help: {_where(facts, 'dp')}."
    )


def _amount(facts: _Facts, axis: str) -> str:
    """`` (12.6 MB each, 4.83 GB a step)`` for the busiest stage; nothing in a job without sizes."""
    if facts.sequence_length is None:
        return ""
    rows = [row for row in traffic_rows(facts.job, facts.sequence_length) if row.axis == axis]
    per_stage = {
        stage: sum(row.bytes_per_step for row in rows if stage in row.stages) for row in rows for stage in row.stages
    }
    largest = max((row.largest_bytes for row in rows), default=0)
    return f" (up to {format_bytes(largest)} a message, {format_bytes(max(per_stage.values(), default=0))} a step)"


def _where(facts: _Facts, axis: str) -> str:
    links = facts.placement.links(axis)
    return f"here its groups lie {links}" if not links.startswith("some") else f"here its groups lie {links} nodes"


# Shards


def _shards_section(facts: _Facts) -> Section:
    job = facts.job
    if job.tp == 1:
        return Section("Shards", ("tp is 1: every parameter is whole on the ranks of its stage.",))
    words = [
        "Each of the tp ranks holds an equal part of every matrix; norms and what is added after a sum stay whole."
    ]
    if job.parallelism.tp.sequence_parallel:
        words.append(
            "Sequence parallel: between the matrices each tp rank has 1/tp of the tokens, so the gradients of whole "
            "parameters are summed over tp, too."
        )
    table = _style_table() if job.model is None else _shard_table(job.model, job.tp)
    return Section("Shards", (*words, table))


_STYLE_WORDS = {
    Style.COLUMN: "outputs split (dim 0), bias too",
    Style.ROW: "inputs split (dim 1), bias whole",
    Style.VOCAB: "tokens split (dim 0), padded to equal parts",
    Style.REPLICATED: "whole on every rank",
}


def _style_table() -> TextTable:
    rows = tuple((pattern, rule.style.value, _STYLE_WORDS[rule.style]) for pattern, rule in DECODER_STYLES.items())
    return TextTable(("module", "style", "how"), rows)


def _shard_table(model: ModelSpec, tp_size: int) -> TextTable:
    shapes = {name: shape for name, shape in model.parameter_shapes().items() if _is_example(name)}
    shards = decoder_shards(
        shapes, model.num_attention_heads, model.num_key_value_heads, model.head_dim, tp_size, tp_coord=0
    )
    rows = []
    for name, shape in shapes.items():
        part = shards[name]
        rule = rule_for(name.rpartition(".")[0])
        note = ""
        if len(part.slices) > 1:
            note = f"{count_of(len(part.slices), 'section')}, each split by itself"
        elif rule.style is Style.VOCAB and part.local_size * tp_size != shape[0]:
            note = f"{shape[0]:,} rows padded to {part.local_size * tp_size:,}"
        local = part.local_shape(shape)
        rows.append((name.replace("layers.0.", "layers.*."), rule.style.value, _shape(shape), _shape(local), note))
    return TextTable(("parameter", "style", "whole", "on a rank", "note"), tuple(rows))


def _is_example(name: str) -> bool:
    return not name.startswith("layers.") or name.startswith("layers.0.")


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(f"{size:,}" for size in shape)


# Warnings


def _warnings_section(facts: _Facts) -> Section:
    checks: tuple[Callable[[_Facts], list[str]], ...] = (
        lambda facts: placement_warnings(facts.placement),
        _few_microbatches,
        _many_live,
    )
    found = [warning for check in checks for warning in check(facts)]
    return Section("Worth a second look", tuple(sentence(warning) for warning in found))


def _few_microbatches(facts: _Facts) -> list[str]:
    p, m, name = facts.job.pp, facts.job.num_microbatches, facts.job.parallelism.pp.schedule
    if p == 1 or name == "naive" or m >= 4 * p:
        return []
    return [
        f"{count_of(m, 'microbatch', 'microbatches')} on {count_of(p, 'stage')} leave {bubble_share(p, m):.0%} of the step "
        f"idle. Fix: more gradient_accumulation_steps (a smaller micro batch at the same train_batch_size); {4 * p} or "
        f"more bring it under {bubble_share(p, 4 * p - 1):.0%}."
    ]


def _many_live(facts: _Facts) -> list[str]:
    p, m, name = facts.job.pp, facts.job.num_microbatches, facts.job.parallelism.pp.schedule
    if name != "gpipe" or p == 1 or m <= p:
        return []
    return [
        f"gpipe keeps the activations of all {m} microbatches on every stage; 1f1b takes as long and keeps at most {p}. "
        "Fix: parallelism.pp.schedule '1f1b'."
    ]
