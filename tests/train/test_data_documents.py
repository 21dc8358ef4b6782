"""Documents out of files: which files, in which order, and what is wrong with a bad one."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from threefold.errors import DataError
from threefold.train.data import documents
from threefold.train.data.documents import Corpus, find_files


def read_all(*files: Path, text_key: str = "text", limit_bytes: int = 0) -> list[str]:
    """Return the documents of the files, their pieces joined."""
    texts: dict[int, str] = {}
    for piece in Corpus(files, text_key, limit_bytes).read():
        texts[piece.document] = texts.get(piece.document, "") + piece.text
        assert 0.0 <= piece.progress <= 1.0
    return list(texts.values())


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_parquet(path: Path, **columns: list[object]) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_directories_are_read_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b.txt", ".git/x.txt", "a/.hidden.txt", "out/train.bin", "c.py"):
        write(tmp_path / name, name)
    found = find_files([tmp_path], output=tmp_path / "out")
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["a/b.txt", "a/z.txt", "b.txt", "c.py"]
    assert find_files([tmp_path], "*.py") == (tmp_path / "c.py",)


def test_names_can_be_excluded_at_any_depth(tmp_path: Path) -> None:
    for name in ("a.txt", "lib/b.txt", "lib/site-packages/c.txt", "test/d.txt", "lib/test_e.txt"):
        write(tmp_path / name, name)
    found = find_files([tmp_path], exclude=["site-packages", "test*"])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["a.txt", "lib/b.txt"]


def test_a_file_that_is_named_is_taken_once_whatever_the_pattern(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "a")
    assert find_files([file, tmp_path, file], "*.py") == (file,)


def test_a_directory_below_a_hidden_one_can_be_named(tmp_path: Path) -> None:
    file = write(tmp_path / ".venv/lib/a.py", "a")
    assert find_files([tmp_path / ".venv/lib"]) == (file,)


def test_all_missing_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file or directory: .*one, .*two"):
        find_files([tmp_path / "one", tmp_path, tmp_path / "two"])


def test_a_directory_without_a_matching_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "a")
    with pytest.raises(DataError, match=r"no file to read in .*--pattern '\*\.py'"):
        find_files([tmp_path], "*.py")


def test_text_keeps_every_character_and_line_end(tmp_path: Path) -> None:
    text = "héllo\r\n\twörld\n\n  世界 🎉"
    assert read_all(write(tmp_path / "a.txt", text), write(tmp_path / "b.md", "\ufeffmarked")) == [text, "marked"]


def test_a_long_text_is_read_in_pieces_that_end_with_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 10)
    text = "a line of text\n" * 20 + "x" * 100
    pieces = list(Corpus((write(tmp_path / "a.txt", text),)).read())
    assert "".join(piece.text for piece in pieces) == text
    assert max(len(piece.text) for piece in pieces) <= 20
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert {piece.document for piece in pieces} == {0}


def test_files_that_are_not_text_are_left_out_and_listed(tmp_path: Path) -> None:
    latin = write(tmp_path / "latin.txt", "caf\xe9 ".encode("latin-1"))
    binary = write(tmp_path / "binary.dat", b"a\0b")
    good = write(tmp_path / "good.txt", "good")
    reader = Corpus((latin, binary, good)).read()
    assert [piece.text for piece in reader] == ["good"]
    assert reader.skipped == [latin, binary]
    assert (reader.num_documents, reader.text_bytes) == (1, 4)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "a")
    reader = Corpus((file,)).read()
    file.unlink()
    for pass_over in (lambda: list(reader), lambda: list(Corpus((file,)).read())):
        with pytest.raises(DataError, match=r"a\.txt: can't be read \(FileNotFoundError"):
            pass_over()


def test_empty_documents_are_left_out(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", '{"text": ""}\n\n{"text": "one"}\n')
    table = write_parquet(tmp_path / "a.parquet", text=["", None, "two"])
    assert read_all(write(tmp_path / "empty.txt", ""), lines, table) == ["one", "two"]


def test_jsonl_plain_and_compressed(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"body": f"text {i}\nof two lines", "n": i}) + "\n" for i in range(5))
    plain = write(tmp_path / "a.jsonl", rows)
    packed = write(tmp_path / "b.jsonl.gz", gzip.compress(rows.encode()))
    expected = [f"text {i}\nof two lines" for i in range(5)]
    assert read_all(plain, packed, text_key="body") == expected * 2


def test_half_a_surrogate_pair_in_json_becomes_a_question_mark(tmp_path: Path) -> None:
    assert read_all(write(tmp_path / "a.jsonl", r'{"text": "a\ud800b 🎉"}')) == ["a?b 🎉"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": ', "a.jsonl:2: this line is not JSON"),
        (b'{"text": "\xff"}', "a.jsonl:2: this line is not JSON"),
        ('["text"]', "a.jsonl:2: this line is not a JSON object"),
        ('{"body": "x", "id": 1}', "a.jsonl:2: there is no 'text'; present: 'body', 'id'"),
        ('{"text": 5}', "a.jsonl:2: the value of 'text' is int, not text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes, said: str) -> None:
    raw = line if isinstance(line, bytes) else line.encode()
    with pytest.raises(DataError) as caught:
        read_all(write(tmp_path / "a.jsonl", b'{"text": "fine"}\n' + raw + b"\n"))
    assert said in str(caught.value)
    assert "fix:" in str(caught.value)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"text": "fine"}\n' * 1000)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: can't be read"):
        read_all(write(tmp_path / "a.jsonl.gz", packed[:-20]))
    with pytest.raises(DataError, match="Not a gzipped file"):
        read_all(write(tmp_path / "b.jsonl.gz", "plain"))


def test_parquet_is_read_column_wise(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", body=["one", "two", "three"], n=[1, 2, 3])
    assert read_all(file, text_key="body") == ["one", "two", "three"]
    with pytest.raises(DataError, match=r"there is no 'text'; present: 'body', 'n'"):
        read_all(file)
    with pytest.raises(DataError, match=r"column 'n' holds int64, not text"):
        read_all(file, text_key="n")


def test_parquet_dictionary_columns_are_text_too(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()}), tmp_path / "a.parquet")
    assert read_all(tmp_path / "a.parquet") == ["a", "b", "a"]


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.parquet: can't be read"):
        read_all(write(tmp_path / "a.parquet", "PAR1 not really"))


def test_the_limit_stops_at_a_whole_character(tmp_path: Path) -> None:
    files = write(tmp_path / "a.txt", "abc"), write(tmp_path / "b.txt", "éé"), write(tmp_path / "c.txt", "never")
    assert read_all(*files, limit_bytes=6) == ["abc", "é"]
    assert read_all(*files, limit_bytes=3) == ["abc"]
    assert read_all(*files, limit_bytes=100) == ["abc", "éé", "never"]
