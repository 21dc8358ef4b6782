"""Somebody else's models, which know nothing of threefold, and a comparison of any layout with the plain model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from threefold.layout import Layout, Shard, Style, StyleRule, shard, split_layers
from threefold.measure.parity import SGD
from threefold.measure.worker_pool import WorkerContext
from threefold.parallel.buckets import ShardingPolicy
from threefold.parallel.engine import Engine, EngineOptions
from threefold.parallel.mesh import build_mesh
from threefold.parallel.stage import TensorParallelPlan, build_stages, ranks_of_ties, take_shard, tied_stages
from threefold.parallel.vocab import VocabPart, cross_entropy_sum
from threefold.schedule import build_schedule
from threefold.train.data.order import microbatch_samples
from threefold.train.data.synthetic import SyntheticTokens
from threefold.train.optimizer import ShardedOptimizer

VOCAB, WIDTH, SEQUENCE, BATCH = 13, 8, 4, 8
GROUP_WIDTH = 4


class GatedBlock(nn.Module):
    """A split block with a replicated linear beside it, and a norm of each group of features inside of it."""

    def __init__(self, width: int = WIDTH, inner: int = 16) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.value = nn.Linear(width, inner)
        self.group_norm = nn.LayerNorm(GROUP_WIDTH)
        self.out = nn.Linear(inner, width)
        self.side = nn.Linear(width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSD = self.before(x_BSD)
        mixed = F.silu(self.gate(h_BSD)) * self.value(h_BSD)
        mixed = self.group_norm(mixed.unflatten(-1, (-1, GROUP_WIDTH))).flatten(-2)
        return x_BSD + self.out(mixed) + self.side(h_BSD)


GATED_STYLES = {
    "0": StyleRule(Style.VOCAB),
    "*.before": StyleRule(Style.REPLICATED),
    "*.gate": StyleRule(Style.COLUMN),
    "*.value": StyleRule(Style.COLUMN),
    "*.group_norm": StyleRule(Style.REPLICATED),
    "*.out": StyleRule(Style.ROW),
    "*.side": StyleRule(Style.REPLICATED),
    "4": StyleRule(Style.REPLICATED),
    "5": StyleRule(Style.VOCAB),
}


def gated_model() -> nn.Module:
    """Six parts, all of which count as layers: embedding, three blocks, norm, head."""
    torch.manual_seed(1)
    blocks = [GatedBlock() for _ in range(3)]
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))
    return model.double()


def half_frozen_model() -> nn.Module:
    """Nothing in the first two parts is trained, nor one matrix further up."""
    model = gated_model()
    assert isinstance(model, nn.Sequential)
    for parameter in (*model[0].parameters(), *model[1].parameters(), model[2].get_submodule("out").weight):
        assert isinstance(parameter, nn.Parameter)
        parameter.requires_grad_(False)
    return model


class TwoLinears(nn.Module):
    """Two matrices of one shape, so that mixing them up would not even be noticed by their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH, bias=False)
        self.two = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + self.two(torch.tanh(self.one(x_BSD)))


