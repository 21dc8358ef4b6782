"""Job files that are wrong, made from a right one by a seeded mutator: the same files for the same seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from threefold.job.keys import MISSING, assign, known_fields, lookup, remove

Settings = dict[str, Any]
Mutation = Callable[[Settings, random.Random], tuple[str, Settings]]
File = tuple[str, str, bytes]

BASE: Settings = {
    "model": {
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 352,
    },
    "data": {"train": "data/demo", "sequence_length": 128},
    "cluster": {"device": "cpu", "nodes": 1, "devices_per_node": 8},
    "steps": 200,
    "seed": 1,
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "parallelism": {
        "order": "tp,pp,dp",
        "tp": {"size": 2, "sequence_parallel": True},
        "pp": {"size": 2, "schedule": "1f1b", "chunks": 1, "partition": [3, 3]},
        "dp": {"size": 2},
    },
    "zero_optimization": {"stage": 0, "reduce_bucket_size": 100000, "overlap_comm": True},
    "bf16": {"enabled": False},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "cosine", "warmup_steps": 20, "min_lr_ratio": 0.1},
    "evaluation": {"every": 50, "batches": 4},
    "logging": {"tensorboard": True, "every": 1},
    "watchdog": {"timeout_s": 60.0},
}

_WRONG_FOR_KIND: dict[type, list[Any]] = {
    bool: ["true", "yes", 1, 0, [], {"on": 1}],
    int: ["4", "four", 2.5, True, [1], {"a": 1}, -1.5],
    float: ["0.1", "fast", True, [0.1], {"a": 1}],
    str: [3, 0.5, True, ["x"], {"a": 1}, ""],
    list: ["x", 3, [1.5, -2], ["a", "b"], {"0": 1}, True],
    dict: [7, 0.5, "off", [1, 2], True],
}
_OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("model.vocab_size", 0),
    ("model.hidden_size", -128),
    ("model.num_hidden_layers", 10**20),
    ("data.sequence_length", 0),
    ("cluster.nodes", 0),
    ("steps", -1),
    ("seed", -5),
    ("train_batch_size", 0),
    ("train_micro_batch_size_per_gpu", -2),
    ("gradient_accumulation_steps", 10**30),
    ("parallelism.tp.size", 0),
    ("parallelism.pp.chunks", -1),
    ("zero_optimization.stage", 4),
    ("gradient_clipping", -0.5),
    ("optimizer.params.lr", 0),
    ("optimizer.params.lr", -1e-3),
    ("optimizer.params.betas", [0.9, 1.0]),
    ("optimizer.params.weight_decay", -0.1),
    ("scheduler.min_lr_ratio", 1.5),
    ("evaluation.batches", 0),
    ("logging.every", 0),
    ("watchdog.timeout_s", 0),
]
_WRONG_CHOICES: list[tuple[str, Any]] = [
    ("model.model_type", "gemma"),
    ("model.hidden_act", "gelu"),
    ("cluster.inter_node", "200Gbps"),
    ("parallelism.pp.schedule", "1f2b"),
    ("parallelism.pp.schedule", "zb_h9"),
    ("parallelism.pp.partition", "balanced"),
    ("parallelism.order", "tp,tp,dp"),
    ("dtype", "fp64"),
    ("optimizer.type", "Lion"),
    ("scheduler.type", "cosin"),
    ("scheduler.batch_scaling", "linear"),
    ("activation_checkpointing", {"mode": "some"}),
]
_CONTRADICTIONS: list[tuple[str, Any]] = [
    ("model.num_attention_heads", 7),
    ("model.num_key_value_heads", 3),
    ("model.num_key_value_heads", 1),
    ("model.hidden_size", 120 + 1),
    ("model.intermediate_size", 353),
    ("data.sequence_length", 127),
    ("cluster.devices_per_node", 1),
    ("cluster.devices_per_node", 12),
    ("parallelism.tp.size", 3),
    ("parallelism.tp.size", 16),
    ("parallelism.pp.size", 7),
    ("parallelism.pp.chunks", 2),
    ("parallelism.pp.partition", [3, 2]),
    ("parallelism.pp.partition", [2, 2, 2]),
    ("parallelism.pp.partition", [7, -1]),
    ("parallelism.dp.size", 3),
    ("scheduler.warmup_steps", 201),
    ("optimizer.params.momentum", 0.9),
    ("zero_optimization.offload_optimizer", {"device": "cpu"}),
    ("fp16", {"enabled": True}),
]
_FOREIGN: list[tuple[str, Any]] = [
    ("amp", {"enabled": True}),
    ("pipeline", {"stages": 2}),
    ("sparse_attention", {"mode": "fixed"}),
    ("curriculum_learning", {"enabled": True}),
    ("zero_optimization.zero_quantized_weights", True),
    ("optimizer.params.lr", "auto"),
    ("fp16.enabled", "auto"),
    ("model.rope_scaling", {"type": "linear", "factor": 2.0}),
    ("model.attention_bias", True),
    ("model.preset", "gpt5"),
    ("model.hf", "no/such/directory"),
    ("steps_per_print", 10),
]
_REQUIRED = ["model.vocab_size", "model.hidden_size", "model.model_type", "data.sequence_length", "cluster.device"]
_BROKEN_TEXT: list[tuple[str, bytes]] = [
    ("an empty file", b""),
    ("only white space", b"  \n\t\n"),
    ("a list", b"[1, 2, 3]"),
    ("one number", b"42"),
    ("one word", b"train"),
    ("binary", bytes(range(256))),
    ("UTF-16", '{"seed": 1}'.encode("utf-16")),
    ("a zero byte", b'{"seed": 1}\0'),
    ("two documents", b"seed: 1\n---\nseed: 2\n"),
    ("an alias", b"seed: &s 1\nsteps: *s\n"),
    ("a tab for indentation", b"parallelism:\n\ttp: {size: 2}\n"),
    ("bad indentation", b"parallelism:\n    tp:\n  size: 2\n"),
    ("a number for a key", b"1: 2\n"),
    ("an unhashable key", b"[1, 2]: 3\n"),
    ("a Python tag", b"seed: !!python/object/apply:os.getcwd []\n"),
    ("endless nesting", b'{"a": ' * 5000),
    ("deep nesting", b'{"model": ' * 40 + b"1" + b"}" * 40),
    ("a lone surrogate", b'{"seed": "\\ud800"}'),
    ("a surrogate key", b'{"\\ud800": 1}'),
    ("a huge number", b'{"seed": 1' + b"0" * 5000 + b"}"),
]


def malformed_jobs(count: int, seed: int) -> list[File]:
    """``count`` wrong job files: what was done to a right one, a file name, and its content."""
    generator = random.Random(seed)
    return [_malformed_job(number, generator) for number in range(count)]


def _malformed_job(number: int, generator: random.Random) -> File:
    if number % 4 == 3:
        description, content = _broken(generator)
        return description, f"job{number}{generator.choice(['.json', '.yaml'])}", content
    settings, done = copy.deepcopy(BASE), []
    for mutate in generator.sample(_MUTATIONS, k=generator.choice([1, 1, 1, 2, 3])):
        description, settings = mutate(settings, generator)
        done.append(description)
    return "; ".join(done), f"job{number}.json", json.dumps(settings, indent=1).encode()


def _broken(generator: random.Random) -> tuple[str, bytes]:
    text = json.dumps(BASE, indent=1)
    structural = [place for place, char in enumerate(text) if char in '{}[],:"']
    place = generator.choice(structural)
    name = generator.choice(sorted(BASE))
    damage = [
        (f"cut at byte {place}", text[:place]),
        (f"no {text[place]!r} at byte {place}", text[:place] + text[place + 1 :]),
        ("text after the end", f"{text} seed"),
        (f"{name} given twice", f'{text[:-2]}, "{name}": 1}}'),
        (f"{name} is NaN", json.dumps({**BASE, name: float("nan")})),
        (f"{name} is infinite", json.dumps({**BASE, name: float("-inf")})),
        *((description, content) for description, content in generator.sample(_BROKEN_TEXT, k=6)),
    ]
    description, content = generator.choice(damage)
    return description, content.encode() if isinstance(content, str) else content


def _wrong_type(settings: Settings, generator: random.Random) -> tuple[str, Settings]:
    key = generator.choice([key for key in known_fields() if _is_set(settings, key)])
    value = generator.choice(_WRONG_FOR_KIND[type(lookup(BASE, key))])
    return f"{key} = {value!r}", assign(settings, key, value)


def _typo(settings: Settings, generator: random.Random) -> tuple[str, Settings]:
    key = generator.choice([key for key in known_fields() if _is_set(settings, key)])
    parent, dot, leaf = key.rpartition(".")
    place = generator.randrange(len(leaf))
    wrong = parent + dot + generator.choice([f"{leaf[:place]}_{leaf[place:]}", leaf[:place] + leaf[place + 1 :] + "x"])
    return f"{key} written {wrong}", assign(remove(settings, key), wrong, lookup(settings, key))


def _missing(settings: Settings, generator: random.Random) -> tuple[str, Settings]:
    key = generator.choice(_REQUIRED)
    return f"no {key}", remove(settings, key)


def _wrong_batch(settings: Settings, generator: random.Random) -> tuple[str, Settings]:
    total = generator.choice([1, 15, 17, 31, 33, 100, 128])
    keep = generator.random() < 0.5
    wrong = settings if keep else remove(settings, "gradient_accumulation_steps")
    total = total if keep or total % 4 else total + 1
    return f"train_batch_size = {total}", assign(wrong, "train_batch_size", total)


def _from(pool: list[tuple[str, Any]]) -> Mutation:
    def mutate(settings: Settings, generator: random.Random) -> tuple[str, Settings]:
        key, value = generator.choice([(key, value) for key, value in pool if _assignable(settings, key)])
        # fp16 alone is right: it contradicts a bf16 that is on.
        wrong = assign(settings, "bf16", {"enabled": True}) if key == "fp16" else settings
        return f"{key} = {value!r}", assign(wrong, key, value)

    return mutate


def _is_set(settings: Settings, key: str) -> bool:
    """Whether ``key`` still has the value of the right job, so that a mutation of it counts."""
    return key in _SET_KEYS and lookup(settings, key) == lookup(BASE, key)


def _assignable(settings: Settings, key: str) -> bool:
    """Whether no section above ``key`` was replaced by a plain value."""
    parts = key.split(".")
    above = [lookup(settings, ".".join(parts[:length])) for length in range(1, len(parts))]
    return all(value is MISSING or isinstance(value, dict) for value in above)


_SET_KEYS = frozenset(key for key in known_fields() if lookup(BASE, key) is not MISSING)
_MUTATIONS: list[Mutation] = [
    _wrong_type,
    _typo,
    _missing,
    _wrong_batch,
    _from(_OUT_OF_RANGE),
    _from(_WRONG_CHOICES),
    _from(_CONTRADICTIONS),
    _from(_FOREIGN),
]
