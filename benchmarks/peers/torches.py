"""PyTorch's own parallelisms: DDP, FSDP2, tensor parallelism over DTensor, and pipelines."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.common import Microbatches, Place, Step, accumulated, adamw, mean_loss, plain_model
from benchmarks.peers.work import Work, job_of
from threefold.layout import split_layers
from threefold.models.decoder import Decoder

CPU = torch.device("cpu")


def ddp(place: Place) -> Step:
    """DDP; all microbatches but the last accumulate without a reduction."""
    model = DistributedDataParallel(plain_model(place.work), gradient_as_bucket_view=True)
    data = Microbatches(place.work, place.rank, place.ranks)

    def logits_of(index: int, tokens: Tensor) -> Tensor:
        model.require_backward_grad_sync = index == data.count - 1  # what no_sync sets
        return model(tokens)

    return accumulated(data, adamw(model.parameters()), logits_of)


def fsdp2(place: Place, reshard: bool) -> Step:
    """FSDP2, a unit for each layer; gradients are reduced and sharded after each microbatch.

    ``reshard`` frees a layer's parameters between forward and backward, as ZeRO-3 does; without it they are gathered
    once for both, and again in the next microbatch.
    """
    model = plain_model(place.work)
    mesh = init_device_mesh("cpu", (place.ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    assert isinstance(model, FSDPModule)
    data = Microbatches(place.work, place.rank, place.ranks)

    def logits_of(index: int, tokens: Tensor) -> Tensor:
        last = index == data.count - 1
        model.set_is_last_backward(last)
        if not reshard:
            model.set_reshard_after_backward(last)  # parameters change with the optimizer step only
        return model(tokens)

    return accumulated(data, adamw(model.parameters()), logits_of)


def dtensor(place: Place, sequence_parallel: bool) -> Step:
    """Megatron's layout over DTensor, with a vocabulary-parallel loss."""
    model = plain_model(place.work)
    _order_rows(model, place)
    mesh = init_device_mesh("cpu", (place.ranks,))
    _parallelize(model, mesh, sequence_parallel)
    optimizer = adamw(model.parameters())
    return accumulated(Microbatches(place.work), optimizer, lambda _, tokens: model(tokens), loss_parallel)


def _order_rows(model: Decoder, place: Place) -> None:
    """Put the rows of fused projections such that a rank's consecutive part has its heads' q, k and v, gate and up."""
    with torch.no_grad():
        for layer in model.layers:
            assert isinstance(layer, nn.Module)
            for name, sections in (("attention.qkv", 3), ("mlp.gate_up", 2)):
                weight = layer.get_submodule(name).weight
                assert isinstance(weight, Tensor)
                parts = weight.unflatten(0, (sections, place.ranks, -1))
                weight.copy_(parts.transpose(0, 1).flatten(0, 2))


def _parallelize(model: Decoder, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    between = Shard(1) if sequence_parallel else Replicate()
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    head = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
    norm = {"final_norm": SequenceParallel()} if sequence_parallel else {}
    parallelize_module(model, mesh, {"embed.tokens": embedding, "head": head, **norm})
    for layer in model.layers:
        plan: dict[str, ParallelStyle] = {
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=between),
            "mlp.gate_up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=between),
        }
        if sequence_parallel:
            plan |= {
                "attention_norm": SequenceParallel(),
                "mlp_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
                ),
                "mlp": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
                ),
            }
        assert isinstance(layer, nn.Module)
        parallelize_module(layer, mesh, plan)


def pipeline(place: Place, schedule: str) -> Step:
    """torch.distributed.pipelining with the cut that threefold gets."""
    work = place.work
    stages = [
        PipelineStage(module, index, count, CPU, group=dist.group.WORLD)
        for index, count, module in _stages(work, place, schedule)
    ]
    data = Microbatches(work)
    optimizer = adamw(parameter for stage in stages for parameter in stage.submod.parameters())
    has_first, has_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    single = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
    several = {"interleaved_1f1b": ScheduleInterleaved1F1B, "zb_v": ScheduleZBVZeroBubble}
    runner = (
        single[schedule](stages[0], work.microbatches, mean_loss)
        if schedule in single
        else several[schedule](list(stages), work.microbatches, mean_loss)
    )

    def step() -> float | None:
        optimizer.zero_grad()
        batch = data.load()
        tokens, labels = (torch.cat(part) for part in zip(*batch, strict=True))
        losses: list[Tensor] = []
        runner.step(
            *([tokens] if has_first else []),
            target=labels if has_last else None,
            losses=losses if has_last else None,
            return_outputs=False,
        )
        optimizer.step()
        return float(torch.stack(losses).mean()) if has_last else None

    return step


def _stages(work: Work, place: Place, schedule: str) -> Sequence[tuple[int, int, nn.Module]]:
    """(index, number of stages, modules) of this rank's stages, as threefold's job cuts them."""
    from threefold.schedule import job_schedule

    job = job_of(work, pp=place.ranks, schedule=schedule)
    plan = job_schedule(job)
    layers = split_layers(work.layers, plan.num_stages, job.parallelism.pp.partition)
    model, found = plain_model(work), []
    for index in range(plan.num_stages):
        if plan.stage_rank(index) == place.rank:
            before = [model.embed] if index == 0 else []
            after = [model.final_norm, model.head] if index == plan.num_stages - 1 else []
            parts = [*before, *(model.layers[layer] for layer in layers[index]), *after]
            found.append((index, plan.num_stages, nn.Sequential(*parts)))
    return found