class TwoLinearsReversed(TwoLinears):
    """The same two, made and listed in the other order."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.two = nn.Linear(WIDTH, WIDTH, bias=False)
        self.one = nn.Linear(WIDTH, WIDTH, bias=False)


TIED_STYLES = {
    "0": StyleRule(Style.VOCAB),
    "?.one": StyleRule(Style.COLUMN),
    "?.two": StyleRule(Style.ROW),
    "5": StyleRule(Style.VOCAB),
}


def tied_model() -> nn.Module:
    """Four ties over three stages of two parts each; stage 2 meets what it shares in another order than stage 0.

    Stages 0 and 2 share the embedding and both matrices of a block, stages 1 and 2 one matrix, stage 1 one with itself.
    """
    torch.manual_seed(2)
    first, second, third, last = TwoLinears(), TwoLinears(), TwoLinears(), TwoLinearsReversed()
    embedding, head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
    head.weight = embedding.weight
    last.one.weight, last.two.weight = first.one.weight, first.two.weight
    third.two.weight = second.two.weight
    return nn.Sequential(embedding, first, second, third, last, head).double()


def repeated_model() -> nn.Module:
    """One block that stands there three times, in the manner of a universal transformer."""
    torch.manual_seed(3)
    block = TwoLinears()
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), block, block, nn.Tanh(), block, nn.Linear(WIDTH, VOCAB))
    return model.double()


@dataclass(frozen=True)
class Case:
    """A model in a layout. ``partition`` counts the parts of each stage."""

    build: Callable[[], nn.Module]
    plan: TensorParallelPlan
    layout: Layout
    partition: Sequence[int] | str = "even"
    microbatches: int = 2
    bucket_elements: int = 100
    schedule: str = "1f1b"
    chunks: int = 1
    zero: int = 0


def build_custom_engine(context: WorkerContext, case: Case) -> Engine:
    model = case.build()
    schedule = build_schedule(case.schedule, case.layout.pp, case.microbatches, case.chunks)
    num_layers = len(list(model.children())) if case.build is not repeated_model else 6
    layers = split_layers(num_layers, schedule.num_stages, case.partition)
    ties = ranks_of_ties(tied_stages(model, layers).values(), schedule.stage_rank)
    mesh = build_mesh(case.layout, context.rank, activity=context.activity, tied=ties)
    stages = build_stages(model, layers, mesh, case.plan, rank_of=schedule.stage_rank)
    micro_batch = BATCH // case.layout.dp // case.microbatches
    local_sequence = SEQUENCE // (case.layout.tp if case.plan.sequence_parallel else 1)
    options = EngineOptions(
        schedule=schedule,
        boundary_shape=(micro_batch, local_sequence, WIDTH),
        dtype=torch.float64,
        sharding=ShardingPolicy(case.bucket_elements, stage=case.zero, accumulate=torch.float64),
    )
    rows = shard(StyleRule(Style.VOCAB), "weight", (VOCAB, WIDTH), mesh.layout.tp, mesh.coord.tp)
    part = VocabPart.of_shard(rows, VOCAB, mesh.tp)
    return Engine(stages, mesh, lambda logits, labels: cross_entropy_sum(logits, labels, part), options)


def compare_custom(context: WorkerContext, case: Case, steps: int = 2) -> list[str]:
    """Loss, gradients, norm and values of ``steps`` SGD steps against the plain model; returns what was compared."""
    source = SyntheticTokens(VOCAB, SEQUENCE, seed=5, ignored_fraction=0.4)
    engine = build_custom_engine(context, case)
    plain = case.build()
    optimizer, plain_optimizer = ShardedOptimizer(SGD, engine.data), torch.optim.SGD(plain.parameters(), lr=0.3)
    compared: list[str] = []
    for step in range(steps):
        loss, norm = _plain_backward(plain, source, step)

        def update(result: object) -> None:
            compared.extend(_compare_gradients(engine, plain))
            optimizer.step(0.3)
            plain_optimizer.step()

        result = engine.train_step(_samples(case, engine.mesh.coord.dp, step), source.batch, update)
        torch.testing.assert_close(torch.tensor([result.loss, result.grad_norm]), torch.tensor([loss, norm]))
        with engine.data.whole_parameters():
            for entry in engine.parameters:
                torch.testing.assert_close(entry.parameter.detach(), _part(plain, entry.name, entry.shard))
    engine.check_replicas(steps)
    return compared


def _samples(case: Case, dp_coord: int, step: int) -> list[range]:
    micro = BATCH // case.layout.dp // case.microbatches
    return [
        microbatch_samples(step, BATCH, micro, case.microbatches, dp_coord, index) for index in range(case.microbatches)
    ]


def _plain_backward(plain: nn.Module, source: SyntheticTokens, step: int) -> tuple[float, float]:
    plain.zero_grad()
    tokens, labels = (torch.from_numpy(array) for array in source.batch(range(step * BATCH, (step + 1) * BATCH)))
    loss = F.cross_entropy(plain(tokens).flatten(0, 1), labels.flatten())
    loss.backward()
    trained = [parameter for parameter in plain.parameters() if parameter.grad is not None]
    return float(loss.detach()), float(nn.utils.clip_grad_norm_(trained, float("inf")))


def _compare_gradients(engine: Engine, plain: nn.Module) -> list[str]:
    pieces = {piece.entry.name: piece for piece in engine.data.gradient_pieces()}
    for entry in engine.parameters:
        expected, piece = plain.get_parameter(entry.name).grad, pieces.get(entry.name)
        if expected is None or engine.data.policy.stage == 0:
            assert (piece is None) == (expected is None), entry.name
        if expected is not None and piece is not None:
            part = take_shard(expected, entry.shard).flatten()[piece.start : piece.start + piece.values.numel()]
            torch.testing.assert_close(piece.values, part, msg=lambda text, entry=entry: f"{entry.name}: {text}")
    return [entry.name for entry in engine.parameters]


def _part(plain: nn.Module, name: str, part: Shard) -> Tensor:
    return take_shard(plain.get_parameter(name).detach(), part)
