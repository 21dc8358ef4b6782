"""Reads documents out of text, JSONL and Parquet files, one piece at a time, so memory doesn't grow with the corpus."""

from __future__ import annotations

import fnmatch
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from threefold.errors import DataError

PIECE_CHARACTERS = 1 << 20
"""A text file is read in pieces of about this length, each ending at a line's end where there is one."""

_PARQUET_ROWS = 256  # rows decoded at once


@dataclass(frozen=True)
class Piece:
    """A part of document number ``document``; ``progress`` is the share of its file that has been read so far."""

    document: int
    text: str
    ends_document: bool
    progress: float


_FilePiece = tuple[str, bool, float]  # text, ends_document, share of the file read


@dataclass(frozen=True)
class Corpus:
    """The files to read, in order, and how; ``limit_bytes`` stops after so many bytes of text (0 = no limit)."""

    files: tuple[Path, ...]
    text_key: str = "text"
    limit_bytes: int = 0

    def read(self) -> CorpusReader:
        """Begin a pass over the documents."""
        return CorpusReader(self)


class CorpusReader:
    """One pass over a corpus: iterate over it for the pieces; the counts are those of what has been read so far.

    Files that are not UTF-8 text (images, bytecode, other encodings) are left out and listed in ``skipped``: decoding
    them with replacement characters would train the model on damage. Empty documents are left out silently.
    """

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._sizes = [_size(path) for path in corpus.files]
        self.num_documents = 0
        self.text_bytes = 0
        self.skipped: list[Path] = []

    @property
    def disk_bytes(self) -> int:
        """Size of all files, as stored."""
        return sum(self._sizes)

    def __iter__(self) -> Iterator[Piece]:
        bytes_before = 0
        for path, size in zip(self._corpus.files, self._sizes, strict=True):
            for text, ends_document, share in self._read_file(path):
                kept = self._within_limit(text)
                progress = self._progress(bytes_before + share * size)
                is_full = self._is_full()
                yield Piece(self.num_documents, kept, ends_document or is_full, progress)
                self.num_documents += ends_document or is_full
                if is_full:
                    return
            bytes_before += size

    def _read_file(self, path: Path) -> Iterator[_FilePiece]:
        try:
            yield from self._open_file(path)
        except (OSError, EOFError, zlib.error) as error:  # the last two are of damaged .gz files
            raise _unreadable(path, error) from error

    def _open_file(self, path: Path) -> Iterator[_FilePiece]:
        name = path.name.lower()
        if name.endswith(".parquet"):
            return _read_parquet(path, self._corpus.text_key)
        if name.endswith((".jsonl", ".jsonl.gz")):
            return _read_jsonl(path, self._corpus.text_key)
        if not _is_text(path):
            self.skipped.append(path)
            return iter(())
        return _read_text(path)

    def _within_limit(self, text: str) -> str:
        """Count the text's bytes, and cut it where the limit is, at a whole character."""
        encoded = text.encode()
        room = self._corpus.limit_bytes - self.text_bytes
        if self._corpus.limit_bytes and len(encoded) > room:
            self.text_bytes = self._corpus.limit_bytes
            return encoded[:room].decode(errors="ignore")
        self.text_bytes += len(encoded)
        return text

    def _is_full(self) -> bool:
        return 0 < self._corpus.limit_bytes <= self.text_bytes

    def _progress(self, bytes_read: float) -> float:
        limit = self._corpus.limit_bytes
        return max(bytes_read / self.disk_bytes, self.text_bytes / limit if limit else 0.0)


def find_files(
    sources: Sequence[Path], pattern: str = "*", exclude: Sequence[str] = (), output: Path | None = None
) -> tuple[Path, ...]:
    """List the files of ``sources``: a file as it is, a directory's files that match ``pattern``, sorted by path.

    The order is the same on every machine. Left out are hidden files and directories, those whose names match one of
    ``exclude``, and what lies in ``output``; a file that is named twice is taken once. Raises DataError for sources
    that don't exist, all at once, and when nothing is left.
    """
    missing = [str(source) for source in sources if not source.exists()]
    if missing:
        raise DataError(
            f"SOURCE: no such file or directory: {', '.join(missing)}\n    fix: give existing text files or directories"
        )
    found = (path for source in sources for path in _expand(source, pattern, (".*", *exclude), output))
    files = tuple({path.resolve(): path for path in found}.values())
    if not files:
        names = ", ".join(str(source) for source in sources) or "nothing"
        raise DataError(
            f"SOURCE: no file to read in {names} (--pattern {pattern!r})\n"
            "    fix: give a directory with text, .jsonl or .parquet files, or another --pattern"
        )
    return files


