"""threefold: train large language models with data, tensor and pipeline parallelism, equal to one process."""

__version__ = "0.1.0"
