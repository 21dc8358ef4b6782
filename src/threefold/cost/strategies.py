"""Many strategies at once: one numpy array a field, so that one formula judges them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]

SCHEDULE_CODES: Mapping[str, int] = MappingProxyType(
    {"naive": 0, "gpipe": 1, "1f1b": 2, "interleaved_1f1b": 3, "zb_h1": 4, "zb_v": 5}
)
PRECISION_CODES: Mapping[str, int] = MappingProxyType({"fp32": 0, "fp16": 1, "bf16": 2, "fp8": 3, "fp4": 4})
RECOMPUTE_CODES: Mapping[str, int] = MappingProxyType({"none": 0, "selective": 1, "full": 2})
ORDER_CODES: Mapping[str, int] = MappingProxyType(
    {"tp,pp,dp": 0, "tp,dp,pp": 1, "pp,tp,dp": 2, "pp,dp,tp": 3, "dp,tp,pp": 4, "dp,pp,tp": 5}
)
PARTITION_CODES: Mapping[str, int] = MappingProxyType({"even": 0, "balanced": 1})
"""``balanced`` counts the embedding and the head as a layer each, which leaves the first and last stage fewer
layers."""

_DEFAULTS: Mapping[str, int | bool] = MappingProxyType(
    {
        "dp": 1,
        "tp": 1,
        "pp": 1,
        "chunks": 1,
        "cp": 1,
        "ep": 1,
        "micro_batch": 1,
        "num_microbatches": 1,
        "zero_stage": 0,
        "sequence_parallel": False,
        "recompute": RECOMPUTE_CODES["none"],
        "schedule": SCHEDULE_CODES["1f1b"],
        "offload_optimizer": False,
        "offload_param": False,
        "precision": PRECISION_CODES["bf16"],
        "order": ORDER_CODES["tp,pp,dp"],
        "partition": PARTITION_CODES["even"],
    }
)


@dataclass(frozen=True)
class Strategies:
    """One array of equal length N a field; ``build`` makes it.

    ``cp`` (context) and ``ep`` (expert) are dimensions of the prediction: cp multiplies the devices, ep lies inside dp
    and splits the experts over it. ``chunks`` are the model chunks of each device (virtual stages).
    ``num_microbatches`` is per replica and step. Codes are those of the tables of this module; order is of the axes,
    innermost first, with cp between tp and whatever follows it.
    """

    dp: Array
    tp: Array
    pp: Array
    chunks: Array
    cp: Array
    ep: Array
    micro_batch: Array
    num_microbatches: Array
    zero_stage: Array
    sequence_parallel: Array
    recompute: Array
    schedule: Array
    offload_optimizer: Array
    offload_param: Array
    precision: Array
    order: Array
    partition: Array

    @classmethod
    def build(cls, **values: ArrayLike) -> Strategies:
        """Scalars and arrays, broadcast against each other; what is left out has degree 1 or is off.

        Raises TypeError for an unknown field and ValueError for lengths that differ.
        """
        unknown = set(values) - set(_DEFAULTS)
        if unknown:
            raise TypeError(f"no field of a strategy is called {', '.join(sorted(unknown))}")
        given = [np.atleast_1d(values.get(name, default)) for name, default in _DEFAULTS.items()]
        arrays = np.broadcast_arrays(*given)
        kinds = [bool if isinstance(default, bool) else np.int64 for default in _DEFAULTS.values()]
        return cls(*(array.astype(kind) for array, kind in zip(arrays, kinds, strict=True)))

    def __len__(self) -> int:
        return len(self.dp)

    @property
    def num_devices(self) -> Array:
        """Devices that each strategy uses."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def global_batch(self) -> Array:
        """Sequences of one optimizer step over all replicas."""
        return self.dp * self.micro_batch * self.num_microbatches

    def take(self, indices: ArrayLike) -> Strategies:
        """The strategies at ``indices`` (integers or a mask)."""
        chosen = np.asarray(indices)
        if chosen.size == 0:
            chosen = chosen.astype(np.int64)
        return Strategies(*(getattr(self, field.name)[chosen] for field in fields(self)))
