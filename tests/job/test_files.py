"""Reading: JSON or YAML whatever the name, and every way in which a file holds no job."""

from __future__ import annotations

from pathlib import Path

import pytest

from threefold.errors import JobError, Problem
from threefold.job import load_job
from threefold.job.files import parse_settings, parse_value

ARTICLE = (
    "{ train_micro_batch_size_per_gpu: 4, gradient_accumulation_steps: 8, zero_optimization: { stage: 3, "
    "offload_optimizer: {device: cpu} }, fp16: {enabled: true}, parallelism: { tp: {size: 8}, pp: {size: 2}, "
    "dp: {size: 4} } }"
)


def refusal(path: Path) -> Problem:
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert caught.value.exit_status == 2
    (problem,) = caught.value.problems
    assert str(path) in problem.key and problem.fix
    return problem


def refusal_of(tmp_path: Path, content: str | bytes, name: str = "job.json") -> Problem:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return refusal(path)


def test_the_articles_job_loads_as_printed(tmp_path: Path) -> None:
    path = tmp_path / "article.json"
    path.write_text(ARTICLE)
    job = load_job(path)
    assert (job.dp, job.tp, job.pp, job.world_size) == (4, 8, 2, 64)
    assert (job.train_batch_size, job.micro_batch, job.num_microbatches) == (128, 4, 8)
    assert job.zero_optimization.stage == 3 and job.zero_optimization.offload_optimizer is not None
    assert job.precision == "fp16"


@pytest.mark.parametrize("name", ["job.json", "job.yaml", "job.txt", "job"])
@pytest.mark.parametrize("text", ['{"train_batch_size": 4, "seed": 7}', "train_batch_size: 4\nseed: 7\n"])
def test_the_extension_does_not_matter(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert load_job(path).seed == 7


def test_a_byte_order_mark_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(b'\xef\xbb\xbf{"train_batch_size": 4}')
    assert load_job(path).train_batch_size == 4


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("5e8", 5e8),
        ("010", 10),
        ("0x10", 16),
        ("0o10", 8),
        ("1_000", 1000),
        ("-3", -3),
        ("true", True),
        ("on", "on"),
        ("yes", "yes"),
        ("null", None),
        ("2024-01-01", "2024-01-01"),
        ("8:30", "8:30"),
        ("1f1b", "1f1b"),
        ("tp,pp,dp", "tp,pp,dp"),
        ("[0.9, 0.95]", [0.9, 0.95]),
        ("{device: cpu}", {"device": "cpu"}),
        ('"quoted"', "quoted"),
    ],
)
def test_yaml_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_value(text)
    assert parsed == value and type(parsed) is type(value)
    assert parse_settings(f"key: {text}", "here") == {"key": value}


def test_a_missing_file_lists_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text("{}")
    problem = refusal(tmp_path / "dmo.json")
    assert "no such file" in problem.message and "demo.json" in problem.fix


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none") in refusal(tmp_path / "none" / "job.json").fix


def test_a_directory_is_no_job(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text("{}")
    problem = refusal(tmp_path)
    assert "directory" in problem.message and "demo.yaml" in problem.fix


def test_a_file_in_the_way_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "can't be read" in refusal(tmp_path / "file" / "job.json").message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "empty"),
        ("   \n\n", "empty"),
        ("null", "empty"),
        ("[1, 2]", "mapping"),
        ("12", "mapping"),
        (b"\x80\x81\x82", "not a text file"),
        (b"\xff\xfe{\x00}\x00", "not a text file"),
        ("{}\0", "not a text file"),
        ("a: \x01", "neither JSON nor YAML"),
        ("seed: 1\n---\nseed: 2", "single document"),
        ("seed: &a 1\nsteps: *a", "aliases"),
        ("1: 2", "key 1 is not text"),
        ("null: 2", "key null is not text"),
        ("seed: !!python/name:os.system x", "could not determine a constructor"),
        ('{"a":' * 3000, "nested too deeply"),
        ('{"seed": 1' + "0" * 5000 + "}", "number that can't be read"),
        ("{" + " " * 300_000 + "}", "larger than"),
    ],
)
def test_what_holds_no_job(tmp_path: Path, content: str | bytes, words: str) -> None:
    assert words in refusal_of(tmp_path, content).message


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('{\n "seed": 1,\n "steps" 3\n}', ":3:10"),
        ('{\n "seed": 1', ":2:11"),
        ("seed: 1\nparallelism:\n\ttp: 1\n", ":3:1"),
        ("seed: 1\n  steps: 2\n", ":2:8"),
        ('{"seed": 1,\n "seed": 2}', ":2:2"),
        ("fp16:\n  enabled: true\n  enabled: false\n", ":3:3"),
    ],
)
def test_broken_syntax_is_placed(tmp_path: Path, content: str, place: str) -> None:
    problem = refusal_of(tmp_path, content)
    assert problem.key.endswith(place)
    assert f"line {place.split(':')[1]}" in problem.fix


def test_a_key_given_twice_is_named(tmp_path: Path) -> None:
    assert '"seed" is given twice' in refusal_of(tmp_path, '{"seed": 1, "seed": 1}').message
    with_tabs = '{\n\t"fp16": {"enabled": true,\n\t"enabled": true}\n}'
    assert '"enabled" is given twice' in refusal_of(tmp_path, with_tabs).message


@pytest.mark.parametrize(
    ("content", "key", "words"),
    [
        ('{"seed": NaN}', "seed", "finite"),
        ('{"optimizer": {"params": {"lr": Infinity}}}', "optimizer.params.lr", "finite"),
        ('{"optimizer": {"params": {"betas": [0.9, 1e999]}}}', "optimizer.params.betas", "finite"),
        ("seed: 0x1" + "0" * 5000, "seed", "bits"),
        ("gradient_clipping: .nan", "gradient_clipping", "finite"),
        ("gradient_clipping: -.inf", "gradient_clipping", "finite"),
        ('{"seed": "\\ud800"}', "seed", "Unicode"),
        ('{"\\ud800": 1}', "the job", "no name"),
        ('{"": 1}', "the job", "no name"),
        ('{"a": ' * 40 + "1" + "}" * 40, "a", "nested"),
    ],
)
def test_values_that_no_key_has(tmp_path: Path, content: str, key: str, words: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(content)
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert [problem.key for problem in caught.value.problems] == [key]
    assert words in caught.value.problems[0].message
