"""Text to token ids and back: plain bytes, a byte-level BPE trained on the corpus, or a tokenizer.json from elsewhere.

Text is data: where it spells a special token such as ``<|endoftext|>``, it is encoded as ordinary characters, so a
document can't end itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from threefold.errors import DataError
from threefold.train.data.meta import TOKENIZER_FILE, TokenMeta

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|end▁of▁sentence|>")
"""Spellings of the end-of-text token in published tokenizers, tried in this order."""

NUM_BYTES = 256
SMALLEST_BPE = NUM_BYTES + 1  # every byte, and end of text; below that some text could not be encoded


class TextTokenizer(Protocol):
    """Encodes text; every id is in ``[0, vocab_size)``, and ``end_of_text`` is the id that ends a document."""

    @property
    def name(self) -> str:
        """``bytes``, ``bpe`` or ``file``."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        ...

    @property
    def end_of_text(self) -> int:
        """Id that ends a document."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Encode each text, without any special token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included."""
        ...

    def save(self, directory: Path) -> None:
        """Write into ``directory`` what ``open_tokenizer`` needs to make it again."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """A token is a byte of UTF-8; 256 is end of text. Nothing to train, nothing to save."""

    name: str = "bytes"
    vocab_size: int = NUM_BYTES + 1
    end_of_text: int = NUM_BYTES

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; bytes cut off in the middle of a character become replacement characters."""
        raw = b"".join(bytes([i]) if i < NUM_BYTES else END_OF_TEXT.encode() for i in ids)
        return raw.decode(errors="replace")

    def save(self, directory: Path) -> None:
        """Write nothing: a name says it all."""


@dataclass(frozen=True)
class LibraryTokenizer:
    """A tokenizer of the ``tokenizers`` library."""

    tokenizer: Tokenizer
    name: str
    vocab_size: int
    end_of_text: int

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Encode the texts in parallel threads."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, special tokens included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def save(self, directory: Path) -> None:
        """Write ``tokenizer.json``."""
        self.tokenizer.save(str(directory / TOKENIZER_FILE))


def build_tokenizer(spec: str, read_texts: Callable[[], Iterable[str]]) -> TextTokenizer:
    """Make the tokenizer that ``bytes``, ``bpe:SIZE`` or a path names; only BPE calls ``read_texts``, to train on.

    The BPE's size includes its end-of-text token; it is smaller than SIZE only when the text has no more pairs to
    merge. Raises DataError when ``spec`` names no tokenizer.
    """
    if spec == "bytes":
        return ByteTokenizer()
    if spec.startswith("bpe:"):
        return _train_bpe(parse_bpe_size(spec), read_texts())
    return load_tokenizer(Path(spec))


def parse_bpe_size(spec: str) -> int:
    """Return SIZE of ``bpe:SIZE``; raise DataError when it's not a number or below 257."""
    size = spec.removeprefix("bpe:")
    if not size.isdecimal() or int(size) < SMALLEST_BPE:
        raise DataError(
            f"--tokenizer: {spec!r}: {size!r} is not a vocabulary size; allowed: a whole number of at least "
            f"{SMALLEST_BPE} (256 bytes and end of text)\n    fix: --tokenizer bpe:4096"
        )
    return int(size)


def load_tokenizer(path: Path) -> LibraryTokenizer:
    """Load a ``tokenizer.json``, or the one in a directory; raise DataError when it's missing, damaged or has no end.

    The end-of-text token is the ``eos_token`` of a ``tokenizer_config.json`` beside it, or else a well-known name.
    """
    file = path / TOKENIZER_FILE if path.is_dir() else path
    tokenizer = _read_tokenizer(file)
    return _wrap(tokenizer, "file", _find_end_of_text(tokenizer, file))


def open_tokenizer(directory: Path, meta: TokenMeta) -> TextTokenizer:
    """Make the tokenizer of a token directory again."""
    if meta.tokenizer == "bytes":
        return ByteTokenizer()
    return _wrap(_read_tokenizer(directory / TOKENIZER_FILE), meta.tokenizer, meta.end_of_text)


def _read_tokenizer(file: Path) -> Tokenizer:
    if not file.is_file():
        raise DataError(
            f"--tokenizer: {str(file)!r} does not exist; allowed: bytes, bpe:SIZE, or the path of a tokenizer.json "
            "or of a directory with one\n    fix: --tokenizer bpe:4096"
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            f"--tokenizer: {str(file)!r} is not a file of the tokenizers library ({error})\n"
            "    fix: save it with tokenizer.save('tokenizer.json')"
        ) from error


def _train_bpe(size: int, texts: Iterable[str]) -> LibraryTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all bytes, so that any text can be encoded
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer, "bpe", tokenizer.get_vocab()[END_OF_TEXT])


def _wrap(tokenizer: Tokenizer, name: str, end_of_text: int) -> LibraryTokenizer:
    # A file may ask for padding or truncation to a model's window; either would damage a corpus.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    # Ids can have gaps, so the number of entries may be less than what an embedding must hold.
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return LibraryTokenizer(tokenizer, name, vocab_size, end_of_text)


def _find_end_of_text(tokenizer: Tokenizer, file: Path) -> int:
    configured = _configured_end(file.parent / "tokenizer_config.json")
    names = (configured, *END_OF_TEXT_NAMES) if configured else END_OF_TEXT_NAMES
    ids = [tokenizer.token_to_id(name) for name in names]
    found = next((i for i in ids if i is not None), None)
    if found is None:
        raise DataError(
            f"--tokenizer: {str(file)!r} has no end-of-text token; looked for {', '.join(names)}\n"
            f"    fix: add one with tokenizer.add_special_tokens(['{END_OF_TEXT}']) and save it again"
        )
    return found


def _configured_end(config_file: Path) -> str | None:
    """Return ``eos_token`` of a Hugging Face tokenizer_config.json: a string, or an object with its ``content``."""
    try:
        config: Any = json.loads(config_file.read_text(encoding="utf-8"))
        token = config.get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return token.get("content") if isinstance(token, dict) else token
