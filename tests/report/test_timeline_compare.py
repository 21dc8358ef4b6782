"""A step beside its simulation: as text, as numbers, and as a page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from threefold.report.timeline_compare import Comparison, format_comparison
from threefold.report.timeline_html import timeline_page
from threefold.schedule import build_schedule
from threefold.simulate import StepCosts, Timeline, simulate

COSTS = StepCosts.uniform(2, p2p_s=1, sync_s=1, step_s=2)
SLOWER = StepCosts.uniform(2, forward_s=1.5, p2p_s=1, sync_s=1, step_s=2)


def step_of(costs: StepCosts, name: str = "1f1b", chunks: int = 1) -> Timeline:
    return simulate(build_schedule(name, 2, 2, chunks), costs)


def comparison(**measured: Timeline) -> Comparison:
    replicas = {(int(key[2:]), 0): timeline for key, timeline in measured.items()}
    return Comparison("runs/x", 7, "made-up costs", step_of(COSTS), replicas or {(0, 0): step_of(SLOWER)})


def test_the_text_of_a_comparison() -> None:
    assert format_comparison(comparison(), width=15).splitlines() == [
        "runs/x, step 7: 1f1b, two stages on two ranks, two microbatches",
        "simulated with made-up costs",
        "",
        "  rank 0 simulated |FF....BB.BB=##.|",
        "         measured  |FFF....BB.BB=##|",
        "  rank 1 simulated |..FBBFBB=##....|",
        "         measured  |..FFBBFBB=##...|",
        "  F forward, B backward, I input gradient, W weight gradient, = gradient sync, # optimizer, . idle",
        "",
        "                         simulated  measured   difference",
        "                   step       14 s    15.5 s       +10.7%",
        "                 bubble      25.0%     25.8%  +0.8 points",
        "  exposed communication      2.5 s     2.5 s           +0",
        "",
        "  rank             compute  warm up  stage  transfer  sync  cool down  host  optimizer",
        "     0  simulated      6 s        0    3 s       2 s   1 s          0     0        2 s",
        "         measured      7 s        0  3.5 s       2 s   1 s          0     0        2 s",
        "     1  simulated      6 s      1 s      0       1 s   1 s        3 s     0        2 s",
        "         measured      7 s    1.5 s      0       1 s   1 s        3 s     0        2 s",
    ]


def test_both_numbers_of_a_rank_add_up_to_both_steps() -> None:
    numbers = json.loads(json.dumps(comparison().to_dict(), allow_nan=False))
    for part in (numbers["simulated"], *numbers["measured"]):
        for row in part["ranks"]:
            assert sum(value for name, value in row.items() if name != "rank") == pytest.approx(part["step_s"])
    assert (numbers["step"], numbers["schedule"], numbers["costs"]) == (7, "1f1b", "made-up costs")
    assert numbers["measured"][0]["dp"] == 0


def test_of_several_pipelines_the_slowest_is_drawn_and_all_are_in_the_numbers() -> None:
    both = comparison(dp0=step_of(COSTS), dp1=step_of(SLOWER))
    assert both.shown == (1, 0)
    assert "of two pipelines the slowest, dp 1 tp 0" in format_comparison(both)
    assert [part["dp"] for part in both.to_dict()["measured"]] == [0, 1]
    assert list(both.timelines) == ["simulated", "measured dp 0 tp 0", "measured dp 1 tp 0"]


class Page(HTMLParser):
    """Looks for actions, and for anything that would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[tuple[str, str]] = []
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if "data-action" in found:
            self.actions.append((str(found["data-rank"]), str(found["data-action"])))
            assert float(found["width"] or 0) > 0 and float(found["x"] or -1) >= 0
        self.loads += [tag] if tag in ("script", "link", "img", "iframe") or {"src", "href"} & found.keys() else []
        if tag not in ("meta", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in ("meta", "line"):
            self.handle_endtag(tag)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_v", 2)])
def test_the_page_has_every_action_twice_and_loads_nothing(name: str, chunks: int) -> None:
    timeline = step_of(StepCosts.uniform(2 * chunks, p2p_s=0.5, sync_s=1, step_s=1), name, chunks)
    page = Page()
    text = timeline_page(Comparison("runs/x", 1, "made-up <costs>", timeline, {(0, 0): timeline}))
    page.feed(text)
    assert page.open == [] and page.loads == []
    expected = [(str(event.rank), str(event.action)) for event in timeline.events]
    assert sorted(page.actions) == sorted(expected * 2)
    assert "made-up &lt;costs&gt;" in text
    assert not re.search(r"https?://", text)
