"""What a published run leaves unsaid: the plausible values of every empty cell, each with a weight.

A run becomes one or more complete configurations whose weights sum to 1. Unknown stays unknown: the prediction is their
mixture, and where they differ the interval widens. What the run does say is never changed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np

from threefold.cost.attention import FUSED_ROWS
from threefold.cost.hardware import Device, find_device
from threefold.cost.known_runs import find_known
from threefold.cost.runs import Run
from threefold.cost.shape import attention_matrices, shape_of
from threefold.cost.strategies import PRECISION_CODES, RECOMPUTE_CODES, SCHEDULE_CODES
from threefold.errors import JobError
from threefold.job.presets import presets
from threefold.job.spec import ModelSpec

VOCABULARIES = (32000, 50304, 51200, 65536, 100352, 128256, 131072, 152064, 250880, 256000)
"""Vocabularies of well-known models, padded as they are trained."""

MEGATRON, DEEPSPEED, DEEPSPEED_SERIAL, FSDP, FSDP2, EAGER, MODERN = (
    "megatron-2021",
    "megatron-deepspeed",
    "megatron-deepspeed-serial",
    "fsdp-2023",
    "fsdp2-2024",
    "eager-2024",
    "modern",
)

UNFUSED = (MEGATRON, DEEPSPEED, DEEPSPEED_SERIAL)
"""Stacks from before fused attention, sequence parallelism and sharded optimizers were the habit."""


class NotModelledError(Exception):
    """A run that can't be predicted; the message says why."""


@dataclass(frozen=True)
class Configuration:
    """A complete configuration of a run: names of ``Shape`` and ``Strategies`` fields -> numbers."""

    weight: float
    shape: Mapping[str, float]
    strategy: Mapping[str, float]
    device: Device
    num_devices: int
    software: str
    nic_bytes_per_s: float


def complete(run: Run) -> list[Configuration]:
    """All plausible configurations of ``run``. Raises NotModelledError for a kind that the model lacks."""
    if "hybrid" in run.text["arch_kind"].lower():
        raise NotModelledError("hybrid of attention and state-space layers")
    try:
        device = find_device(run.text["gpu"])
    except JobError as error:
        raise NotModelledError(f"device {run.text['gpu']} is not in the table") from error
    software = software_of(run, device)
    degrees = _degrees(run)
    devices = int(_known(run, "n_gpus"))
    found = [
        Configuration(weight * share * chance, dims, strategy, device, devices, software, nic)
        for nic, chance in _networks(run, device, devices)
        for dims, weight in _dimensions(run, device, software, degrees)
        for strategy, share in _strategies(run, device, software, degrees, dims)
    ]
    total = sum(one.weight for one in found)
    return [replace(one, weight=one.weight / total) for one in found]


def _networks(run: Run, device: Device, devices: int) -> list[tuple[float, float]]:
    """Bytes/s between nodes for each device: stated in the text (of a node), else what such machines have been built
    with.

    A100 nodes were built with a network card for each device (Selene), for every second one, and with four half as
    fast.
    """
    said = run.text["note"] + " " + run.source
    stated = re.search(r"(\d+) ?Gbps (?:inter-node|node-node|between nodes)", said)
    if stated:
        return [(float(stated[1]) * 1e9 / 8 / device.nvlink_domain, 1.0)]
    known = find_known(said)
    if known is not None and devices > device.nvlink_domain:
        return [(known.nic_bytes_per_s, 1.0)]
    if devices <= device.nvlink_domain:
        return [(device.nic_bytes_per_s, 1.0)]
    usual = device.nic_bytes_per_s
    return [(usual, 0.6), (usual / 2, 0.3), (usual / 4, 0.1)] if device.generation == "ampere" else [(usual, 1.0)]


