"""From a file or a mapping to a judged Job: read, override, translate, validate, solve, judge, all problems at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threefold.errors import JobError
from threefold.job.batch import Sizes, resolve_sizes
from threefold.job.deepspeed import translate_settings
from threefold.job.files import check_plain, read_settings
from threefold.job.hugging_face import resolve_model
from threefold.job.keys import MISSING, assign, lookup, remove
from threefold.job.messages import Findings
from threefold.job.overrides import BATCH_KEYS, LAYOUT_KEYS, Override, apply_overrides, parse_overrides
from threefold.job.rules import judge, num_chunks
from threefold.job.spec import CHUNKS_OF, DataParallel, Job, JobFile
from threefold.job.validate import validated

TOTAL, MICRO, ACCUMULATION = BATCH_KEYS
EDITOR_SCHEMA = "$schema"  # names the schema to an editor; nothing of the job


@dataclass(frozen=True)
class Loaded:
    """A job, and notes on keys of its file that were understood but have no effect."""

    job: Job
    notes: tuple[str, ...]


def load_job(path: str | Path, overrides: Sequence[str] = (), *, world_size: int | None = None) -> Job:
    """The job in the file at ``path`` with ``KEY=VALUE`` overrides, on ``world_size`` processes where that is known.

    Raises JobError with all problems at once.
    """
    return read_job(path, overrides, world_size=world_size).job


def read_job(path: str | Path, overrides: Sequence[str] = (), *, world_size: int | None = None) -> Loaded:
    """Like ``load_job``, with the notes."""
    return _build(read_settings(Path(path)), overrides, world_size)


def parse_job(data: Mapping[str, Any], overrides: Sequence[str] = (), *, world_size: int | None = None) -> Job:
    """The job in a mapping, judged as ``load_job`` judges a file. Raises JobError with all problems at once."""
    return _build(data, overrides, world_size).job


def _build(settings: Mapping[str, Any], texts: Sequence[str], world_size: int | None) -> Loaded:
    findings = Findings()
    overrides = parse_overrides(texts, findings)
    changed = apply_overrides(settings, overrides, findings)
    changed = _give_way(remove(changed, EDITOR_SCHEMA), settings, overrides, world_size)
    odd = check_plain(changed)
    if odd:
        raise JobError([*findings.problems, *odd])
    file = _file(changed, findings)
    verdicts = judge(file, findings)  # before sizes are solved, so that neither silences the other
    sizes = resolve_sizes(file, world_size, findings)
    findings.problems.extend(verdicts)
    if findings.problems or sizes is None:
        raise JobError(findings.problems)
    return Loaded(_resolved(file, sizes), tuple(findings.notes))


def _file(settings: Mapping[str, Any], findings: Findings) -> JobFile:
    return validated(resolve_model(translate_settings(settings, findings), findings), findings)


def _resolved(file: JobFile, sizes: Sizes) -> Job:
    pipeline = file.parallelism.pp.model_copy(update={"chunks": num_chunks(file)})
    parallelism = file.parallelism.model_copy(update={"dp": DataParallel(size=sizes.dp), "pp": pipeline})
    solved = {
        "parallelism": parallelism,
        TOTAL: sizes.train_batch_size,
        MICRO: sizes.micro_batch,
        ACCUMULATION: sizes.accumulation,
    }
    return Job(**{**dict(file), **solved})


def _give_way(
    changed: dict[str, Any], settings: Mapping[str, Any], overrides: Sequence[Override], world_size: int | None
) -> dict[str, Any]:
    """Let the file's accumulation give way to a layout or batch that the command line states.

    A layout without a batch keeps the file's train_batch_size (and micro batch, where stated), so that the run computes
    the same steps on other devices.
    """
    batch_set = {key for key in BATCH_KEYS for override in overrides if override.touches([key])}
    if ACCUMULATION in batch_set:
        return changed
    if not batch_set and any(override.touches(LAYOUT_KEYS) for override in overrides):
        changed = _keep_batch(changed, settings, world_size)
    both_others = all(lookup(changed, key) is not MISSING for key in (TOTAL, MICRO))
    layout_or_batch = batch_set or any(override.touches(LAYOUT_KEYS) for override in overrides)
    return remove(changed, ACCUMULATION) if layout_or_batch and both_others else changed


def _keep_batch(changed: dict[str, Any], settings: Mapping[str, Any], world_size: int | None) -> dict[str, Any]:
    stated = [key for key in BATCH_KEYS if lookup(settings, key) is not MISSING]
    sizes = _sizes_of(settings, world_size) or _sizes_of(settings, None)
    if len(stated) < 2 or sizes is None:
        return changed  # the total alone keeps itself; a micro batch alone states no total to keep
    return assign(assign(changed, TOTAL, sizes.train_batch_size), MICRO, sizes.micro_batch)


def _sizes_of(settings: Mapping[str, Any], world_size: int | None) -> Sizes | None:
    """The sizes of the file as it stands; None where they have no answer, which is said elsewhere if it matters."""
    if check_plain(settings):
        return None
    ignored = Findings()
    return resolve_sizes(_file(settings, ignored), world_size, ignored)


def relayout(
    job: Job,
    *,
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    sequence_parallel: bool | None = None,
    partition: str | Sequence[float] | None = None,
    order: str | None = None,
    micro_batch: int | None = None,
    accumulation: int | None = None,
) -> Job:
    """The same training on another layout: what is not given stays, and so does train_batch_size.

    The accumulation follows, or, when only ``accumulation`` is given, the micro batch; both together state a new batch
    size. A cluster that the new layout does not fill is dropped, and so is a partition for another number of stages,
    and a schedule file for another pipeline. A new schedule has the chunks that it needs: 2 where any number would do.
    Raises JobError with all problems at once.
    """
    settings = job.model_dump(mode="json", exclude_none=True)
    written = job.parallelism.pp.schedule_file is not None
    if written and (schedule is not None or pp not in (None, job.pp)):
        settings = remove(settings, "parallelism.pp.schedule_file")
        schedule = schedule or "1f1b"
    if schedule is not None:
        settings = remove(settings, "parallelism.pp.chunks")
        chunks = chunks or _fewest_chunks(schedule)
    changes = {
        "parallelism.dp.size": dp,
        "parallelism.tp.size": tp,
        "parallelism.pp.size": pp,
        "parallelism.pp.schedule": schedule,
        "parallelism.pp.chunks": chunks,
        "parallelism.tp.sequence_parallel": sequence_parallel,
        "parallelism.pp.partition": partition if partition is None or isinstance(partition, str) else list(partition),
        "parallelism.order": order,
        **_batch_changes(job, micro_batch, accumulation),
    }
    if (pp or job.pp) * (chunks or job.parallelism.pp.chunks) != job.parallelism.pp.num_stages:
        settings = remove(settings, "activation_checkpointing.stages")
        settings = remove(settings, "parallelism.pp.partition") if partition is None else settings
    for key in BATCH_KEYS:
        settings = remove(settings, key)
    for key, value in changes.items():
        settings = settings if value is None else assign(settings, key, value)
    world = (dp or job.dp) * (tp or job.tp) * (pp or job.pp)
    fits = job.cluster is None or job.cluster.num_devices == world
    return parse_job(settings if fits else remove(settings, "cluster"))


def _fewest_chunks(schedule: str) -> int | None:
    """What a schedule must have; None for an unknown one, which is refused as such."""
    if schedule not in CHUNKS_OF:
        return None
    return CHUNKS_OF[schedule] or (2 if schedule == "interleaved_1f1b" else 1)


def _batch_changes(job: Job, micro_batch: int | None, accumulation: int | None) -> dict[str, int | None]:
    if micro_batch is not None and accumulation is not None:
        return {MICRO: micro_batch, ACCUMULATION: accumulation}
    if accumulation is not None:
        return {TOTAL: job.train_batch_size, ACCUMULATION: accumulation}
    return {TOTAL: job.train_batch_size, MICRO: job.micro_batch if micro_batch is None else micro_batch}


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file, for editors."""
    schema = JobFile.model_json_schema()
    model = schema["$defs"]["ModelSpec"]
    model["anyOf"] = [{"required": ["preset"]}, {"required": ["hf"]}, {"required": model.pop("required")}]
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "threefold job"}
    return _with_standard_bounds(whole)


def _with_standard_bounds(schema: Any) -> Any:
    """Spell pydantic's bounds as JSON schema does; it leaves its own names where a value is converted first."""
    if isinstance(schema, list):
        return [_with_standard_bounds(entry) for entry in schema]
    if isinstance(schema, dict):
        return {_BOUNDS.get(key, key): _with_standard_bounds(value) for key, value in schema.items()}
    return schema


_BOUNDS: Mapping[str, str] = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
}
