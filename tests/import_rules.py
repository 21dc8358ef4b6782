"""The rules of the house for modules, checked on their syntax trees: who imports whom, and no state in modules.

A rule is a function from all modules to violations, so each can be tried on a planted bad source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "threefold"

PURE = frozenset({"job", "layout", "schedule", "cost", "simulate", "plan", "report"})

# part -> parts that it must not import
FORBIDDEN: Mapping[str, frozenset[str]] = {
    "job": frozenset({"layout", "schedule", "cost", "simulate", "plan", "report"}),
    "layout": frozenset({"schedule", "cost", "simulate", "plan", "report"}),
    "schedule": frozenset({"job", "layout", "cost", "simulate", "plan", "report"}),
    "cost": frozenset({"schedule", "simulate", "plan", "report"}),
    "simulate": frozenset({"plan", "report"}),
    "models": frozenset({"parallel", "train", "measure", "layout", "schedule", "cost", "simulate", "plan", "report"}),
    "parallel": frozenset({"train", "measure", "cost", "simulate", "plan", "report"}),
    "train": frozenset({"measure", "cost", "simulate", "plan", "report"}),
}

# Impure modules that run before torch is imported, or without it.
TORCH_FREE = (
    "threefold.__main__",
    "threefold.errors",
    "threefold.cli",
    "threefold.measure.timeline",
    "threefold.parallel.activity",
    "threefold.parallel.recorder",
    "threefold.train.data",
    "threefold.train.failures",
    "threefold.train.launcher",
    "threefold.train.lines",
    "threefold.train.learning_rate",
    "threefold.train.preflight",
    "threefold.train.recorded",
    "threefold.train.torch_profile",
    "threefold.train.watchdog",
)

_MUTABLE_NODES = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_MUTABLE_CALLS = frozenset({"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter"})
# A literal with one of these types can't be changed without the type checker's protest.
_READ_ONLY_TYPES = frozenset({"Mapping", "Sequence", "Collection", "Iterable", "AbstractSet"})


@dataclass(frozen=True)
class Import:
    """One imported module, in dotted form. ``eager``: at import time, not in a function. ``names``: after ``from``."""

    module: str
    names: tuple[str, ...]
    line: int
    eager: bool
    relative: bool = False


@dataclass(frozen=True)
class Module:
    """A module's dotted name and syntax tree."""

    name: str
    tree: ast.Module

    @property
    def part(self) -> str:
        """``schedule`` for ``threefold.schedule.check``; empty for what lies beside the parts."""
        names = self.name.split(".")
        return names[1] if len(names) > 2 or (len(names) == 2 and self.is_package) else ""

    @property
    def is_package(self) -> bool:
        """Whether this is an ``__init__``."""
        return getattr(self.tree, "is_package", False)

    def imports(self) -> list[Import]:
        """All imports that run; those for the type checker only are left out."""
        return list(_imports(self.tree.body, eager=True))


def read_modules(source: Path) -> dict[str, Module]:
    """All modules under ``source`` (a ``src`` directory) by dotted name."""
    return dict(_named(path.relative_to(source), path.read_text()) for path in sorted(source.rglob("*.py")))


def parse_modules(sources: Mapping[str, str]) -> dict[str, Module]:
    """Modules from texts by path, like ``{"threefold/job/load.py": "import torch"}``."""
    return dict(_named(Path(path), text) for path, text in sources.items())


def _named(path: Path, text: str) -> tuple[str, Module]:
    names = path.with_suffix("").parts
    tree = ast.parse(text, str(path))
    tree.is_package = names[-1] == "__init__"  # type: ignore[attr-defined]
    name = ".".join(names[:-1] if names[-1] == "__init__" else names)
    return name, Module(name, tree)