def _expand(source: Path, pattern: str, exclude: Sequence[str], output: Path | None) -> Iterable[Path]:
    if source.is_file():
        return [source]
    resolved_output = output.resolve() if output else None
    found: list[Path] = []
    for folder, subfolders, names in os.walk(source):
        # Assigned in place, so that os.walk does not enter what is left out.
        subfolders[:] = [
            name
            for name in subfolders
            if not _matches(name, exclude) and (Path(folder) / name).resolve() != resolved_output
        ]
        taken = (name for name in names if _matches(name, [pattern]) and not _matches(name, exclude))
        found += (Path(folder) / name for name in taken)
    return sorted(path for path in found if path.is_file())


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _size(path: Path) -> int:
    """Return the stored bytes, at least 1 so that shares of it are numbers."""
    try:
        return max(1, path.stat().st_size)
    except OSError as error:
        raise _unreadable(path, error) from error


def _is_text(path: Path) -> bool:
    """Tell whether a file is UTF-8 throughout. A zero byte is valid UTF-8, but means a binary file in practice."""
    try:
        with path.open(encoding="utf-8", newline="") as handle:
            return all("\0" not in block for block in iter(lambda: handle.read(PIECE_CHARACTERS), ""))
    except UnicodeDecodeError:
        return False


def _read_text(path: Path) -> Iterator[_FilePiece]:
    """Yield a text file as one document. A byte order mark is dropped; line ends stay as they are."""
    size = _size(path)
    bytes_read = 0
    with path.open(encoding="utf-8-sig", newline="") as handle:
        piece = _next_text(handle)
        while piece:
            following = _next_text(handle)  # one ahead, to know which piece is the last
            bytes_read += len(piece.encode())
            yield piece, not following, min(1.0, bytes_read / size)
            piece = following


def _next_text(handle: TextIO) -> str:
    return handle.read(PIECE_CHARACTERS) + handle.readline(PIECE_CHARACTERS)


def _read_jsonl(path: Path, text_key: str) -> Iterator[_FilePiece]:
    """Yield the documents of a JSONL file, one a line; blank lines are left out."""
    size = _size(path)
    with path.open("rb") as stored:
        # The position in the stored file tells the progress, of compressed ones too.
        lines = gzip.GzipFile(fileobj=stored) if path.suffix.lower() == ".gz" else stored
        for number, line in enumerate(lines, start=1):
            text = _text_of_line(line, text_key, f"{path}:{number}") if line.strip() else ""
            if text:
                yield text, True, min(1.0, stored.tell() / size)


def _text_of_line(line: bytes, text_key: str, place: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{place}: this line is not JSON ({error}): {_excerpt(line)}\n"
            "    fix: a .jsonl file holds one JSON object a line; mend or remove the line"
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{place}: this line is not a JSON object: {_excerpt(line)}\n"
            f'    fix: write each line as {{"{text_key}": "..."}}'
        )
    if text_key not in row:
        raise _missing_key(place, text_key, row)
    return _clean(row[text_key], text_key, place)


def _clean(text: Any, text_key: str, place: str) -> str:
    """Return ``text`` as UTF-8 can hold it: JSON may carry half a surrogate pair, which becomes a question mark."""
    if not isinstance(text, str):
        raise DataError(
            f"{place}: the value of {text_key!r} is {type(text).__name__}, not text\n"
            "    fix: name the key that holds the text with --text-key"
        )
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _read_parquet(path: Path, text_key: str) -> Iterator[_FilePiece]:
    """Yield the documents of a Parquet column, decoding some rows at a time; nulls are left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            _check_column(path, table.schema_arrow, text_key)
            num_rows, rows_read = max(1, table.metadata.num_rows), 0
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=[text_key]):
                rows_read += batch.num_rows
                for text in batch.column(0).to_pylist():
                    if text:
                        yield text, True, rows_read / num_rows
    except (ValueError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _check_column(path: Path, schema: Any, text_key: str) -> None:
    import pyarrow as pa

    if text_key not in schema.names:
        raise _missing_key(str(path), text_key, schema.names)
    found = schema.field(text_key).type
    value_type = found.value_type if pa.types.is_dictionary(found) else found
    if not (pa.types.is_string(value_type) or pa.types.is_large_string(value_type)):
        raise DataError(
            f"{path}: the column {text_key!r} holds {found}, not text\n"
            "    fix: name the column that holds the text with --text-key"
        )


def _missing_key(place: str, text_key: str, present: Iterable[str]) -> DataError:
    return DataError(
        f"{place}: there is no {text_key!r}; present: {', '.join(map(repr, present)) or 'nothing'}\n"
        "    fix: name the one that holds the text with --text-key"
    )


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path}: can't be read ({type(error).__name__}: {error})\n    fix: check the file, or leave it out of SOURCE"
    )


def _excerpt(line: bytes) -> str:
    text = line.strip().decode(errors="replace")
    return repr(text if len(text) <= 60 else text[:60] + "...")
