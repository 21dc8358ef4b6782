"""Prints a schedule as a time grid: one row a rank, one column a unit of time."""

from __future__ import annotations

from collections.abc import Collection

from threefold.schedule.actions import COMPUTE, Action
from threefold.schedule.timing import UNIT_COSTS, Rows, start_times

IDLE = "."
BUSY = "="


def format_grid(rows: Rows, num_stages: int, marked: Collection[int] = ()) -> str:
    """The grid of the compute actions, F one column and B two (``UNIT_COSTS``); ``marked`` rows begin with ``>``.

    ``.`` is an idle column (the bubble), ``=`` the second column of a backward pass. When every rank runs one stage,
    its own, the stage number is left out of the cells. Actions that never start follow their row after ``never:``.
    """
    compute = [[action for action in row if action.kind in COMPUTE] for row in rows]
    starts = start_times(compute, num_stages)
    short = all(action.stage == rank for rank, row in enumerate(compute) for action in row)
    lines = [_cells(row, times, short) for row, times in zip(compute, starts, strict=True)]
    num_columns = max((len(line) for line in lines), default=0)
    width = max((len(cell) for line in lines for cell in line), default=1)
    width = max(width, len(str(max(num_columns - 1, 0))))
    label_width = len(f"rank {len(rows) - 1}")
    out = [_join("  " + "time".ljust(label_width), [str(column) for column in range(num_columns)], width)]
    for rank, line in enumerate(lines):
        label = ("> " if rank in marked else "  ") + f"rank {rank}".ljust(label_width)
        text = _join(label, line + [IDLE] * (num_columns - len(line)), width)
        out.append(text + _stuck(compute[rank], starts[rank]))
    return "\n".join(out)


def _cells(row: list[Action], starts: tuple[float | None, ...], short: bool) -> list[str]:
    cells: list[str] = []
    for action, start in zip(row, starts, strict=True):
        if start is None:
            break
        cells += [IDLE] * (int(start) - len(cells))
        cells.append(_short(action) if short else str(action))
        cells += [BUSY] * (int(UNIT_COSTS[action.kind]) - 1)
    return cells


def _short(action: Action) -> str:
    return f"{action.kind.value}{action.microbatch}"


def _join(label: str, cells: list[str], width: int) -> str:
    return (label + "  " + " ".join(cell.ljust(width) for cell in cells)).rstrip()


def _stuck(row: list[Action], starts: tuple[float | None, ...]) -> str:
    never = [str(action) for action, start in zip(row, starts, strict=True) if start is None]
    return "  never: " + " ".join(never) if never else ""


def bubble_share(num_stages: int, num_microbatches: int) -> float:
    """The share of a GPipe or 1F1B step that a rank idles: (p - 1) / (m + p - 1)."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)