def _imports(statements: Iterable[ast.stmt], eager: bool) -> Iterator[Import]:
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (Import(alias.name, (), statement.lineno, eager) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            names = tuple(alias.name for alias in statement.names)
            yield Import(statement.module or "", names, statement.lineno, eager, relative=statement.level > 0)
        elif not _is_type_checking(statement):
            inner_eager = eager and not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports(_children(statement), inner_eager)


def _is_type_checking(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _children(statement: ast.stmt) -> Iterator[ast.stmt]:
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.stmt):
            yield node
        elif isinstance(node, ast.ExceptHandler | ast.match_case):
            yield from node.body


# ---------------------------------------------------------------------------------------------------------------------
# The rules


def pure_parts_reach_no_torch(modules: Mapping[str, Module]) -> list[str]:
    """Not even in a function, not even through another part."""
    found = []
    for module in modules.values():
        if module.part in PURE:
            found += _paths_to_torch(module, modules, eager_only=False)
    return found


def torch_free_modules_reach_no_torch(modules: Mapping[str, Module]) -> list[str]:
    """At import time; a function may import torch later."""
    found = []
    for module in modules.values():
        if any(module.name == free or module.name.startswith(f"{free}.") for free in TORCH_FREE):
            found += _paths_to_torch(module, modules, eager_only=True)
    return found


def pure_parts_import_pure_parts(modules: Mapping[str, Module]) -> list[str]:
    return [
        f"{module.name}:{line} is pure and imports {target}"
        for module, target, line in _inner_imports(modules)
        if module.part in PURE and part_of(target, modules) not in PURE | {"", "errors"}
    ]


def parts_keep_their_distance(modules: Mapping[str, Module]) -> list[str]:
    return [
        f"{module.name}:{line} imports {target}: {module.part} must not know {part_of(target, modules)}"
        for module, target, line in _inner_imports(modules)
        if part_of(target, modules) in FORBIDDEN.get(module.part, frozenset())
    ]


def only_the_command_line_imports_the_command_line(modules: Mapping[str, Module]) -> list[str]:
    return [
        f"{module.name}:{line} imports {target}"
        for module, target, line in _inner_imports(modules)
        if part_of(target, modules) == "cli" and module.part != "cli" and module.name != f"{PACKAGE}.__main__"
    ]


def the_command_line_imports_parts_in_functions(modules: Mapping[str, Module]) -> list[str]:
    allowed = {"errors", "cli", ""}
    return [
        f"{module.name}:{item.line} imports {item.module} when it is imported"
        for module in modules.values()
        if module.part == "cli"
        for item in module.imports()
        if item.eager and _is_inner(item.module) and part_of(item.module, modules) not in allowed
    ]


def models_know_nothing_of_parallelism(modules: Mapping[str, Module]) -> list[str]:
    return [
        f"{module.name}:{item.line} imports torch.distributed"
        for module in modules.values()
        if module.part == "models"
        for item in module.imports()
        if item.module.startswith("torch.distributed") or (item.module == "torch" and "distributed" in item.names)
    ]


def imports_are_absolute(modules: Mapping[str, Module]) -> list[str]:
    return [
        f"{module.name}:{item.line} imports relatively"
        for module in modules.values()
        for item in module.imports()
        if item.relative
    ]


def no_global_statement(modules: Mapping[str, Module]) -> list[str]:
    return [
        f"{module.name}:{node.lineno} says global {', '.join(node.names)}"
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Global)
    ]


def no_mutable_module_state(modules: Mapping[str, Module]) -> list[str]:
    """A constant is a tuple, a frozenset or a read-only mapping. (Ruff's RUF012 sees to class bodies.)"""
    return [
        f"{module.name}:{node.lineno} {ast.unparse(node).splitlines()[0][:60]} is mutable"
        for module in modules.values()
        for node in _assignments(module.tree.body)
        if node.value is not None and _is_mutable(node.value) and not _is_excused(node)
    ]


RULES = (
    pure_parts_reach_no_torch,
    torch_free_modules_reach_no_torch,
    pure_parts_import_pure_parts,
    parts_keep_their_distance,
    only_the_command_line_imports_the_command_line,
    the_command_line_imports_parts_in_functions,
    models_know_nothing_of_parallelism,
    imports_are_absolute,
    no_global_statement,
    no_mutable_module_state,
)


# ---------------------------------------------------------------------------------------------------------------------
# What the rules are made of


def part_of(target: str, modules: Mapping[str, Module]) -> str:
    """The part that a dotted name of ours belongs to; ``errors`` and other single files count by their own name."""
    names = target.split(".")
    return names[1] if len(names) > 1 and ".".join(names[:2]) in modules else ""


def _is_inner(name: str) -> bool:
    return name == PACKAGE or name.startswith(f"{PACKAGE}.")


def _targets(item: Import, modules: Mapping[str, Module]) -> list[str]:
    """The modules that an import runs: ``from a import b`` runs a.b where that is a module, and a itself."""
    submodules = [f"{item.module}.{name}" for name in item.names if f"{item.module}.{name}" in modules]
    return [item.module, *submodules]


def _inner_imports(modules: Mapping[str, Module]) -> Iterator[tuple[Module, str, int]]:
    for module in modules.values():
        for item in module.imports():
            if _is_inner(item.module):
                yield from ((module, target, item.line) for target in _targets(item, modules))


def _paths_to_torch(start: Module, modules: Mapping[str, Module], eager_only: bool) -> list[str]:
    """A chain of imports from ``start`` to torch, if there is one: ``a -> b -> torch``."""
    seen = {start.name}
    frontier = [(start, start.name)]
    while frontier:
        module, chain = frontier.pop()
        for target in _run_by(module, modules, eager_only):
            if target.split(".")[0] == "torch":
                return [f"{chain} -> {target}"]
            if target in modules and target not in seen:
                seen.add(target)
                frontier.append((modules[target], f"{chain} -> {target}"))
    return []


def _run_by(module: Module, modules: Mapping[str, Module], eager_only: bool) -> Iterator[str]:
    """Names of all modules that importing ``module`` runs directly, with the packages around them."""
    for item in module.imports():
        if item.eager or not eager_only:
            for target in _targets(item, modules):
                names = target.split(".")
                yield from (".".join(names[: length + 1]) for length in range(len(names)))


def _assignments(statements: Iterable[ast.stmt]) -> Iterator[ast.Assign | ast.AnnAssign]:
    for statement in statements:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            yield statement
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _assignments(_children(statement))


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        called = value.func.attr if isinstance(value.func, ast.Attribute) else ast.unparse(value.func)
        return called in _MUTABLE_CALLS
    return isinstance(value, _MUTABLE_NODES)


def _is_excused(node: ast.Assign | ast.AnnAssign) -> bool:
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) == "__all__"
    words = ast.unparse(node.annotation).replace("Final[", "")
    return words.split("[")[0].split(".")[-1] in _READ_ONLY_TYPES
