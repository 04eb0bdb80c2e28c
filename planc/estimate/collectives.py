"""Seconds of collectives: a latency for each step of a ring and a bandwidth for each byte.

Both depend on whether the group's ranks are in one node. A group with few ranks a node has the
share of the network that its ranks have; the groups beside it have the rest.
"""

from __future__ import annotations

from planc.estimate.profiles import Hardware
from planc.estimate.workload import Collective, Group, Kind


def seconds(collective: Collective, hardware: Hardware) -> float:
    """Of all `count` collectives, nothing overlapped."""
    group, per_node = collective.group, hardware.ranks_per_node
    if group.size == 1:
        return 0.0
    if collective.kind is Kind.SEND:
        return collective.count * point_to_point(collective.size, group, hardware)
    reduces = collective.kind is Kind.ALL_REDUCE
    node = hardware.node_reduce_gb_s if reduces else hardware.node_gb_s
    network = hardware.network_reduce_gb_s if reduces else hardware.network_gb_s
    bandwidth = node
    if group.crosses(per_node):
        bandwidth = min(node, network * group.in_node(per_node) / per_node)
    share = (group.size - 1) / group.size * (2 if reduces else 1)
    sent = collective.count * collective.size * share / (bandwidth * 1e9)
    return sent + latency(collective, hardware)


def latency(collective: Collective, hardware: Hardware) -> float:
    """The part that is not bandwidth: a step of the ring for each rank, one of a send."""
    group = collective.group
    crosses = group.crosses(hardware.ranks_per_node)
    one = hardware.network_latency_us if crosses else hardware.node_latency_us
    steps = 1 if collective.kind is Kind.SEND else group.size - 1
    return collective.count * steps * one * 1e-6


def point_to_point(size: float, group: Group, hardware: Hardware) -> float:
    """Of one send of `size` bytes to the next rank of a group."""
    if not group.crosses(hardware.ranks_per_node) and group.stride < hardware.ranks_per_node:
        return size / (hardware.node_gb_s * 1e9) + hardware.node_latency_us * 1e-6
    share = hardware.network_gb_s / hardware.ranks_per_node
    return size / (share * 1e9) + hardware.network_latency_us * 1e-6
