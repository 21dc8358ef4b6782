"""Numbers and lists as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

_NUMBER_WORDS = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)


def count_of(number: int, singular: str, plural: str | None = None) -> str:
    """``two nodes``: a small number as a word, with its noun."""
    word = _NUMBER_WORDS[number] if number < len(_NUMBER_WORDS) else f"{number:,}"
    return f"{word} {singular if number == 1 else plural or singular + 's'}"


def sentence(text: str) -> str:
    """``text`` with a capital first letter."""
    return text[:1].upper() + text[1:]


def format_bytes(num_bytes: float) -> str:
    """Bytes in SI units, three digits: ``12.6 MB``."""
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while num_bytes >= 999.5 and len(units) > 1:
        num_bytes /= 1000
        units.pop(0)
    return f"{num_bytes:.3g} {units[0]}"


def format_count(number: int) -> str:
    """A large count in thousands, millions or billions: ``6.74 B``."""
    for limit, unit in ((10**12, " T"), (10**9, " B"), (10**6, " M"), (10**3, " k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return str(number)


def format_integers(numbers: Sequence[int], most: int = 4) -> str:
    """Ascending integers, short: ``0-7``, ``0, 8, 16, ..., 56``, ``3``."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 2 else f"{numbers[0]}, {numbers[1]}"
    if len(numbers) <= most + 1:
        return ", ".join(map(str, numbers))
    return ", ".join(map(str, numbers[: most - 1])) + f", ..., {numbers[-1]}"
