"""Turns text into a token directory: one file of token ids a split, and ``meta.json``.

Documents are encoded one after the other, each followed by the end-of-text id. Everything is written into a hidden
directory inside the output and moved out at the end, ``meta.json`` last, so a build that dies leaves nothing that looks
finished.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from threefold.errors import DataError
from threefold.train.data.documents import Corpus, CorpusReader, Piece, find_files
from threefold.train.data.meta import DTYPES, META_FILE, SPLITS, TOKENIZER_FILE, SplitMeta, TokenMeta
from threefold.train.data.order import hash_numbers
from threefold.train.data.tokenizer import TextTokenizer, build_tokenizer, parse_bpe_size
from threefold.train.data.writer import TokenWriter

ProgressCallback = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, 0 to 1."""

BPE_TRAINING_BYTES = 256 << 20
"""A BPE learns from about so much text: more does not change its merges much, but costs time and memory."""

_BATCH_CHARACTERS = 1 << 20
_BATCH_PIECES = 1024
_BPE_SAMPLE_STREAM = 202  # names the random stream that picks what a BPE learns from
_PART_PREFIX = ".build-"


@dataclass(frozen=True)
class BuildRequest:
    """What ``threefold data build`` was asked for; ``limit_bytes`` 0 reads everything."""

    sources: tuple[Path, ...]
    out: Path
    tokenizer: str
    validation_fraction: float = 0.01
    pattern: str = "*"
    exclude: tuple[str, ...] = ()
    text_key: str = "text"
    limit_bytes: int = 0
    seed: int = 0
    overwrite: bool = False


@dataclass(frozen=True)
class BuildReport:
    """What came out: the written ``meta``, the files that were left out, and notes for the user."""

    meta: TokenMeta
    skipped: tuple[Path, ...]
    notes: tuple[str, ...]


def build_token_directory(request: BuildRequest, on_progress: ProgressCallback = lambda _, __: None) -> BuildReport:
    """Read the sources, tokenize them and write the token directory; raise DataError when any of that can't be done.

    Memory use depends on the longest document and the vocabulary, not on the corpus.
    """
    _check_request(request)
    files = find_files(request.sources, request.pattern, request.exclude, request.out)
    corpus = Corpus(files, request.text_key, request.limit_bytes)
    tokenizer = build_tokenizer(request.tokenizer, lambda: _training_texts(corpus, request.seed, on_progress))
    try:
        request.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=_PART_PREFIX, dir=request.out) as part:
            return _build_in(Path(part), request, corpus, tokenizer, on_progress)
    except OSError as error:  # the sources' own errors are DataErrors already
        raise DataError(
            f"--out: {str(request.out)!r} can't be written ({error})\n"
            "    fix: give a directory that you may write to, on a disk with room"
        ) from error


def _build_in(
    part: Path, request: BuildRequest, corpus: Corpus, tokenizer: TextTokenizer, on_progress: ProgressCallback
) -> BuildReport:
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    reader = corpus.read()
    with TokenWriter(part, dtype, request.validation_fraction, request.seed) as writer:
        for batch in _batches(_reporting(reader, "encoding", on_progress)):
            writer.write(batch, tokenizer)
        _require_text(reader, request)
        writer.ensure_validation()
    tokenizer.save(part)
    meta = _describe(part, request, reader, tokenizer, dtype, writer)
    _publish(part, request.out, meta)
    return BuildReport(meta, tuple(reader.skipped), _notes(request, meta))


def _check_request(request: BuildRequest) -> None:
    """Judge what can be judged before any text is read: a BPE takes minutes to train."""
    if not 0.0 <= request.validation_fraction <= 0.5:
        raise DataError(
            f"--validation-fraction: {request.validation_fraction} is not a share; allowed: 0 (no validation split) to "
            "0.5\n    fix: --validation-fraction 0.01"
        )
    if request.limit_bytes < 0:
        raise DataError(
            f"--limit-bytes: {request.limit_bytes} is negative; allowed: 0 (no limit) or more\n    fix: leave it out"
        )
    if request.tokenizer.startswith("bpe:"):
        parse_bpe_size(request.tokenizer)
    _check_out(request.out, request.overwrite)


def _check_out(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"--out: {str(out)!r} is a file\n    fix: name a directory; it will be made")
    ours = {META_FILE, TOKENIZER_FILE, *(f"{split}.bin" for split in SPLITS)}
    # A killed build leaves its hidden directory behind; that is no reason to refuse.
    present = {path.name for path in out.iterdir() if not path.name.startswith(_PART_PREFIX)}
    if foreign := sorted(present - ours):
        raise DataError(
            f"--out: {str(out)!r} holds other files ({', '.join(foreign[:3])}); allowed: a new or empty directory, or "
            "a token directory with --overwrite\n    fix: name another directory"
        )
    if present and not overwrite:
        raise DataError(
            f"--out: {str(out)!r} already holds a token directory\n    fix: add --overwrite, or name another directory"
        )


