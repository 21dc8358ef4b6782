"""The explanation of a job: derived from the layout, plain text, instant, without torch."""

import io
import re
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from tests.cost.profiles import small_profile
from threefold.cli.explain import explain
from threefold.errors import JobError
from threefold.job import Job, parse_job
from threefold.layout import Layout
from threefold.report.explain import explain_sections, print_explanation
from threefold.report.facts import TextTable
from threefold.report.placement import Placement, describe_placement, node_rows, placement_warnings
from threefold.report.words import count_of, format_bytes, format_count, format_integers

ARTICLE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "fp16": {"enabled": True},
    "parallelism": {"tp": {"size": 8}, "pp": {"size": 2}, "dp": {"size": 4}},
}
SMALL: dict[str, Any] = {
    "model": {"preset": "gpt2"},
    "data": {"sequence_length": 128},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "parallelism": {
        "tp": {"size": 2, "sequence_parallel": True},
        "pp": {"size": 2, "partition": "even"},
        "dp": {"size": 2},
    },
}


def text_of(job: Job) -> str:
    out = io.StringIO()
    print_explanation(job, Console(file=out))
    return out.getvalue()


def flat(job: Job) -> str:
    """The text without line breaks."""
    return re.sub(r"\s+", " ", text_of(job))


def sent(settings: dict[str, Any], axis: str) -> list[tuple[str, ...]]:
    """Rows of the table of what ``axis`` sends: operation, what, stages, times, bytes each, bytes a step, nodes."""
    sections = {section.title: section.body for section in explain_sections(parse_job(settings))}
    table = sections["What is sent"][0]
    assert isinstance(table, TextTable)
    return [(row[1], row[2], *row[4:]) for row in table.rows if row[0] == axis]


def test_the_articles_job():
    text = flat(parse_job(ARTICLE))
    assert "Each node is one tp group" in text
    assert "Two nodes form a pipeline of two stages (nodes 0, 1; 2, 3; 4, 5; 6, 7)." in text
    assert "There are four pipelines" in text
    assert "= 4 × 8 × 4 = 128 sequences" in text
    assert "The job states no cluster: eight devices a node are assumed." in text
    assert "optimizer states live in host memory" in text
    assert "data: is missing" in text, "what training needs is named"
    assert "ZeRO stage 3 talks in each of the 8 microbatches" in text
    assert "1/9 = 11.1%" in text
    assert "Worth a second look" not in text


def test_the_map_follows_the_order_and_says_what_is_wrong_with_it():
    job = parse_job({**ARTICLE, "parallelism": {**ARTICLE["parallelism"], "order": "dp,pp,tp"}})
    text = flat(job)
    assert "Each node is one tp group" not in text
    assert "A tp group spans eight nodes." in text
    assert "A pipeline of two stages touches eight nodes, and shares them with other pipelines." in text
    assert "A tp group crosses nodes" in text
    assert "put tp first in parallelism.order: 'tp,dp,pp'" in text


def test_a_hundred_billion_on_512():
    settings = {
        "model": {"preset": "llama2-70b"},
        "data": {"sequence_length": 4096},
        "cluster": {"device": "a100-80gb", "nodes": 64, "devices_per_node": 8},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 16,
        "parallelism": {"tp": {"size": 8}, "pp": {"size": 4}, "dp": {"size": 16}},
    }
    text = flat(parse_job(settings))
    assert "Four nodes form a pipeline of four stages (nodes 0-3; 4-7; 8-11; 12-15; ...)." in text
    assert "There are 16 pipelines" in text
    assert "(48 nodes before the last left out.)" in text
    assert "69 B parameters" in text
    assert len(text_of(parse_job(settings)).splitlines()) < 155


