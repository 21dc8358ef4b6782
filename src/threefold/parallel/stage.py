"""From a plain model to this rank's part of it: the pipeline takes a slice, the table of styles splits the rest.

The model is usually built on the ``meta`` device, so that it costs nothing, and its parameters are made here one by one
from their names. A model with real values works too: each rank then keeps its part of those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from threefold.layout import Shard, Style, StyleRule, parameter_kind, rule_for, shard
from threefold.models.decoder import Rotary
from threefold.models.init import InitialValue
from threefold.parallel.collectives import Group
from threefold.parallel.deferred import DeferredGradients, WeightTask, run_weight_tasks
from threefold.parallel.dropout import HEAD_SHARDED, CurrentSamples, SampleDropout, split_dim_of
from threefold.parallel.mesh import Mesh
from threefold.parallel.tensor import ColumnLinear, RowLinear, SequenceSlice, VocabEmbedding


@dataclass(frozen=True)
class ShardedParameter:
    """One local parameter and what it is globally.

    ``name`` and ``global_shape`` are those of the plain model; a tied copy carries the name of the original.
    ``copies``: the ranks that hold the same elements, so their values must stay equal.
    ``sum_over``: the ranks whose local gradients add up to the true gradient.
    ``owns_norm``: whether ``sum_over`` counts it in the global gradient norm; of groups that hold copies of each other,
    one does. ``place``: where in the model it stands, if several pipeline ranks share it, else None.
    """

    name: str
    parameter: nn.Parameter
    shard: Shard
    global_shape: tuple[int, ...]
    copies: Group
    sum_over: Group
    owns_norm: bool
    place: int | None = None


@dataclass(frozen=True)
class TensorParallelPlan:
    """How tensor parallelism treats the modules of a model.

    ``styles`` maps patterns of module names to rules, ``qkv`` gives the section sizes of a fused projection (rows of
    query, key and value) and ``dropouts`` the dim that is split at the dropouts inside of split layers. ``inside`` are
    patterns of replicated modules between a column and a row layer, like a norm of each head: every rank uses them on
    other features, so that its gradient of them is a part of the true one.
    """

    styles: Mapping[str, StyleRule]
    qkv: tuple[int, int, int] | None = None
    sequence_parallel: bool = False
    dropouts: Mapping[str, int] | None = None
    inside: tuple[str, ...] = ()


class Stage(nn.Module):
    """Some consecutive parts of a model, with the parameters of this rank.

    ``stage(x)`` is the forward pass of a microbatch. Its backward pass is ``backward``, or ``backward_input`` and, any
    time later, ``backward_weights``; ``x.grad`` is there after either of the first two.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, nn.Module]],
        *,
        is_first: bool,
        is_last: bool,
        index: int = 0,
        samples: CurrentSamples | None = None,
        deferred: DeferredGradients | None = None,
    ) -> None:
        super().__init__()
        self.index = index
        self.part_names = tuple(name for name, _ in parts)
        self.parts = nn.ModuleList(module for _, module in parts)
        self.is_first, self.is_last = is_first, is_last
        # A rank's stages share these two: a module may stand in several stages, and one runs at a time.
        self.samples = samples or CurrentSamples()
        self.deferred = deferred or DeferredGradients()
        self.sharded: tuple[ShardedParameter, ...] = ()
        self.part_of: dict[str, int] = {}
        self.recompute_layers = False
        self.run_part: Callable[[int, Tensor], Tensor] = self.compute_part

    def forward(self, x: Tensor) -> Tensor:
        """Apply the parts in order, each by ``run_part``, which the data-parallel engine may replace."""
        for index in range(len(self.parts)):
            x = self.run_part(index, x)
        return x

    def compute_part(self, index: int, x: Tensor) -> Tensor:
        """Apply one part; a layer that is to be recomputed keeps its input only."""
        part = self.parts[index]
        if self.recompute_layers and torch.is_grad_enabled() and _LAYER_NAME.search(self.part_names[index]):
            return recompute(part, x)
        return part(x)

    def backward(self, y: Tensor, gradient: Tensor) -> None:
        """Whole backward pass (B) of the microbatch that gave ``y``; ``gradient`` is that of ``y``.

        The gradient of the input is left in its ``grad``, those of parameters are added to theirs.
        """
        if y.requires_grad:  # not where the first stage has no parameter that is trained
            torch.autograd.backward(y, gradient)

    def backward_input(self, y: Tensor, gradient: Tensor) -> list[WeightTask]:
        """The gradient of the input alone (I); returns what ``backward_weights`` needs, the rest of ``y`` is freed.

        Parameters of which a gradient can't wait (norms, and whatever is no linear layer or embedding) get theirs now.
        """
        with self.deferred.collect() as tasks:
            self.backward(y, gradient)
        return tasks

    def backward_weights(self, tasks: list[WeightTask]) -> None:
        """The gradients of parameters that waited (W) are added to theirs; ``tasks`` is emptied."""
        run_weight_tasks(tasks)

    def find(self, name: str) -> ShardedParameter | None:
        """The parameter of that global name, if this stage holds it."""
        return next((entry for entry in self.sharded if entry.name == name), None)


