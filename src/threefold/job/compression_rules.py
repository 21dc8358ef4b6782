"""What compressed gradients agree with, and the nearest that does where they don't."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from threefold.errors import Problem
from threefold.job.spec import JobFile

STAGE, TYPE, FORMAT = "zero_optimization.stage", "gradient_compression.type", "communication_data_type"
START, FREEZE, CLIPPING = "gradient_compression.start_step", "optimizer.params.freeze_step", "gradient_clipping"
OPTIMIZER = "optimizer.type"


def _has_power_sgd(file: JobFile) -> bool:
    return file.gradient_compression.type == "powersgd"


def _has_one_bit(file: JobFile) -> bool:
    return file.optimizer.type == "OneBitAdam"


def _half_sums_keep_small_gradients(file: JobFile) -> Iterator[Problem]:
    if file.communication_data_type == "fp16" and not file.fp16.enabled:
        message = "fp16 loses gradients below 6e-8, and only fp16 training has a loss scale to keep them above"
        yield Problem(FORMAT, message, 'write "bf16", which has the range of fp32, or set fp16.enabled to true')


def _one_compression(file: JobFile) -> Iterator[Problem]:
    if _has_power_sgd(file) and _has_one_bit(file):
        message = "powersgd and OneBitAdam both compress the gradients"
        yield Problem(TYPE, message, 'write "none", or set optimizer.type to "AdamW"')


def _compressed_in_full_precision(file: JobFile) -> Iterator[Problem]:
    if file.communication_data_type in ("fp16", "bf16") and (_has_power_sgd(file) or _has_one_bit(file)):
        name = "powersgd" if _has_power_sgd(file) else "OneBitAdam"
        message = f"{file.communication_data_type} would round what {name} compresses already"
        yield Problem(FORMAT, message, "leave it out: of the gradients little is sent anyway")


def _power_sgd_has_whole_gradients(file: JobFile) -> Iterator[Problem]:
    stage = file.zero_optimization.stage
    if _has_power_sgd(file) and stage >= 2:
        message = f"powersgd factors whole gradient matrices, but ZeRO stage {stage} keeps a part of each"
        yield Problem(STAGE, message, 'set it to 1, or gradient_compression.type to "none"')


def _power_sgd_feeds_finite_errors_back(file: JobFile) -> Iterator[Problem]:
    if _has_power_sgd(file) and file.fp16.enabled:
        message = "powersgd would keep the infinities of an fp16 overflow in what it feeds back"
        yield Problem(TYPE, message, 'write "none", or use bf16 instead of fp16')


def _one_bit_has_whole_momentum(file: JobFile) -> Iterator[Problem]:
    stage = file.zero_optimization.stage
    if _has_one_bit(file) and stage >= 1:
        message = f"OneBitAdam keeps the whole momentum on every replica, but ZeRO stage {stage} splits it"
        yield Problem(STAGE, message, 'set it to 0 and remove offload_*, or optimizer.type to "AdamW"')


def _one_bit_never_sums_gradients(file: JobFile) -> Iterator[Problem]:
    if _has_one_bit(file) and file.gradient_clipping > 0:
        message = "OneBitAdam never sums the gradients, so the norm that clipping needs is not known"
        yield Problem(CLIPPING, message, 'set it to 0, or optimizer.type to "AdamW"')


def _freeze_step_fits(file: JobFile) -> Iterator[Problem]:
    freeze, near = file.optimizer.params.freeze_step, max(1, (file.steps or 500) // 5)
    if not _has_one_bit(file):
        if freeze is not None:
            message = f"{file.optimizer.type} freezes nothing"
            yield Problem(FREEZE, message, 'remove it, or set optimizer.type to "OneBitAdam"')
        return
    if freeze is None:
        yield Problem(FREEZE, "is missing, and OneBitAdam starts with that many steps of Adam", f"set it to {near}")
    elif file.steps is not None and freeze >= file.steps:
        message = f"{freeze} steps of Adam leave none of the {file.steps} to compress"
        yield Problem(FREEZE, message, f'set it to {near}, or optimizer.type to "AdamW"')


def _power_sgd_starts(file: JobFile) -> Iterator[Problem]:
    start = file.gradient_compression.start_step
    if _has_power_sgd(file) and file.steps is not None and start >= file.steps:
        message = f"{start} steps without it leave none of the {file.steps} to compress"
        yield Problem(START, message, f'set it to {file.steps // 10}, or gradient_compression.type to "none"')


COMPRESSION_RULES: tuple[tuple[tuple[str, ...], Callable[[JobFile], Iterator[Problem]]], ...] = (
    ((FORMAT, "fp16.enabled"), _half_sums_keep_small_gradients),
    ((TYPE, OPTIMIZER), _one_compression),
    ((FORMAT, TYPE, OPTIMIZER), _compressed_in_full_precision),
    ((TYPE, STAGE), _power_sgd_has_whole_gradients),
    ((TYPE, "fp16.enabled"), _power_sgd_feeds_finite_errors_back),
    ((OPTIMIZER, STAGE), _one_bit_has_whole_momentum),
    ((OPTIMIZER, CLIPPING), _one_bit_never_sums_gradients),
    ((OPTIMIZER, FREEZE, "steps"), _freeze_step_fits),
    ((TYPE, START, "steps"), _power_sgd_starts),
)