def test_a_small_job_in_full():
    text = text_of(parse_job(SMALL))
    lines = [line.rstrip() for line in text.splitlines()]
    assert any(re.fullmatch(r"  rank 0  F0 F1 \. .*B3 =", line) for line in lines)
    assert re.search(r"^embed\.tokens\.weight +vocab +50,257 × 768 +25,129 × 768 +50,257 padded to 50,258", text, re.M)
    assert re.search(r"^layers\.\*\.attention\.qkv\.weight +column .* three sections, each split by itself", text, re.M)
    assert re.search(r"^0 +0-5 \(6\) +embedding +\S+ M +2$", "\n".join(lines), re.M)
    assert ("send", "activations to the next stage", "0", "4", "393 kB", "1.57 MB", "inside") in sent(SMALL, "pp")
    assert "ten times in every layer" in text
    assert "Sequence parallel" in text


def test_one_device():
    text = flat(parse_job({"model": {"preset": "gpt2"}, "train_batch_size": 4}))
    assert "One rank sends nothing." in text
    assert "tp is 1: every layer is whole on its device." in text
    assert "the model's longest is assumed" in text
    assert "How to read this" not in text


def test_schedules_that_waste_are_named():
    parallelism = {"pp": {"size": 4, "schedule": "gpipe"}}
    text = flat(parse_job({"train_batch_size": 8, "gradient_accumulation_steps": 8, "parallelism": parallelism}))
    assert (
        "gpipe keeps the activations of all 8 microbatches on every stage; 1f1b takes as long and keeps at most 4."
        in text
    )
    assert "Eight microbatches on four stages leave 27% of the step idle." in text
    parallelism = {"pp": {"size": 4, "schedule": "naive"}}
    text = flat(parse_job({"train_batch_size": 8, "gradient_accumulation_steps": 8, "parallelism": parallelism}))
    assert "1 - 1/p = 75.0% of the step" in text


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_symbols_stand_for_a_model_not_stated(zero: int, sequence_parallel: bool):
    parallelism = {**ARTICLE["parallelism"], "tp": {"size": 8, "sequence_parallel": sequence_parallel}}
    text = text_of(parse_job({**ARTICLE, "zero_optimization": {"stage": zero}, "parallelism": parallelism}))
    assert "16·L" in text
    assert ("4·S·D/8" in text) == sequence_parallel
    assert "P/16" in text
    assert re.search(r"^dp +(all_reduce|reduce_scatter) +gradients", text, re.M)


def test_an_explicit_partition_needs_no_model():
    parallelism = {"pp": {"size": 2, "partition": [3, 4]}}
    text = text_of(parse_job({"train_batch_size": 8, "parallelism": parallelism}))
    assert re.search(r"^1 +3-6 \(4\) +head and loss", text, re.M)
    parallelism = {"pp": {"size": 2, "partition": [2.5, 4.5]}}
    text = text_of(parse_job({"train_batch_size": 8, "parallelism": parallelism}))
    assert re.search(r"^1 +feed-forward of 2, 3-6 \(4.5\) +head and loss", text, re.M)


def test_plain_text_has_no_escapes_and_fits():
    text = text_of(parse_job(SMALL))
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_wide_grids_are_left_out():
    job = parse_job({**SMALL, "gradient_accumulation_steps": 40})
    assert "wider than the 80 columns" in str(explain_sections(job, width=80))
    huge = parse_job({**SMALL, "gradient_accumulation_steps": 4000})
    assert "F0" not in str([section for section in explain_sections(huge) if section.title == "Schedule"])


def test_many_stages_list_the_ends():
    model = {"preset": "gpt2", "num_hidden_layers": 24}
    settings = {**SMALL, "model": model, "parallelism": {"pp": {"size": 12}}}
    assert [row[2] for row in sent(settings, "pp")] == ["0, 1", "1, 11"]
    assert "Stages 2 to 10 send what stage 1 sends" in flat(parse_job(settings))


