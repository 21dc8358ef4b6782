"""Text to plain settings: JSON or YAML whatever the file is called, and every way in which a file can be unreadable."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from threefold.errors import JobError, Problem
from threefold.job.messages import printable, show

Settings = dict[str, Any]
MOST_BYTES = 200_000
DEEPEST = 32
MOST_BITS = 256  # far above every limit of a key, and far below what Python refuses to print
_EXAMPLE = '{"train_batch_size": 8, "parallelism": {"dp": {"size": 2}}}'


class JobLoader(yaml.SafeLoader):
    """YAML with the 1.2 core scalars, so that 3e-4 is a number and ``on`` is text; no aliases, no duplicate keys."""

    # PyYAML fills these two tables through add_*() below; its own 1.1 resolvers (octal 010, dates, yes/no) stay out.
    yaml_implicit_resolvers = {}  # noqa: RUF012

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse aliases: a job needs none, and nested ones grow without bound."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases (*name) are not read", problem_mark=self.peek_event().start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse keys that are given twice or are not text."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"key {show(key)} is not text", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {show(key)} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _DuplicateKeyError(ValueError):
    """JSON text gives a key twice."""


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 16 if "0x" in text else 8 if "0o" in text else 10)


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(loader.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan"))


for _tag, _pattern, _first in (
    ("null", r"^(~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(\d+(_\d+)*|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        r"^[-+]?((\.\d+|\d+\.?\d*)([eE][-+]?\d+)?|\.inf|\.Inf|\.INF|\.nan|\.NaN|\.NAN)$",
        list("-+0123456789."),
    ),
):
    JobLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
JobLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
JobLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def read_settings(path: Path) -> Settings:
    """The settings in the file at ``path``. Raises JobError for every file that holds none."""
    return parse_settings(_read_text(path), str(path))


def parse_settings(text: str, where: str) -> Settings:
    """The settings in ``text``; ``where`` names it in errors. Raises JobError when it is no JSON or YAML mapping."""
    value = _parse(text, where)
    if value is None:
        raise _refusal(where, "the file is empty", f"write a job into it, such as {_EXAMPLE}")
    if not isinstance(value, dict):
        raise _refusal(where, f"holds {show(value)}, but a job is a mapping", f"write a mapping, such as {_EXAMPLE}")
    return value


def parse_value(text: str) -> Any:
    """One value as ``--set`` takes it: JSON or YAML. Raises ValueError with what is wrong."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        pass
    try:
        return yaml.load(text, JobLoader)
    except yaml.YAMLError as error:
        raise ValueError(_yaml_words(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check_plain(settings: Mapping[str, Any]) -> list[Problem]:
    """Values that no key can have: NaN, infinity, text that is not Unicode, keys that are not text, endless nesting."""
    return list(_odd_values(settings, "", 0))


def _odd_values(value: object, key: str, depth: int) -> Iterator[Problem]:
    name = printable(key) or "the job"
    if depth > DEEPEST:
        yield Problem(
            printable(key.partition(".")[0]),
            f"is nested more than {DEEPEST} deep",
            "write it flat: no section of a job is so deep",
        )
    elif isinstance(value, Mapping):
        for child, item in value.items():
            if not isinstance(child, str) or not child or not _encodable(child):
                yield Problem(name, f"has the key {show(child)}, which is no name", "write the key as plain text")
            else:
                yield from _odd_values(item, f"{key}.{child}" if key else child, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _odd_values(item, key, depth + 1)
    elif isinstance(value, int) and value.bit_length() > MOST_BITS:
        yield Problem(name, f"is a number of {value.bit_length()} bits", "write a number that a machine can count to")
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(name, f"{value} is not a finite number", "write a finite number, or leave the key out")
    elif isinstance(value, str) and not _encodable(value):
        yield Problem(name, f"{show(value)} holds characters that are not Unicode text", "write it as plain text")


def _encodable(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise _refusal(str(path), "there is no such file", _fix_for_missing(path)) from None
    except IsADirectoryError:
        raise _refusal(str(path), "is a directory, not a job file", f"name a file in it{_jobs_in(path)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _refusal(str(path), f"can't be read: {reason}", "name a file that you may read") from None
    if len(content) > MOST_BYTES:
        raise _refusal(str(path), f"is larger than {MOST_BYTES} bytes", "name a job file; jobs are a few kilobytes")
    return _decode(content, path)


def _decode(content: bytes, path: Path) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8 text"
        raise _refusal(str(path), f"is not a text file: {reason}", "name a JSON or YAML file saved as UTF-8") from None
    if "\0" in text:
        place = f"byte {text.index(chr(0))} is zero"
        raise _refusal(str(path), f"is not a text file: {place}", "name a JSON or YAML file saved as UTF-8")
    return text


def _fix_for_missing(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"make the directory {printable(str(parent))} or correct the path"
    return f"correct the path{_jobs_in(parent)}"


def _jobs_in(directory: Path) -> str:
    try:
        jobs = sorted(file.name for file in directory.iterdir() if file.suffix in {".json", ".yaml", ".yml"})
    except OSError:
        return ""
    return f"; there are {', '.join(map(printable, jobs[:8]))}" if jobs else ""


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        json_error = error
    try:
        return yaml.load(text, JobLoader)
    except yaml.YAMLError as error:
        if isinstance(json_error, json.JSONDecodeError) and _looks_like_json(text):
            raise _json_refusal(json_error, where) from None
        if isinstance(json_error, _DuplicateKeyError) and "given twice" not in _yaml_words(error):
            raise _refusal(where, str(json_error), "keep one of the two") from None
        raise _yaml_refusal(error, where) from None
    except RecursionError:
        raise _refusal(where, "is nested too deeply", "write it flat: no section of a job is so deep") from None
    except ValueError as error:
        raise _refusal(where, f"holds a number that can't be read: {error}", "write a shorter number") from None


def _unique(pairs: list[tuple[str, Any]]) -> Settings:
    settings = dict(pairs)
    if len(settings) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in settings if names.count(name) > 1)
        raise _DuplicateKeyError(
            f"key {show(repeated)} is given twice"
        )  # the YAML reader, which knows lines, says where
    return settings


def _looks_like_json(text: str) -> bool:
    return re.match(r'\s*\{\s*"', text) is not None


def _json_refusal(error: json.JSONDecodeError, where: str) -> JobError:
    place = f"{where}:{error.lineno}:{error.colno}"
    fix = f"check commas, quotes and brackets just before line {error.lineno}, column {error.colno}"
    return _refusal(place, f"is not valid JSON: {error.msg}", fix)


def _yaml_refusal(error: yaml.YAMLError, where: str) -> JobError:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is None:
        return _refusal(where, f"is neither JSON nor YAML: {_yaml_words(error)}", "save it as JSON or YAML in UTF-8")
    line, column = mark.line + 1, mark.column + 1
    return _refusal(
        f"{where}:{line}:{column}", _yaml_words(error), f"{_yaml_fix(error)} at line {line}, column {column}"
    )


def _yaml_fix(error: yaml.YAMLError) -> str:
    fixes = {
        "given twice": "keep one of the two, not that",
        "aliases": "write the value out",
        "not text": "name the key",
    }
    syntax = "check indentation (spaces, no tabs), colons, commas and brackets"
    return next((fix for words, fix in fixes.items() if words in _yaml_words(error)), syntax)


def _yaml_words(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        return printable(", ".join(part for part in (error.context, error.problem) if part))
    return printable(str(error).splitlines()[0])


def _refusal(where: str, message: str, fix: str) -> JobError:
    return JobError([Problem(printable(where), message, fix)])
