"""The predicted numbers of a job, for its explanation."""

from __future__ import annotations

from threefold.cost.profile import Profile
from threefold.errors import JobError
from threefold.job import Job
from threefold.plan.as_is import predict_job
from threefold.plan.plans import Plan
from threefold.plan.wording import format_gigabytes, format_seconds, percent
from threefold.report.facts import Section, TextTable
from threefold.report.words import format_bytes, format_count

TITLE = "What is predicted"


def prediction_section(job: Job, profile: Profile | None = None) -> Section:
    """Time, memory and traffic of a step, by measured costs where there is a profile.

    Empty for a job without model, data or machines that are known.
    """
    try:
        plan = predict_job(job, profile).plans[0]
    except JobError:  # nothing is known of such machines, say of CPUs: an explanation goes without numbers
        return Section(TITLE, ())
    rows = (*_step_rows(plan), *_memory_rows(plan))
    return Section(TITLE, (TextTable(("quantity", "value", "of which"), rows), *plan.reasons))


def _step_rows(plan: Plan) -> tuple[tuple[str, str, str], ...]:
    interval = f"{format_seconds(plan.step_s_low)} to {format_seconds(plan.step_s_high)} with 90 % confidence"
    exposed = {axis: seconds for axis, seconds in plan.exposed_comm_s.items() if seconds > 0}
    by_axis = ", ".join(f"{axis} {format_seconds(seconds)}" for axis, seconds in exposed.items())
    speed = f"{plan.tokens_per_s:,.0f} tokens/s"
    mfu = "" if plan.mfu is None else f", MFU {percent(plan.mfu)}"
    return (
        ("optimizer step", format_seconds(plan.step_s), interval),
        ("speed", speed, f"{format_count(int(plan.tflops_per_gpu * 1e12))}FLOP/s a device{mfu}"),
        ("bubble", percent(plan.bubble_fraction), "of the step, on the busiest device"),
        ("communication that nothing hides", format_seconds(sum(exposed.values())), by_axis or "none"),
    )


def _memory_rows(plan: Plan) -> tuple[tuple[str, str, str], ...]:
    items = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.memory_bytes.items() if size > 0)
    usable = format_gigabytes(plan.usable_memory_bytes)
    verdict = "fits" if plan.fits else "does not fit"
    return (
        ("memory of the fullest device", f"{format_gigabytes(plan.peak_memory_bytes)}", f"{verdict} {usable}: {items}"),
    )
