"""The job in a paragraph, and where its ranks are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from threefold.job import check_trainable
from threefold.job.spec import Job
from threefold.layout import Layout
from threefold.report.facts import Facts, Section, TextTable
from threefold.report.placement import NodeRow, describe_placement, node_rows
from threefold.report.words import count_of, format_count, format_integers

MOST_NODE_ROWS = 16
"""Of more nodes than this, only the first ones and the last are listed."""

ZERO_WORDS = (
    "every replica keeps whole gradients and optimizer states (ZeRO stage 0)",
    "ZeRO stage 1 splits the optimizer states over the replicas",
    "ZeRO stage 2 splits gradients and optimizer states over the replicas",
    "ZeRO stage 3 splits parameters, gradients and optimizer states over the replicas: each parameter is gathered "
    "before forward and again before backward, and gradients are reduce-scattered to the replica that owns them",
)
"""What each ZeRO stage means (Rajbhandari et al. 2020)."""


def job_section(facts: Facts) -> Section:
    """What is trained, on how many devices, with which batch."""
    job = facts.job
    devices = f"{job.world_size:,} device{'s' if job.world_size > 1 else ''}"
    axes = (
        f"{count_of(job.dp, 'replica')} of the model (dp) × {count_of(job.pp, 'pipeline stage')} (pp) × "
        f"{count_of(job.tp, 'tensor slice')} of each layer (tp)"
    )
    ranks = f"dp × pp × tp = {job.dp} × {job.pp} × {job.tp} = {job.world_size:,} ranks, one a device."
    body = [f"{devices}: {axes}. {ranks}", _batch_words(facts), _model_words(facts), *_settings_words(job)]
    return Section("The job", tuple(body))


def _batch_words(facts: Facts) -> str:
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


def _model_words(facts: Facts) -> str:
    model = facts.job.model
    if model is None:
        return (
            "The job states no model: map, groups and frequencies follow from the layout alone, and sizes stay "
            "symbols: S tokens a sequence, D hidden size, L layers of a stage, P parameters of the model."
        )
    most, least = format_count(max(facts.parameters)), format_count(min(facts.parameters))
    amount = most if most == least else f"{least} to {most}"
    return (
        f"The model: {model.model_type} style, {model.num_hidden_layers} layers, hidden size {model.hidden_size:,}, "
        f"{model.num_attention_heads} heads, vocabulary {model.vocab_size:,}: {format_count(model.num_parameters)} "
        f"parameters, of which a device holds {amount}."
    )


def _settings_words(job: Job) -> Iterator[str]:
    zero = job.zero_optimization
    offloaded = zero.offload_optimizer is not None and zero.offload_optimizer.device != "none"
    offload = "; optimizer states live in host memory" if offloaded else ""
    yield f"Numbers are {job.precision}; {ZERO_WORDS[zero.stage]}{offload}."
    missing = check_trainable(job)
    if missing:
        lines = "\n".join(f"  {problem.key}: {problem.message}" for problem in missing)
        yield f"This explains the plan. Training it needs more than the job states or this version runs:\n{lines}"


def map_section(facts: Facts) -> Section:
    """Nodes: their ranks, tp groups, stages and pipelines."""
    placement, cluster = facts.placement, facts.job.cluster
    order = facts.layout.order
    intro = f"Ranks count up along {order[0]} first, then {order[1]}, then {order[2]} (parallelism.order)."
    if cluster is None:
        intro += f" The job states no cluster: {count_of(placement.devices_per_node, 'device')} a node are assumed."
    else:
        intro += f" A node has {count_of(cluster.devices_per_node, 'device')} ({cluster.device})."
    num_nodes = placement.num_nodes
    num_hidden = max(num_nodes - MOST_NODE_ROWS, 0)
    shown = range(num_nodes) if not num_hidden else [*range(MOST_NODE_ROWS - 1), num_nodes - 1]
    note = [f"({count_of(num_hidden, 'node')} before the last left out.)"] if num_hidden else []
    table = _node_table(node_rows(placement, shown))
    return Section("Where the ranks are", (intro, *describe_placement(placement), table, *note))


def _node_table(rows: Sequence[NodeRow]) -> TextTable:
    cells = tuple(
        (
            str(row.node),
            format_integers(row.ranks),
            format_integers(row.tp_groups),
            format_integers(row.stages),
            format_integers(row.pipelines),
        )
        for row in rows
    )
    return TextTable(("node", "ranks", "tp group", "stage", "pipeline (replica)"), cells)


def groups_section(facts: Facts) -> Section:
    """The groups of each axis, and the links that they cross."""
    purposes = {"tp": "share each layer", "pp": "hand activations on", "dp": "sum gradients"}
    rows = tuple(
        (axis, purpose, *_group_cells(facts.layout, axis), facts.placement.links(axis))
        for axis, purpose in purposes.items()
    )
    header = ("axis", "its ranks", "groups", "ranks each", "apart", "for example", "links")
    return Section("Groups", (TextTable(header, rows),))


def _group_cells(layout: Layout, axis: str) -> tuple[str, str, str, str]:
    groups = layout.group_table(axis)
    shown = "  ".join(f"({format_integers(group)})" for group in groups[:2].tolist())
    more = "  ..." if len(groups) > 2 else ""
    apart = str(layout.stride(axis)) if layout.size(axis) > 1 else "-"
    return str(len(groups)), str(layout.size(axis)), apart, shown + more
