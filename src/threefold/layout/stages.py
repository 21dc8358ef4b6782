"""Which pipeline stage holds which layers and parameters. No layer is ever lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby, pairwise

from threefold.errors import JobError, Problem

Partition = tuple[float, ...]
"""Layers of each stage: whole numbers, and halves where a stage ends between a layer's attention and feed-forward."""

EMBEDDING = "embed.tokens.weight"
"""The token embedding, which the head of a model with tied embeddings uses again on the last stage."""


def split_layers(num_layers: int, num_stages: int, partition: str | Sequence[float] = "even") -> tuple[range, ...]:
    """The layers of each stage: contiguous ranges that cover ``range(num_layers)`` exactly once.

    ``partition`` is "even", "auto", or the number of layers of each stage. "even" gives sizes that differ by at most
    one; spare layers go to the middle stages first, then to the first (it also holds the embedding and, under 1F1B, the
    most microbatches), then to the last (it also holds the head and the loss). "auto" means a list that balances costs
    (``plan.balance``); here, where no costs are known, it is the same as "even". An explicit list may be uneven and may
    hold 0 (a stage that holds only the embedding or the head).

    Raises JobError naming ``parallelism.pp.size`` or ``parallelism.pp.partition``, also for a list that cuts a layer.
    """
    halves = split_halves(num_layers, num_stages, partition)
    if any(half.start % 2 for half in halves):
        fix = "state whole layers"
        raise JobError([Problem("parallelism.pp.partition", f"{partition} cuts a layer, which can't be cut here", fix)])
    return tuple(range(half.start // 2, half.stop // 2) for half in halves)


def split_halves(num_layers: int, num_stages: int, partition: str | Sequence[float] = "even") -> tuple[range, ...]:
    """The half layers of each stage: 2n is the attention of layer n, 2n + 1 its feed-forward, each with its norm.

    ``partition`` is as for ``split_layers``, and its numbers may be halves: [4.5, 3.5] gives the first stage the
    attention of layer 4 and the second its feed-forward. Raises JobError as ``split_layers`` does.
    """
    return halves_of(stage_sizes(num_layers, num_stages, partition))


def halves_of(sizes: Sequence[float]) -> tuple[range, ...]:
    """The half layers of stages of these sizes."""
    return tuple(range(start, end) for start, end in pairwise([0, *accumulate(round(2 * size) for size in sizes)]))


def count_halves(halves: range) -> tuple[int, int]:
    """How many of a stage's half layers are attention, and how many are feed-forward."""
    num_feed_forward = halves.stop // 2 - halves.start // 2
    return len(halves) - num_feed_forward, num_feed_forward


def stage_sizes(num_layers: int, num_stages: int, partition: str | Sequence[float] = "even") -> Partition:
    """Layers of each stage by ``partition``, as for ``split_halves``."""
    if num_stages < 1:
        raise JobError([Problem("parallelism.pp.size", f"{num_stages} is no number of stages", "use 1 or more")])
    if not isinstance(partition, str):
        return tuple(_explicit_sizes(num_layers, num_stages, list(partition)))
    if partition in ("even", "auto"):
        return tuple(_even_sizes(num_layers, num_stages))
    fix = "use 'even', 'auto' or a list with the number of layers of each stage"
    raise JobError([Problem("parallelism.pp.partition", f"{partition!r} is no way to split layers", fix)])


def balanced_sizes(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage when the embedding and the head count as one layer each.

    Raises JobError naming ``parallelism.pp.size`` where a stage would get neither.
    """
    if num_stages == 1:
        return (num_layers,)
    sizes = _even_sizes(num_layers + 2, num_stages)
    return (sizes[0] - 1, *sizes[1:-1], sizes[-1] - 1)


def _even_sizes(num_layers: int, num_stages: int) -> list[int]:
    if num_stages > num_layers:
        message = f"{num_stages} stages can't share {num_layers} layers evenly: a stage would be left without a layer"
        fix = f"use a size from 1 to {num_layers}, or state parallelism.pp.partition as a list (it may hold 0)"
        raise JobError([Problem("parallelism.pp.size", message, fix)])
    base, num_spare = divmod(num_layers, num_stages)
    sizes = [base] * num_stages
    for stage in _spare_order(num_stages)[:num_spare]:
        sizes[stage] += 1
    return sizes


def _spare_order(num_stages: int) -> list[int]:
    # Later middle stages come first: stage r of 1F1B keeps min(m, p - r) microbatches, so a layer costs less there.
    middle = list(range(num_stages - 2, 0, -1))
    return [*middle, 0, num_stages - 1]


def _explicit_sizes(num_layers: int, num_stages: int, sizes: list[float]) -> list[float]:
    key = "parallelism.pp.partition"
    fix = f"give {num_stages} numbers, 0 or more and whole or a half over, that sum to {num_layers}"
    if 1 <= num_stages <= num_layers:
        fix += f", for example {_even_sizes(num_layers, num_stages)}"
    problems = []
    if len(sizes) != num_stages:
        problems.append(Problem(key, f"{sizes} has {len(sizes)} entries for {num_stages} stages", fix))
    if any(size < 0 for size in sizes):
        problems.append(Problem(key, f"{sizes} holds a negative number of layers", fix))
    if any(2 * size != round(2 * size) for size in sizes):
        problems.append(Problem(key, f"{sizes} cuts a layer elsewhere than in the middle", fix))
    if sum(sizes) != num_layers:
        problems.append(Problem(key, f"{sizes} sums to {sum(sizes)}, but the model has {num_layers} layers", fix))
    if problems:
        raise JobError(problems)
    return sizes


def format_partition(partition: Sequence[float], most: int = 12) -> str:
    """``[7, 1]``; of many stages runs of equal numbers are joined: ``[1, 62 × 2, 1]``."""
    if len(partition) <= most:
        return str(list(partition))
    runs = [(f"{size:g}", len(list(group))) for size, group in groupby(partition)]
    return f"[{', '.join(f'{count} × {size}' if count > 1 else str(size) for size, count in runs)}]"


def stage_of_parameter(name: str, stages: Sequence[range]) -> int:
    """The stage that owns the parameter (or module) called ``name``; ``stages`` are their half layers.

    ``embed.*`` is on the first stage, ``layers.N.*`` where that half of layer N is, everything after the layers
    (``final_norm``, ``head``) on the last. A tied embedding is owned by the first stage. Raises ValueError for a layer
    that no stage holds.
    """
    for stage in range(len(stages)):
        if _holds(stages, stage, name):
            return stage
    raise ValueError(f"{name}: no stage holds this layer; the half layers of the stages are {list(stages)}")


def _holds(stages: Sequence[range], stage: int, name: str) -> bool:
    part, _, rest = name.partition(".")
    if part == "embed":
        return stage == 0
    if part == "layers":
        layer, _, module = rest.partition(".")
        return 2 * int(layer) + module.startswith("mlp") in stages[stage]
    return stage == len(stages) - 1


def stage_parameters(names: Iterable[str], stages: Sequence[range], stage: int, *, tied: bool) -> tuple[str, ...]:
    """The names, in the order given, of the parameters that ``stage`` holds; ``stages`` are their half layers.

    With ``tied`` embeddings the last stage holds a copy of the token embedding besides the first stage's.
    """
    copied = tied and stage == len(stages) - 1
    return tuple(name for name in names if _holds(stages, stage, name) or (copied and name == EMBEDDING))
