"""Tokenizers: round trips, sizes, and what is wrong with a bad one."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from threefold.errors import DataError
from threefold.train.data.tokenizer import ByteTokenizer, build_tokenizer, load_tokenizer

TEXTS = ["the cat sat on the mat", "def f(x):\n    return x + 1\n", "naïve 世界 🎉 <|endoftext|>"] * 5


def no_texts() -> list[str]:
    raise AssertionError("only BPE reads text")


def save_words(path: Path, *special: str, **options: int) -> Path:
    """Write a tokenizer.json that knows two words and the special tokens."""
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    tokenizer.add_special_tokens(list(special))
    if options:
        tokenizer.enable_truncation(**options)
        tokenizer.enable_padding(length=8)
    path.parent.mkdir(exist_ok=True, parents=True)
    tokenizer.save(str(path))
    return path


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bytes_round_trip(text: str) -> None:
    tokenizer = build_tokenizer("bytes", no_texts)
    [ids] = tokenizer.encode_batch([text])
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids.tolist()) == text
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)


def test_bytes_show_the_end_of_text_and_survive_a_cut_character() -> None:
    assert ByteTokenizer().decode([104, 105, 256, 0xC3]) == "hi<|endoftext|>\ufffd"


def test_bpe_has_the_size_asked_for_and_round_trips_any_text() -> None:
    tokenizer = build_tokenizer("bpe:280", lambda: TEXTS)
    assert tokenizer.vocab_size == 280
    texts = [*TEXTS, "unseen: Ω ≠ \x00 \u2028 zebra"]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(ids.tolist()) == text
        assert tokenizer.end_of_text not in ids
        assert ids.max() < 280
    assert len(tokenizer.encode_batch(TEXTS)[0]) < len(TEXTS[0])


def test_the_smallest_bpe_is_bytes() -> None:
    tokenizer = build_tokenizer("bpe:257", lambda: TEXTS)
    assert tokenizer.vocab_size == 257
    assert len(tokenizer.encode_batch(["héllo"])[0]) == 6


def test_bpe_says_its_real_size_when_the_text_is_too_small() -> None:
    assert 257 < build_tokenizer("bpe:5000", lambda: ["hello hello"]).vocab_size < 270


def test_bpe_is_the_same_each_time() -> None:
    first, second = (build_tokenizer("bpe:300", lambda: TEXTS) for _ in range(2))
    assert [ids.tolist() for ids in first.encode_batch(TEXTS)] == [ids.tolist() for ids in second.encode_batch(TEXTS)]


def test_bpe_saves_and_loads(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("bpe:290", lambda: TEXTS)
    tokenizer.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = build_tokenizer(str(path), no_texts)
        assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
        assert loaded.encode_batch(TEXTS)[2].tolist() == tokenizer.encode_batch(TEXTS)[2].tolist()


@pytest.mark.parametrize("spec", ["bpe:", "bpe:many", "bpe:256", "bpe:-5", "bpe:1e4"])
def test_an_impossible_bpe_size_is_refused(spec: str) -> None:
    with pytest.raises(DataError, match=r"--tokenizer: .* at least 257"):
        build_tokenizer(spec, no_texts)


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>"])
def test_well_known_ends_of_text_are_found(tmp_path: Path, end: str) -> None:
    tokenizer = load_tokenizer(save_words(tmp_path / "tokenizer.json", "<pad>", end))
    assert (tokenizer.end_of_text, tokenizer.vocab_size, tokenizer.name) == (4, 5, "file")


@pytest.mark.parametrize("token", ["<stop>", {"content": "<stop>", "lstrip": False}])
def test_the_configured_end_of_text_goes_first(tmp_path: Path, token: object) -> None:
    save_words(tmp_path / "tokenizer.json", "</s>", "<stop>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    assert load_tokenizer(tmp_path).end_of_text == 4


def test_padding_and_truncation_of_a_file_are_switched_off(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_words(tmp_path / "tokenizer.json", "</s>", max_length=1))
    assert [len(ids) for ids in tokenizer.encode_batch(["one", "two"])] == [1, 1]
    assert len(load_tokenizer(tmp_path).tokenizer.encode("one", add_special_tokens=False).ids) == 1


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no end-of-text token; looked for <\|endoftext\|>, (.|\n)*fix: add one"):
        load_tokenizer(save_words(tmp_path / "tokenizer.json", "<pad>"))


def test_a_missing_or_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'byte' does not exist; allowed: bytes, bpe:SIZE"):
        build_tokenizer("byte", no_texts)
    with pytest.raises(DataError, match=r"tokenizer\.json' does not exist"):
        build_tokenizer(str(tmp_path), no_texts)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a file of the tokenizers library"):
        build_tokenizer(str(tmp_path), no_texts)