def software_of(run: Run, device: Device) -> str:
    """The software generation by what the run shows: stated, or by device, number format and parallelism.

    Ampere and Volta without ZeRO stage 3 are the Megatron of 2021, without fused attention, or its DeepSpeed branch
    where the text says so. PyTorch's FSDP is named in the text, or shown by ZeRO stage 3 alone; nanotron is known to
    run eager PyTorch. All else has fused kernels.
    """
    if run.text["software"]:
        return run.text["software"]
    said = run.text["note"] + " " + run.source
    known = find_known(said)
    if known is not None and known.software:
        return known.software
    if (run["zero_stage"] or 0) >= 2 and re.search(r"\bFSDP2?\b(?!=)", said):
        return FSDP2 if "FSDP2" in said else FSDP
    if "nanotron" in said.lower():
        return EAGER
    sharded = run["zero_stage"] == 3 and (run["pp"] or 1) == 1
    if device.generation in ("volta", "ampere") and not sharded:
        return DEEPSPEED if "deepspeed" in said.lower() else MEGATRON
    if sharded and (run["tp"] or 1) == 1 and _precision(run, device, MODERN) in ("bf16", "fp16"):
        return FSDP
    return MODERN


def _known(run: Run, name: str) -> float:
    value = run[name]
    if value is None:
        raise NotModelledError(f"{name} is not stated")
    return value


def _degrees(run: Run) -> dict[str, float]:
    """tp, pp, cp, ep and dp; dp follows from the others."""
    if run["tp"] is None and run["pp"] is None and run["zero_stage"] is None:
        raise NotModelledError("the degrees of parallelism are not stated")
    degrees = {axis: run[axis] or 1.0 for axis in ("tp", "pp", "cp", "ep")}
    devices = _known(run, "n_gpus")
    product = degrees["tp"] * degrees["pp"] * degrees["cp"]
    dp = run["dp"] or devices / product
    if dp * product != devices:
        raise NotModelledError(f"tp·pp·dp·cp = {dp * product:g}, not n_gpus = {devices:g}")
    return {**degrees, "dp": dp}


def _dimensions(
    run: Run, device: Device, software: str, degrees: Mapping[str, float]
) -> Iterator[tuple[dict[str, float], float]]:
    if "moe" in run.text["arch_kind"].lower():
        yield from _expert_dimensions(run, device)
        return
    known = _named_dimensions(run)
    hidden, layers = known.get("hidden"), known.get("layers")
    if hidden is None:
        raise NotModelledError("hidden size is not stated")
    if layers is None:
        layers = _layers_by_size(run, hidden, known.get("vocab") or 51200.0, degrees["pp"])
    heads = known.get("heads")
    ffn = known.get("ffn") or 4 * hidden
    for sequence, weight in _sequences(run, device):
        for head_count, share in _heads(heads, hidden, degrees["tp"], software):
            base = {"hidden": hidden, "layers": layers, "heads": head_count, "ffn": ffn, "sequence": sequence}
            base["kv_heads"] = known.get("kv_heads") or _kv_heads(run, head_count)
            base["head_dim"] = hidden / head_count
            ends = _ends(run, base, known.get("vocab"), device)
            yield {**base, **ends, **_parameters(base, ends)}, weight * share


def _expert_dimensions(run: Run, device: Device) -> Iterator[tuple[dict[str, float], float]]:
    """A mixture of experts has too many dimensions for columns: those of the preset of its name."""
    name = re.sub(r"\(.*", "", run.text["model_name"].lower().replace("_", "-")).strip()
    preset = presets().get(re.sub(r"^deepseek(?=v)", "deepseek-", name))
    if preset is None or (run["layers"] or preset["num_hidden_layers"]) != preset["num_hidden_layers"]:
        raise NotModelledError("mixture of experts without stated dimensions")
    for sequence, weight in _sequences(run, device):
        yield asdict(shape_of(ModelSpec.model_validate(preset), int(sequence))), weight


def _named_dimensions(run: Run) -> dict[str, float | None]:
    """The stated dimensions; for a model stated by name only, those of the preset of that name."""
    stated = {name: run[name] for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")}
    if stated["hidden"] is not None:
        return stated
    name = re.sub(r"[^a-z0-9.-]", "", run.text["model_name"].lower())
    preset = presets().get(name)
    if preset is None:
        return stated
    names = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "ffn": "intermediate_size",
        "vocab": "vocab_size",
    }
    return {ours: stated[ours] or preset.get(theirs) for ours, theirs in names.items()}


def _kv_heads(run: Run, heads: float) -> float:
    """Llama 3 models share key-value heads among eight or more query heads; older ones do not."""
    return 8.0 if run["vocab"] == 128256 and heads >= 32 else heads


