"""Whole jobs: round trips, other layouts, the schema, the examples, and what importing costs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.job.problems import BATCH, TINY
from threefold.errors import JobError
from threefold.job import Job, job_schema, load_job, parse_job, read_job, relayout
from threefold.job.keys import known_fields, suggestion

EXAMPLES = Path(__file__).parents[2] / "examples"


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    tp, pp, dp = draw(st.sampled_from([1, 2, 3, 6])), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    micro, accumulation = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    positive = st.floats(1e-9, 1e6)
    settings: dict[str, Any] = {
        "model": {**TINY, "norm_eps": draw(positive), "tie_word_embeddings": draw(st.booleans())},
        "data": {"sequence_length": draw(st.sampled_from([6, 12, 60])), "train": draw(st.none() | st.text(min_size=1))},
        "steps": draw(st.none() | st.integers(100, 10**6)),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "parallelism": {
            "order": draw(st.sampled_from(["tp,pp,dp", "dp,pp,tp", "pp,tp,dp"])),
            "tp": {"size": tp, "sequence_parallel": draw(st.booleans())},
            "pp": {
                "size": pp,
                "schedule": draw(st.sampled_from(["naive", "gpipe", "1f1b"])),
                "partition": draw(st.sampled_from(["even", "auto", [1] * (pp - 1) + [7 - pp]])),
            },
            "dp": {"size": dp},
        },
        "dtype": draw(st.sampled_from(["float32", "float64"])),
        "gradient_clipping": draw(st.floats(0, 10)),
        "optimizer": {"params": {"lr": draw(positive), "betas": draw(st.tuples(*[st.floats(0, 0.99)] * 2).map(list))}},
        "scheduler": {"type": draw(st.sampled_from(["constant", "linear", "cosine"])), "warmup_steps": 10},
        "checkpoint": {"keep_last": draw(st.none() | st.integers(1, 9))},
    }
    if draw(st.booleans()):
        settings["cluster"] = {"device": "cpu", "nodes": dp, "devices_per_node": tp * pp, "inter_node": "2x25Gb/s"}
    return parse_job(_without_none(settings))


def _without_none(settings: dict[str, Any]) -> dict[str, Any]:
    inner = {key: _without_none(value) if isinstance(value, dict) else value for key, value in settings.items()}
    return {key: value for key, value in inner.items() if value is not None}


@given(job=jobs())
def test_a_job_written_as_json_loads_to_an_equal_job(job: Job) -> None:
    assert parse_job(json.loads(job.to_json())) == job


@given(job=jobs())
def test_a_written_job_states_every_size(job: Job) -> None:
    written = json.loads(job.to_json())
    assert written["train_batch_size"] == job.micro_batch * job.num_microbatches * job.dp
    assert written["parallelism"]["dp"]["size"] == job.dp
    assert next(iter(written)) == "model"


@given(job=jobs(), dp=st.integers(1, 4), tp=st.sampled_from([1, 2, 3, 6]), pp=st.integers(1, 6))
def test_another_layout_trains_the_same_batch(job: Job, dp: int, tp: int, pp: int) -> None:
    try:
        other = relayout(job, dp=dp, tp=tp, pp=pp)
    except JobError as error:
        assert [problem.key for problem in error.problems] == ["train_batch_size"]
        assert job.train_batch_size % (job.micro_batch * dp) != 0
        return
    assert (other.dp, other.tp, other.pp) == (dp, tp, pp)
    assert (other.train_batch_size, other.micro_batch) == (job.train_batch_size, job.micro_batch)
    assert other.model == job.model and other.optimizer == job.optimizer and other.seed == job.seed
    assert other.cluster in (None, job.cluster)


def test_relayout_keeps_what_is_not_given() -> None:
    job = parse_job({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "model": TINY}, world_size=4)
    assert relayout(job) == job
    other = relayout(job, tp=2, schedule="gpipe", sequence_parallel=True, order="dp,tp,pp")
    assert (other.dp, other.tp, other.world_size, other.num_microbatches) == (4, 2, 8, 3)
    assert other.parallelism.pp.schedule == "gpipe" and other.parallelism.tp.sequence_parallel
    assert other.parallelism.axes == ("dp", "tp", "pp")


def test_relayout_changes_the_batch_only_when_told() -> None:
    job = parse_job({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2})

    def sides(other: Job) -> tuple[int, int, int]:
        return other.train_batch_size, other.micro_batch, other.num_microbatches

    assert sides(relayout(job, dp=3)) == (24, 2, 4)
    assert sides(relayout(job, dp=3, micro_batch=4)) == (24, 4, 2)
    assert sides(relayout(job, dp=3, accumulation=2)) == (24, 4, 2)
    assert sides(relayout(job, dp=3, micro_batch=1, accumulation=2)) == (6, 1, 2)


def test_relayout_of_a_partition() -> None:
    job = parse_job({**BATCH, "model": TINY, "parallelism": {"pp": {"size": 2, "partition": [4, 2]}}})
    assert relayout(job, dp=2).parallelism.pp.partition == (4, 2)
    assert relayout(job, pp=3).parallelism.pp.partition == known_fields()["parallelism.pp.partition"].default
    assert relayout(job, pp=3, partition=[1, 2, 3]).parallelism.pp.partition == (1, 2, 3)
    assert relayout(job, partition="auto").parallelism.pp.partition == "auto"


def test_relayout_runs_on_any_machine() -> None:
    job = load_job(EXAMPLES / "llama3-8b-64xa100.json")
    assert relayout(job, dp=8, pp=1).cluster == job.cluster
    assert relayout(job, dp=1, pp=1, tp=1).cluster is None


def test_relayout_names_what_is_wrong() -> None:
    job = parse_job({**BATCH, "model": TINY})
    with pytest.raises(JobError) as caught:
        relayout(job, tp=4, pp=9, dp=5)
    assert {problem.key for problem in caught.value.problems} == {
        "train_batch_size",
        "parallelism.tp.size",
        "parallelism.pp.size",
    }


def test_a_file_and_a_mapping_give_the_same_job(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(BATCH))
    assert load_job(str(path), ["seed=3"]) == read_job(path, ["seed=3"]).job == parse_job(BATCH, ["seed=3"])


def test_parsing_leaves_the_mapping_alone() -> None:
    settings = {**BATCH, "parallelism": {"dp": {"size": 2}}, "steps_per_print": 3}
    before = json.dumps(settings)
    parse_job(settings, ["parallelism.dp.size=4", "steps=3"])
    assert json.dumps(settings) == before


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.json")), ids=lambda path: path.name)
def test_examples_load_and_round_trip(path: Path) -> None:
    loaded = read_job(path)
    assert loaded.notes == ()
    assert parse_job(json.loads(loaded.job.to_json())) == loaded.job


def test_the_articles_example() -> None:
    job = load_job(EXAMPLES / "article-64xa100.json")
    assert (job.dp, job.tp, job.pp, job.world_size) == (4, 8, 2, 64)
    assert (job.micro_batch, job.num_microbatches, job.train_batch_size) == (4, 8, 128)
    assert job.zero_optimization.stage == 3 and job.precision == "fp16"
    assert job.zero_optimization.offload_optimizer is not None
    assert job.zero_optimization.offload_optimizer.device == "cpu"


def test_the_hundred_billion_example() -> None:
    job = load_job(EXAMPLES / "hundred-billion-512.json")
    assert (job.dp, job.tp, job.pp, job.world_size) == (16, 8, 4, 512)
    assert job.model is not None and 99e9 < job.model.num_parameters < 105e9


def test_the_schema_describes_every_key() -> None:
    schema = job_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert set(schema["properties"]) == {key for key in known_fields() if "." not in key}
    assert schema["additionalProperties"] is False
    model = schema["$defs"]["ModelSpec"]
    assert {"required": ["preset"]} in model["anyOf"] and "required" not in model
    assert model["properties"]["hidden_size"]["description"]


def test_a_job_may_name_the_schema_to_an_editor() -> None:
    assert parse_job({"$schema": "job.schema.json", **BATCH}) == parse_job(BATCH)


def test_every_synonym_leads_to_a_known_key() -> None:
    for word in ("lr", "batch_size", "tp", "zero_stage", "num_layers", "seq_len", "world_size"):
        assert suggestion(word) in known_fields()


def test_importing_is_cheap_and_needs_no_torch() -> None:
    code = (
        "import sys, time; start = time.process_time(); import threefold.job; "
        "print(time.process_time() - start, any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    # The fastest of three: other work on the machine must not fail this.
    outputs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(3)]
    assert min(float(output.split()[0]) for output in outputs) < 0.3
    assert outputs[0].split()[1] == "False"


def test_no_source_of_the_part_imports_torch() -> None:
    sources = (Path(__file__).parents[2] / "src/threefold/job").glob("*.py")
    assert not any(re.search(r"^\s*(import|from) torch", source.read_text(), re.M) for source in sources)
