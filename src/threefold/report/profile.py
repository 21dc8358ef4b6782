"""A profile as tables: what each part and each link takes."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from threefold.cost.profile import LinkProfile, PartProfile, Profile, Spread
from threefold.plan.wording import format_seconds
from threefold.report.words import count_of, format_bytes, format_count

MIN_WIDTH = 120


def print_profile(profile: Profile, console: Console | None = None) -> None:
    """Print what was measured, with the quartiles of each number."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=MIN_WIDTH, color_system=None)
    machine, work = profile.machine, profile.workload
    ranks, threads = count_of(machine.num_ranks, "busy rank"), count_of(machine.threads, "thread")
    batch = f"micro batch {work.micro_batch} × {work.sequence_length:,} tokens, tp {work.tp}"
    settings = f"recompute {work.recompute}, {work.precision}; {count_of(profile.num_rounds, 'round')}"
    head = f"{machine.host}: {machine.device}, {ranks} with {threads} each; {batch}, {settings}"
    console.print(head, markup=False, highlight=False)
    console.print(_parts(profile))
    console.print(_links(profile))
    console.print(
        f"The executor adds {_seconds(profile.action_s)} to a pass and {_seconds(profile.post_s)} to start a "
        f"message; the optimizer takes {_seconds(profile.optimizer_s_per_parameter * 1e6)} for a million "
        "parameters.",
        markup=False,
        highlight=False,
    )


def _parts(profile: Profile) -> Table:
    header = ("part", "forward", "backward", "input gradient", "weight gradient", "activations", "parameters")
    table = _table(header)
    for name in ("embedding", "layer", "head"):
        part: PartProfile = getattr(profile, name)
        spreads = (part.forward_s, part.backward_s, part.input_grad_s, part.weight_grad_s)
        amounts = (format_bytes(part.activation_bytes), format_count(part.parameters))
        table.add_row(name, *map(_spread, spreads), *amounts)
    return table


def _spread(spread: Spread) -> str:
    """The median, and the wider of the quartiles' distances from it."""
    if not spread.median:
        return "0"
    off = max(spread.high - spread.median, spread.median - spread.low) / spread.median
    return f"{_seconds(spread.median)} ± {off:.0%}"


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def _links(profile: Profile) -> Table:
    table = _table(("link", "ranks", "start (alpha)", "bytes/s (beta)"))
    for link in profile.links:
        table.add_row(*_link(link))
    return table


def _link(link: LinkProfile) -> tuple[str, str, str, str]:
    return link.operation, str(link.ranks), _seconds(link.alpha_s), f"{format_bytes(round(link.bytes_per_s))}/s"


def _table(header: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in header:
        table.add_column(name)
    return table
