"""Types and ranges: pydantic finds what is wrong with each key, this says it in threefold's words.

A wrong key is reported and taken out, so that everything else in the job is judged in the same run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from threefold.job.files import parse_value
from threefold.job.keys import known_fields, lookup, remove, section_of, siblings, suggestion
from threefold.job.messages import LONGEST_VALUE, Findings, choices, nearest_word, printable, show
from threefold.job.spec import JobFile, Section

# Keys of which pydantic can't say in one sentence what they take.
FORMS: Mapping[str, str] = {
    "parallelism.pp.partition": '"even", "auto" or a list with the layers of each stage, such as [6, 6] or [6.5, 5.5]',
    "cluster.inter_node": 'LINKSxSPEED with Gb/s for bits or GB/s for bytes, such as "8x200Gb/s"',
    "optimizer.params.betas": "a list of two numbers from 0 to below 1, such as [0.9, 0.95]",
}
_KINDS: Mapping[str, str] = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a section",
}
# The key that a person means who writes a section as one value: "fp16": true, "tp": 2, "model": "gpt2".
_SHORTHANDS = ("enabled", "size", "stage", "every", "device", "mode", "type", "preset", "train", "timeout_s")
_TRUE_WORDS = frozenset({"yes", "on", "y", "enabled", "1", 1})


def validated(settings: Mapping[str, Any], findings: Findings) -> JobFile:
    """What remains of ``settings`` when every key that is wrong by itself is reported in ``findings`` and taken out."""
    while True:
        try:
            return JobFile.model_validate(settings)
        except ValidationError as error:
            settings = _report(settings, error.errors(include_url=False), findings)


def _report(settings: Mapping[str, Any], errors: Sequence[ErrorDetails], findings: Findings) -> dict[str, Any]:
    remaining = dict(settings)
    # A default that could not be computed follows from another error in the same section.
    errors = [error for error in errors if error["type"] != "default_factory_not_called"]
    misspelt = {suggestion(_key_in(settings, e["loc"])) for e in errors if e["type"] == "extra_forbidden"}
    for error in errors:
        key = _key_in(settings, error["loc"])
        if error["type"] == "missing" and key not in FORMS:
            _report_missing(f"{key}.{error['loc'][-1]}", misspelt, findings)
        elif not findings.explains(key):
            message, fix = _words(key, lookup(settings, key), error)
            findings.problem(key, message, fix)
        remaining = remove(remaining, key)
    return remaining


def _key_in(settings: Mapping[str, Any], location: Sequence[int | str]) -> str:
    """The dotted key of an error: pydantic's location without list indexes and the branches of a union."""
    parts: list[str] = []
    value: Any = settings
    for part in location:
        if not isinstance(value, Mapping) or part not in value:
            break
        parts.append(str(part))
        value = value[part]
    return ".".join(parts)


def _report_missing(key: str, misspelt: Collection[str | None], findings: Findings) -> None:
    if key in misspelt or findings.explains(key):
        return  # it is there under a wrong name, or was there with a wrong value: that is reported
    fix = f'add "{key.rpartition(".")[2]}" to it, for example {show(example(key))}'
    preset = ', or start from a known model with "preset": "gpt2"' if key.startswith("model.") else ""
    findings.problem(key, f"is missing from the section {key.rpartition('.')[0]}", fix + preset)


def _words(key: str, value: Any, error: ErrorDetails) -> tuple[str, str]:
    if key in FORMS:
        return f"{show(value)} is not of the form that is read", f"write {FORMS[key]}"
    translate = _TRANSLATIONS.get(error["type"], _unsuitable)
    return translate(key, value, error.get("ctx", {}))


def _unknown(key: str, value: Any, context: Mapping[str, Any]) -> tuple[str, str]:
    meant = suggestion(key)
    if meant:
        return f"is not a known key; the nearest is {meant}", f"write {meant} instead, or remove {printable(key)}"
    names = [known.rpartition(".")[2] for known in siblings(key)]
    return "is not a known key", f"remove it; known here: {', '.join(names)}"


def _wrong_kind(needed: str) -> Callable[[str, Any, Mapping[str, Any]], tuple[str, str]]:
    def words(key: str, value: Any, context: Mapping[str, Any]) -> tuple[str, str]:
        return f"{show(value)} is not {needed}", _fix_kind(needed, key, value)

    return words


