"""``threefold data``: text to token directories, and a look inside one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from threefold.train.data.build import BuildReport, BuildRequest
    from threefold.train.data.meta import TokenMeta

app = typer.Typer(name="data", help="Make and inspect token directories.", no_args_is_help=True)

_SHOWN_SKIPPED = 5


@app.command()
def build(
    sources: Annotated[
        list[Path], typer.Argument(metavar="SOURCE", help="Text, .jsonl(.gz) or .parquet files, or directories.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to make.")],
    tokenizer: Annotated[
        str, typer.Option(metavar="TOKENIZER", help="bytes, bpe:SIZE, or the path of a tokenizer.json.")
    ],
    validation_fraction: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of the documents that is held out; 0 holds out nothing.")
    ] = 0.01,
    pattern: Annotated[str, typer.Option(help="Names of the files to take from directories.")] = "*",
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Leave out files and directories so named; repeatable.")
    ] = None,
    text_key: Annotated[str, typer.Option(metavar="KEY", help="JSONL key or Parquet column with the text.")] = "text",
    limit_bytes: Annotated[int, typer.Option(metavar="N", help="Stop after N bytes of text; 0 reads it all.")] = 0,
    seed: Annotated[int, typer.Option(help="Decides which documents are held out.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the token directory that is there.")] = False,
) -> None:
    """Turn text into a token directory to train on.

    Files that are not UTF-8 text are left out and counted. Hidden files are left out.
    """
    from rich.console import Console

    from threefold.train.data.build import BuildRequest

    request = BuildRequest(
        sources=tuple(sources),
        out=out,
        tokenizer=tokenizer,
        validation_fraction=validation_fraction,
        pattern=pattern,
        exclude=tuple(exclude or ()),
        text_key=text_key,
        limit_bytes=limit_bytes,
        seed=seed,
        overwrite=overwrite,
    )
    _print_report(Console(), request, _build_with_progress(request))


@app.command()
def show(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A token directory.")],
    tokens: Annotated[int, typer.Option(metavar="N", min=0, help="Tokens of each split to decode.")] = 64,
) -> None:
    """Print what a token directory holds, and the text of its first tokens."""
    from rich.console import Console

    from threefold.train.data.dataset import map_tokens
    from threefold.train.data.meta import read_meta
    from threefold.train.data.tokenizer import open_tokenizer

    meta = read_meta(directory)
    console = Console()
    _print_meta(console, meta)
    codec = open_tokenizer(directory, meta)
    for name, split in meta.splits.items():
        first = map_tokens(directory / split.file, split.tokens, meta.dtype)[:tokens].tolist()
        console.print(f"\nfirst {len(first)} tokens of {name}: {first}", markup=False, highlight=False, soft_wrap=True)
        console.print(codec.decode(first), markup=False, highlight=False, soft_wrap=True)


def _build_with_progress(request: BuildRequest) -> BuildReport:
    """Build with a progress bar on stderr; without a terminal there is none."""
    from rich.console import Console
    from rich.progress import Progress

    from threefold.train.data.build import build_token_directory

    # The tokenizers library otherwise warns when a process that has used its threads forks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("starting", total=1.0)
        return build_token_directory(
            request, lambda what, share: progress.update(task, description=what, completed=share)
        )


def _print_report(console: Console, request: BuildRequest, report: BuildReport) -> None:
    console.print(f"wrote {request.out}", markup=False, highlight=False, soft_wrap=True)
    _print_meta(console, report.meta)
    if report.skipped:
        names = ", ".join(str(path) for path in report.skipped[:_SHOWN_SKIPPED])
        more = ", ..." if len(report.skipped) > _SHOWN_SKIPPED else ""
        console.print(f"left out, not UTF-8 text: {names}{more}", markup=False, highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def _print_meta(console: Console, meta: TokenMeta) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row(
        "tokenizer", f"{meta.tokenizer}, {meta.vocab_size:,} ids ({meta.dtype}), end of text {meta.end_of_text}"
    )
    table.add_row(
        "text", f"{meta.documents:,} documents, {meta.text_bytes:,} bytes, {meta.skipped_files:,} files left out"
    )
    for name, split in meta.splits.items():
        table.add_row(name, f"{split.tokens:,} tokens, {split.documents:,} documents")
    table.add_row("fingerprint", meta.fingerprint)
    console.print(table)
