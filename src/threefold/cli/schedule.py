"""``threefold schedule NAME`` prints what a schedule does and costs; ``threefold schedule FILE`` judges one by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from threefold.cli.output import say_written, write_output
from threefold.errors import JobError, Problem

if TYPE_CHECKING:
    from threefold.schedule import Schedule
    from threefold.simulate import StepCosts

MOST_ACTIONS = 200_000
"""A schedule with more is not made: nobody reads it, and playing it would take minutes."""

TRIED_CHUNKS = (1, 2)
"""The chunks a rank that a search tries where their number is left open."""


@dataclass(frozen=True)
class Asked:
    """The sizes on the command line; None is not given."""

    stages: int | None
    microbatches: int | None
    chunks: int | None
    memory_limit: float | None

    def given(self) -> list[str]:
        """The options that are given."""
        return [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None]


@dataclass(frozen=True)
class Costs:
    """Times of a microbatch, as the options state them.

    One number is a rank's whole share of the model; several are equal parts of the model, first to last. Either is cut
    into as many stages as a schedule has. ``p2p`` is one transfer between two ranks.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    p2p: float

    def of(self, num_ranks: int, num_stages: int) -> StepCosts:
        """For the model on ``num_ranks`` ranks in ``num_stages`` stages, each of which holds 1."""
        from threefold.simulate import StepCosts

        nothing = (0.0,) * num_stages
        return StepCosts(
            forward_s=_cut(self.forward, num_ranks, num_stages),
            input_grad_s=_cut(self.input_grad, num_ranks, num_stages),
            weight_grad_s=_cut(self.weight_grad, num_ranks, num_stages),
            p2p_s=(self.p2p,) * (num_stages - 1),
            sync_s=nothing,
            step_s=nothing,
            activation_bytes=(1.0,) * num_stages,
            static_bytes=nothing,
        )


def schedule(
    name: str, asked: Asked, costs: Mapping[str, str], *, text: bool, json_: bool, output: Path | None
) -> None:
    """Print a schedule by name or from a file: grid, step time, bubble and memory, beside its rivals.

    ``costs`` are the words of --forward, --input-grad, --weight-grad and --p2p. Raises JobError for wrong words,
    ScheduleError with the violations and the grid for an illegal file.
    """
    read = _read_costs(costs)
    found = _schedule(name, asked, read)
    _check_parts(read, found)
    if text:
        print(found.to_text(), end="")
    else:
        _show(found, read, json_)
    if output is not None:
        write_output("-o", output, found.to_text())
        say_written(output, "; a job trains it with parallelism.pp.schedule_file")


def _show(found: Schedule, costs: Costs, json_: bool) -> None:
    from threefold.report.schedules import print_schedule, rivals, score, to_dict

    scored, others = score(found, costs.of), rivals(found, costs.of)
    if json_:
        import json

        print(json.dumps(to_dict(scored, others)))
    else:
        print_schedule(scored, others)


def _schedule(name: str, asked: Asked, costs: Costs) -> Schedule:
    from threefold.schedule import NAMED, SEARCHED, build_schedule

    if name not in NAMED and name != SEARCHED:
        return _from_file(name, asked)
    stages, microbatches = _sizes(name, asked)
    if name != SEARCHED:
        return build_schedule(name, stages, microbatches, asked.chunks)

    from threefold.simulate import search_chunks

    tried = TRIED_CHUNKS if asked.chunks is None else (asked.chunks,)
    limit = asked.memory_limit
    return search_chunks(
        lambda chunks: costs.of(stages, stages * chunks), stages, microbatches, tried, limit_microbatches=limit
    ).schedule


def _sizes(name: str, asked: Asked) -> tuple[int, int]:
    """Stages and microbatches. Raises JobError with all that is wrong with them."""
    from threefold.schedule import SEARCHED

    problems = []
    for option, value, example in (("--stages", asked.stages, 4), ("--microbatches", asked.microbatches, 8)):
        if value is None:
            problems.append(Problem(option, "is missing", f"state it, like {option} {example}"))
    if asked.memory_limit is not None and name != SEARCHED:
        message, fix = f"has no influence on {name}", f"leave it out, or ask for the schedule {SEARCHED}"
        problems.append(Problem("--memory-limit", message, fix))
    if asked.memory_limit is not None and not asked.memory_limit >= 1:
        message = f"{asked.memory_limit:g} leaves no room for one microbatch"
        problems.append(Problem("--memory-limit", message, "use 1 or more"))
    stages, microbatches = asked.stages or 1, asked.microbatches or 1
    actions = 2 * stages * microbatches * (asked.chunks or 1)
    if actions > MOST_ACTIONS:
        message = f"{stages} stages, {microbatches} microbatches and {asked.chunks or 1} chunks are too many to print"
        fix = f"keep their product at {MOST_ACTIONS // 2} or less"
        problems.append(Problem("--microbatches", message, fix))
    if problems:
        raise JobError(problems)
    return stages, microbatches


def _from_file(name: str, asked: Asked) -> Schedule:
    from threefold.job.messages import choices, nearest_word
    from threefold.schedule import NAMED, SEARCHED, read_schedule

    path, names = Path(name), (*NAMED, SEARCHED)
    if not path.exists():
        meant = nearest_word(name, names, cutoff=0.4)
        fix = f"write {meant}" if meant else "write one of them, or the path of a file"
        raise JobError([Problem("NAME", f"{name!r} is neither a file nor one of {choices(names)}", fix)])
    if asked.given():
        message = f"contradicts {path}, whose header states the sizes"
        raise JobError([Problem(option, message, "leave it out") for option in asked.given()])
    return read_schedule(path)


def _read_costs(words: Mapping[str, str]) -> Costs:
    """Raises JobError for every option that holds no times."""
    numbers = {option: _numbers(text) for option, text in words.items()}
    problems = [
        Problem(option, f"{words[option]!r} is no time", "write 0 or more, or one for each stage, like 1,1,1.5")
        for option, values in numbers.items()
        if not values or (option == "--p2p" and len(values) > 1)
    ]
    if problems:
        raise JobError(problems)
    return Costs(numbers["--forward"], numbers["--input-grad"], numbers["--weight-grad"], numbers["--p2p"][0])


def _numbers(text: str) -> tuple[float, ...]:
    """The times in ``text``; none where one of them is no time."""
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError:
        return ()
    return values if all(math.isfinite(value) and value >= 0 for value in values) else ()


def _check_parts(costs: Costs, found: Schedule) -> None:
    """Parts are stages or shares of ranks. Raises JobError where they are neither."""
    names = ("forward", "input_grad", "weight_grad")
    lengths = {f"--{name.replace('_', '-')}": len(getattr(costs, name)) for name in names}
    allowed = sorted({1, found.num_ranks, found.num_stages})
    problems = [
        Problem(option, f"has {length} times", f"give {' or '.join(map(str, allowed))} of them")
        for option, length in lengths.items()
        if length not in allowed
    ]
    if problems:
        raise JobError(problems)


def _cut(parts: Sequence[float], num_ranks: int, num_stages: int) -> tuple[float, ...]:
    """The model, of equal ``parts`` that take so long, cut into ``num_stages`` equal stages."""
    if len(parts) == 1:
        return (parts[0] * num_ranks / num_stages,) * num_stages
    size = len(parts) / num_stages
    return tuple(
        sum(
            part * max(0.0, min((stage + 1) * size, place + 1) - max(stage * size, place))
            for place, part in enumerate(parts)
        )
        for stage in range(num_stages)
    )
