"""Building token directories, and the commands that do it."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from threefold.cli.data import app
from threefold.errors import DataError
from threefold.train.data import build
from threefold.train.data.build import BuildReport, BuildRequest, build_token_directory
from threefold.train.data.dataset import TokenDataset, map_tokens
from threefold.train.data.meta import read_meta
from threefold.train.data.tokenizer import open_tokenizer


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return a directory of 40 short documents."""
    directory = tmp_path / "corpus"
    directory.mkdir()
    for i in range(40):
        (directory / f"{i:02d}.txt").write_text(f"document {i} says hello to the world, " * 5)
    return directory


def make(*sources: Path, out: Path, tokenizer: str = "bytes", **options: Any) -> BuildReport:
    return build_token_directory(BuildRequest(sources, out, tokenizer, **options))


def texts(directory: Path, split: str) -> list[str]:
    """Return the documents of a split, decoded."""
    meta = read_meta(directory)
    tokens = map_tokens(directory / meta.splits[split].file, meta.splits[split].tokens, meta.dtype)
    decoded = open_tokenizer(directory, meta).decode(tokens.tolist())
    return decoded.removesuffix("<|endoftext|>").split("<|endoftext|>")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_every_document_ends_up_in_one_split_unchanged(corpus: Path, tmp_path: Path, tokenizer: str) -> None:
    report = make(corpus, out=tmp_path / "out", tokenizer=tokenizer, validation_fraction=0.2)
    train, validation = texts(tmp_path / "out", "train"), texts(tmp_path / "out", "validation")
    assert sorted(train + validation) == sorted(file.read_text() for file in corpus.iterdir())
    assert 2 <= len(validation) <= 16
    assert report.meta == read_meta(tmp_path / "out")
    assert {name: split.documents for name, split in report.meta.splits.items()} == {
        "train": len(train),
        "validation": len(validation),
    }
    assert (report.meta.documents, report.skipped, report.notes) == (40, (), ())
    assert (tmp_path / "out" / "tokenizer.json").exists() == (tokenizer != "bytes")


