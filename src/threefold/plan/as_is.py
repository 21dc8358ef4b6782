"""The prediction of a job as it stands: nothing is searched."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from threefold.cost.parts import model_costs
from threefold.cost.profile import Profile
from threefold.cost.strategies import SCHEDULE_CODES
from threefold.job import Job
from threefold.layout import compression_of
from threefold.plan.balance import play_partition, resolve_partition, schedule_to_play
from threefold.plan.imbalance import current_partition
from threefold.plan.limits import limits
from threefold.plan.plans import Plan, PlanResult, predict
from threefold.plan.play import played
from threefold.plan.reasons import Reason
from threefold.plan.to_job import cut_of, question_of, schedule_like, strategy_of
from threefold.plan.wording import format_gigabytes
from threefold.schedule import job_schedule


def predict_job(job: Job, profile: Profile | None = None) -> PlanResult:
    """One plan, the job's own, whether it fits or not; with a profile by measured costs, stage by stage.

    Raises JobError for what can't be predicted.
    """
    start_s = time.perf_counter()
    question = question_of(job, profile)
    job, _ = resolve_partition(job, profile)
    one = predict(question, strategy_of(job), cut_of(job))[0]
    one = played(question, one, job_schedule(job)) if profile is None else _played_by_profile(job, one, profile)
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


def _played_by_profile(job: Job, one: Plan, profile: Profile) -> Plan:
    """The plan with the step that its schedule takes with the measured costs of its own stages."""
    partition = current_partition(job) or (job.model.num_hidden_layers if job.model else 0,)
    schedule = schedule_to_play(job)
    timeline = play_partition(model_costs(job, profile), partition, schedule)
    # Where fewer microbatches are played, each of the others adds what the busiest rank computes for one.
    busiest_s = float(timeline.compute_s.max()) / schedule.num_microbatches
    step_s = timeline.makespan_s + (job.num_microbatches - schedule.num_microbatches) * busiest_s
    ratio = step_s / one.step_s
    compute_s = busiest_s * job.num_microbatches
    held = float(timeline.peak_memory_bytes.max())
    return replace(
        one,
        timeline=timeline,
        step_s=step_s,
        step_s_low=one.step_s_low * ratio,
        step_s_high=one.step_s_high * ratio,
        tokens_per_s=one.tokens_per_s / ratio,
        tflops_per_gpu=one.tflops_per_gpu / ratio,
        mfu=None if one.mfu is None else one.mfu / ratio,
        compute_s=compute_s,
        bubble_s=max(0.0, timeline.makespan_s - float((timeline.compute_s + timeline.step_s).max())),
        bubble_fraction=timeline.bubble_fraction,
        fits=one.fits and held <= one.usable_memory_bytes,
    )


def _assumptions(job: Job) -> Iterator[str]:
    """What of the job is predicted as something else."""
    pipeline = job.parallelism.pp
    if pipeline.schedule_file is not None or pipeline.schedule not in SCHEDULE_CODES:
        name = pipeline.schedule_file or pipeline.schedule
        yield f"The step time of {name} is judged as that of {schedule_like(job)}; it is itself that is played."
    if job.optimizer.type == "SGD":
        yield "The optimizer SGD is judged as AdamW, whose states are larger."
    if compression_of(job) is not None or job.communication_data_type is not None:
        yield "The time of communication is that of gradients that are not compressed."