def test_the_command_reads_overrides(tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_text("{train_micro_batch_size_per_gpu: 4, parallelism: {tp: {size: 2}}}")
    explain(path, ["parallelism.tp.size=4"])
    assert "four tensor slices" in capsys.readouterr().out
    with pytest.raises(JobError):
        explain(path, ["parallelism.tp.size=0"])


def test_explaining_never_imports_torch():
    code = "import sys, threefold.report.explain, threefold.cli.explain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("layout", "devices", "sentences"),
    [
        (
            Layout(dp=2, pp=2, tp=2),
            4,
            ["Each node holds two tp groups of 2 devices.", "One node forms a pipeline of two stages"],
        ),
        (
            Layout(dp=2, pp=2, tp=2),
            8,
            ["Each node holds four tp groups", "Each node holds two whole pipelines of two stages."],
        ),
        (Layout(pp=4), 2, ["tp is 1", "Two nodes form a pipeline of four stages", "There is one pipeline"]),
        (Layout(dp=2, pp=2, tp=3), 4, ["A tp group spans two nodes.", "A pipeline of two stages touches two nodes"]),
    ],
)
def test_sentences_about_nodes(layout: Layout, devices: int, sentences: list[str]):
    described = " ".join(describe_placement(Placement(layout, devices)))
    for sentence in sentences:
        assert sentence in described


def test_node_rows_and_links():
    placement = Placement(Layout(dp=2, pp=2, tp=2), 4)
    rows = [(row.ranks, row.tp_groups, row.stages, row.pipelines) for row in node_rows(placement)]
    assert rows == [((0, 1, 2, 3), (0, 1), (0, 1), (0,)), ((4, 5, 6, 7), (2, 3), (0, 1), (1,))]
    assert [placement.links(axis) for axis in ("tp", "pp", "dp")] == ["inside a node", "inside a node", "across nodes"]
    mixed = Placement(Layout(tp=3, dp=2), 4)
    assert mixed.links("tp") == "some inside a node, some across nodes"
    assert mixed.links_word("tp") == "both"
    assert mixed.links("pp") == mixed.links_word("pp") == "none"
    assert placement_warnings(mixed)[0].endswith("divides the 4 devices of a node (1, 2, 4).")


def test_words():
    assert count_of(1, "node") == "one node"
    assert count_of(2, "microbatch", "microbatches") == "two microbatches"
    assert count_of(1000, "node") == "1,000 nodes"
    assert [format_bytes(n) for n in (8, 1500, 999_900, 12_582_912, 3.5e18)] == [
        "8 B",
        "1.5 kB",
        "1 MB",
        "12.6 MB",
        "3.5e+03 PB",
    ]
    assert [format_count(n) for n in (999, 6_740_000_000, 10**12)] == ["999", "6.74 B", "1 T"]
    assert [format_integers(n) for n in ((3,), (0, 1), range(8), (0, 8, 16), range(0, 64, 8))] == [
        "3",
        "0, 1",
        "0-7",
        "0, 8, 16",
        "0, 8, 16, ..., 56",
    ]


def test_stages_that_are_cut_by_costs_say_so():
    settings = SMALL | {"parallelism": {"pp": {"size": 2}}}
    text = text_of(parse_job(settings))
    assert re.search(r"^0 +0-8 \(9\) +embedding", text, re.M)
    flat_text = " ".join(text.split())
    assert "Partition auto is [9, 3] by FLOPs: the embedding costs as much as 0.00 and the head as 5." in flat_text
    assert "The even split [6, 6] would take" in flat_text
    assert "Partition auto" not in text_of(parse_job(SMALL))


def test_stages_are_cut_by_a_profile_where_there_is_one():
    job = parse_job(SMALL | {"parallelism": {"pp": {"size": 2}}})
    out = io.StringIO()
    print_explanation(job, Console(file=out), profile=small_profile(job, layer_s=1.0, head_s=0.0))
    assert "[6, 6] by measured costs" in " ".join(out.getvalue().split())
