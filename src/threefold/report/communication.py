"""What each axis sends, in tables and words: in bytes where the job states its model, else in symbols."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from threefold.cost.traffic import Transfer, estimate_traffic
from threefold.job.spec import Job
from threefold.report.facts import Facts, Section, TextTable
from threefold.report.placement import Placement
from threefold.report.words import format_bytes, format_integers
from threefold.schedule import Schedule

GROUP_AXES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "dp+tp": ("dp", "tp"),
    "dp+pp": ("dp", "pp"),
    "world": ("dp", "pp", "tp"),
}
"""Name of a group in ``Transfer.axis`` -> the axes that it runs over."""

MOST_STAGES = 8
"""Of more stages than this, only the first, the second and the last are listed."""


@dataclass(frozen=True)
class TrafficRow:
    """Transfers of one kind, and the stages whose ranks send them."""

    axis: str
    operation: str
    what: str
    when: str
    stages: tuple[int, ...]
    times: int
    largest_bytes: int
    bytes_per_step: int


def traffic_rows(job: Job, sequence_length: int, schedule: Schedule | None = None) -> list[TrafficRow]:
    """The transfers of all stages; stages that send the same share a row, buckets of one kind too.

    Of ranks with several chunks a row is a rank; ``schedule`` tells which stages it holds.
    """
    stages: dict[tuple[str | int, ...], list[int]] = {}
    rows: dict[tuple[str | int, ...], TrafficRow] = {}
    for stage in listed_stages(job.pp):
        held = None if schedule is None else schedule.stages_of(stage)
        for row in _merge_buckets(estimate_traffic(job, stage, sequence_length, stages=held)):
            key = (row.axis, row.operation, row.what, row.when, row.times, row.largest_bytes, row.bytes_per_step)
            stages.setdefault(key, []).append(stage)
            rows.setdefault(key, row)
    merged = [replace(row, stages=tuple(stages[key])) for key, row in rows.items()]
    return sorted(merged, key=lambda row: list(GROUP_AXES).index(row.axis))


def listed_stages(num_stages: int) -> list[int]:
    """The stages that tables list."""
    return list(range(num_stages)) if num_stages <= MOST_STAGES else [0, 1, num_stages - 1]


def _merge_buckets(transfers: tuple[Transfer, ...]) -> Iterator[TrafficRow]:
    kinds: dict[tuple[str, str, str, str], list[Transfer]] = {}
    for transfer in transfers:
        kinds.setdefault((transfer.axis, transfer.operation, transfer.what, transfer.when), []).append(transfer)
    for kind, members in kinds.items():
        times = sum(member.count_per_step for member in members)
        largest = max(member.payload_bytes for member in members)
        yield TrafficRow(*kind, (), times, largest, sum(member.bytes_per_step for member in members))


def traffic_table(job: Job, placement: Placement, sequence_length: int, schedule: Schedule | None = None) -> TextTable:
    """Every transfer of a step with its bytes."""
    who = "pp rank" if job.parallelism.pp.chunks > 1 else "stage"
    header = ("axis", "operation", "what", "when", who, "times", "bytes each", "bytes a step", "nodes")
    nodes = {axis: placement.links_word(axes) for axis, axes in GROUP_AXES.items()}
    rows = tuple(
        (
            row.axis,
            row.operation,
            row.what,
            row.when,
            format_integers(row.stages),
            f"{row.times:,}",
            _each(row),
            format_bytes(row.bytes_per_step),
            nodes[row.axis],
        )
        for row in traffic_rows(job, sequence_length, schedule)
    )
    return TextTable(header, rows)


def _each(row: TrafficRow) -> str:
    prefix = "" if row.times * row.largest_bytes == row.bytes_per_step else "up to "
    return prefix + format_bytes(row.largest_bytes)


def symbolic_table(job: Job, placement: Placement) -> TextTable:
    """The same for a job without a model: counts with L layers a stage, sizes with S, D and P."""
    header = ("axis", "operation", "what", "when", "times a step", "elements each", "nodes")
    rows = [
        (axis, *words, placement.links_word(GROUP_AXES[axis]))
        for axis, lines in (("tp", _tensor_lines(job)), ("pp", _pipeline_lines(job)), ("dp", _data_lines(job)))
        for words in lines
        if getattr(job, axis) > 1
    ]
    return TextTable(header, tuple(rows))


def _tensor_lines(job: Job) -> list[tuple[str, ...]]:
    activations, M = f"{job.micro_batch}·S·D", job.num_microbatches
    if job.parallelism.tp.sequence_parallel:
        return [
            ("all_gather", "layer inputs", "forward, 2 a layer and microbatch", f"{2 * M}·L", activations),
            ("reduce_scatter", "layer outputs", "forward, 2 a layer and microbatch", f"{2 * M}·L", activations),
            ("all_gather", "gradients and inputs", "backward, 4 a layer and microbatch", f"{4 * M}·L", activations),
            ("reduce_scatter", "input gradients", "backward, 2 a layer and microbatch", f"{2 * M}·L", activations),
        ]
    return [
        ("all_reduce", "layer outputs", "forward, 2 a layer and microbatch", f"{2 * M}·L", activations),
        ("all_reduce", "input gradients", "backward, 2 a layer and microbatch", f"{2 * M}·L", activations),
    ]


def _pipeline_lines(job: Job) -> list[tuple[str, ...]]:
    part = f"/{job.tp}" if job.parallelism.tp.sequence_parallel and job.tp > 1 else ""
    elements, times = f"{job.micro_batch}·S·D{part}", f"{job.num_microbatches}"
    return [
        ("send", "activations to the next stage", "forward, 1 a microbatch", times, elements),
        ("send", "their gradient back", "backward, 1 a microbatch", times, elements),
    ]


def _data_lines(job: Job) -> list[tuple[str, ...]]:
    zero, M = job.zero_optimization.stage, job.num_microbatches
    parameters = f"P/{job.tp * job.pp}" if job.tp * job.pp > 1 else "P"
    if zero == 0:
        return [("all_reduce", "gradients", "backward of the last microbatch", "1", parameters)]
    if zero == 3:
        gather = ("all_gather", "parameters", "before forward, again before backward", f"{2 * M}", parameters)
    else:
        gather = ("all_gather", "updated parameters", "after the optimizer step", "1", parameters)
    times = f"{M}" if zero > 1 else "1"
    when = "backward of each microbatch" if zero > 1 else "backward of the last microbatch"
    return [("reduce_scatter", "gradients", when, times, parameters), gather]


def traffic_section(facts: Facts) -> Section:
    """The table of everything that is sent in one step."""
    if facts.job.world_size == 1:
        return Section("What is sent", ("One rank sends nothing.",))
    if facts.sequence_length is None:
        return Section("What is sent", (symbolic_table(facts.job, facts.placement),))
    table = traffic_table(facts.job, facts.placement, facts.sequence_length, facts.schedule)
    note = (
        "Times and bytes are those of one rank in one optimizer step; nodes says whether the group lies inside a node "
        "or across several. Bytes are the whole tensor that enters a collective; a ring all_reduce over g ranks puts "
        "2(g - 1)/g times that on the wire."
    )
    last = facts.job.pp - 1
    if last >= MOST_STAGES:
        note += f" Stages 2 to {last - 1} send what stage 1 sends, each in proportion to its layers."
    return Section("What is sent", (table, note))


def reading_section(facts: Facts) -> Section:
    """The same in words: tp often and fast, pp between stages, dp rarest and largest."""
    parts = [
        words(facts)
        for axis, words in (("tp", _tensor_words), ("pp", _pipeline_words), ("dp", _data_words))
        if facts.layout.size(axis) > 1
    ]
    return Section("How to read this", tuple(parts))


def _tensor_words(facts: Facts) -> str:
    M = facts.job.num_microbatches
    times = "ten" if facts.job.parallelism.tp.sequence_parallel else "four"
    return (
        f"tp talks most often: {times} times in every layer, for each of the {M} microbatches{_amount(facts, 'tp')}. A "
        f"layer can't go on before its sum is there, so tp belongs on the fastest links. {_where(facts, 'tp')}"
    )


def _pipeline_words(facts: Facts) -> str:
    M = facts.job.num_microbatches
    return (
        f"pp talks less: only at the borders between stages, once forward and once backward for each of the {M} "
        f"microbatches{_amount(facts, 'pp')}. A send goes from one rank to one other and can hide behind the next "
        f"microbatch, so pp can do with slower links. {_where(facts, 'pp')}"
    )


def _data_words(facts: Facts) -> str:
    zero = facts.job.zero_optimization.stage
    if zero >= 2:
        often = f"dp would talk most rarely, but ZeRO stage {zero} talks in each of the {facts.job.num_microbatches} "
        often += "microbatches"
    else:
        often = "dp talks most rarely: its gradients once a step"
    return (
        f"{often}{_amount(facts, 'dp')}. It moves the most at a time, a gradient for every parameter of the stage, and "
        f"all replicas wait for it, so it decides how far more replicas help. {_where(facts, 'dp')}"
    )


def _amount(facts: Facts, axis: str) -> str:
    """`` (up to 12.6 MB a message, 4.83 GB a step)`` for the busiest stage; nothing for a job without sizes."""
    if facts.sequence_length is None:
        return ""
    rows = [row for row in traffic_rows(facts.job, facts.sequence_length, facts.schedule) if row.axis == axis]
    per_stage = Counter[int]()
    for row in rows:
        per_stage.update(dict.fromkeys(row.stages, row.bytes_per_step))
    largest = max((row.largest_bytes for row in rows), default=0)
    busiest = max(per_stage.values(), default=0)
    return f" (up to {format_bytes(largest)} a message, {format_bytes(busiest)} a step)"


def _where(facts: Facts, axis: str) -> str:
    groups = "group lies" if len(facts.layout.group_table(axis)) == 1 else "groups lie"
    return f"Here its {groups} {facts.placement.links(axis)}."
