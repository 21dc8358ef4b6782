"""Threefold, by its own trainer."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.common import Place, Step, source_of
from benchmarks.peers.work import job_of
from threefold.parallel.engine import build_engine, build_job_mesh
from threefold.train.trainer import Sources, Trainer

SIZES_3D = {"dp": 2, "tp": 2, "pp": 2}


def train(place: Place, axis: str, **options: Any) -> Step:
    """``axis`` takes all ranks; ``3d`` splits 8 of them."""
    sizes = SIZES_3D if axis == "3d" else {axis: place.ranks}
    job = job_of(place.work, **sizes, **options)
    engine = build_engine(job, build_job_mesh(job, place.rank))
    trainer = Trainer(job, engine, Sources(source_of(place.work)), metrics=None)
    return lambda: trainer._train_step(0).loss
