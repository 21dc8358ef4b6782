"""Why a candidate is not the plan."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """One cause of rejection; the text is what people and JSON see. A candidate has the first one that applies."""

    HEADS = "tp does not divide the attention heads"
    KV_HEADS = "tp does not divide the key-value heads"
    WIDTH = "tp does not divide the width of the MLP"
    LAYERS = "more stages than layers"
    SEQUENCE = "tp or cp does not divide the sequence"
    EXPERTS = "ep does not divide the experts and the replicas"
    NODE = "tp would leave the node"
    BATCH = "dp does not divide the global batch"
    MICRO_BATCH = "dp × micro batch × microbatches is not the global batch"
    INTERLEAVING = "chunks need whole layers, and as many microbatches as there are devices in the pipeline"
    OFFLOAD = "offload without the ZeRO stage that it needs"
    HOST_MEMORY = "offloaded states exceed the memory of the hosts"
    SAME = "the same as a simpler candidate"
    DOMINATED = "never better than another candidate, which fits as well"
    RESORT = "last resort, which is not needed"
    MEMORY = "does not fit into the device's memory"
    SLOWER = "slower than the plans shown"
