"""The ``threefold`` command: its verbs and options. What a verb does is imported when it runs.

Asking for help or for an explanation must be instant, so nothing heavy is imported here, above all not torch.
"""

from __future__ import annotations

import errno
import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from threefold.cli.data import app as data_app
from threefold.errors import ThreefoldError

# Plain help: drawing it with rich would take longer than everything else together.
app = typer.Typer(
    name="threefold",
    help="Trains large language models with data, tensor and pipeline parallelism, equal to one process.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app)

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Job file, JSON or YAML.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job, like parallelism.tp.size=2."),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="Measured costs, by `threefold profile`, instead of modelled ones."),
]
PartitionWords = Annotated[
    str | None,
    typer.Option("--partition", metavar="COUNTS", help="Layers of each stage: 3,3,2,4 or 4.5,3.5; or even, or auto."),
]


def main() -> None:
    """Run the command line and exit: 0 success, 1 a failed run, 2 a wrong job, 3 nothing fits, 130 Ctrl-C, 143 SIGTERM.

    An error that threefold raises on purpose is told in its own words. Any other is our bug, and keeps its traceback.
    """
    _print_what_the_terminal_can()
    try:
        try:
            app(prog_name="threefold")  # also when run by `python -m threefold`
        finally:
            sys.stdout.flush()
    except ThreefoldError as error:
        _print_error(str(error))
        sys.exit(error.exit_status)
    except OSError as error:
        _end_output(error)


def _print_what_the_terminal_can() -> None:
    """Print "?" for a character that the output's encoding lacks, rather than fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def _end_output(error: OSError) -> NoReturn:
    """End when nobody reads on (``| head``) or the output can't be written; another error is our bug."""
    if error.errno not in (errno.EPIPE, errno.ENOSPC):
        raise error
    if error.errno == errno.ENOSPC:
        _print_error("the output can't be written: no space left where it goes")
    # Python flushes once more as it exits, and would complain about what is still in the buffer.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from threefold import __version__

        print(f"threefold {__version__}")
        raise typer.Exit


@app.command()
def train(
    job: JobFile,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where metrics, logs and the resolved job go; default: runs/NAME/NUMBER."),
    ] = None,
    set_: Overrides = None,
    profile: ProfileFile = None,
    partition: PartitionWords = None,
    torch_profile: Annotated[
        str | None,
        typer.Option(
            "--torch-profile", metavar="STEPS", help="Trace steps like 3 or 3:6 on every rank with PyTorch's profiler."
        ),
    ] = None,
) -> None:
    """Train as the job says, on processes that this command starts, or as one of those that torchrun started."""
    from threefold.cli.train import train as run

    run(job, run_dir, set_ or [], profile, partition, torch_profile)


@app.command()
def timeline(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.", show_default=False)],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="The step to show; default: one of median length.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the picture as one HTML page.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Show what each rank did in a step of a run, beside the simulation: bubble, idle time by cause."""
    from threefold.cli.timeline import timeline as run

    run(run_dir, step, html, trace, json_)


@app.command()
def check(job: JobFile, set_: Overrides = None) -> None:
    """Judge a job without running it: every problem at once, each with a fix."""
    from threefold.cli.check import check as run

    run(job, set_ or [])


@app.command()
def explain(
    job: JobFile, set_: Overrides = None, profile: ProfileFile = None, partition: PartitionWords = None
) -> None:
    """Say who computes what, who talks to whom, when and how often."""
    from threefold.cli.explain import explain as run

    run(job, set_ or [], profile, partition)


@app.command()
def profile(
    job: JobFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the measurements are written.")
    ] = Path("profile.json"),
    seconds: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="About how long the parts of the model are measured.")
    ] = 10.0,
    set_: Overrides = None,
) -> None:
    """Measure the model's parts and the links on this machine, for --profile of plan, train and explain."""
    from threefold.cli.profile import profile as run

    run(job, output, seconds, set_ or [])


@app.command()
def plan(
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB", help="Job file to plan for, instead of the options below.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="A known model, or the path of a Hugging Face config.json.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="Kind of device, like a100-80gb.")] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", help="Machines; default: 1.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(metavar="N", help="Devices in each; default: 8.")] = None,
    global_batch: Annotated[int | None, typer.Option(metavar="N", help="Sequences of one optimizer step.")] = None,
    sequence_length: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a sequence; default: the model's longest.")
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Decide something yourself, like tp=8, zero=1, recompute=full; repeatable."
        ),
    ] = None,
    top: Annotated[int, typer.Option(metavar="N", help="Layouts to list.")] = 5,
    json_: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the best plan as a job file.")
    ] = None,
    as_is: Annotated[bool, typer.Option("--as-is", help="Predict the job file as it stands.")] = False,
    inter_node: Annotated[
        str | None, typer.Option(metavar="LINKSxSPEED", help="Network of one node, like 8x200Gb/s.")
    ] = None,
    set_: Overrides = None,
    profile: ProfileFile = None,
) -> None:
    """Choose the strategy: the fastest layouts that fit, with time, memory and reasons; or predict a job."""
    from threefold.cli.plan import plan as run

    run(
        job, model, gpu, nodes, gpus_per_node, global_batch, sequence_length, fix or [], top, json_, output, as_is,
        inter_node, set_ or [], profile,
    )  # fmt: skip