_LAYER_NAME = re.compile(r"(^|\.)\d+$")


def recompute(module: nn.Module, *inputs: Tensor) -> Tensor:
    """Run ``module`` without keeping its activations; backward computes them again (Chen et al. 2016).

    Dropout masks depend on the sample numbers alone, so no state of a random generator has to be kept.
    """
    kept = [_Keep.apply(x) for x in inputs]
    return checkpoint(module, *kept, use_reentrant=False, preserve_rng_state=False)


class _Keep(torch.autograd.Function):
    """Identity that saves its input as autograd saves tensors: ``checkpoint`` keeps it out of a counter's sight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


class Recomputed(nn.Module):
    """Wraps a module whose activations are computed again in backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Tensor:
        """The module's output."""
        return recompute(self.module, *inputs) if torch.is_grad_enabled() else self.module(*inputs)


def model_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The model's pieces in the order of the data flow: its ``parts()``, or the children of an ``nn.Sequential``."""
    parts: Callable[[], list[tuple[str, nn.Module]]] | None = getattr(model, "parts", None)
    if callable(parts):
        return parts()
    if isinstance(model, nn.Sequential):
        # Not named_children(), which leaves out a module that stands there twice.
        return [(name, module) for name, module in model._modules.items() if module is not None]
    raise TypeError(f"{type(model).__name__} must have a method parts() or be an nn.Sequential to be cut into stages")


def select_parts(
    parts: Sequence[tuple[str, nn.Module]], layers: range, *, is_first: bool, is_last: bool
) -> list[tuple[str, nn.Module]]:
    """The parts of one stage: its ``layers`` (pieces whose name ends in a number), what comes before on the first
    stage, what comes after on the last. A piece between two layers stays with the one before it.
    """
    starts = _layer_starts(parts)
    end = starts[-1] + 1 if starts else len(parts)
    bounds = [*starts, end]
    before, after = list(parts[: bounds[0]]), list(parts[end:])
    middle = [part for layer in layers for part in parts[bounds[layer] : bounds[layer + 1]]]
    return [*(before if is_first else []), *middle, *(after if is_last else [])]


def _layer_starts(parts: Sequence[tuple[str, nn.Module]]) -> list[int]:
    return [index for index, (name, _) in enumerate(parts) if _LAYER_NAME.search(name)]


def _check_layers(parts: Sequence[tuple[str, nn.Module]], layers: Sequence[range]) -> None:
    held, num_layers = [layer for stage in layers for layer in stage], len(_layer_starts(parts))
    if held != list(range(num_layers)):
        raise ValueError(
            f"the stages hold layers {held}, but the model has {num_layers}: give each to one stage, in order"
        )


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


def ranks_of_ties(ties: Iterable[Collection[int]], rank_of: Callable[[int], int]) -> set[tuple[int, ...]]:
    """For stages that share a parameter: the pipeline ranks that hold a copy of it each, where they are several."""
    found = {tuple(sorted({rank_of(stage) for stage in stages})) for stages in ties}
    return {ranks for ranks in found if len(ranks) > 1}


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
    """Cut out this rank's part of ``model``: the stage of its pipeline coordinate. See ``build_stages``."""
    (stage,) = build_stages(model, layers, mesh, plan, seed=seed, initial_value=initial_value, dtype=dtype)
    return stage


