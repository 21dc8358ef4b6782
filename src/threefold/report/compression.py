"""What compressing the gradients saves, and whether that can pay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from threefold.cost.traffic import Transfer, estimate_traffic
from threefold.errors import JobError
from threefold.job.spec import Job
from threefold.layout import compression_of
from threefold.plan.as_is import predict_job
from threefold.plan.wording import format_seconds, percent
from threefold.report.communication import listed_stages
from threefold.report.facts import Facts, Section
from threefold.report.words import format_bytes

TITLE = "What compression saves"
PASSES: Mapping[str, int] = MappingProxyType({"all_reduce": 2})
"""How often a ring sends (g - 1)/g of the payload; once where nothing is said."""


def compression_section(facts: Facts) -> Section:
    """Bytes with and without; empty for a job that compresses nothing or sends no gradients."""
    job = facts.job
    asked = compression_of(job) is not None or job.communication_data_type is not None
    if not asked or job.dp == 1 or facts.sequence_length is None:
        return Section(TITLE, ())
    return Section(TITLE, (_saved(job, facts.sequence_length), *_pays(job)))


def gradient_wire_bytes(job: Job, sequence_length: int, *, compressed: bool) -> float:
    """What gradients put on the wire of a ring in a step, from a rank of the stage that sends the most."""
    return max(
        sum(map(_on_the_wire, _gradients(estimate_traffic(job, stage, sequence_length, compressed=compressed))))
        for stage in listed_stages(job.pp)
    )


def _gradients(transfers: tuple[Transfer, ...]) -> Iterator[Transfer]:
    return (each for each in transfers if each.axis.startswith("dp") and "gradient" in each.what)


def _on_the_wire(transfer: Transfer) -> float:
    return PASSES.get(transfer.operation, 1) * transfer.bytes_per_step


def _saved(job: Job, sequence_length: int) -> str:
    whole = job.model_copy(update={"communication_data_type": None})
    before = gradient_wire_bytes(whole, sequence_length, compressed=False)
    after = gradient_wire_bytes(job, sequence_length, compressed=True)
    settings = compression_of(job)
    since = f" from step {settings.start_step + 1} on" if settings and settings.start_step else ""
    return (
        f"Gradients put {format_bytes(after)} a step on the wire for each rank{since}, in place of "
        f"{format_bytes(before)}: {before / after:.3g} times fewer, times (g - 1)/g on a ring over g ranks."
    )


def _pays(job: Job) -> Iterator[str]:
    try:
        plan = predict_job(job).plans[0]
    except JobError:  # nothing is known of such machines
        yield (
            "Whether that pays is not predicted for these machines: it can only save time that dp communication takes "
            "and nothing hides. Train a few steps with and without it, and compare tokens_per_s in metrics.jsonl."
        )
        return
    exposed_s = plan.exposed_comm_s.get("dp", 0.0)
    share = exposed_s / plan.step_s
    verdict = "it can pay" if share > 0.05 else "it does not pay here"
    yield (
        f"Without compression, dp communication that nothing hides takes {format_seconds(exposed_s)} of a step of "
        f"{format_seconds(plan.step_s)}, {percent(share)}: no compression saves more than that, so {verdict}."
    )
