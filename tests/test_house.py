"""The house itself: what the files beside the code say is true."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from threefold import __version__
from threefold.job import check_trainable, load_job

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))


def test_the_version_is_said_once() -> None:
    assert PROJECT["project"]["version"] == __version__
    assert f"[{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_makefile_has_its_targets() -> None:
    assert {"demo", "test", "test-slow", "lint", "types", "clean", "help"} <= TARGETS


def test_all_targets_that_are_no_files_say_so() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == TARGETS


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_make_commands_in_the_text_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    commands = re.findall(r"`{1,3}[^`]*`{1,3}", text)
    said = {target for command in commands for target in re.findall(r"\bmake ([a-z-]+)", command)}
    assert said <= TARGETS


def test_the_check_script_runs_make_targets_that_exist() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert set(re.findall(r"\bmake ([a-z-]+)", script.read_text())) <= TARGETS


def test_the_demo_trains_on_the_data_that_make_builds() -> None:
    job = load_job(ROOT / "examples" / "demo.json")
    assert check_trainable(job) == []
    assert job.data is not None
    assert job.model is not None
    built = re.search(r"^DEMO_DATA := (\S+)$", MAKEFILE, flags=re.MULTILINE)
    vocabulary = re.search(r"--tokenizer bpe:(\d+)", MAKEFILE)
    assert built is not None
    assert vocabulary is not None
    assert job.data.train == built[1]
    assert int(vocabulary[1]) <= job.model.vocab_size


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.json")), ids=lambda path: path.name)
def test_every_example_is_a_valid_job(path: Path) -> None:
    assert load_job(path).world_size >= 1


def test_every_part_says_what_it_is() -> None:
    packages = list((ROOT / "src" / "threefold").rglob("__init__.py"))
    assert len(packages) > 10
    assert [package for package in packages if not package.read_text().startswith('"""')] == []


def test_warnings_are_errors() -> None:
    assert PROJECT["tool"]["pytest"]["ini_options"]["filterwarnings"][0] == "error"


def test_no_file_is_larger_than_a_person_reads() -> None:
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    assert [path.name for path in sources if len(path.read_text().splitlines()) > 600] == []