def build_stages(
    model: nn.Module,
    layers: Sequence[range],
    mesh: Mesh,
    plan: TensorParallelPlan,
    *,
    rank_of: Callable[[int], int] | None = None,
    seed: int = 0,
    initial_value: InitialValue | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Stage, ...]:
    """Cut this rank's stages out of ``model`` (which is taken apart and must not be used afterwards).

    ``layers`` are those of every stage, ``rank_of`` says which pipeline coordinate holds a stage: without it stages go
    round the ranks. A parameter that several stages of this rank use is one and the same in all of them.
    ``initial_value`` makes each whole parameter from its name; without it the model's own values are used. Raises
    JobError when the model can't be split so, KeyError for a module without style, TypeError for a module that its
    style does not fit, ValueError when ``layers`` are not the model's.
    """
    _check_layers(model_parts(model), layers)
    names, ties = _canonical_names(model), tied_stages(model, layers)
    _check_ties(names, plan.styles)
    parts, last = model_parts(model), len(layers) - 1
    rank_of = rank_of or (lambda stage: stage % mesh.layout.pp)
    tied_to = {name: tuple(sorted({rank_of(stage) for stage in stages})) for name, stages in ties.items()}
    order = {name: place for place, name in enumerate(names)}
    samples, deferred = CurrentSamples(), DeferredGradients(mesh.memory)
    made: dict[str, ShardedParameter] = {}
    stages = []
    for index in (index for index in range(len(layers)) if rank_of(index) == mesh.coord.pp):
        is_first, is_last = index == 0, index == last
        mine = select_parts(parts, layers[index], is_first=is_first, is_last=is_last)
        stage = Stage(mine, is_first=is_first, is_last=is_last, index=index, samples=samples, deferred=deferred)
        entries: dict[str, ShardedParameter] = {}
        for module_name, module in list(_modules_with_parameters(mine)):
            for local_name, parameter in list(module.named_parameters(recurse=False)):
                name = names[f"{module_name}.{local_name}"]
                if name not in made:
                    ranks = tied_to.get(name, (mesh.coord.pp,))
                    entry = _make(name, module_name, local_name, parameter, mesh, plan, ranks, initial_value, dtype)
                    made[name] = replace(entry, place=order[name] if len(ranks) > 1 else None)
                entries[name] = made[name]
                setattr(module, local_name, made[name].parameter)
        stage.sharded = tuple(entries.values())
        stage.part_of = _part_of(mine, names)
        stages.append((stage, mine))
    for stage, mine in stages:
        _apply_styles(stage, mine, mesh.tp, plan, made, names)
        _replace_dropouts(stage, mine, mesh.tp, plan, seed)
    return tuple(stage for stage, _ in stages)


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the first name of that parameter; tied parameters have several."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _check_ties(names: Mapping[str, str], styles: Mapping[str, StyleRule]) -> None:
    """Uses of one parameter in different styles would need different shards of it."""
    for name, first in names.items():
        rule, other = (rule_for(full_name.rpartition(".")[0], styles) for full_name in (name, first))
        if rule != other:
            raise TypeError(f"{name} is tied to {first}, but their styles are {rule.style} and {other.style}")


def rank_parameters(stages: Iterable[Stage]) -> tuple[ShardedParameter, ...]:
    """The parameters of a rank, each once: what ranks share, in the model's order; the others as the data flows.

    Ranks may use what they share in different orders, but must communicate about it in the same one.
    """
    entries = {entry.name: entry for stage in stages for entry in stage.sharded}.values()
    return tuple(sorted(entries, key=lambda entry: (entry.place is None, entry.place or 0)))


def _part_of(parts: Sequence[tuple[str, nn.Module]], names: Mapping[str, str]) -> dict[str, int]:
    """The first part that uses each parameter, by the parameter's name."""
    found: dict[str, int] = {}
    for index, part in enumerate(parts):
        for module_name, module in _modules_with_parameters([part]):
            for local_name, _ in module.named_parameters(recurse=False):
                found.setdefault(names[f"{module_name}.{local_name}"], index)
    return found


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
    pp_ranks: tuple[int, ...],
    initial_value: InitialValue | None,
    dtype: torch.dtype | None,
) -> ShardedParameter:
    rule = rule_for(module_name, plan.styles)
    part = shard(rule, parameter_kind(local_name), parameter.shape, mesh.layout.tp, mesh.coord.tp, plan.qkv)
    whole = parameter.detach() if initial_value is None else initial_value(name, parameter.shape)
    value = take_shard(whole, part).to(device=mesh.device, dtype=dtype or whole.dtype)
    replicated = part.dim is None
    # Under sequence parallelism a replicated parameter sees only this rank's part of the sequence, so its local
    # gradient is a partial sum (Korthikanti et al. 2022). Otherwise every tp rank computes the whole of it, except
    # inside of split layers.
    inside = any(fnmatchcase(module_name, pattern) for pattern in plan.inside)
    partial = replicated and (plan.sequence_parallel or inside)
    if len(pp_ranks) > 1 and replicated and mesh.layout.tp > 1:
        where = f"pipeline ranks {pp_ranks}"
        raise TypeError(f"{name}: a parameter that is used on {where} must be split over tp, not replicated")
    return ShardedParameter(
        name=name,
        parameter=nn.Parameter(value, requires_grad=parameter.requires_grad),
        shard=part,
        global_shape=tuple(parameter.shape),
        copies=_reach(mesh, pp_ranks, over_tp=replicated),
        sum_over=_reach(mesh, pp_ranks, over_tp=partial),
        owns_norm=partial or not replicated or mesh.coord.tp == 0,
    )


