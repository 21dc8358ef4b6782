"""``threefold schedule``: what is printed, written and refused."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from threefold.cli.main import main
from threefold.job.spec import CHUNKS_OF
from threefold.schedule import NAMED, build_schedule, lower, parse_schedule, zb_v


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["threefold", "schedule", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


SIZES = ("--stages", 2, "--microbatches", 4)


@pytest.mark.parametrize("name", NAMED)
def test_a_grid_and_a_table_with_the_rivals(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, name, *SIZES) == 0
    text = capsys.readouterr().out
    schedule = build_schedule(name, 2, 4)
    assert schedule.grid() in text
    chunks = " × 2" if schedule.num_chunks == 2 else ""
    first = [line.split("  ")[0] for line in text.splitlines() if line.endswith(tuple("0123456789")) and "%" in line]
    assert first[0] == name + chunks
    assert set(first[1:]) == {"gpipe", "1f1b", "interleaved_1f1b × 2", "zb_h1", "zb_v × 2"} - {name + chunks}
    assert "Peak live microbatches by rank: " in text


def answer_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert run(monkeypatch, *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_json_holds_the_numbers_and_the_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = answer_of(monkeypatch, capsys, "zb_h1", "--stages", 4, "--microbatches", 8)
    assert answer["step_time"] == 3 * 8 + 4 - 1
    assert answer["bubble"] == pytest.approx(3 / 27)
    assert answer["peak_live_microbatches"] == [4, 4, 4, 4]
    assert parse_schedule(answer["text"]) == build_schedule("zb_h1", 4, 8)
    steps = {rival["name"]: rival["step_time"] for rival in answer["rivals"]}
    assert steps == {"gpipe": 33, "1f1b": 33, "interleaved_1f1b": 28.5, "zb_v": 25.5}


def test_costs_of_a_device_are_shared_by_its_chunks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = ("--forward", 2, "--input-grad", 2, "--weight-grad", 2)
    whole = answer_of(monkeypatch, capsys, "interleaved_1f1b", *SIZES, "--chunks", 4, *costs)
    assert whole["chunks"] == 4
    assert whole["step_time"] == pytest.approx(4 * 6 + 1 * 6 / 4)
    uneven = answer_of(monkeypatch, capsys, "gpipe", *SIZES, "--forward", "1,3")
    halves = answer_of(monkeypatch, capsys, "zb_v", *SIZES, "--forward", "0.5,0.5,1.5,1.5")
    assert uneven["rivals"][3]["step_time"] == halves["step_time"]


def test_transfers_are_waited_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer = answer_of(monkeypatch, capsys, "gpipe", *SIZES, "--p2p", 0.5)
    assert answer["step_time"] == 5 * 3 + 2 * 0.5
    assert answer["exposed_transfers"] > 0


def test_a_search_obeys_its_limit_and_beats_its_rivals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("searched", "--stages", 4, "--microbatches", 8, "--forward", "1,1,1,1.5", "--p2p", 0.1)
    tight = answer_of(monkeypatch, capsys, *words, "--memory-limit", 2)
    assert max(tight["peak_live_microbatches"]) <= 2
    free = answer_of(monkeypatch, capsys, *words)
    assert free["step_time"] < tight["step_time"]
    within = [rival for rival in free["rivals"] if max(rival["peak_live_microbatches"]) <= 4]
    assert len(within) == 3
    assert all(free["step_time"] <= rival["step_time"] + 1e-9 for rival in within)
    chunked = answer_of(monkeypatch, capsys, *words, "--chunks", 3)
    assert chunked["stages"] == 12


def test_what_is_written_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.txt"
    assert run(monkeypatch, "zb_v", *SIZES, "--text", "-o", path) == 0
    printed = capsys.readouterr()
    assert printed.out == path.read_text() == zb_v(2, 4).to_text()
    assert "parallelism.pp.schedule_file" in printed.err
    answer = answer_of(monkeypatch, capsys, path)
    assert answer["text"] == zb_v(2, 4).to_text()
    assert [rival["name"] for rival in answer["rivals"]] == ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"]
    path.write_text(lower(zb_v(2, 4)).to_text())
    assert answer_of(monkeypatch, capsys, path)["step_time"] == answer["step_time"]


def test_a_wrong_file_is_told_with_its_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(build_schedule("1f1b", 2, 3).to_text().replace("1F2", "1F1"))
    assert run(monkeypatch, path) == 2
    told = capsys.readouterr().err
    assert f"error: {path}: schedule '1f1b' is illegal" in told
    assert "rank 1: 1F1 stands 2 times" in told
    assert "> rank 1" in told
    path.write_text("1f1b stages=2\n")
    assert run(monkeypatch, path) == 2
    assert "line 1: '1f1b stages=2' is no header" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("1f1b",), ["--stages: is missing", "--microbatches: is missing"]),
        (("1fb1", *SIZES), ["NAME: '1fb1' is neither a file nor one of", "fix: write 1f1b"]),
        (("nowhere.txt",), ["NAME: 'nowhere.txt' is neither a file nor one of"]),
        (("1f1b", *SIZES, "--chunks", 2), ["parallelism.pp.chunks: 2 chunks are not what 1f1b has"]),
        (("1f1b", *SIZES, "--memory-limit", 3), ["--memory-limit: has no influence on 1f1b"]),
        (("searched", *SIZES, "--memory-limit", 0.5), ["--memory-limit: 0.5 leaves no room for one microbatch"]),
        (("searched", *SIZES, "--memory-limit", "nan"), ["--memory-limit: nan leaves no room for one microbatch"]),
        (("1f1b", *SIZES, "--forward", "fast"), ["--forward: 'fast' is no time"]),
        (("1f1b", *SIZES, "--forward=-1", "--p2p", "1,2"), ["--forward: '-1' is no time", "--p2p: '1,2' is no time"]),
        (("1f1b", *SIZES, "--weight-grad", "inf"), ["--weight-grad: 'inf' is no time"]),
        (("1f1b", *SIZES, "--input-grad", "1,2,3"), ["--input-grad: has 3 times", "give 1 or 2 of them"]),
        (("1f1b", "--stages", 1000, "--microbatches", 1000), ["--microbatches: 1000 stages, 1000 microbatches"]),
        (("1f1b", *SIZES, "-o", "/nowhere/at/all.txt"), ["-o: /nowhere/at/all.txt can't be written"]),
    ],
)
def test_wrong_words_are_named_with_a_fix(
    words: tuple[object, ...], told: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words) == 2
    error = capsys.readouterr().err
    assert all(each in error for each in told), error


def test_sizes_beside_a_file_contradict_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(zb_v(2, 4).to_text())
    assert run(monkeypatch, path, *SIZES) == 2
    error = capsys.readouterr().err
    assert "--stages: contradicts" in error
    assert "--microbatches: contradicts" in error


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from threefold.cli.main import main; main()"
    words = ["schedule", "searched", "--stages", "2", "--microbatches", "4"]
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_job_with_a_wrong_file_is_refused_by_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written, job = tmp_path / "mine.txt", tmp_path / "job.json"
    written.write_text(zb_v(2, 4).to_text())
    pipeline = {"size": 2, "chunks": 2, "schedule_file": str(written)}
    model = {"preset": "gpt2"}
    job.write_text(json.dumps({"model": model, "train_batch_size": 4, "parallelism": {"pp": pipeline}}))
    monkeypatch.setattr(sys, "argv", ["threefold", "check", str(job), "--set", "gradient_accumulation_steps=4"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    monkeypatch.setattr(sys, "argv", ["threefold", "check", str(job), "--set", "gradient_accumulation_steps=2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "gradient_accumulation_steps: 2 differs from the 4 microbatches" in capsys.readouterr().err


def test_the_page_on_schedules_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
    assert run(monkeypatch, "zb_h1", "--stages", 4, "--microbatches", 6) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = {line.strip() for line in page.splitlines()}
    assert all(line.strip() in shown for line in printed if line and not line.startswith(("F0 is", "Peak live")))
    assert all(f"`{name}`" in page for name in CHUNKS_OF)
    command = re.search(r"threefold schedule (searched .*)", page)
    assert command is not None
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *shlex.split(command[1])) == 0
    written = page[page.index("    zb_v stages=4") :]
    text = textwrap.dedent("\n".join(itertools.takewhile(lambda line: line.startswith("    "), written.splitlines())))
    assert text + "\n" == zb_v(2, 2).to_text()
