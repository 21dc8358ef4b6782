"""``threefold plan``: which dp, tp, pp, micro batch, ZeRO stage and recompute, how fast, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threefold.cli.output import say_written, write_output
from threefold.errors import JobError, Problem

if TYPE_CHECKING:
    from threefold.job import ClusterSpec, Job, ModelSpec
    from threefold.plan.plans import PlanResult
    from threefold.plan.question import Question

_OPTIONS: Mapping[str, str] = {
    "model": "--model",
    "cluster.device": "--gpu",
    "cluster.nodes": "--nodes",
    "cluster.devices_per_node": "--gpus-per-node",
    "cluster.inter_node": "--inter-node",
    "data.sequence_length": "--sequence-length",
}
"""The option that states a key of a job."""


@dataclass(frozen=True)
class Asked:
    """The words of a question that is asked without a job file; None is not given."""

    model: str | None
    gpu: str | None
    nodes: int | None
    gpus_per_node: int | None
    inter_node: str | None
    global_batch: int | None
    sequence_length: int | None

    def given(self) -> list[str]:
        """The options that are given."""
        return [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None]


def plan(
    job: Path | None,
    model: str | None,
    gpu: str | None,
    nodes: int | None,
    gpus_per_node: int | None,
    global_batch: int | None,
    sequence_length: int | None,
    fix: list[str],
    top: int,
    json_: bool,
    output: Path | None,
    as_is: bool,
    inter_node: str | None,
    set_: list[str],
    profile: Path | None = None,
) -> None:
    """Print the best plans for a job file or for a question in words, or with ``as_is`` what a job file amounts to.

    Raises JobError for wrong input, InfeasibleError when nothing fits, in both cases with what would help.
    """
    asked = Asked(model, gpu, nodes, gpus_per_node, inter_node, global_batch, sequence_length)
    _check_options(job, asked, fix, top, output, as_is, set_, profile)
    if job is not None:
        _plan_job(job, set_, fix, top, json_, output, as_is, profile)
    else:
        _plan_question(asked, fix, top, json_, output)


def _check_options(
    job: Path | None,
    asked: Asked,
    fix: Sequence[str],
    top: int,
    output: Path | None,
    as_is: bool,
    set_: Sequence[str],
    profile: Path | None,
) -> None:
    problems = [] if 1 <= top <= 1000 else [Problem("--top", f"{top} is not from 1 to 1000", "use 5")]
    if job is not None:
        message, fix_words = "contradicts the job file, which states it", "leave it out, or change the job with --set"
        problems += [Problem(name, message, fix_words) for name in asked.given()]
        if as_is:
            stated = [name for name, value in (("--fix", fix), ("-o", output)) if value]
            message = "contradicts --as-is, which predicts the job as it stands"
            problems += [Problem(name, message, "leave one of them out") for name in stated]
    else:
        stated = [name for name, value in (("--as-is", as_is), ("--set", set_), ("--profile", profile)) if value]
        problems += [Problem(name, "needs a job file", "name one: threefold plan JOB") for name in stated]
        problems += _missing(asked)
    if problems:
        raise JobError(problems)


def _missing(asked: Asked) -> list[Problem]:
    examples = {"model": "gpt3-175b", "gpu": "a100-80gb", "global_batch": "512"}
    missing = [name for name in examples if getattr(asked, name) is None]
    if len(missing) == len(examples):
        fix = "state --model, --gpu, --nodes and --global-batch, or name a job file"
        return [Problem("plan", "there is nothing to plan", fix)]
    options = {name: f"--{name.replace('_', '-')}" for name in missing}
    return [
        Problem(option, "is missing", f"state it, like {option} {examples[name]}") for name, option in options.items()
    ]


def _plan_job(
    path: Path,
    set_: list[str],
    fix: Sequence[str],
    top: int,
    json_: bool,
    output: Path | None,
    as_is: bool,
    profile_path: Path | None,
) -> None:
    from threefold.cli.partition import profile_of
    from threefold.job import load_job
    from threefold.plan.as_is import predict_job
    from threefold.plan.to_job import balanced_job, question_of, replanned_job

    job = load_job(path, set_)
    profile = profile_of(profile_path, job)
    if as_is:
        result = predict_job(job, profile)
        _show(result, json_)
        if not result.plans[0].fits:
            from threefold.errors import InfeasibleError

            raise InfeasibleError(f"{path}: {result.plans[0].reasons[0]}")
        return
    question = question_of(job, profile)
    result = _answer(replace(question, fixed={**question.fixed, **_fixed_of(job, fix)}), top, json_)
    _show(result, json_)
    if output is not None:
        planned = replanned_job(result.plans[0], job)
        _write(output, planned if profile is None else balanced_job(planned, profile))


def _fixed_of(job: Job, fix: Sequence[str]) -> Mapping[str, int]:
    """What is fixed for a job: what the command line says, and the number format that the job states."""
    fixed = _fixed(fix)
    stated = {"precision": job.precision} if job.precision in ("fp16", "bf16") else {}
    from threefold.plan.question import read_fixed

    return {**read_fixed(stated), **fixed}


def _plan_question(asked: Asked, fix: Sequence[str], top: int, json_: bool, output: Path | None) -> None:
    from threefold.plan.to_job import new_job

    model, cluster, question = _question(asked, fix)
    result = _answer(question, top, json_)
    _show(result, json_)
    if output is not None:
        _write(output, new_job(result.plans[0], model, cluster, question.sequence_length))


def _question(asked: Asked, fix: Sequence[str]) -> tuple[ModelSpec, ClusterSpec, Question]:
    """The question in words, judged as a job is. Raises JobError with all problems of model, machines and decisions."""
    from threefold.cost.hardware import build_hardware, find_device
    from threefold.plan.question import Question

    problems: list[Problem] = []

    def collect(make: Any, *arguments: Any) -> Any:
        try:
            return make(*arguments)
        except JobError as error:
            problems.extend(_renamed(problem) for problem in error.problems)
            return None

    model = collect(_model, asked)
    cluster = collect(_cluster, asked)
    collect(find_device, asked.gpu)
    fixed = collect(_fixed, fix)
    batch = collect(_batch, asked)
    if problems:
        raise JobError(problems)
    length = asked.sequence_length or model.max_position_embeddings
    return model, cluster, Question(model, length, build_hardware(cluster), batch, fixed)


def _renamed(problem: Problem) -> Problem:
    """The problem under the name of the option that states its key."""
    for key, option in _OPTIONS.items():
        if problem.key == key or problem.key.startswith(f"{key}."):
            return replace(problem, key=option)
    return problem


def _model(asked: Asked) -> ModelSpec | None:
    from threefold.job import parse_job

    path = Path(asked.model or "")
    source = {"hf": str(path.parent if path.is_file() else path)} if path.exists() else {"preset": asked.model}
    data = {} if asked.sequence_length is None else {"data": {"sequence_length": asked.sequence_length}}
    return parse_job({"model": source, **data, "train_batch_size": 1}).model


def _cluster(asked: Asked) -> ClusterSpec | None:
    from threefold.job import parse_job

    nodes = 1 if asked.nodes is None else asked.nodes
    each = 8 if asked.gpus_per_node is None else asked.gpus_per_node
    network = {} if asked.inter_node is None else {"inter_node": asked.inter_node}
    cluster = {"device": asked.gpu, "nodes": nodes, "devices_per_node": each, **network}
    return parse_job({"cluster": cluster, "train_micro_batch_size_per_gpu": 1}).cluster


def _batch(asked: Asked) -> int:
    batch = asked.global_batch or 0
    if not 1 <= batch <= 10**9:
        raise JobError([Problem("--global-batch", f"{batch} is no number of sequences", "use 1 or more, like 512")])
    return batch


def _fixed(fix: Sequence[str]) -> Mapping[str, int]:
    from threefold.plan.question import read_fixed, split_fixes

    settings, problems = split_fixes(fix)
    try:
        fixed = read_fixed(settings)
    except JobError as error:
        problems.extend(error.problems)
        fixed = {}
    if problems:
        raise JobError(problems)
    return fixed


def _answer(question: Question, top: int, json_: bool) -> PlanResult:
    """The answer; where nothing fits, JSON still gets the counts before the error goes its way."""
    from threefold.plan.misses import NothingFitsError
    from threefold.plan.planner import answer

    try:
        return answer(question, top)
    except NothingFitsError as error:
        if json_:
            _show(error.result, json_)
        raise


def _show(result: PlanResult, json_: bool) -> None:
    if json_:
        import json

        print(json.dumps(result.to_dict()))
        return
    from threefold.report.plans import print_plans

    print_plans(result)


def _write(path: Path, settings: Mapping[str, Any]) -> None:
    import json
    import sys

    from threefold.job.keys import MISSING, lookup

    write_output("-o", path, json.dumps(settings, indent=2) + "\n")
    say_written(path)
    missing = [key for key in ("steps", "data.train") if lookup(settings, key) is MISSING]
    if missing:
        print(f"To train it, state {' and '.join(missing)}: in the file, or with --set.", file=sys.stderr)