def _reach(mesh: Mesh, pp_ranks: tuple[int, ...], *, over_tp: bool) -> Group:
    """All replicas' ranks with these pipeline coordinates, or, over tp too, with this one."""
    if len(pp_ranks) > 1:
        return mesh.tied(pp_ranks)
    return mesh.group("dp", "tp") if over_tp else mesh.dp


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
        for name, module in list(part.named_modules(prefix=part_name, remove_duplicate=False)):
            done = isinstance(module, (ColumnLinear, RowLinear, VocabEmbedding, SequenceSlice))  # used twice
            if done or not any(True for _ in module.parameters(recurse=False)):
                continue
            entry = made[names[f"{name}.weight"]] if hasattr(module, "weight") else None
            rule = rule_for(name, plan.styles)
            replacement = _styled(name, module, rule, entry, group, plan.sequence_parallel, stage.deferred)
            _replace(stage, index, part_name, name, replacement)


def _styled(
    name: str,
    module: nn.Module,
    rule: StyleRule,
    entry: ShardedParameter | None,
    group: Group,
    sequence_parallel: bool,
    deferred: DeferredGradients,
) -> nn.Module:
    if _is_linear(module) and rule.style in (Style.COLUMN, Style.VOCAB):
        return ColumnLinear(module, group, sequence_parallel, deferred)
    if _is_linear(module) and rule.style is Style.ROW:
        return RowLinear(module, group, sequence_parallel, deferred)
    if _is_embedding(module) and rule.style is Style.VOCAB and entry is not None:
        return VocabEmbedding(module, entry.shard, group, sequence_parallel, deferred)
    if rule.style is not Style.REPLICATED:
        raise TypeError(f"{name}: {module} has no {rule.style.value}-parallel form")
    if _is_embedding(module) and sequence_parallel:
        return SequenceSlice(module, group)
    return module


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    # A subclass that computes something else has no parallel form that we know.
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _is_embedding(module: nn.Module) -> TypeGuard[nn.Embedding]:
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.padding_idx is None
        and module.max_norm is None
        and not (module.scale_grad_by_freq or module.sparse)
    )


def _replace_dropouts(
    stage: Stage, parts: Sequence[tuple[str, nn.Module]], group: Group, plan: TensorParallelPlan, seed: int
) -> None:
    inside = HEAD_SHARDED if plan.dropouts is None else plan.dropouts
    for index, (part_name, part) in enumerate(parts):
        for name, module in list(part.named_modules(prefix=part_name, remove_duplicate=False)):
            if isinstance(module, nn.Dropout):
                split_dim = split_dim_of(name, plan.sequence_parallel, inside)
                dropout = SampleDropout(module.p, name, seed, stage.samples, group, split_dim)
                _replace(stage, index, part_name, name, dropout)


def recompute_modules(stage: Stage, pattern: str) -> None:
    """Do not keep the activations of modules whose name within their part matches ``pattern``."""
    for index, part in enumerate(list(stage.parts)):
        for name, module in list(part.named_modules()):
            if name and fnmatchcase(name, pattern):
                parent, _, child = name.rpartition(".")
                stage.parts[index].get_submodule(parent).register_module(child, Recomputed(module))


_NOT_COMPILED = ((ColumnLinear, "forward"), (RowLinear, "forward"), (SampleDropout, "forward"), (Rotary, "angles"))


def compile_layers(stage: Stage, backend: str) -> None:
    """Compile each layer with ``torch.compile`` when it first runs; layers of one kind share what is compiled.

    Layers that communicate, or leave their weight gradients for later, dropouts, whose masks are drawn by sample, and
    what keeps something for the next call run as they are, between compiled pieces. That is said of their classes: were
    it said of each module, every layer would be compiled anew.
    """
    for kind, method in _NOT_COMPILED:
        function = getattr(kind, method)
        if not hasattr(function, "_torchdynamo_disable"):
            setattr(kind, method, torch.compiler.disable(function))
    for name, part in zip(stage.part_names, stage.parts, strict=True):
        if _LAYER_NAME.search(name):
            part.compile(backend=backend, dynamic=False)


def defer_plain_linears(stage: Stage, group: Group) -> None:
    """Let the weight gradients of ordinary linear layers wait too, where a schedule runs I and W apart.

    ``group`` is any of the rank's. A layer with hooks, or of a subclass, stays what it is: its gradients come in I.
    """
    for index, part_name in enumerate(stage.part_names):
        for name, module in list(stage.parts[index].named_modules(prefix=part_name, remove_duplicate=False)):
            if type(module) is nn.Linear and not (module._forward_hooks or module._forward_pre_hooks):
                replacement = ColumnLinear(module, group.alone(), False, stage.deferred)
                _replace(stage, index, part_name, name, replacement)


def _replace(stage: Stage, index: int, part_name: str, name: str, replacement: nn.Module) -> None:
    """Put ``replacement`` where the module called ``name`` is; the part itself may be it."""
    if name == part_name:
        stage.parts[index] = replacement
        return
    parent_name, _, child_name = name[len(part_name) + 1 :].rpartition(".")
    stage.parts[index].get_submodule(parent_name).register_module(child_name, replacement)
