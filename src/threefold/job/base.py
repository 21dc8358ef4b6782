"""What all sections of a job are made of: the base class, and numbers with their ranges."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _as_whole(value: object) -> object:
    """Read 5e8 as 500000000: DeepSpeed's own examples write whole numbers so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Upper bounds keep arithmetic on a mistyped number instant; they lie far above what any machine can train.
Whole = Annotated[int, BeforeValidator(_as_whole)]
Count = Annotated[Whole, Field(ge=1, le=10**9)]
CountOrZero = Annotated[Whole, Field(ge=0, le=10**9)]
Degree = Annotated[Whole, Field(ge=1, le=10**6)]
Steps = Annotated[Whole, Field(ge=1, le=10**12)]
StepsOrZero = Annotated[Whole, Field(ge=0, le=10**12)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1, max_length=4096)]


class Section(BaseModel):
    """Base of every section: immutable, unknown keys refused, no silent conversion, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
