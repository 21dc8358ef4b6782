"""What compression saves and what a run has counted, as told before and after it."""

from __future__ import annotations

import re
from typing import Any

from tests.report.test_explain import flat
from threefold.cost.held import estimate_held
from threefold.cost.traffic import estimate_traffic
from threefold.job import Job, parse_job
from threefold.layout import Layout
from threefold.report.counted import TITLE, counted_section, group_of
from threefold.report.explain import explain_sections
from threefold.report.facts import TextTable

GPT2: dict[str, Any] = {
    "model": {"preset": "gpt2"},
    "data": {"sequence_length": 128},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "parallelism": {"tp": {"size": 2}, "pp": {"size": 2}, "dp": {"size": 2}},
}
ONE_BIT = {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 100}}}
A100 = {"cluster": {"device": "a100-80gb", "nodes": 1, "devices_per_node": 8}}


def test_b091_bytes_saved_and_what_they_can_win_are_told_before_the_start() -> None:
    text = flat(parse_job(GPT2 | A100 | ONE_BIT))
    times = re.search(r"on the wire for each rank from step 101 on, in place of .*?: ([\d.]+) times fewer", text)
    assert times is not None and float(times[1]) > 20
    assert re.search(r"takes [\d.]+ m?s of a step of [\d.]+ m?s, [\d.]+ ?%: no compression saves more than that", text)
    on_cpu = flat(parse_job(GPT2 | ONE_BIT))
    assert "Whether that pays is not predicted for these machines" in on_cpu


def test_half_the_bytes_in_bf16() -> None:
    assert "2 times fewer" in flat(parse_job(GPT2 | {"communication_data_type": "bf16"}))
    assert "What compression saves" not in flat(parse_job(GPT2))


def summary_of(job: Job) -> dict[str, Any]:
    """What a run would have counted that did exactly what is predicted."""
    layout = Layout(dp=job.dp, pp=job.pp, tp=job.tp)
    ranks = []
    for rank in range(job.world_size):
        coord = layout.coord(rank)
        sent: dict[str, int] = {}
        for transfer in estimate_traffic(job, coord.pp):
            group = group_of(job, transfer.axis)
            sent[group] = sent.get(group, 0) + transfer.bytes_per_step
        held = estimate_held(job, coord.pp)
        states = {name: getattr(held, name) for name in ("parameters", "gradients", "optimizer")}
        peak = {"bytes": 3 * held.device, "step": 2, "action": "0B1", "held": {**states, "activations": 5000}}
        rows = [{"group": group, "operation": "all_reduce", "calls": 1, "bytes": size} for group, size in sent.items()]
        memory = {"held": states, "host": {"optimizer": held.host}, "peak": peak}
        place = {"dp": coord.dp, "pp": coord.pp, "tp": coord.tp}
        ranks.append({"rank": rank, **place, "memory": memory, "traffic": {"last_step": rows}})
    return {"steps": 7, "loss": 4.25, "tokens_per_s": 1234.5, "ranks": ranks}


def table_of(job: Job, summary: dict[str, Any]) -> list[tuple[str, ...]]:
    body = counted_section(job, summary).body
    assert "7 steps, loss 4.25, 1,234.5 tokens/s." in body
    assert any("step 2 at 0B1" in str(part) and "activations 5 kB" in str(part) for part in body)
    (table,) = (part for part in body if isinstance(part, TextTable))
    return list(table.rows)


def test_counted_stands_next_to_predicted() -> None:
    job = parse_job(GPT2 | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    summary = summary_of(job)
    rows = table_of(job, summary)
    assert {row[-1] for row in rows} == {"equal"}
    assert {"sent over tp", "sent over pp", "sent over dp", "parameters", "in host memory"} <= {row[0] for row in rows}
    summary["ranks"][3]["traffic"]["last_step"][0]["bytes"] += 10**9
    assert [row[-1] for row in table_of(job, summary)].count("differs") == 1


def test_without_a_summary_nothing_was_counted() -> None:
    job = parse_job(GPT2)
    assert TITLE not in [section.title for section in explain_sections(job)]
    assert TITLE in [section.title for section in explain_sections(job, summary=summary_of(job))]
