"""Seconds of collectives, by alpha-beta with rings inside a hierarchy of links.

g ranks of a group, k of them in each node; n bytes is the whole tensor (all-gather: what comes out). A ring moves
n (g - 1) / g bytes out of every rank for a reduce-scatter or an all-gather, twice that for an all-reduce (Thakur et al.
2005; Patarasuk and Yuan 2009). Between nodes, the k ranks of a node drive k rings at the same time, one on the
network of each device, so that a group gets min(fast link, k · network) (as NCCL does).
"""

from __future__ import annotations

import numpy as np

from threefold.cost.case import Array, Case
from threefold.cost.shape import Number


def group_bytes_per_s(case: Case, size: Array, in_node: Array) -> Array:
    """What the ring of a group reaches, bytes/s out of each rank."""
    fast = case.machine.nvlink_bytes_per_s * case.constants.nvlink_efficiency
    slow = case.machine.nic_bytes_per_s * case.constants.nic_efficiency
    return np.where(size > in_node, np.minimum(fast, in_node * slow), fast)


def group_latency_s(case: Case, size: Array, in_node: Array) -> Array:
    """Start-up of one collective: inside the node at once, between nodes by a tree of log2(nodes) steps."""
    nodes = np.maximum(size / in_node, 1.0)
    return case.constants.nvlink_latency_s + case.constants.nic_latency_s * np.log2(nodes)


def scatter_s(case: Case, num_bytes: Number, size: Array, in_node: Array) -> Array:
    """One reduce-scatter or all-gather of ``num_bytes``; an all-reduce is two of them. 0 for a group of one."""
    ring = num_bytes * (size - 1) / size / group_bytes_per_s(case, size, in_node)
    return np.where(size > 1, ring + group_latency_s(case, size, in_node), 0.0)


def all_reduce_s(case: Case, num_bytes: Number, size: Array, in_node: Array) -> Array:
    """One all-reduce of ``num_bytes``: a reduce-scatter inside the nodes, an all-reduce between them, an all-gather
    inside. 2 n (N - 1) / N bytes leave each of N nodes, for two of them half of what one ring through all ranks sends
    (two trees do the same: Sanders et al. 2009).
    """
    nodes = np.maximum(size / in_node, 1.0)
    fast = case.machine.nvlink_bytes_per_s * case.constants.nvlink_efficiency
    slow = np.minimum(fast, in_node * case.machine.nic_bytes_per_s * case.constants.nic_efficiency)
    inside = num_bytes * (in_node - 1) / in_node / fast
    outside = num_bytes * (nodes - 1) / nodes / slow
    seconds = 2 * (inside + outside + group_latency_s(case, size, in_node))
    return np.where(size > 1, seconds, 0.0)


def send_s(case: Case, num_bytes: Number, crosses_nodes: Array) -> Array:
    """One message to a neighbour."""
    fast = case.machine.nvlink_bytes_per_s * case.constants.nvlink_efficiency
    slow = case.machine.nic_bytes_per_s * case.constants.nic_efficiency
    latency = np.where(crosses_nodes, case.constants.nic_latency_s, case.constants.nvlink_latency_s)
    return latency + num_bytes / np.where(crosses_nodes, np.minimum(fast, slow), fast)


def all_to_all_s(case: Case, num_bytes: Number, size: Array, in_node: Array) -> Array:
    """Each rank sends ``num_bytes`` in all, an equal part to every other rank (expert parallelism)."""
    fast = case.machine.nvlink_bytes_per_s * case.constants.nvlink_efficiency
    slow = case.machine.nic_bytes_per_s * case.constants.nic_efficiency
    outside = (size - in_node) / size
    seconds = np.maximum(num_bytes * (in_node - 1) / size / fast, num_bytes * outside / np.minimum(fast, slow))
    return np.where(size > 1, seconds + group_latency_s(case, size, in_node), 0.0)
