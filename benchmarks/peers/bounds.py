"""The bounds: each rank does its share of the work and nobody talks."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.peers.common import Microbatches, Place, Step, accumulated, adamw, mean_loss, plain_model
from benchmarks.peers.work import Work, balanced_cut


def replica(place: Place) -> Step:
    """The whole model on this replica's microbatches; with one rank it is the single process."""
    return _step(place.work, place.rank, place.ranks)


def shard(place: Place) -> Step:
    """1/ranks of every matrix product on all microbatches."""
    return _step(place.work.split(tp=place.ranks))


def part(place: Place) -> Step:
    """1/ranks of the layers and of the head on all microbatches: a balance that no cut into whole layers has."""
    return _step(place.work.split(pp=place.ranks))


def stage(place: Place) -> Step:
    """This rank's layers of the cut that all pipelines have, on all microbatches, without a bubble."""
    work, rank = place.work, place.rank
    cut, model = balanced_cut(work, range(place.ranks)), plain_model(work)
    layers = list(model.layers)[sum(cut[:rank]) : sum(cut[: rank + 1])]
    is_first, is_last = rank == 0, rank == place.ranks - 1
    ends = [model.final_norm, model.head] if is_last else []
    module = nn.Sequential(*([model.embed] if is_first else []), *layers, *ends)
    data, optimizer = Microbatches(work), adamw(module.parameters())
    boundary = torch.randn(work.micro_batch, work.sequence, work.hidden)

    def step() -> float:
        optimizer.zero_grad()
        for tokens, labels in data.load():
            y = module(tokens if is_first else boundary.clone().requires_grad_())
            if is_last:
                (mean_loss(y, labels) / data.count).backward()
            else:
                y.backward(boundary)
        optimizer.step()
        return 0.0

    return step


def _step(work: Work, replica: int = 0, replicas: int = 1) -> Step:
    model = plain_model(work)
    data = Microbatches(work, replica, replicas)
    return accumulated(data, adamw(model.parameters()), lambda _, tokens: model(tokens))
