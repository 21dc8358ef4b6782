"""One rank of a training job, from joining the others to the last step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from threefold.errors import DataError, JobError, Problem
from threefold.job import Job
from threefold.parallel.activity import STOPPED_AFTER, ActivityBoard, ActivityLog, ActivityWriter, NullActivity
from threefold.parallel.engine import Engine, build_engine, build_job_mesh, build_layout
from threefold.parallel.mesh import describe
from threefold.train.data.dataset import TokenDataset
from threefold.train.launcher import BOARD_VARIABLE, STORE_VARIABLE
from threefold.train.metrics import MetricsWriter
from threefold.train.recording import StepObserver, TimesOf
from threefold.train.summary import TrainSummary, gather_reports, write_summary
from threefold.train.torch_profile import ProfiledSteps, StepProfiler
from threefold.train.trainer import Sources, StopRequest, Trainer
from threefold.train.watchdog import Watchdog, end_process

_BACKSTOP = 2.0
"""The backend's own timeout, in watchdog timeouts: it ends a rank whose watchdog thread is stuck too."""


def run_worker(job: Job, run_dir: Path, times_of: TimesOf | None = None, profiled: ProfiledSteps | None = None) -> int:
    """Train as the rank that the environment names; 0 when done, also after a stop that was asked for.

    Environment: ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``, as torchrun and threefold's launcher set them. Ranks meet
    over the file ``THREEFOLD_STORE`` or, without it, as ``MASTER_ADDR`` says. ``times_of`` says what a recorded step
    amounts to; without it none is kept. ``profiled`` steps are traced. Raises WorkerError when a peer is lost.
    """
    rank = int(os.environ["RANK"])
    with _activity(job, rank, run_dir) as activity:
        try:
            summary = _train(job, rank, run_dir, activity, times_of, profiled)
        except Exception as error:
            activity.finish("failed", " ".join(str(error).split()) or repr(error))
            raise
        activity.finish("done", f"{STOPPED_AFTER} {summary.steps}" if summary.stopped else "")
    return 0


def _train(
    job: Job,
    rank: int,
    run_dir: Path,
    activity: ActivityLog,
    times_of: TimesOf | None,
    profiled: ProfiledSteps | None,
) -> TrainSummary:
    device = choose_device(job)
    with joined_ranks(job, rank, device):
        mesh = build_job_mesh(job, rank, device, activity)
        engine = build_engine(job, mesh)
        sources = open_sources(job)
        stop = StopRequest()
        with (
            stop.listening(),  # until here a signal ends a rank at once: it may wait for peers that never come
            _metrics(job, rank, run_dir) as metrics,
            _observer(job, engine, times_of, run_dir) as observer,
            StepProfiler(profiled, run_dir, mesh) if profiled else nullcontext() as profiler,
        ):
            summary = Trainer(job, engine, sources, metrics, stop, observer, profiler).run()
        reports = gather_reports(mesh, summary)
        if rank == 0:
            write_summary(run_dir, summary, reports)
        # Nobody leaves while others still talk to it: gloo aborts a process whose peer hangs up.
        mesh.world.all_reduce(torch.zeros(1, device=device)).wait()
        return summary


def _observer(
    job: Job, engine: Engine, times_of: TimesOf | None, run_dir: Path
) -> AbstractContextManager[StepObserver | None]:
    if times_of is None:
        return nullcontext()
    num_logged = 1 + -(-(job.steps or 0) // job.logging.every)
    return StepObserver(engine.mesh, engine.schedule, times_of, run_dir, num_logged)


@contextmanager
def _metrics(job: Job, rank: int, run_dir: Path) -> Iterator[MetricsWriter | None]:
    """One rank writes the metrics."""
    if rank != 0:
        yield None
        return
    with MetricsWriter(run_dir, job.steps or 0, job.logging.tensorboard, live=True) as metrics:
        yield metrics


def choose_device(job: Job) -> torch.device:
    """This rank's device: its own GPU when the job asks for GPUs, else the CPU."""
    if job.cluster is None or job.is_cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        message = f"is {job.cluster.device!r}, but PyTorch finds no GPU on this machine"
        raise JobError([Problem("cluster.device", message, 'run it on a GPU machine, or set cluster.device to "cpu"')])
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextmanager
def joined_ranks(job: Job, rank: int, device: torch.device) -> Iterator[None]:
    """Be one of the job's ranks. The process group ends here for GPUs, and for CPUs with the process.

    Gloo aborts a process whose peer hangs up while it takes its own connections down, so it takes none down.
    """
    _join(job, rank, device)
    try:
        yield
    finally:
        if device.type == "cuda":
            dist.destroy_process_group()


def _join(job: Job, rank: int, device: torch.device) -> None:
    """Make the process group, by the store that the launcher names or as torchrun says."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=_BACKSTOP * job.watchdog.timeout_s)
    # NCCL binds its communicators to the device at once, instead of guessing it at the first collective.
    device_id = device if device.type == "cuda" else None
    store_path = os.environ.get(STORE_VARIABLE)
    if store_path is None:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
        return
    store = FileStore(store_path, job.world_size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=job.world_size, timeout=timeout, device_id=device_id
    )


def open_sources(job: Job) -> Sources:
    """The job's token files. Raises DataError when they are missing, too short, or of another vocabulary."""
    assert job.data is not None and job.data.train is not None, "check_trainable was not called"
    train = _open(job, job.data.train, "train", shuffle=True)
    if not job.evaluation.every:
        return Sources(train)
    # Held-out samples are always the same ones, in the order of the file.
    return Sources(train, _open(job, job.data.validation or job.data.train, "validation", shuffle=False))


def _open(job: Job, directory: str, split: str, shuffle: bool) -> TokenDataset:
    assert job.data is not None, "check_trainable was not called"
    dataset = TokenDataset.open(directory, split, job.data.sequence_length, job.seed, shuffle)
    check_vocabulary(job, dataset, directory)
    return dataset


def check_vocabulary(job: Job, dataset: TokenDataset, directory: str) -> None:
    """Refuse tokens that the model has no row for."""
    assert job.model is not None, "check_trainable was not called"
    if dataset.vocab_size > job.model.vocab_size:
        raise DataError(
            f"model.vocab_size: {directory} has a vocabulary of {dataset.vocab_size}, the model one of "
            f"{job.model.vocab_size}\n    fix: set model.vocab_size to at least {dataset.vocab_size}"
        )


@contextmanager
def _activity(job: Job, rank: int, run_dir: Path) -> Iterator[ActivityLog]:
    """Note on the board what this rank does, with a watchdog that ends it when it hangs."""
    board_path = os.environ.get(BOARD_VARIABLE)
    if board_path is None:
        yield NullActivity()
        return
    place = describe(build_layout(job).coord(rank))
    writer = ActivityWriter(ActivityBoard.open(board_path), rank, place)
    with Watchdog(writer, job.watchdog.timeout_s, end_process(run_dir, rank)):
        yield writer
