"""DeepSpeed on its CPU accelerator. Only a worker whose Python has DeepSpeed imports this."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed  # pyright: ignore[reportMissingImports]
from deepspeed.pipe import PipelineModule  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

from benchmarks.peers.common import Microbatches, Place, Step, adamw, mean_loss, plain_model
from benchmarks.peers.work import Work


def _settings(work: Work, replicas: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": work.samples,
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.microbatches // replicas,
        "gradient_clipping": 0.0,
        "steps_per_print": 1_000_000,
        "zero_allow_untested_optimizer": True,
        **more,
    }


def zero(place: Place, stage: int) -> Step:
    """ZeRO by stage, with the defaults of its settings."""
    model = plain_model(place.work)
    settings = _settings(place.work, place.ranks, zero_optimization={"stage": stage})
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=settings)
    data = Microbatches(place.work, place.rank, place.ranks)

    def step() -> float:
        total = 0.0
        for tokens, labels in data.load():
            loss = mean_loss(engine(tokens), labels)
            engine.backward(loss)
            engine.step()
            total += loss.item()
        return total / data.count

    return step


def pipeline(place: Place) -> Step:
    """PipelineModule, whose schedule is 1F1B."""
    work, model = place.work, plain_model(place.work)
    parts: list[nn.Module] = [model.embed, *model.layers, model.final_norm, model.head]
    deepspeed.init_distributed(dist_backend="gloo")
    # Counting layers and head alike gives the cut of the others: 5 and 3 of 8 layers on 2 ranks.
    module = PipelineModule(
        parts, num_stages=place.ranks, loss_fn=mean_loss, partition_method="type:Block|Linear", seed_layers=False
    )
    optimizer = adamw(module.parameters())
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=_settings(work, 1))
    data = Microbatches(work)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from data.load()

    stream = batches()
    return lambda: float(engine.train_batch(data_iter=stream))
