"""What is refused before a rank starts."""

from pathlib import Path

import pytest
import torch

from tests.jobs import GPT2, LLAMA, small_job
from threefold.errors import JobError
from threefold.job import load_job
from threefold.train.preflight import (
    RESOLVED_JOB,
    check_before_start,
    check_one_machine,
    crowded,
    prepare_run_dir,
    summarize,
)

GPU_NODES = {"device": "a100-80gb", "nodes": 2, "devices_per_node": 4}


def test_gpus_on_several_machines_are_told_to_use_torchrun() -> None:
    job = small_job(dp=8, cluster=GPU_NODES)
    with pytest.raises(JobError, match=r"cluster\.nodes: is 2") as caught:
        check_one_machine(job, Path("my.json"))
    assert "torchrun --nnodes 2 --nproc-per-node 4" in str(caught.value)
    assert "-m threefold train my.json" in str(caught.value)


@pytest.mark.parametrize("cluster", [GPU_NODES | {"device": "cpu"}, GPU_NODES | {"nodes": 1, "devices_per_node": 8}])
def test_one_machine_and_cpu_nodes_are_fine(cluster: dict[str, object]) -> None:
    check_one_machine(small_job(dp=8, cluster=cluster), Path("my.json"))


def test_what_training_needs_is_asked_for() -> None:
    with pytest.raises(JobError, match=r"data\.train"):
        check_before_start(small_job(), 1)


def test_data_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="nowhere"):
        check_before_start(small_job(data={"train": str(tmp_path / "nowhere")}), 1)


def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threefold.train.worker.open_sources", lambda job: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    job = small_job(dp=4, data={"train": "data"}, cluster=GPU_NODES | {"nodes": 1})
    with pytest.raises(JobError, match="needs 4 GPUs on this machine, which has 3"):
        check_before_start(job, 4)


def test_the_run_directory_gets_the_resolved_job(tmp_path: Path) -> None:
    job = small_job(LLAMA, dp=2)
    prepare_run_dir(tmp_path / "a" / "b", job)
    assert load_job(tmp_path / "a" / "b" / RESOLVED_JOB) == job


def test_a_run_directory_is_not_used_twice(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(JobError, match="holds another run"):
        prepare_run_dir(tmp_path, small_job())


def test_a_run_directory_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match=r"--run-dir: can't write into .*file"):
        prepare_run_dir(tmp_path / "file" / "run", small_job())


def test_the_summary_has_the_numbers_that_a_person_checks() -> None:
    text = summarize(small_job(LLAMA, dp=2, tp=2, pp=2), Path("runs/x"))
    assert "for 4 steps in fp32 on 8 × cpu: dp=2 × tp=2 × pp=2 (1f1b)" in text
    assert "8 samples (micro batch 1 × accumulation 4 × dp 2) = 96 tokens" in text
    assert text.endswith("Everything goes to runs/x.")


def test_counts_are_rounded_once_they_are_large() -> None:
    assert summarize(small_job(LLAMA), Path("runs/x")).startswith("Training 34,912 parameters (llama)")
    large = LLAMA | {"hidden_size": 512, "intermediate_size": 2048}
    assert summarize(small_job(large), Path("runs/x")).startswith("Training 15.8 million parameters")


@pytest.mark.parametrize("name", ["thesis.txt", "job.json", "metrics.jsonl", "logs"])
def test_a_directory_that_holds_anything_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(JobError, match=f"--run-dir.*{name}"):
        prepare_run_dir(tmp_path, small_job())
    assert (tmp_path / name).read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_of_two_runs_in_one_directory_the_second_is_refused(tmp_path: Path) -> None:
    (tmp_path / "activity.board").touch()  # a rank of torchrun may be faster than the first one
    prepare_run_dir(tmp_path, small_job())
    with pytest.raises(JobError, match="holds another run"):
        prepare_run_dir(tmp_path, small_job())


def test_compiling_for_cpus_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = small_job(data={"train": str(tmp_path)}, compile={"enabled": True})
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(JobError, match=r"compile.enabled: torch.compile needs a C\+\+ compiler"):
        check_before_start(job, 1)
    monkeypatch.setattr("shutil.which", lambda name: name == "clang++" or None)
    with pytest.raises(JobError) as caught:
        check_before_start(job, 1)
    assert "compile.enabled" not in str(caught.value)


def test_many_ranks_on_a_core_are_remarked_upon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert crowded(small_job(dp=8)) == []
    (note,) = crowded(small_job(GPT2 | {"num_hidden_layers": 4}, dp=4, pp=4))
    assert note.startswith("16 ranks share 2 cores")
    assert crowded(small_job(dp=4, pp=2, cluster=GPU_NODES)) == []
