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
    """Run the command line and exit: 0 is success, 1 a failed run, 2 a wrong job, 130 a stop by Ctrl-C.

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
