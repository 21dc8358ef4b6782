"""``threefold timeline``: what a run's ranks did in a step, beside what the simulator makes of the same job."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threefold.report.timeline_compare import Comparison


def timeline(run_dir: Path, step: int | None, html: Path | None, trace: Path | None, json_: bool) -> None:
    """Print a step of a run as text or JSON, and write a page or a trace of it.

    Raises JobError when the run has no recorded steps or not this one, or a file can't be written.
    """
    from threefold.measure.timeline import compare

    comparison = compare(run_dir, step)
    if html is not None:
        from threefold.report.timeline_html import timeline_page

        _write("--html", html, comparison, timeline_page)
    if trace is not None:
        from threefold.report.trace import chrome_trace_json

        _write("--trace", trace, comparison, lambda comparison: chrome_trace_json(comparison.timelines))
    if json_:
        import json

        print(json.dumps(comparison.to_dict()))
    else:
        from threefold.report.timeline_compare import format_comparison

        print(format_comparison(comparison))


def _write(option: str, path: Path, comparison: Comparison, text_of: Callable[[Comparison], str]) -> None:
    from threefold.errors import JobError, Problem

    try:
        path.write_text(text_of(comparison), encoding="utf-8")
    except OSError as error:
        fix = "name a file in a directory that exists and can be written to"
        raise JobError([Problem(option, f"{path} can't be written: {error.strerror}", fix)]) from None
    print(f"wrote {path}", file=sys.stderr)
