"""The prediction of a job as it stands: nothing is searched."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from threefold.job import Job
from threefold.layout import compression_of
from threefold.plan.limits import limits
from threefold.plan.options import balanced_layers, even_layers
from threefold.plan.plans import Plan, PlanResult, predict
from threefold.plan.play import played
from threefold.plan.reasons import Reason
from threefold.plan.to_job import question_of, strategy_of
from threefold.plan.wording import format_gigabytes


def predict_job(job: Job) -> PlanResult:
    """One plan, the job's own, whether it fits or not. Raises JobError for what can't be predicted."""
    start_s = time.perf_counter()
    question = question_of(job)
    one = played(question, predict(question, strategy_of(job))[0])
    one = replace(one, reasons=(*_verdict(one), *limits(question, one), *_assumptions(job)))
    rejected = {} if one.fits else {str(Reason.MEMORY): 1}
    return PlanResult(question, (one,), 1, int(one.fits), time.perf_counter() - start_s, rejected)


def _verdict(plan: Plan) -> Iterator[str]:
    if not plan.fits:
        over = format_gigabytes(plan.peak_memory_bytes - plan.usable_memory_bytes)
        yield (
            f"Does not fit: a device needs {format_gigabytes(plan.peak_memory_bytes)}, {over} more than the "
            f"{format_gigabytes(plan.usable_memory_bytes)} that are usable."
        )


def _assumptions(job: Job) -> Iterator[str]:
    """What of the job is predicted as something else."""
    stated = job.parallelism.pp.partition
    if job.model is not None and not isinstance(stated, str):
        count = job.model.num_hidden_layers
        if tuple(stated) not in (even_layers(count, job.pp), balanced_layers(count, job.pp)):
            yield f"The partition {list(stated)} is judged as an even one."
    if job.optimizer.type == "SGD":
        yield "The optimizer SGD is judged as AdamW, whose states are larger."
    if compression_of(job) is not None or job.communication_data_type is not None:
        yield "The time of communication is that of gradients that are not compressed."
