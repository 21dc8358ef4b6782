"""A recorded step beside its simulation as one HTML page: a picture in SVG, and the numbers. It loads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from threefold.report.timeline import format_seconds
from threefold.report.timeline_compare import Comparison, rank_rows, summary_rows
from threefold.schedule import Kind, partner
from threefold.schedule.actions import RECEIVES, SENDS
from threefold.simulate import Event, Timeline

_WIDTH, _MARGIN = 1200.0, 130.0
_LANE, _LINE, _GAP = 26.0, 5.0, 14.0
_LABEL_WIDTH = 8.0
"""Pixels of a letter: an action that is narrower than its text has none."""

_COLOURS: Mapping[Kind, str] = {
    Kind.F: "#4c78a8",
    Kind.B: "#59a14f",
    Kind.I: "#76b7b2",
    Kind.W: "#b6992d",
    Kind.SYNC: "#e15759",
    Kind.STEP: "#79706e",
    Kind.SEND_F: "#4c78a8",
    Kind.SEND_B: "#59a14f",
    Kind.RECV_F: "#4c78a8",
    Kind.RECV_B: "#59a14f",
}
_LEGEND: Mapping[Kind, str] = {
    Kind.F: "F forward",
    Kind.B: "B backward",
    Kind.I: "I input gradient",
    Kind.W: "W weight gradient",
    Kind.SYNC: "gradient sync",
    Kind.STEP: "optimizer",
}
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em; color: #222; background: #fff; }
h1 { font-size: 1.25em; } svg { font: 11px system-ui, sans-serif; } table { border-collapse: collapse; margin: 1em 0; }
td, th { padding: 2px 10px; text-align: right; border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; }
.key { display: inline-block; margin-right: 1.2em; } .key i { display: inline-block; width: 1em; height: .8em; }
"""


def timeline_page(comparison: Comparison) -> str:
    """The page: hovering over an action says what it is, from when to when."""
    keys = "".join(f'<span class="key"><i style="background:{_COLOURS[k]}"></i> {w}</span>' for k, w in _LEGEND.items())
    title = escape(comparison.title)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head><body>',
            f"<h1>{title}</h1>",
            f"<p>Simulated with {escape(comparison.costs)}. Thin bars below a rank are its transfers.</p>",
            f"<p>{keys}</p>",
            *_picture(comparison.pair),
            *_table(summary_rows(comparison)),
            *_table(rank_rows(comparison)),
            "</body></html>",
            "",
        ]
    )


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "<table>"
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        yield "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
    yield "</table>"


def _picture(pair: Mapping[str, Timeline]) -> Iterator[str]:
    seconds = max(timeline.makespan_s for timeline in pair.values()) or 1.0
    scale = _WIDTH / seconds
    num_ranks = max(timeline.num_ranks for timeline in pair.values())
    block = num_ranks * (_LANE + 2 * _LINE + _GAP)
    height = len(pair) * (block + _GAP) + 2 * _GAP
    yield f'<svg width="{_MARGIN + _WIDTH + 20:g}" height="{height:g}" role="img" aria-label="timeline">'
    yield from _axis(seconds, scale, height)
    for place, (words, timeline) in enumerate(pair.items()):
        yield from _rows(words, timeline, scale, place * (block + _GAP) + 2 * _GAP)
    yield "</svg>"


def _axis(seconds: float, scale: float, height: float) -> Iterator[str]:
    for tick in range(11):
        time_s = seconds * tick / 10
        x = _MARGIN + time_s * scale
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{height:g}" stroke="#eee"/>'
        yield f'<text x="{x:.1f}" y="12" text-anchor="middle" fill="#666">{format_seconds(time_s)}</text>'


def _rows(words: str, timeline: Timeline, scale: float, top: float) -> Iterator[str]:
    for rank in range(timeline.num_ranks):
        y = top + rank * (_LANE + 2 * _LINE + _GAP)
        yield f'<text x="0" y="{y + 16:g}">rank {rank} {words}</text>'
        width = timeline.makespan_s * scale
        yield f'<rect x="{_MARGIN:g}" y="{y:g}" width="{width:.2f}" height="{_LANE:g}" fill="#f4f4f4"/>'
    for event in timeline.events:
        yield from _event(event, scale, top + event.rank * (_LANE + 2 * _LINE + _GAP))


def _event(event: Event, scale: float, y: float) -> Iterator[str]:
    x, width = _MARGIN + event.start_s * scale, max(event.duration_s * scale, 0.5)
    transfer = event.kind in SENDS | RECEIVES
    text = str(event.action)
    about = f" and {partner(event.action)}" if transfer else ""
    hint = f"{text}{about}: {format_seconds(event.start_s)} to {format_seconds(event.end_s)}"
    if transfer:
        y, height = y + _LANE + (_LINE if event.kind in RECEIVES else 0), _LINE - 1
    else:
        height = _LANE
    yield (
        f'<rect data-action="{text}" data-rank="{event.rank}" x="{x:.2f}" y="{y:g}" width="{width:.2f}" '
        f'height="{height:g}" fill="{_COLOURS[event.kind]}" stroke="#fff" stroke-width=".5">'
        f"<title>{hint}</title></rect>"
    )
    label = text if event.action.stage < 0 else f"{event.kind.value}{event.action.microbatch}"
    if not transfer and width >= _LABEL_WIDTH * len(label):
        yield f'<text x="{x + 3:.2f}" y="{y + 17:g}" fill="#fff" pointer-events="none">{label}</text>'
