"""``--set KEY=VALUE``: overrides of single keys, and what a changed layout does to the batch that the file states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from threefold.job.files import parse_value
from threefold.job.keys import MISSING, assign, known_fields, lookup, remove, section_of, suggestion
from threefold.job.messages import Findings, printable, show

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
LAYOUT_KEYS = (
    *(f"parallelism.{axis}.size" for axis in ("dp", "tp", "pp")),
    "cluster.nodes",
    "cluster.devices_per_node",
)


_MODEL_STARTS = ("model.preset", "model.hf")


@dataclass(frozen=True)
class Override:
    """One ``--set``: a dotted key and the value it gets; None takes the key out."""

    key: str
    value: Any

    def touches(self, keys: Sequence[str]) -> bool:
        """Whether it sets one of ``keys`` or a section that holds one."""
        return any(key == self.key or key.startswith(f"{self.key}.") for key in keys)


def parse_overrides(texts: Sequence[str], findings: Findings) -> list[Override]:
    """The overrides in ``texts``; malformed ones become problems that quote the text."""
    parsed = (_parse_override(text, findings) for text in texts)
    return [override for override in parsed if override is not None]


def _parse_override(text: str, findings: Findings) -> Override | None:
    where = f"--set {printable(text)}"
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not all(part.strip() for part in key.split(".")):
        findings.problem(where, "is not KEY=VALUE", "write it like --set parallelism.tp.size=2")
    elif not value:
        findings.problem(where, "has no value", f"write --set {key}=VALUE, or --set {key}=null to take the key out")
    else:
        try:
            return Override(key, parse_value(value))
        except ValueError as error:
            fix = f"write JSON or YAML; quote text for your shell, like --set '{key}=\"text\"'"
            findings.problem(where, f"{show(value)} is not a value: {error}", fix)
    return None


def apply_overrides(settings: Mapping[str, Any], overrides: Sequence[Override], findings: Findings) -> dict[str, Any]:
    """A copy of ``settings`` with each override in it, later ones winning.

    Another preset or Hugging Face directory is another model: the file's own numbers go with its old one.
    """
    another_model = any(override.key in _MODEL_STARTS and override.value is not None for override in overrides)
    changed = remove(settings, "model") if another_model else dict(settings)
    for override in overrides:
        if override.value is None:
            changed = _take_out(changed, override.key, findings)
        else:
            changed = _put_in(changed, override, findings)
    return changed


def _put_in(settings: dict[str, Any], override: Override, findings: Findings) -> dict[str, Any]:
    above = next((prefix for prefix in _prefixes(override.key) if not _takes_keys(settings, prefix)), None)
    if above is None:
        return assign(settings, override.key, override.value)
    fix = f"set the whole of it: --set {printable(above)}=VALUE"
    findings.problem(override.key, f"{printable(above)} is one value, with no keys inside", fix)
    return settings


def _take_out(settings: dict[str, Any], key: str, findings: Findings) -> dict[str, Any]:
    if lookup(settings, key) is MISSING and key not in known_fields():
        meant = suggestion(key)
        fix = f"write --set {meant}=null" if meant else "leave this --set out"
        findings.problem(key, "is not a key of this job, so it can't be taken out", fix)
    return remove(settings, key)


def _prefixes(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _takes_keys(settings: Mapping[str, Any], key: str) -> bool:
    value, field = lookup(settings, key), known_fields().get(key)
    if value is MISSING or value is None:
        return field is None or section_of(field.annotation) is not None
    return isinstance(value, Mapping)
