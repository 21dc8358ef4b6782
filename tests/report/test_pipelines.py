"""Stages and schedules in the words of ``explain``, for every schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs import small_job
from threefold.report.facts import Facts, Section, TextTable, collect_facts
from threefold.report.pipelines import schedule_section, schedule_warnings, stages_section
from threefold.schedule import build_schedule, idle_share, zb_v

COPY = "head (a copy of the embedding) and loss"


def facts_of(microbatches: int = 8, **pipeline: Any) -> Facts:
    job = small_job(train_batch_size=microbatches, parallelism={"pp": {"size": 2, "partition": "even", **pipeline}})
    return collect_facts(job)


def table_of(section: Section) -> TextTable:
    return next(part for part in section.body if isinstance(part, TextTable))


def words_of(section: Section) -> str:
    return "\n".join(part for part in section.body if isinstance(part, str))


def test_a_layer_that_is_cut_is_told_by_its_halves() -> None:
    two = table_of(stages_section(facts_of(partition=[2.5, 1.5])))
    assert [row[1] for row in two.rows] == ["0, 1, attention of 2 (2.5)", "feed-forward of 2, 3 (1.5)"]
    four = table_of(stages_section(facts_of(schedule="zb_v", partition=[0.5, 0.5, 2.5, 0.5])))
    assert [row[2] for row in four.rows] == [
        "attention of 0; feed-forward of 3 (1)",
        "feed-forward of 0; 1, 2, attention of 3 (3)",
    ]


def test_a_row_a_stage_with_one_chunk() -> None:
    table = table_of(stages_section(facts_of(schedule="zb_h1")))
    assert table.header[:3] == ("stage", "layers", "also holds")
    assert [(row[0], row[1], row[2], row[-1]) for row in table.rows] == [
        ("0", "0, 1 (2)", "embedding", "2"),
        ("1", "2, 3 (2)", COPY, "2"),
    ]


@pytest.mark.parametrize(
    ("pipeline", "rows"),
    [
        (
            {"schedule": "interleaved_1f1b", "chunks": 2},
            [("0", "0, 2", "0; 2 (2)", "embedding", "2.5"), ("1", "1, 3", "1; 3 (2)", COPY, "1.5")],
        ),
        (
            {"schedule": "zb_v"},
            [("0", "0, 3", "0; 3 (2)", "embedding, head and loss", "2"), ("1", "1, 2", "1; 2 (2)", "", "2")],
        ),
    ],
)
def test_a_row_a_rank_with_its_stages_where_it_has_several(
    pipeline: dict[str, Any], rows: list[tuple[str, ...]]
) -> None:
    section = stages_section(facts_of(**pipeline))
    table = table_of(section)
    assert table.header[:4] == ("rank", "stages", "layers", "also holds")
    assert [(*row[:4], row[-1]) for row in table.rows] == rows
    assert "counts as a part" in words_of(section)


@pytest.mark.parametrize(
    ("pipeline", "form"),
    [
        ({"schedule": "1f1b"}, "(p - 1)/(m + p - 1) = 1/9 = 11.1%"),
        ({"schedule": "interleaved_1f1b", "chunks": 2}, "(p - 1)/(2m + p - 1) = 1/17 = 5.9%"),
        ({"schedule": "zb_h1"}, "(p - 1)/(3m + p - 1) = 1/25 = 4.0% of the step where F, I and W take equal times"),
        ({"schedule": "zb_v"}, "(p - 1)/(6m + p - 1) = 1/49 = 2.0% of the step where F, I and W take equal times"),
        ({"schedule": "searched"}, "each rank idles 4.0% of the step where F, I and W take equal times"),
    ],
)
def test_the_bubble_has_its_closed_form(pipeline: dict[str, Any], form: str) -> None:
    facts = facts_of(**pipeline)
    assert form in words_of(schedule_section(facts, 400))
    played = idle_share(facts.schedule.rows, facts.schedule.num_stages)
    assert f"{played:.1%}" in form


def test_few_microbatches_have_no_form_and_a_warning() -> None:
    facts = facts_of(microbatches=1, schedule="zb_h1")
    schedule = build_schedule("zb_h1", 2, 1)
    share = idle_share(schedule.rows, 2)
    assert f"each rank idles {share:.1%} of the step" in words_of(schedule_section(facts, 400))
    assert "zb_h1, which fills" not in schedule_warnings(facts)[0]
    assert f"leaves {share:.0%} of the step idle" in schedule_warnings(facts)[0]
    assert "zb_h1, which fills" in schedule_warnings(facts_of(microbatches=1))[0]
    assert schedule_warnings(facts_of(microbatches=4, schedule="zb_v")) == []


def test_a_schedule_from_a_file_is_explained_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(zb_v(2, 8).to_text().replace("zb_v", "by_hand"))
    facts = facts_of(schedule_file=str(path), chunks=2)
    assert table_of(stages_section(facts)).rows[0][1] == "0, 3"
    assert "by_hand with p = 2 ranks of two chunks each" in words_of(schedule_section(facts, 400))
