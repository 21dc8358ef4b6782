"""The ``threefold`` command: its verbs and options. What a verb does is imported when it runs.

Asking for help or for an explanation must be instant, so nothing heavy is imported here, above all not torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

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


def main() -> None:
    """Run the command line and exit: 0 success, 1 a failed run, 2 a wrong job, 3 nothing fits, 130 a stop by Ctrl-C.

    An error that threefold raises on purpose is told in its own words. Any other is our bug, and keeps its traceback.
    """
    try:
        app(prog_name="threefold")  # also when run by `python -m threefold`
    except ThreefoldError as error:
        _print_error(str(error))
        sys.exit(error.exit_status)


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
) -> None:
    """Train as the job says, on processes that this command starts, or as one of those that torchrun started."""
    from threefold.cli.train import train as run

    run(job, run_dir, set_ or [])


@app.command()
def check(job: JobFile, set_: Overrides = None) -> None:
    """Judge a job without running it: every problem at once, each with a fix."""
    from threefold.cli.check import check as run

    run(job, set_ or [])


@app.command()
def explain(job: JobFile, set_: Overrides = None) -> None:
    """Say who computes what, who talks to whom, when and how often."""
    from threefold.cli.explain import explain as run

    run(job, set_ or [])


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
) -> None:
    """Choose the strategy: the fastest layouts that fit, with time, memory and reasons; or predict a job."""
    from threefold.cli.plan import plan as run

    run(
        job, model, gpu, nodes, gpus_per_node, global_batch, sequence_length, fix or [], top, json_, output, as_is,
        inter_node, set_ or [],
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
