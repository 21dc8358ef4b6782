"""Every command in the README works as written, every example job explains itself, and the schema is current."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from threefold.job import Job, check_trainable, job_schema, load_job

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.json"))
_TAKES_LONG = ("parity", "train", "profile", "timeline")


def readme_commands() -> list[tuple[str, int]]:
    """(command, exit status) of each ``$`` line in the console blocks; a comment may say ``exits with N``."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ threefold")]
    commands = []
    for line in lines:
        command, _, comment = line.partition("#")
        status = re.search(r"exits with (\d+)", comment)
        commands.append((command.strip(), int(status[1]) if status else 0))
    return commands


def marked(command: str, status: int) -> object:
    slow = shlex.split(command)[1] in _TAKES_LONG
    return pytest.param(command, status, marks=pytest.mark.slow if slow else (), id=command)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like the repository after ``make demo``, so that commands leave nothing in the real one."""
    place = tmp_path_factory.mktemp("readme")
    for name in ("examples", "docs", "README.md"):
        (place / name).symlink_to(ROOT / name)
    text = Path(sysconfig.get_paths()["stdlib"]) / "json"
    for out in ("data/demo", "data/mine"):
        status, output = run(f"threefold data build {text} --out {out} --tokenizer bpe:600 --pattern *.py", place)
        assert status == 0, output
    return place


def run(command: str, place: Path) -> tuple[int, str]:
    words = [sys.executable, "-m", "threefold", *shlex.split(command)[1:]]
    if words[3:5] == ["data", "build"]:
        words.append("--overwrite")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, timeout=400, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_readme_has_commands() -> None:
    verbs = {shlex.split(command)[1] for command, _ in readme_commands()}
    assert verbs == {"data", "train", "check", "explain", "parity", "plan", "profile", "schedule", "timeline"}


@pytest.mark.parametrize(("command", "status"), [marked(*entry) for entry in readme_commands()])
def test_readme_command(command: str, status: int, workplace: Path) -> None:
    if "--run-dir" in command:
        subprocess.run(["rm", "-rf", str(workplace / "runs")], check=True)
    got, output = run(command, workplace)
    assert got == status, output
    assert "Traceback" not in output


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_loads_and_explains_itself(path: Path, workplace: Path) -> None:
    job = load_job(path)
    status, output = run(f"threefold explain examples/{path.name}", workplace)
    assert status == 0, output
    assert f"{job.world_size} devices" in output
    assert json.loads(job.to_json())["parallelism"]["dp"]["size"] == job.dp


def test_the_article_job_is_64_devices_as_4_pipelines_of_2_nodes(workplace: Path) -> None:
    job = load_job(ROOT / "examples/article-64xa100.json")
    assert (job.dp, job.tp, job.pp, job.world_size) == (4, 8, 2, 64)
    assert (job.micro_batch, job.num_microbatches, job.train_batch_size) == (4, 8, 128)
    assert job.zero_optimization.stage == 3
    assert job.fp16.enabled
    assert check_trainable(job) == []
    _, output = run("threefold explain examples/article-64xa100.json", workplace)
    for sentence in ("Each node is one tp group", "Two nodes form a pipeline", "There are four pipelines"):
        assert sentence in output


def test_the_demo_can_be_trained() -> None:
    job = load_job(ROOT / "examples/demo.json")
    assert isinstance(job, Job)
    assert check_trainable(job) == []
    assert (job.dp, job.tp, job.pp) == (2, 2, 2)


def test_the_published_schema_is_that_of_the_code() -> None:
    published = json.loads((ROOT / "docs/job.schema.json").read_text())
    assert published == job_schema(), "run: make docs"
