"""The published runs and rows made up after them."""

from __future__ import annotations

from pathlib import Path

PUBLISHED = Path(__file__).parents[1] / "data" / "published_runs.csv"

ROW = {
    "source": "somebody/something runs.md",
    "model_name": "GPT-7.5B",
    "layers": "36",
    "hidden": "4096",
    "heads": "32",
    "ffn": "16384",
    "vocab": "51200",
    "seq_len": "2048",
    "gpu": "A100-80GB",
    "n_gpus": "32",
    "tp": "4",
    "pp": "1",
    "vpp": "1",
    "micro_batch": "4",
    "global_batch": "512",
    "precision": "fp16",
    "recompute": "full",
    "iter_time_s": "14.0",
    "status": "ok",
}


def write_runs(path: Path, *changes: dict[str, str]) -> Path:
    """A file with one row for each of ``changes``, which are made to ``ROW``."""
    names = list(dict.fromkeys([*ROW, *(name for change in changes for name in change)]))
    rows = [",".join({**ROW, **change}.get(name, "") for name in names) for change in changes or ({},)]
    path.write_text("\n".join([",".join(names), *rows]) + "\n", encoding="utf-8")
    return path
