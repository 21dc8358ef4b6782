"""DeepSpeed's config files load unchanged where threefold has the feature; everything else in them is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.job.problems import BATCH, problem_of, problems_of
from threefold.job import parse_job, read_job
from threefold.job.deepspeed import TUNING, UNSUPPORTED
from threefold.job.keys import assign, known_fields

CONFIG: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7, "adam_w_mode": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": 0.001,
            "warmup_num_steps": 100,
            "warmup_type": "linear",
            "total_num_steps": 5000,
        },
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "fp16": {
        "enabled": True,
        "auto_cast": False,
        "loss_scale": 0,
        "initial_scale_power": 15,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "buffer_count": 4},
        "round_robin_gradients": True,
    },
    "tensorboard": {"enabled": True, "output_path": "output/", "job_name": "demo"},
    "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1},
    "sparse_gradients": False,
}


def test_a_config_file_loads_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    loaded = read_job(path)
    job = loaded.job
    assert (job.train_batch_size, job.micro_batch, job.num_microbatches) == (32, 4, 8)
    assert job.optimizer.type == "AdamW" and job.optimizer.params.betas == (0.8, 0.999)
    assert (job.scheduler.type, job.scheduler.warmup_steps, job.scheduler.total_steps) == ("linear", 100, 5000)
    assert job.scheduler.min_lr_ratio == 0.0
    assert job.logging.tensorboard and job.logging.every == 10
    assert job.zero_optimization.stage == 2 and job.zero_optimization.reduce_bucket_size == 500_000_000
    offload = job.zero_optimization.offload_optimizer
    assert offload is not None and offload.pin_memory
    assert job.fp16.initial_scale_power == 15
    noted = {note.partition(":")[0] for note in loaded.notes}
    assert {"zero_optimization.allgather_bucket_size", "tensorboard.output_path", "optimizer.type"} <= noted
    assert "flops_profiler" not in noted  # switched off: nothing to say


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_unsupported_keys_are_named_with_what_to_do(key: str) -> None:
    problem = problem_of(assign({**BATCH, "zero_optimization": {"stage": 3}}, key, "something"))
    assert problem.key == key
    assert "a DeepSpeed key that threefold does not support" in problem.message and problem.fix


@pytest.mark.parametrize("key", UNSUPPORTED)
@pytest.mark.parametrize("value", [None, False, {"enabled": False}])
def test_unsupported_keys_that_are_switched_off_are_harmless(key: str, value: object) -> None:
    assert parse_job(assign({**BATCH, "zero_optimization": {"stage": 3}}, key, value)).train_batch_size == 8


@pytest.mark.parametrize("key", [key for key in TUNING if not key.startswith("scheduler.")])
def test_tuning_keys_are_dropped_with_a_note(key: str, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(assign({**BATCH, "zero_optimization": {"stage": 3}}, key, 1)))
    (note,) = read_job(path).notes
    assert note.startswith(f"{key}: has no effect: ")


def test_the_tables_name_no_key_of_our_own() -> None:
    assert not (TUNING.keys() | UNSUPPORTED.keys()) & known_fields().keys()
    assert not TUNING.keys() & UNSUPPORTED.keys()


def test_values_that_ask_for_nothing() -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 1, "mics_shard_size": -1, "offload_optimizer": {"ratio": 1.0}}
    settings = {"gradient_predivide_factor": 1.0, "data_types": {"grad_accum_dtype": "fp32"}}
    assert parse_job({**BATCH, **settings, "zero_optimization": zero}).zero_optimization.stage == 3


def test_auto_is_derived_where_it_can_be() -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 5},
        },
        "parallelism": {"dp": {"size": "auto"}, "pp": {"partition": "auto"}},
    }
    job = parse_job(config, world_size=4)
    assert (job.train_batch_size, job.dp) == (8, 4)
    assert job.optimizer.params.betas == (0.9, 0.999)
    assert job.scheduler.type == "constant" and job.scheduler.warmup_type == "log"
    assert job.parallelism.pp.partition == "auto"


@pytest.mark.parametrize(
    "key",
    ["optimizer.params.lr", "gradient_clipping", "fp16.enabled", "bf16.enabled", "scheduler.params.warmup_num_steps"],
)
def test_auto_elsewhere_is_named(key: str) -> None:
    settings = {**BATCH, "scheduler": {"type": "WarmupLR", "params": {}}}
    problem = problem_of(assign(settings, key, "auto"))
    assert problem.key == key and "auto" in problem.message and "write the value" in problem.fix


def test_auto_in_our_own_sections_is_a_name() -> None:
    job = parse_job({**BATCH, "data": {"train": "auto", "sequence_length": 8}})
    assert job.data is not None and job.data.train == "auto"


@pytest.mark.parametrize(("name", "ours"), [("AdamW", "AdamW"), ("adamw", "AdamW"), ("ADAM", "AdamW"), ("sgd", "SGD")])
def test_optimizers_by_any_case(name: str, ours: str) -> None:
    assert parse_job({**BATCH, "optimizer": {"type": name}}).optimizer.type == ours


def test_adam_with_an_l2_penalty_is_refused() -> None:
    params = {"adam_w_mode": False, "weight_decay": 0.1}
    assert problem_of({**BATCH, "optimizer": {"type": "Adam", "params": params}}).key == "optimizer.params.adam_w_mode"
    without_decay = {"adam_w_mode": False, "bias_correction": True}
    assert parse_job({**BATCH, "optimizer": {"type": "Adam", "params": without_decay}}).optimizer.type == "AdamW"


@pytest.mark.parametrize("name", ["Lamb", "OneBitLamb", "Lion", "Muon"])
def test_other_optimizers_are_named(name: str) -> None:
    problem = problem_of({**BATCH, "optimizer": {"type": name}})
    assert problem.key == "optimizer.type" and "AdamW, SGD or OneBitAdam" in problem.message


def test_cosine_and_defaults_of_deepspeeds_schedulers() -> None:
    params = {"total_num_steps": 9000, "cos_min_ratio": 0.01, "warmup_min_ratio": 0.0}
    scheduler = parse_job({**BATCH, "scheduler": {"type": "WarmupCosineLR", "params": params}}).scheduler
    assert (scheduler.type, scheduler.min_lr_ratio, scheduler.total_steps) == ("cosine", 0.01, 9000)
    assert (scheduler.warmup_steps, scheduler.warmup_type) == (1000, "log")


def test_our_own_keys_beside_deepspeeds_scheduler_win() -> None:
    settings = {**BATCH, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}
    scheduler = parse_job(settings, ["scheduler.warmup_steps=3", "scheduler.warmup_type=linear"]).scheduler
    assert (scheduler.warmup_steps, scheduler.warmup_type) == (3, "linear")


def test_the_peak_of_a_scheduler_is_the_optimizers() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}
    assert parse_job({**BATCH, "scheduler": scheduler}).optimizer.params.lr == 0.5
    optimizer = {"type": "AdamW", "params": {"lr": 0.25}}
    problem = problem_of({**BATCH, "scheduler": scheduler, "optimizer": optimizer})
    assert problem.key == "scheduler.params.warmup_max_lr" and "0.25" in problem.message


@pytest.mark.parametrize(
    ("scheduler", "key"),
    [
        ({"type": "WarmupLR", "params": {"warmup_min_lr": 0.1}}, "scheduler.params.warmup_min_lr"),
        ({"type": "WarmupLR", "params": {"wormup": 1}}, "scheduler.params"),
        ({"type": "cosine", "params": {"warmup_steps": 1}}, "scheduler.params"),
    ],
)
def test_what_a_scheduler_can_not_say(scheduler: dict[str, Any], key: str) -> None:
    assert problem_of({**BATCH, "scheduler": scheduler}).key == key


def test_other_schedulers_are_named() -> None:
    problems = problems_of({**BATCH, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0}}})
    assert {problem.key for problem in problems} == {"scheduler.type", "scheduler.params"}


def test_two_names_for_one_setting_contradict() -> None:
    problem = problem_of({**BATCH, "steps_per_print": 10, "logging": {"every": 5}})
    assert problem.key == "steps_per_print" and "logging.every 5" in problem.message
    assert parse_job({**BATCH, "steps_per_print": 5, "logging": {"every": 5}}).logging.every == 5


def test_a_wrong_section_is_one_problem() -> None:
    assert problem_of({**BATCH, "steps_per_print": 5, "logging": 3}).key == "logging"
