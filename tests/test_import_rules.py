"""The import rules hold in the package, and each rule catches what it is there to catch."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests import import_rules
from tests.import_rules import RULES, Module, parse_modules, read_modules

ROOT = Path(__file__).parents[1]
ARTICLE_JOB = ROOT / "examples" / "article-64xa100.json"

Rule = Callable[[Mapping[str, Module]], list[str]]


@pytest.fixture(scope="module")
def package() -> dict[str, Module]:
    return read_modules(ROOT / "src")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule, package: dict[str, Module]) -> None:
    assert rule(package) == []


def test_all_parts_are_walked(package: dict[str, Module]) -> None:
    assert {"threefold.errors", "threefold.cli.main", "threefold.job.load", "threefold.train.launcher"} <= set(package)
    parts = {module.part for module in package.values()} - {""}
    assert parts <= import_rules.PURE | {"models", "parallel", "train", "measure", "cli"}


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults: (rule, sources, words of the one violation)


JOB = "threefold/job/load.py"
HELPER = "threefold/errors.py"

BAD: list[tuple[Rule, dict[str, str], str]] = [
    (import_rules.pure_parts_reach_no_torch, {JOB: "import torch"}, "threefold.job.load -> torch"),
    (import_rules.pure_parts_reach_no_torch, {JOB: "def f():\n    from torch import nn"}, "job.load -> torch"),
    (
        import_rules.pure_parts_reach_no_torch,
        {JOB: "from threefold.errors import E", HELPER: "try:\n    import torch.nn\nexcept ImportError:\n    pass"},
        "threefold.job.load -> threefold.errors -> torch",
    ),
    (
        import_rules.pure_parts_reach_no_torch,
        {JOB: "from threefold import errors", HELPER: "import torch"},
        "threefold.job.load -> threefold.errors -> torch",
    ),
    (
        import_rules.pure_parts_reach_no_torch,
        {"threefold/job/__init__.py": "", JOB: "import threefold.layout.ranks", "threefold/layout/ranks.py": "",
         "threefold/layout/__init__.py": "import torch"},
        "threefold.job.load -> threefold.layout -> torch",
    ),
    (
        import_rules.torch_free_modules_reach_no_torch,
        {"threefold/train/launcher.py": "from threefold.train.x import y", "threefold/train/x.py": "import torch"},
        "threefold.train.launcher -> threefold.train.x -> torch",
    ),
    (
        import_rules.pure_parts_import_pure_parts,
        {"threefold/plan/x.py": "from threefold.train.y import z", "threefold/train/__init__.py": ""},
        "threefold.plan.x:1 is pure and imports threefold.train.y",
    ),
    (
        import_rules.parts_keep_their_distance,
        {"threefold/schedule/x.py": "\nimport threefold.cost.y", "threefold/cost/__init__.py": ""},
        "threefold.schedule.x:2 imports threefold.cost.y: schedule must not know cost",
    ),
    (
        import_rules.parts_keep_their_distance,
        {"threefold/train/x.py": "def f():\n    import threefold.plan.y", "threefold/plan/__init__.py": ""},
        "train must not know plan",
    ),
    (
        import_rules.parts_keep_their_distance,
        {"threefold/models/x.py": "import threefold.parallel.y", "threefold/parallel/__init__.py": ""},
        "models must not know parallel",
    ),
    (
        import_rules.only_the_command_line_imports_the_command_line,
        {"threefold/train/x.py": "from threefold.cli.y import z", "threefold/cli/__init__.py": ""},
        "threefold.train.x:1 imports threefold.cli.y",
    ),
    (
        import_rules.the_command_line_imports_parts_in_functions,
        {"threefold/cli/x.py": "from threefold.job import load_job", "threefold/job/__init__.py": ""},
        "threefold.cli.x:1 imports threefold.job when it is imported",
    ),
    (
        import_rules.models_know_nothing_of_parallelism,
        {"threefold/models/x.py": "import torch.distributed as dist"},
        "threefold.models.x:1 imports torch.distributed",
    ),
    (
        import_rules.models_know_nothing_of_parallelism,
        {"threefold/models/x.py": "from torch import distributed"},
        "threefold.models.x:1 imports torch.distributed",
    ),
    (import_rules.imports_are_absolute, {JOB: "from . import x"}, "threefold.job.load:1 imports relatively"),
    (import_rules.no_global_statement, {JOB: "def f():\n    global x\n    x = 1"}, "job.load:2 says global x"),
    (import_rules.no_mutable_module_state, {JOB: "cache = {}"}, "threefold.job.load:1 cache = {} is mutable"),
    (import_rules.no_mutable_module_state, {JOB: "x: dict[str, int] = dict()"}, "is mutable"),
    (import_rules.no_mutable_module_state, {JOB: "import collections\nx = collections.deque()"}, "is mutable"),
    (import_rules.no_mutable_module_state, {JOB: "if True:\n    x = [1]"}, "threefold.job.load:2"),
    (import_rules.no_mutable_module_state, {JOB: "for x in y:\n    seen = set()"}, "threefold.job.load:2"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "sources", "words"), BAD)
def test_a_planted_fault_is_caught(rule: Rule, sources: dict[str, str], words: str) -> None:
    violations = rule(parse_modules(sources))
    assert any(words in violation for violation in violations), violations


@pytest.mark.parametrize(
    "sources",
    [
        {JOB: "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"},
        {JOB: "__all__ = ['x']\nX: Mapping[str, int] = {}\nY: Final[Sequence[int]] = [1]\nZ = (1, 2)"},
        {JOB: "X = MappingProxyType({'a': 1})\nY = frozenset({1})\ndef f():\n    return {}"},
        {"threefold/cli/x.py": "import typer\nfrom threefold.errors import E\ndef f():\n    import torch"},
        {"threefold/train/launcher.py": "def f():\n    import torch"},
        {"threefold/measure/x.py": "import torch\nfrom threefold.train import a\nfrom threefold.cost import b",
         "threefold/train/__init__.py": "", "threefold/cost/__init__.py": ""},
    ],
)  # fmt: skip
def test_what_is_allowed_is_not_caught(sources: dict[str, str]) -> None:
    assert [violation for rule in RULES for violation in rule(parse_modules(sources))] == []


# ---------------------------------------------------------------------------------------------------------------------
# The proof from outside: these verbs work where torch can't be imported


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which importing torch raises."""
    directory = tmp_path_factory.mktemp("without_torch")
    (directory / "torch.py").write_text("raise ImportError('torch is not to be imported here')\n")
    return {**os.environ, "PYTHONPATH": str(directory)}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["train", "--help"],
        ["explain", str(ARTICLE_JOB)],
        ["check", str(ARTICLE_JOB)],
    ],
    ids=lambda arguments: " ".join(Path(argument).name for argument in arguments),
)
def test_works_without_torch(arguments: list[str], without_torch: dict[str, str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "threefold", *arguments], capture_output=True, text=True, env=without_torch, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_torch_really_is_missing_there(without_torch: dict[str, str]) -> None:
    code = "import torch"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=without_torch, check=False
    )
    assert "torch is not to be imported here" in result.stderr
