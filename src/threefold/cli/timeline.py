"""``threefold timeline``: what a run's ranks did in a step, beside what the simulator makes of the same job."""

from __future__ import annotations

from pathlib import Path

from threefold.cli.output import say_written, write_output


def timeline(run_dir: Path, step: int | None, html: Path | None, trace: Path | None, json_: bool) -> None:
    """Print a step of a run as text or JSON, and write a page or a trace of it.

    Raises JobError when the run has no recorded steps or not this one, or a file can't be written.
    """
    from threefold.measure.timeline import compare

    comparison = compare(run_dir, step)
    if html is not None:
        from threefold.report.timeline_html import timeline_page

        write_output("--html", html, timeline_page(comparison))
        say_written(html)
    if trace is not None:
        from threefold.report.trace import chrome_trace_json

        write_output("--trace", trace, chrome_trace_json(comparison.timelines))
        say_written(trace)
    if json_:
        import json

        print(json.dumps(comparison.to_dict()))
    else:
        from threefold.report.timeline_compare import format_comparison

        print(format_comparison(comparison))
