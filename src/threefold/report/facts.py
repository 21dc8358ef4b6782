"""What the sections of an explanation are made of, and the facts that they share."""

from __future__ import annotations

from dataclasses import dataclass

from threefold.cost.traffic import local_parameters
from threefold.job.spec import Job
from threefold.layout import Layout, split_halves
from threefold.report.placement import Placement
from threefold.schedule import Schedule, job_schedule

ASSUMED_DEVICES_PER_NODE = 8
"""Devices of a node where the job states no cluster: what most GPU servers have."""


@dataclass(frozen=True)
class TextTable:
    """A table of words: a header and rows, all of the same length."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Grid:
    """Lines that must not be wrapped."""

    text: str


@dataclass(frozen=True)
class Section:
    """A title, and the paragraphs, tables and grids under it."""

    title: str
    body: tuple[str | TextTable | Grid, ...]


@dataclass(frozen=True)
class Facts:
    """A job, where its ranks are, its schedule, and the parameters that a device of each pipeline rank holds.

    ``sequence_length`` is None and ``parameters`` are empty for a job without a model: there are no bytes to state.
    """

    job: Job
    placement: Placement
    schedule: Schedule
    sequence_length: int | None
    parameters: tuple[int, ...]

    @property
    def layout(self) -> Layout:
        """The rank map."""
        return self.placement.layout

    @property
    def stages(self) -> tuple[range, ...] | None:
        """The half layers of each stage; None when the job states neither a model nor a list of layers."""
        pipeline = self.job.parallelism.pp
        if self.job.model is not None:
            return split_halves(self.job.model.num_hidden_layers, pipeline.num_stages, pipeline.partition)
        if isinstance(pipeline.partition, str):
            return None
        return split_halves(int(sum(pipeline.partition)), pipeline.num_stages, pipeline.partition)


def collect_facts(job: Job) -> Facts:
    """The facts of ``job``, with the assumptions that stand in for a cluster and a sequence length not stated."""
    layout = Layout(dp=job.dp, pp=job.pp, tp=job.tp, order=job.parallelism.axes)
    devices = job.cluster.devices_per_node if job.cluster else min(ASSUMED_DEVICES_PER_NODE, layout.world_size)
    schedule = job_schedule(job)
    placement = Placement(layout, devices)
    if job.model is None:
        return Facts(job, placement, schedule, sequence_length=None, parameters=())
    sequence_length = job.data.sequence_length if job.data else job.model.max_position_embeddings
    parameters = tuple(local_parameters(job, rank, schedule.stages_of(rank)) for rank in range(job.pp))
    return Facts(job, placement, schedule, sequence_length, parameters)
