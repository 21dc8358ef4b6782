"""What compression does to loss and bytes: the demo, trained by two replicas with Adam, 1-bit Adam, PowerSGD and bf16.

Run ``make data`` first, then ``python benchmarks/compression.py``; it takes some minutes. All runs see the same samples
in the same number of steps. Bytes are those counted in the last step and put on the wire by a ring: an all-reduce of n
bytes over g ranks sends 2 n (g - 1)/g from each, every other collective n (g - 1)/g.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REPLICAS = 2
# Clipping needs the norm of the summed gradient, which 1-bit Adam never forms, so nobody clips.
COMMON = (
    f"cluster.devices_per_node={REPLICAS}",
    f"parallelism.dp.size={REPLICAS}",
    "parallelism.tp.size=1",
    "parallelism.pp.size=1",
    "gradient_clipping=0",
    "logging.tensorboard=false",
)
RUNS: Mapping[str, tuple[str, ...]] = {
    "AdamW": (),
    "AdamW, sums in bf16": ("communication_data_type=bf16",),
    "OneBitAdam, frozen after 30": ("optimizer.type=OneBitAdam", "optimizer.params.freeze_step=30"),
    "PowerSGD rank 4 from step 30": ("gradient_compression.type=powersgd", "gradient_compression.start_step=30"),
    "PowerSGD rank 16 from step 30": (
        "gradient_compression.type=powersgd",
        "gradient_compression.start_step=30",
        "gradient_compression.rank=16",
    ),
}
PASSES: Mapping[str, int] = {"all_reduce": 2}


def main() -> None:
    """Train each and print a table."""
    print(f"{'run':32} {'held-out loss':>13} {'over AdamW':>10} {'MB a step':>10} {'fewer':>6}")
    base: tuple[float, float] | None = None
    for name, overrides in RUNS.items():
        with tempfile.TemporaryDirectory(prefix="threefold-compression-") as directory:
            loss, sent = train(Path(directory) / "run", overrides)
        base = base or (loss, sent)
        print(
            f"{name:32} {loss:13.4f} {loss / base[0] - 1:+10.2%} {sent / 1e6:10.3f} {base[1] / sent:5.1f}x", flush=True
        )


def train(run_dir: Path, overrides: tuple[str, ...]) -> tuple[float, float]:
    """The last held-out loss, and the gradient bytes that a rank puts on the wire in the last step."""
    settings = [part for override in (*COMMON, *overrides) for part in ("--set", override)]
    command = [sys.executable, "-m", "threefold", "train", "examples/demo.json", "--run-dir", str(run_dir), *settings]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    return held_out[-1], wire_bytes(json.loads((run_dir / "summary.json").read_text()))


def wire_bytes(summary: Mapping[str, Any]) -> float:
    """Bytes of the last step; with dp alone all of them are gradients, but for a few numbers."""
    rows = summary["ranks"][0]["traffic"]["last_step"]
    share = (REPLICAS - 1) / REPLICAS
    return sum(PASSES.get(row["operation"], 1) * share * row["bytes"] for row in rows)


if __name__ == "__main__":
    main()
