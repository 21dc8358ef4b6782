"""What can be predicted, but not trained."""

from __future__ import annotations

from collections.abc import Iterator

from threefold.plan.plans import Plan


def prediction_only(plan: Plan) -> Iterator[str]:
    """What of the plan no job file can state, because training does not do it."""
    words = plan.parallelism
    for axis, name in (("cp", "context"), ("ep", "expert")):
        if plan.size(axis) > 1:
            yield f"prediction only: training has no {name} parallelism yet"
    if words["precision"] in ("fp8", "fp4"):
        yield f"prediction only: training does not run in {words['precision']}"
