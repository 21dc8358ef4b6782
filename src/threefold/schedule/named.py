"""The training schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from threefold.errors import JobError, Problem
from threefold.schedule.generators import gpipe, naive, one_f_one_b
from threefold.schedule.interleaved import interleaved_1f1b
from threefold.schedule.schedule import Schedule
from threefold.schedule.zero_bubble import zb_h1, zb_v


@dataclass(frozen=True)
class Named:
    """A generator of (ranks, microbatches, chunks), and the chunks that it takes; None stands for any number."""

    build: Callable[[int, int, int], Schedule]
    chunks: int | None = 1


NAMED: Mapping[str, Named] = MappingProxyType(
    {
        "naive": Named(lambda p, m, v: naive(p, m)),
        "gpipe": Named(lambda p, m, v: gpipe(p, m)),
        "1f1b": Named(lambda p, m, v: one_f_one_b(p, m)),
        "interleaved_1f1b": Named(interleaved_1f1b, chunks=None),
        "zb_h1": Named(lambda p, m, v: zb_h1(p, m)),
        "zb_v": Named(lambda p, m, v: zb_v(p, m), chunks=2),
    }
)
"""Every schedule that a formula makes; ``searched`` is not among them."""


def build_schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None) -> Schedule:
    """The training schedule called ``name``; ``num_chunks`` None takes what the schedule has (interleaved: 2).

    Raises JobError naming ``parallelism.pp.schedule`` for an unknown one, and ``parallelism.pp.chunks`` for a number of
    chunks that it doesn't have.
    """
    if name not in NAMED:
        fix = f"use one of {', '.join(NAMED)}"
        raise JobError([Problem("parallelism.pp.schedule", f"{name!r} is no schedule that this version knows", fix)])
    named = NAMED[name]
    if num_chunks is None:
        num_chunks = named.chunks or 2
    if named.chunks not in (None, num_chunks):
        message = f"{num_chunks} chunks are not what {name} has: {named.chunks} on each rank"
        raise JobError([Problem("parallelism.pp.chunks", message, f"set it to {named.chunks}")])
    return named.build(num_ranks, num_microbatches, num_chunks)
