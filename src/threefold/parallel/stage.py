"""From a plain model to this rank's part of it: the pipeline takes a slice, the table of styles splits the rest.

The model is usually built on the ``meta`` device, so that it costs nothing, and its parameters are made here one by one
from their names. A model with real values works too: each rank then keeps its part of those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from threefold.layout import DECODER_STYLES, Shard, Style, StyleRule, parameter_kind, rule_for, shard
from threefold.models.init import InitialValue
from threefold.parallel.collectives import Group
from threefold.parallel.dropout import HEAD_SHARDED, CurrentSamples, SampleDropout, split_dim_of
from threefold.parallel.mesh import Mesh
from threefold.parallel.tensor import ColumnLinear, RowLinear, SequenceSlice, VocabEmbedding


@dataclass(frozen=True)
class ShardedParameter:
    """One local parameter and what it is globally.

    ``name`` and ``global_shape`` are those of the plain model; a tied copy carries the name of the original.
    ``copies``: the ranks that hold the same elements, so their values must stay equal.
    ``sum_over``: the ranks whose local gradients add up to the true gradient.
    ``owns_norm``: whether this rank counts it in the global gradient norm (each element is counted exactly once).
    """

    name: str
    parameter: nn.Parameter
    shard: Shard
    global_shape: tuple[int, ...]
    copies: Group
    sum_over: Group
    owns_norm: bool


@dataclass(frozen=True)
class TensorParallelPlan:
    """How tensor parallelism treats the modules of a model.

    ``styles`` maps patterns of module names to rules, ``qkv`` gives the section sizes of a fused projection (rows of
    query, key and value) and ``dropouts`` the dim that is split at the dropouts inside of split layers.
    """

    styles: Mapping[str, StyleRule]
    qkv: tuple[int, int, int] | None = None
    sequence_parallel: bool = False
    dropouts: Mapping[str, int] | None = None


class Stage(nn.Module):
    """Some consecutive parts of a model, with the parameters of this rank."""

    def __init__(self, parts: Sequence[tuple[str, nn.Module]], *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.part_names = tuple(name for name, _ in parts)
        self.parts = nn.ModuleList(module for _, module in parts)
        self.is_first, self.is_last = is_first, is_last
        self.samples = CurrentSamples()
        self.sharded: tuple[ShardedParameter, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the parts in order."""
        for part in self.parts:
            x = part(x)
        return x

    def find(self, name: str) -> ShardedParameter | None:
        """The parameter of that global name, if this stage holds it."""
        return next((entry for entry in self.sharded if entry.name == name), None)


_LAYER_NAME = re.compile(r"(^|\.)\d+$")


def model_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The model's pieces in the order of the data flow: its ``parts()``, or the children of an ``nn.Sequential``."""
    parts: Callable[[], list[tuple[str, nn.Module]]] | None = getattr(model, "parts", None)
    if callable(parts):
        return parts()
    if isinstance(model, nn.Sequential):
        return list(model.named_children())
    raise TypeError(f"{type(model).__name__} must have a method parts() or be an nn.Sequential to be cut into stages")


def select_parts(
    parts: Sequence[tuple[str, nn.Module]], layers: range, *, is_first: bool, is_last: bool
) -> list[tuple[str, nn.Module]]:
    """The parts of one stage: its ``layers`` (pieces whose name ends in a number), what comes before on the first stage,
    what comes after on the last.
    """
    numbered = [index for index, (name, _) in enumerate(parts) if _LAYER_NAME.search(name)]
    before, after = list(parts[: numbered[0]]), list(parts[numbered[-1] + 1 :])
    middle = [parts[numbered[layer]] for layer in layers]
    return [*(before if is_first else []), *middle, *(after if is_last else [])]


def tied_stages(model: nn.Module, layers: Sequence[range]) -> dict[str, tuple[int, ...]]:
    """Each parameter that is used on more than one stage -> those stages. ``layers`` are those of every stage."""
    names, parts, last = _canonical_names(model), model_parts(model), len(layers) - 1
    users: dict[str, set[int]] = {}
    for stage, held in enumerate(layers):
        for module_name, module in _modules_with_parameters(
            select_parts(parts, held, is_first=stage == 0, is_last=stage == last)
        ):
            for local_name, _ in module.named_parameters(recurse=False):
                users.setdefault(names[f"{module_name}.{local_name}"], set()).add(stage)
    return {name: tuple(sorted(stages)) for name, stages in users.items() if len(stages) > 1}


def build_stage(
    model: nn.Module,
    layers: Sequence[range],
    mesh: Mesh,
    plan: TensorParallelPlan,
    *,
    seed: int = 0,
    initial_value: InitialValue | None = None,
    dtype: torch.dtype | None = None,
) -> Stage:
    """Cut out this rank's part of ``model`` (which is taken apart and must not be used afterwards).

    ``layers`` are those of every stage. ``initial_value`` makes each whole parameter from its name; without it the
    model's own values are used. Raises JobError when the model can't be split so, KeyError for a module without style.
    """
    is_first, is_last = mesh.coord.pp == 0, mesh.coord.pp == mesh.layout.pp - 1
    names, ties = _canonical_names(model), tied_stages(model, layers)
    parts = select_parts(model_parts(model), layers[mesh.coord.pp], is_first=is_first, is_last=is_last)
    stage = Stage(parts, is_first=is_first, is_last=is_last)
    entries = []
    made: dict[str, ShardedParameter] = {}
    for module_name, module in list(_modules_with_parameters(parts)):
        for local_name, parameter in list(module.named_parameters(recurse=False)):
            name = names[f"{module_name}.{local_name}"]
            if name not in made:
                stages = ties.get(name, (mesh.coord.pp,))
                made[name] = _make(name, module_name, local_name, parameter, mesh, plan, stages, initial_value, dtype)
                entries.append(made[name])
            setattr(module, local_name, made[name].parameter)
    stage.sharded = tuple(entries)
    _apply_styles(stage, parts, mesh.tp, plan, made, names)
    _replace_dropouts(stage, parts, mesh.tp, plan, seed)
    return stage


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the first name of that parameter; tied parameters have several."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _modules_with_parameters(parts: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    for part_name, part in parts:
        for name, module in part.named_modules(prefix=part_name):
            if any(True for _ in module.parameters(recurse=False)):
                yield name, module


