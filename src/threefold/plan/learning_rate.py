"""A first guess at the learning rate for a model and a batch."""

from __future__ import annotations

import math

# Parameters, batch in tokens, learning rate (Brown et al. 2020, Language Models are Few-Shot Learners, table 2.1).
GPT3_TABLE = (
    (125e6, 0.5e6, 6.0e-4),
    (350e6, 0.5e6, 3.0e-4),
    (760e6, 0.5e6, 2.5e-4),
    (1.3e9, 1.0e6, 2.0e-4),
    (2.7e9, 1.0e6, 1.6e-4),
    (6.7e9, 2.0e6, 1.2e-4),
    (13e9, 2.0e6, 1.0e-4),
    (175e9, 3.2e6, 0.6e-4),
)


def learning_rate_hint(num_parameters: float, batch_tokens: float) -> float:
    """Peak learning rate for AdamW: that of the table, interpolated in logarithms, times √(batch / table's batch).

    The square root is Adam's scaling rule (Malladi et al. 2022). It is a start for tuning, not a prediction.
    """
    rate, reference = _interpolate(num_parameters)
    return rate * math.sqrt(batch_tokens / reference)


def _interpolate(num_parameters: float) -> tuple[float, float]:
    """Learning rate and batch of the table; beyond its ends those of the last row."""
    low = max((row for row in GPT3_TABLE if row[0] <= num_parameters), default=GPT3_TABLE[0])
    high = min((row for row in GPT3_TABLE if row[0] >= num_parameters), default=GPT3_TABLE[-1])
    if low[0] == high[0]:
        return low[2], low[1]
    share = math.log(num_parameters / low[0]) / math.log(high[0] / low[0])
    batch, rate = (math.exp((1 - share) * math.log(low[i]) + share * math.log(high[i])) for i in (1, 2))
    return rate, batch
