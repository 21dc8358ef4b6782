"""What one process computes: plain PyTorch, the whole batch at once, none of threefold's engines.

It is what every layout is compared with, so it must not share their code: its loss is ``F.cross_entropy``, its clipping
``torch.nn.utils.clip_grad_norm_``, its model the plain decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from threefold.job import Job
from threefold.models.decoder import Decoder
from threefold.models.init import InitialValue, decoder_initial_value
from threefold.parallel.activity import NullActivity
from threefold.parallel.collectives import Group, Traffic
from threefold.parallel.dropout import CurrentSamples, SampleDropout
from threefold.train.data.source import SampleSource


@dataclass(frozen=True)
class Reference:
    """Per step: mean loss over valid tokens, raw gradient norm, raw gradients and updated parameters by global name."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: tuple[dict[str, Tensor], ...]
    parameters: tuple[dict[str, Tensor], ...]


def run_reference(job: Job, source: SampleSource, steps: int, learning_rate: float, dtype: torch.dtype) -> Reference:
    """Run ``steps`` steps of SGD on the job's model in this process."""
    assert job.model is not None, "parity needs a model"
    samples = CurrentSamples()
    model = build_plain_model(job, samples, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    losses, norms, gradients, parameters = [], [], [], []
    for step in range(steps):
        samples.numbers = range(step * job.train_batch_size, (step + 1) * job.train_batch_size)
        optimizer.zero_grad()
        loss = mean_loss(model, source, samples.numbers)
        loss.backward()
        gradients.append({name: _gradient(parameter) for name, parameter in model.named_parameters()})
        limit = job.gradient_clipping or float("inf")
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        losses.append(float(loss.detach()))
        parameters.append({name: value.detach().clone() for name, value in model.named_parameters()})
    return Reference(tuple(losses), tuple(norms), tuple(gradients), tuple(parameters))


def mean_loss(model: nn.Module, source: SampleSource, numbers: Sequence[int]) -> Tensor:
    """Sum of the loss over valid tokens, divided by their number."""
    tokens_BS, labels_BS = (torch.from_numpy(array) for array in source.batch(numbers))
    logits_BSV = model(tokens_BS)
    loss_sum = F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum")
    return loss_sum / max(int((labels_BS != -100).sum()), 1)


def build_plain_model(job: Job, samples: CurrentSamples, dtype: torch.dtype) -> Decoder:
    """The whole model in one process, with the initial weights that every layout starts from."""
    assert job.model is not None, "parity needs a model"
    with torch.device("meta"):
        model = Decoder(job.model)
    initial_value = decoder_initial_value(job.model, job.seed)
    _fill(model, initial_value, dtype)
    _share_dropout_masks(model, job.seed, samples)
    return model


def _fill(model: nn.Module, initial_value: InitialValue, dtype: torch.dtype) -> None:
    values = {
        id(parameter): nn.Parameter(initial_value(name, parameter.shape).to(dtype))
        for name, parameter in model.named_parameters()
    }
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, values[id(parameter)])


def _share_dropout_masks(model: nn.Module, seed: int, samples: CurrentSamples) -> None:
    """Use the masks of sample numbers, which are the same under every layout."""
    alone = Group("self", (0,), 0, None, NullActivity(), Traffic())
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Dropout):
            parent, _, child = name.rpartition(".")
            dropout = SampleDropout(module.p, name, seed, samples, alone, split_dim=None)
            model.get_submodule(parent).register_module(child, dropout)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
