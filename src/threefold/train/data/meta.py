"""``meta.json``: what a token directory holds. Written last, so a directory without it is not a finished one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from threefold.errors import DataError

META_FILE = "meta.json"
TOKENIZER_FILE = "tokenizer.json"
FORMAT = 1
DTYPES: Mapping[str, int] = {"uint16": 2, "uint32": 4}
"""Names of the token number formats, with their bytes a token; tokens are little-endian."""

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class SplitMeta:
    """One token file: ``tokens`` ids of ``documents`` documents in ``file``, whose bytes have this ``sha256``."""

    tokens: int
    file: str
    documents: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class TokenMeta:
    """A token directory: its tokenizer, number format, splits, and what it was made of.

    ``end_of_text`` is the id that ends each document. ``fingerprint`` is a sha256 over the splits and the vocabulary:
    equal fingerprints mean equal training data.
    """

    vocab_size: int
    dtype: str
    tokenizer: str
    end_of_text: int
    splits: Mapping[str, SplitMeta]
    documents: int = 0
    text_bytes: int = 0
    skipped_files: int = 0
    seed: int = 0
    fingerprint: str = ""
    format: int = FORMAT

    def to_json(self) -> str:
        """Return the text of ``meta.json``."""
        return json.dumps(asdict(self), indent=2) + "\n"


def read_meta(directory: Path) -> TokenMeta:
    """Read and judge ``directory/meta.json``; raise DataError when it is missing, damaged or of another format."""
    path = directory / META_FILE
    if not path.is_file():
        raise DataError(
            f"data: {str(directory)!r} is not a token directory: it has no {META_FILE}\n"
            f"    fix: threefold data build SOURCE... --out {directory} --tokenizer bytes"
        )
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"data: {str(path)!r} is damaged ({_reason(error)})\n"
            f"    fix: build the directory again with `threefold data build ... --overwrite`"
        ) from error


def _parse(fields: dict[str, Any]) -> TokenMeta:
    if fields["format"] != FORMAT:
        raise ValueError(f"format {fields['format']!r}; this version of threefold reads format {FORMAT}")
    if fields["dtype"] not in DTYPES:
        raise ValueError(f"dtype {fields['dtype']!r}; allowed: {', '.join(DTYPES)}")
    splits = {name: SplitMeta(**split) for name, split in fields["splits"].items()}
    meta = TokenMeta(**{**fields, "splits": splits})
    meta = TypeAdapter(TokenMeta).validate_json(meta.to_json(), strict=True)
    for name, split in meta.splits.items():
        if split.tokens < 0 or Path(split.file).name != split.file:
            raise ValueError(f"splits.{name}: {split.tokens} tokens in {split.file!r}; allowed: a file beside it")
    if meta.vocab_size < 1:
        raise ValueError(f"vocab_size {meta.vocab_size}; allowed: 1 or more")
    return meta


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))} is {first['input']!r}: {first['msg']}"
    return f"{type(error).__name__}: {error}"
