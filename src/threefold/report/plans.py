"""Plans for people: a table of the best, why the first one is it, what the others lose, and what was rejected."""

from __future__ import annotations

from textwrap import fill

from rich.console import Console
from rich.table import Table
from rich.text import Text

from threefold.plan.plans import Plan, PlanResult
from threefold.plan.wording import format_gigabytes, format_seconds, layout_words, percent, settings_words
from threefold.report.words import format_count

MIN_WIDTH = 132
"""Columns of the text when it doesn't go to a terminal."""

HEADER = ("", "layout", "settings", "step", "90 % interval", "tokens/s", "TFLOP/s", "MFU", "memory", "bubble", "comm.")


def print_plans(result: PlanResult, console: Console | None = None) -> None:
    """Print an answer; plain text where stdout is no terminal."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=MIN_WIDTH, color_system=None)
    console.print(Text(question_words(result), style="bold"))
    console.print()
    console.print(plan_table(result.plans))
    console.print()
    for number, plan in enumerate(result.plans, start=1):
        _print_reasons(console, plan, number, stated=result.searched == 1)
    if result.searched > 1:
        _print_search(console, result)


def question_words(result: PlanResult) -> str:
    """What was asked, in one line."""
    question, hardware = result.question, result.question.hardware
    name = question.model.preset or question.model.model_type
    tokens = question.global_batch * question.sequence_length
    return (
        f"{name}, {format_count(question.model.num_parameters)} parameters, on {hardware.nodes} × "
        f"{hardware.devices_per_node} {hardware.device.name}; a step is {question.global_batch:,} sequences of "
        f"{question.sequence_length:,} = {format_count(tokens)} tokens"
    )


def plan_table(plans: tuple[Plan, ...]) -> Table:
    """One row a plan; TFLOP/s are the model's, of one device, and comm. is communication that nothing hides."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in HEADER:
        table.add_column(name, justify="left" if name in HEADER[:3] else "right", overflow="fold")
    for number, plan in enumerate(plans, start=1):
        table.add_row(*map(Text, _cells(number, plan)))
    return table


def _cells(number: int, plan: Plan) -> tuple[str, ...]:
    exposed = sum(plan.exposed_comm_s.values())
    return (
        str(number),
        layout_words(plan),
        settings_words(plan),
        format_seconds(plan.step_s),
        f"{format_seconds(plan.step_s_low)} to {format_seconds(plan.step_s_high)}",
        f"{plan.tokens_per_s:,.0f}",
        f"{plan.tflops_per_gpu:.3g}" if plan.tflops_per_gpu < 1 else f"{plan.tflops_per_gpu:.0f}",
        "-" if plan.mfu is None else percent(plan.mfu),
        format_gigabytes(plan.peak_memory_bytes) + ("" if plan.fits else " !"),
        percent(plan.bubble_fraction),
        percent(exposed / plan.step_s),
    )


def _print_reasons(console: Console, plan: Plan, number: int, stated: bool) -> None:
    """``stated``: the plan was not chosen, it is a job's own."""
    if number == 1:
        console.print(Text("As it stands" if stated else f"Why {layout_words(plan)}", style="bold"))
        for reason in plan.reasons:
            console.print(Text(fill(reason, console.width - 1, initial_indent="- ", subsequent_indent="  ")))
        console.print()
    else:
        console.print(Text(f"{number}. {layout_words(plan)} {'; '.join(plan.reasons)}"))


def _print_search(console: Console, result: PlanResult) -> None:
    console.print()
    console.print(Text(f"Searched {result.searched:,} candidates in {format_seconds(result.seconds)}", style="bold"))
    for reason, count in sorted(result.rejected.items(), key=lambda item: (-item[1], item[0])):
        console.print(Text(f"{count:>12,}  {reason}"))