def _layers_by_size(run: Run, hidden: float, vocab: float, stages: float) -> float:
    """From the parameter count, 12·D² a layer, to the nearest whole number of layers a stage."""
    billions = run["params_B"]
    if billions is None:
        raise NotModelledError("layers are not stated")
    return max(1.0, round((billions * 1e9 - vocab * hidden) / (12 * hidden**2) / stages)) * stages


def _heads(heads: float | None, hidden: float, tp: float, software: str) -> list[tuple[float, float]]:
    """Heads about 128 wide that divide hidden and are shared evenly by tp; where softmax is a kernel that takes them in
    fours, so many that it runs at any micro batch, if there are such.
    """
    if heads is not None:
        return [(heads, 1.0)]
    options = [n for n in range(int(tp), 257, int(tp)) if hidden % n == 0]
    if software in UNFUSED:
        options = [n for n in options if n // tp % FUSED_ROWS == 0] or options
    options.sort(key=lambda n: abs(math.log(hidden / n / 128)))
    return [(float(n), 1 / len(options[:2])) for n in options[:2]] or [(max(1.0, hidden // 128), 1.0)]


def _sequences(run: Run, device: Device) -> list[tuple[float, float]]:
    """Llama 3 was trained at 8,192 tokens; other models on Hopper and later mostly at 4,096, before that at 2,048."""
    stated = run["seq_len"]
    if stated is not None:
        return [(stated, 1.0)]
    if run["vocab"] == 128256:
        return [(8192.0, 0.8), (4096.0, 0.2)]
    if device.generation in ("volta", "ampere"):
        return [(2048.0, 0.8), (1024.0, 0.2)]
    return [(4096.0, 0.7), (2048.0, 0.3)]


def _ends(run: Run, base: Mapping[str, float], vocab: float | None, device: Device) -> dict[str, float]:
    """Vocabulary, tied or not, gated MLP or not: what agrees best with the parameter count, else by style."""
    gpt = base["ffn"] == 4 * base["hidden"]
    old = device.generation in ("volta", "ampere")
    likely = {
        "gated": 0.0 if gpt else 1.0,
        "tied": 1.0 if gpt else 0.0,
        "vocab": vocab or (51200.0 if gpt else 32000.0),
    }
    billions = run["params_B"]
    if billions is None or vocab is not None:
        return _with_style(likely, old)
    options = [
        {"gated": gated, "tied": tied, "vocab": float(size)}
        for size, tied, gated in itertools.product(VOCABULARIES, (1.0, 0.0), (likely["gated"], 1.0))
    ]
    target = billions * 1e9
    # One embedding for both ends counts like two of half the vocabulary; models got larger ones.
    best = min(options, key=lambda ends: (round(abs(_count(base, ends) / target - 1), 3), -ends["vocab"]))
    near = abs(_count(base, best) / target - 1) < 0.01 and abs(_count(base, likely) / target - 1) > 0.02
    return _with_style(best if near else likely, old)


def _with_style(ends: Mapping[str, float], old: bool) -> dict[str, float]:
    """GPT style has learned positions and, in the old days, dropout."""
    gpt = 1.0 - ends["gated"]
    return {**ends, "dropout": gpt if old else 0.0, "positions": 2048.0 * gpt}


def _parameters(base: Mapping[str, float], ends: Mapping[str, float]) -> dict[str, float]:
    """Matrices of the attention; vectors: two norms, with GPT's biases about 13 times hidden."""
    matrices = attention_matrices(base["hidden"], base["heads"], base["kv_heads"], base["head_dim"])
    vectors = base["hidden"] * (2.0 if ends["gated"] else 13.0)
    return {"attention_parameters": float(np.asarray(matrices)), "vector_parameters": vectors}


def _count(base: Mapping[str, float], ends: Mapping[str, float]) -> float:
    heads = 2 * base["hidden"] * base["head_dim"] * (base["heads"] + base["kv_heads"])
    layer = heads + (2 + ends["gated"]) * base["hidden"] * base["ffn"]
    return base["layers"] * layer + (2 - ends["tied"]) * ends["vocab"] * base["hidden"]


def _precision(run: Run, device: Device, software: str) -> str:
    """bf16 unless stated, fp16 in stacks from before bf16 was the habit; names like amp_fp8 and mxfp8 are 8-bit, nvfp4
    is 4-bit.
    """
    text = run.text["precision"].lower()
    for name in ("fp8", "fp4", "fp16", "bf16", "fp32"):
        if name in text:
            return name
    return "fp16" if device.generation == "volta" or software in UNFUSED else "bf16"


def _strategies(
    run: Run, device: Device, software: str, degrees: Mapping[str, float], dims: Mapping[str, float]
) -> Iterator[tuple[dict[str, float], float]]:
    tp = degrees["tp"]
    sequence_parallel = (
        run.sequence_parallel if run.sequence_parallel is not None else software not in UNFUSED and tp > 1
    )
    zero = run["zero_stage"] if run["zero_stage"] is not None else (0.0 if software in UNFUSED else 1.0)
    fixed = {
        **degrees,
        "zero_stage": zero,
        "sequence_parallel": float(sequence_parallel),
        "precision": float(PRECISION_CODES[_precision(run, device, software)]),
        "order": 1.0,
        "partition": _partition(dims["layers"], degrees["pp"], run["vpp"] or 1),
    }
    for micro_batch, share in _micro_batches(run, degrees):
        batch = run["global_batch"] or micro_batch * degrees["dp"] * max(1.0, 4 * degrees["pp"])
        count = max(1.0, batch // (micro_batch * degrees["dp"]))
        for chunks, schedule, chance in _schedules(run, degrees["pp"], dims["layers"]):
            for recompute, likely in _recomputes(run, software):
                rest = {"micro_batch": micro_batch, "num_microbatches": count, "chunks": chunks, "schedule": schedule}
                yield {**fixed, **rest, "recompute": recompute}, share * chance * likely


def _partition(layers: float, stages: float, chunks: float) -> float:
    """Balanced where only embedding and head, counted as layers, make the chunks equal."""
    return float(layers % (stages * chunks) != 0 and (layers + 2) % (stages * chunks) == 0)


def _micro_batches(run: Run, degrees: Mapping[str, float]) -> list[tuple[float, float]]:
    stated = run["micro_batch"]
    if stated is not None:
        per_replica = (run["global_batch"] or math.inf) / degrees["dp"]
        whole = run["zero_stage"] == 3 and degrees["pp"] > 1 and stated == per_replica
        # With a pipeline, a "local batch" as large as the replica's share is no microbatch.
        return [(1.0, 0.5), (2.0, 0.3), (4.0, 0.2)] if whole and per_replica >= 4 else [(stated, 1.0)]
    return [(1.0, 1.0)]


def _schedules(run: Run, stages: float, layers: float) -> list[tuple[float, float, float]]:
    """(chunks, schedule code, weight)."""
    name = run.text["schedule"].lower()
    plain, interleaved = float(SCHEDULE_CODES["1f1b"]), float(SCHEDULE_CODES["interleaved_1f1b"])
    if stages == 1:
        return [(1.0, plain, 1.0)]
    stated = run["vpp"]
    if stated is not None:
        return [(stated, interleaved if stated > 1 else plain, 1.0)]
    if "interleaved" not in name:
        return [(1.0, plain, 1.0)]
    most = math.ceil(layers / stages)
    # Whoever interleaves without saying how often wants a small bubble: chunks of one layer are most likely.
    options = {float(max(2, most // per_chunk)): share for per_chunk, share in ((4, 0.2), (2, 0.3), (1, 0.5))}
    return [(chunks, interleaved, share / sum(options.values())) for chunks, share in options.items()]


def _recomputes(run: Run, software: str) -> list[tuple[float, float]]:
    """Not stated: most published configurations store what they can, but PyTorch's selective policy is FSDP's habit;
    what does not fit is ruled out later.
    """
    stated = run.text["recompute"].lower()
    if stated:
        return [(float(RECOMPUTE_CODES[stated]), 1.0)]
    if software in (FSDP, FSDP2):
        return [(0.0, 0.2), (1.0, 0.5), (2.0, 0.3)]
    return [(0.0, 0.8), (1.0, 0.1), (2.0, 0.1)]
