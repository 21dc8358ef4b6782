"""What the user states: the job, its model, cluster and parallelism, and the rules that judge them (pure)."""

from threefold.job.load import Loaded, job_schema, load_job, parse_job, read_job, relayout
from threefold.job.rules import check_trainable
from threefold.job.spec import ClusterSpec, DataSpec, Job, ModelSpec, Parallelism

__all__ = [
    "ClusterSpec",
    "DataSpec",
    "Job",
    "Loaded",
    "ModelSpec",
    "Parallelism",
    "check_trainable",
    "job_schema",
    "load_job",
    "parse_job",
    "read_job",
    "relayout",
]