def test_meta_says_what_the_contract_says(corpus: Path, tmp_path: Path) -> None:
    make(corpus, out=tmp_path / "out")
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    size = (tmp_path / "out" / "train.bin").stat().st_size
    assert (meta["format"], meta["vocab_size"], meta["dtype"], meta["tokenizer"]) == (1, 257, "uint16", "bytes")
    assert meta["end_of_text"] == 256
    assert (meta["splits"]["train"]["file"], meta["splits"]["train"]["tokens"]) == ("train.bin", size // 2)
    assert len(meta["fingerprint"]) == len(meta["splits"]["train"]["sha256"]) == 64
    assert meta["text_bytes"] == sum(file.stat().st_size for file in corpus.iterdir())


def test_a_token_directory_opens_as_a_dataset(corpus: Path, tmp_path: Path) -> None:
    make(corpus, out=tmp_path / "out", tokenizer="bpe:270")
    dataset = TokenDataset.open(tmp_path / "out", "train", 32, seed=0)
    tokens, labels = dataset.batch(range(8))
    assert tokens.shape == labels.shape == (8, 32)
    assert dataset.vocab_size == 270 > labels.max()


def test_the_build_is_reproducible_and_the_fingerprint_tells_data_apart(corpus: Path, tmp_path: Path) -> None:
    first = make(corpus, out=tmp_path / "a", tokenizer="bpe:290").meta
    assert make(corpus, out=tmp_path / "b", tokenizer="bpe:290").meta == first
    others = [
        make(corpus, out=tmp_path / "c", tokenizer="bpe:291"),
        make(corpus, out=tmp_path / "d", tokenizer="bytes"),
        make(corpus, out=tmp_path / "e", tokenizer="bpe:290", seed=1, validation_fraction=0.3),
        make(corpus, out=tmp_path / "f", tokenizer="bpe:290", limit_bytes=500),
    ]
    assert len({first.fingerprint, *(other.meta.fingerprint for other in others)}) == 5


def test_small_batches_and_pieces_give_the_same_tokens(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make(corpus, out=tmp_path / "a").meta
    monkeypatch.setattr(build, "_BATCH_CHARACTERS", 300)
    monkeypatch.setattr("threefold.train.data.documents.PIECE_CHARACTERS", 50)
    assert make(corpus, out=tmp_path / "b").meta == whole


def test_more_than_65536_ids_take_4_bytes(corpus: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(65_536)} | {"</s>": 65_536}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    meta = make(corpus, out=tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json")).meta
    assert (meta.vocab_size, meta.dtype, meta.tokenizer) == (65_537, "uint32", "file")
    assert (tmp_path / "out" / "train.bin").stat().st_size == 4 * meta.splits["train"].tokens
    assert open_tokenizer(tmp_path / "out", meta).end_of_text == 65_536


def test_validation_gets_the_last_document_when_chance_gives_it_none(corpus: Path, tmp_path: Path) -> None:
    make(corpus, out=tmp_path / "out", validation_fraction=1e-9)
    assert texts(tmp_path / "out", "validation") == [(corpus / "39.txt").read_text()]
    assert len(texts(tmp_path / "out", "train")) == 39


def test_a_single_document_gives_its_tail(corpus: Path, tmp_path: Path) -> None:
    meta = make(corpus / "00.txt", out=tmp_path / "out", validation_fraction=0.1).meta
    total = len((corpus / "00.txt").read_text()) + 1
    assert meta.splits["validation"].tokens == -(-total // 10)
    assert meta.splits["train"].tokens + meta.splits["validation"].tokens == total
    [head], [tail] = texts(tmp_path / "out", "train"), texts(tmp_path / "out", "validation")
    assert head + tail == (corpus / "00.txt").read_text()


def test_without_a_fraction_there_is_no_validation(corpus: Path, tmp_path: Path) -> None:
    meta = make(corpus, out=tmp_path / "out", validation_fraction=0.0).meta
    assert set(meta.splits) == {"train"}
    assert not (tmp_path / "out" / "validation.bin").exists()


def test_bpe_learns_from_a_part_of_a_large_corpus(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "BPE_TRAINING_BYTES", 1000)
    assert make(corpus, out=tmp_path / "out", tokenizer="bpe:5000").meta.vocab_size < 400


def test_bpe_learns_from_pieces_of_a_single_huge_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "BPE_TRAINING_BYTES", 2000)
    monkeypatch.setattr("threefold.train.data.documents.PIECE_CHARACTERS", 100)
    (tmp_path / "big.txt").write_text("many words make one long line of text\n" * 1000)
    for seed in range(5):
        report = make(tmp_path / "big.txt", out=tmp_path / f"{seed}", tokenizer="bpe:270", seed=seed)
        assert report.meta.vocab_size == 270


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_BATCH_CHARACTERS", 1 << 15)
    monkeypatch.setattr("threefold.train.data.documents.PIECE_CHARACTERS", 1 << 15)
    (tmp_path / "big.txt").write_text("one line of a long text\n" * 200_000)  # 4.8 MB, a single document
    tracemalloc.start()
    make(tmp_path / "big.txt", out=tmp_path / "out")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1.5e6


def test_nothing_here_imports_torch() -> None:
    modules = ["cli.data", "train.metrics", "train.learning_rate", "train.data.build", "train.data.synthetic"]
    imports = "; ".join(f"import threefold.{module}" for module in modules)
    check = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_progress_goes_from_0_to_1_in_each_pass(corpus: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, float]] = []
    request = BuildRequest((corpus,), tmp_path / "out", "bpe:280")
    build_token_directory(request, lambda what, share: calls.append((what, share)))
    for what in ("reading for BPE", "encoding"):
        shares = [share for name, share in calls if name == what]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0


def test_an_existing_directory_is_kept_unless_told_otherwise(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    before = make(corpus, out=out, tokenizer="bpe:280").meta
    with pytest.raises(DataError, match=r"already holds a token directory(.|\n)*--overwrite"):
        make(corpus, out=out)
    assert read_meta(out) == before
    make(corpus, out=out, validation_fraction=0.0, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["meta.json", "train.bin"]


def test_a_directory_with_other_files_is_never_touched(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds other files \(00\.txt, 01\.txt, 02\.txt\)"):
        make(corpus, out=corpus, overwrite=True)


def test_a_build_that_fails_leaves_the_old_directory_as_it_was(corpus: Path, tmp_path: Path) -> None:
    make(corpus, out=tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    (corpus / "99.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"99\.jsonl:1"):
        make(corpus, out=tmp_path / "out", overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_build_that_dies_leaves_nothing_that_looks_finished(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "_describe", dies)
    with pytest.raises(KeyboardInterrupt):
        make(corpus, out=tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_a_killed_build_leaves_behind_is_no_obstacle(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / ".build-1234").mkdir(parents=True)
    make(corpus, out=tmp_path / "out")


def test_an_output_that_cannot_be_written_is_named(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"--out: .*file' is a file"):
        make(corpus, out=tmp_path / "file")
    with pytest.raises(DataError, match=r"--out: .* can't be written"):
        make(corpus, out=tmp_path / "file" / "below")


def test_a_corpus_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="no text in"):
        make(tmp_path / "empty.txt", out=tmp_path / "out")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    with pytest.raises(DataError, match=r"1 files are not UTF-8 text, e\.g\. .*latin\.txt"):
        make(tmp_path / "latin.txt", out=tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"validation_fraction": 0.7}, "--validation-fraction: 0.7"),
        ({"validation_fraction": -0.1}, "--validation-fraction: -0.1"),
        ({"validation_fraction": float("nan")}, "--validation-fraction: nan"),
        ({"limit_bytes": -1}, "--limit-bytes: -1"),
        ({"tokenizer": "bpe:12"}, "--tokenizer: 'bpe:12'"),
        ({"tokenizer": "word"}, "--tokenizer: 'word'"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_written(
    corpus: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match="fix:") as caught:
        make(corpus, out=tmp_path / "out", **options)
    assert str(caught.value).startswith(said)
    assert not (tmp_path / "out").exists()


def test_the_command_builds_and_shows(corpus: Path, tmp_path: Path) -> None:
    (corpus / "image.txt").write_bytes(b"\xff\xd8")
    out = tmp_path / "out"
    built = CliRunner().invoke(app, ["build", str(corpus), "--out", str(out), "--tokenizer", "bpe:5000"])
    assert built.exit_code == 0, built.output
    assert "40 documents" in built.output
    assert "left out, not UTF-8 text" in built.output
    assert "image.txt" in built.output
    assert "fewer than bpe:5000 asks for" in built.output
    shown = CliRunner().invoke(app, ["show", str(out), "--tokens", "40"])
    assert shown.exit_code == 0, shown.output
    assert "fingerprint" in shown.output
    assert "document 0 says hello" in shown.output


def test_the_command_raises_what_the_program_prints(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["build", str(tmp_path / "no"), "--out", str(tmp_path), "--tokenizer", "bytes"])
    assert isinstance(result.exception, DataError)
    assert result.exception.exit_status == 2


def test_tokens_are_little_endian_on_disk(corpus: Path, tmp_path: Path) -> None:
    make(corpus, out=tmp_path / "out")
    raw = (tmp_path / "out" / "train.bin").read_bytes()
    assert np.frombuffer(raw[:4], "<u2").tolist() == [ord("d"), ord("o")]