@app.command()
def validate(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="CSV file of published runs.", show_default=False)],
    json_: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compare predictions with published runs: error, bias, coverage of the interval, ranking, memory."""
    from threefold.cli.validate import validate as run

    run(runs, json_)


@app.command()
def schedule(
    name: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="A schedule by name, or a text file that spells one.")
    ],
    stages: Annotated[int | None, typer.Option(metavar="P", min=1, help="Devices of the pipeline.")] = None,
    microbatches: Annotated[int | None, typer.Option(metavar="M", min=1, help="Microbatches of a step.")] = None,
    chunks: Annotated[
        int | None,
        typer.Option(metavar="V", min=1, help="Model chunks on each device; default: what the schedule has."),
    ] = None,
    forward: Annotated[
        str, typer.Option(metavar="F", help="Forward time of a device's share, or of each stage, like 1,1,1.5.")
    ] = "1",
    input_grad: Annotated[str, typer.Option(metavar="I", help="Likewise, backward for the input's gradient.")] = "1",
    weight_grad: Annotated[str, typer.Option(metavar="W", help="Likewise, backward for the weights' gradients.")] = "1",
    p2p: Annotated[str, typer.Option(metavar="C", help="Time of a transfer between two devices.")] = "0",
    memory_limit: Annotated[
        float | None,
        typer.Option(metavar="N", help="For searched: microbatches that a device may hold; default: as 1F1B, P."),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the rows as text.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the text that schedule_file trains.")
    ] = None,
) -> None:
    """Print a pipeline schedule, its bubble and its memory, by name or from a file, which is checked."""
    from threefold.cli.schedule import Asked
    from threefold.cli.schedule import schedule as run

    costs = {"--forward": forward, "--input-grad": input_grad, "--weight-grad": weight_grad, "--p2p": p2p}
    run(name, Asked(stages, microbatches, chunks, memory_limit), costs, text=text, json_=json_, output=output)


@app.command()
def parity(
    job: JobFile,
    world: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Compare every layout of N processes; default: the job's.")
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="Compare this layout, like dp=2,tp=2,pp=2,schedule=gpipe; repeatable."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Number format: float64, float32 or bfloat16.")] = "float64",
    set_: Overrides = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    steps: Annotated[int, typer.Option(metavar="K", min=1, help="Optimizer steps to compare.")] = 2,
    shrink: Annotated[bool, typer.Option("--shrink", help="Use a small model of the same kind.")] = False,
) -> None:
    """Prove that layouts compute what one process computes: loss, every gradient, every parameter."""
    from threefold.cli.parity import parity as run

    run(job, world, layout or [], dtype, set_ or [], json_, steps, shrink)


def _print_error(message: str) -> None:
    """Print to stderr, the word ``error`` in red where a person looks at it."""
    word = typer.style("error", fg="red", bold=True) if sys.stderr.isatty() else "error"
    print(f"{word}: {message}", file=sys.stderr, flush=True)