def _make(
    name: str,
    module_name: str,
    local_name: str,
    parameter: nn.Parameter,
    mesh: Mesh,
    plan: TensorParallelPlan,
    stages: tuple[int, ...],
    initial_value: InitialValue | None,
    dtype: torch.dtype | None,
) -> ShardedParameter:
    rule = rule_for(module_name, plan.styles)
    part = shard(rule, parameter_kind(local_name), parameter.shape, mesh.layout.tp, mesh.coord.tp, plan.qkv)
    whole = parameter.detach() if initial_value is None else initial_value(name, parameter.shape)
    value = take_shard(whole, part).to(device=mesh.device, dtype=dtype or whole.dtype)
    replicated = part.dim is None
    # Under sequence parallelism a replicated parameter sees only this rank's part of the sequence, so its local
    # gradient is a partial sum (Korthikanti et al. 2022). Otherwise every tp rank computes the whole of it.
    partial = replicated and plan.sequence_parallel
    tied = len(stages) > 1
    if tied and replicated and mesh.layout.tp > 1:
        raise TypeError(f"{name}: a parameter that is used on stages {stages} must be split over tp, not replicated")
    return ShardedParameter(
        name=name,
        parameter=nn.Parameter(value, requires_grad=parameter.requires_grad),
        shard=part,
        global_shape=tuple(parameter.shape),
        copies=mesh.tied(stages) if tied else mesh.group("dp", "tp") if replicated else mesh.dp,
        sum_over=mesh.tied(stages) if tied else mesh.group("dp", "tp") if partial else mesh.dp,
        owns_norm=(not replicated or mesh.coord.tp == 0) and mesh.coord.pp == stages[0],
    )


def take_shard(whole: Tensor, part: Shard) -> Tensor:
    """This rank's elements of ``whole``, copied; padding is zero."""
    if part.dim is None:
        return whole.clone()
    local = whole.new_zeros(part.local_shape(whole.shape))
    for piece in part.slices:
        target = local.narrow(part.dim, piece.local_start, piece.length)
        target.copy_(whole.narrow(part.dim, piece.global_start, piece.length))
    return local


def _apply_styles(
    stage: Stage,
    parts: Sequence[tuple[str, nn.Module]],
    group: Group,
    plan: TensorParallelPlan,
    made: Mapping[str, ShardedParameter],
    names: Mapping[str, str],
) -> None:
    for index, (part_name, part) in enumerate(parts):
        for name, module in list(part.named_modules(prefix=part_name)):
            if not any(True for _ in module.parameters(recurse=False)):
                continue
            entry = made[names[f"{name}.weight"]] if hasattr(module, "weight") else None
            replacement = _styled(name, module, rule_for(name, plan.styles), entry, group, plan.sequence_parallel)
            _replace(stage, index, part_name, name, replacement)


def _styled(
    name: str,
    module: nn.Module,
    rule: StyleRule,
    entry: ShardedParameter | None,
    group: Group,
    sequence_parallel: bool,
) -> nn.Module:
    if isinstance(module, nn.Linear) and rule.style in (Style.COLUMN, Style.VOCAB):
        return ColumnLinear(module, group, sequence_parallel)
    if isinstance(module, nn.Linear) and rule.style is Style.ROW:
        return RowLinear(module, group, sequence_parallel)
    if isinstance(module, nn.Embedding) and rule.style is Style.VOCAB and entry is not None:
        return VocabEmbedding(module, entry.shard, group, sequence_parallel)
    if rule.style is not Style.REPLICATED:
        raise TypeError(f"{name}: a {type(module).__name__} has no {rule.style.value}-parallel form")
    if isinstance(module, nn.Embedding) and sequence_parallel:
        return SequenceSlice(module, group)
    return module


def _replace_dropouts(
    stage: Stage, parts: Sequence[tuple[str, nn.Module]], group: Group, plan: TensorParallelPlan, seed: int
) -> None:
    inside = HEAD_SHARDED if plan.dropouts is None else plan.dropouts
    for index, (part_name, part) in enumerate(parts):
        for name, module in list(part.named_modules(prefix=part_name)):
            if isinstance(module, nn.Dropout):
                split_dim = split_dim_of(name, plan.sequence_parallel, inside)
                dropout = SampleDropout(module.p, name, seed, stage.samples, group, split_dim)
                _replace(stage, index, part_name, name, dropout)


def _replace(stage: Stage, index: int, part_name: str, name: str, replacement: nn.Module) -> None:
    """Put ``replacement`` where the module called ``name`` is; the part itself may be it."""
    if name == part_name:
        stage.parts[index] = replacement
        return
    parent_name, _, child_name = name[len(part_name) + 1 :].rpartition(".")
    stage.parts[index].get_submodule(parent_name).register_module(child_name, replacement)