def _training_texts(corpus: Corpus, seed: int, on_progress: ProgressCallback) -> Iterator[str]:
    """Yield the text that a BPE learns from: pieces picked by a hash from all over, when there is more than enough.

    Pieces, not documents: a corpus can be one huge file. The first is always taken, so that there is something.
    """
    reader = corpus.read()
    share = min(1.0, BPE_TRAINING_BYTES / max(1, corpus.limit_bytes or reader.disk_bytes))
    for number, piece in enumerate(_reporting(reader, "reading for BPE", on_progress)):
        if number == 0 or share == 1.0 or _uniform(seed, number) < share:
            yield piece.text
    on_progress("learning BPE merges", 0.0)


def _uniform(seed: int, piece_number: int) -> float:
    return float(hash_numbers(seed, _BPE_SAMPLE_STREAM, np.array([piece_number]))[0]) * 2.0**-64


def _reporting(reader: CorpusReader, what: str, on_progress: ProgressCallback) -> Iterator[Piece]:
    for piece in reader:
        on_progress(what, piece.progress)
        yield piece
    on_progress(what, 1.0)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Collect pieces until there are enough to keep all cores busy."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _require_text(reader: CorpusReader, request: BuildRequest) -> None:
    if reader.text_bytes:
        return
    skipped = f"; {len(reader.skipped)} files are not UTF-8 text, e.g. {reader.skipped[0]}" if reader.skipped else ""
    raise DataError(
        f"SOURCE: no text in {', '.join(map(str, request.sources))}{skipped}\n"
        "    fix: give UTF-8 text (iconv converts other encodings), .jsonl or .parquet files that hold some"
    )


def _describe(
    part: Path, request: BuildRequest, reader: CorpusReader, tokenizer: TextTokenizer, dtype: str, writer: TokenWriter
) -> TokenMeta:
    splits = {name: _describe_split(part / f"{name}.bin", dtype, writer.documents[name]) for name in writer.splits}
    return TokenMeta(
        vocab_size=tokenizer.vocab_size,
        dtype=dtype,
        tokenizer=tokenizer.name,
        end_of_text=tokenizer.end_of_text,
        splits=splits,
        documents=reader.num_documents,
        text_bytes=reader.text_bytes,
        skipped_files=len(reader.skipped),
        seed=request.seed,
        fingerprint=_fingerprint(part, dtype, tokenizer, splits),
    )


def _describe_split(file: Path, dtype: str, documents: int) -> SplitMeta:
    return SplitMeta(file.stat().st_size // DTYPES[dtype], file.name, documents, _sha256(file))


def _fingerprint(part: Path, dtype: str, tokenizer: TextTokenizer, splits: dict[str, SplitMeta]) -> str:
    tokenizer_file = part / TOKENIZER_FILE
    facts = [
        dtype,
        str(tokenizer.vocab_size),
        str(tokenizer.end_of_text),
        _sha256(tokenizer_file) if tokenizer_file.exists() else tokenizer.name,
        *(f"{name} {split.sha256}" for name, split in sorted(splits.items())),
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _publish(part: Path, out: Path, meta: TokenMeta) -> None:
    """Move the finished files into place; the old meta.json goes first and the new one comes last."""
    (out / META_FILE).unlink(missing_ok=True)
    for name in (TOKENIZER_FILE, *(f"{split}.bin" for split in SPLITS)):
        if (part / name).exists():
            (part / name).replace(out / name)
        else:
            (out / name).unlink(missing_ok=True)  # of an earlier build that had one
    (part / META_FILE).write_text(meta.to_json(), encoding="utf-8")
    (part / META_FILE).replace(out / META_FILE)


def _notes(request: BuildRequest, meta: TokenMeta) -> tuple[str, ...]:
    notes: list[str] = []
    if meta.tokenizer == "bpe" and meta.vocab_size < parse_bpe_size(request.tokenizer):
        notes.append(
            f"the text supports {meta.vocab_size} BPE tokens, fewer than {request.tokenizer} asks for; "
            f"set model.vocab_size to {meta.vocab_size} or more"
        )
    empty = [name for name, split in meta.splits.items() if split.tokens < 2]
    notes += [f"the {name} split has too little text to make one sample" for name in empty]
    return tuple(notes)