def _fix_kind(needed: str, key: str, value: Any) -> str:
    if value is None:
        return f"leave {key} out, or write {show(example(key))}"
    if needed == "a section":
        return _fix_section(key, value)
    if needed == "a whole number" and isinstance(value, float) and math.isfinite(value):
        return f"write {math.floor(value)} or {math.ceil(value)}"
    if needed == "true or false":
        return f"write {'true' if _means_true(value) else 'false'} (no quotes)"
    if needed == "text" and not isinstance(value, Mapping | list):
        return f"write it in quotes: {show(str(value))}"
    unquoted = _unquoted(value)
    if isinstance(unquoted, int if needed == "a whole number" else float | int) and not isinstance(unquoted, bool):
        return f"write {unquoted} without quotes"
    return f"write {needed}, for example {show(example(key))}"


def _means_true(value: Any) -> bool:
    word = value.lower() if isinstance(value, str) else value
    return word == "true" or (isinstance(word, str | int) and word in _TRUE_WORDS)


def _unquoted(value: Any) -> Any:
    try:
        return parse_value(value) if isinstance(value, str) and len(value) <= LONGEST_VALUE else value
    except ValueError:
        return None


def _fix_section(key: str, value: Any) -> str:
    section = section_of(known_fields()[key].annotation) if key in known_fields() else None
    names = list(section.model_fields) if section else []
    shorthand = next((name for name in _SHORTHANDS if section and _accepts(section, name, value)), None)
    if shorthand:
        return f"write {show({shorthand: value})}"
    return f"write a mapping with the keys {choices(names)}"


def _accepts(section: type[Section], name: str, value: Any) -> bool:
    if name not in section.model_fields:
        return False
    try:
        section.model_validate({name: value})
    except ValidationError as error:
        return all(found["loc"][0] != name for found in error.errors(include_url=False))
    return True


def _not_in_range(words: str, fix: str) -> Callable[[str, Any, Mapping[str, Any]], tuple[str, str]]:
    def translated(key: str, value: Any, context: Mapping[str, Any]) -> tuple[str, str]:
        (limit,) = (context[name] for name in ("ge", "gt", "le", "lt") if name in context)
        shown = int(limit) if limit == int(limit) else limit
        return f"{show(value)} is out of range: {words} {shown}", fix.format(limit=shown, like=example(key))

    return translated


def _no_choice(key: str, value: Any, context: Mapping[str, Any]) -> tuple[str, str]:
    allowed = re.findall(r"'([^']*)'", str(context.get("expected", "")))
    meant = nearest_word(value, allowed, cutoff=0.4) if isinstance(value, str) else None
    words = f"{show(value)} is not one of {choices(allowed)}"
    return words, f"write {show(meant)}" if meant else f"write {choices(show(name) for name in allowed)}"


def _too_short(key: str, value: Any, context: Mapping[str, Any]) -> tuple[str, str]:
    return "is empty", f"leave {key} out, or write {show(example(key))}"


def _unsuitable(key: str, value: Any, context: Mapping[str, Any]) -> tuple[str, str]:
    return f"{show(value)} is not allowed", f"write a value like {show(example(key))}"


_TRANSLATIONS: Mapping[str, Callable[[str, Any, Mapping[str, Any]], tuple[str, str]]] = {
    "extra_forbidden": _unknown,
    "literal_error": _no_choice,
    "string_too_short": _too_short,
    "greater_than_equal": _not_in_range("the least is", "write {limit} or more"),
    "less_than_equal": _not_in_range("the most is", "write {limit} or less"),
    "greater_than": _not_in_range("it must be above", "write a number above {limit}, such as {like}"),
    "less_than": _not_in_range("it must be below", "write a number below {limit}, such as {like}"),
    **{kind: _wrong_kind(needed) for kind, needed in _KINDS.items()},
}


def example(key: str) -> Any:
    """A value that the key takes: the first of its examples, or its default."""
    field = known_fields().get(key)
    if field is None:
        return None
    if field.examples:
        return field.examples[0]
    default = field.get_default()
    return 1 if default is None else default
