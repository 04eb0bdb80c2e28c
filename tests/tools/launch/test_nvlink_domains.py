"""Tensor axes that leave their node, where the links between nodes are NVLink too."""

from dataclasses import replace

import pytest

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.tools.launch.facts import RankFacts, nvlink_domain
from planc.tools.launch.judge import Needed, judge_ranks

TOLD = """
    Fabric
        State                             : {state}
        Status                            : Success
        CliqueId                          : {clique}
        ClusterUUID                       : {cluster}
    Processes                             : None
"""
CLUSTER = "50000000-0000-0000-0000-0000000000a1"
RANK = RankFacts(
    host="node0",
    nvlink="",
    local_world_size=2,
    versions={},
    plan="a",
    error="",
    files={},
    memory=None,
    disk=None,
    compute=0.001,
)


@pytest.mark.parametrize(
    ("state", "cluster", "domain"),
    [
        ("Completed", CLUSTER, f"{CLUSTER}.7"),
        ("Completed", "00000000-0000-0000-0000-000000000000", ""),
        ("N/A", "N/A", ""),
    ],
)
def test_what_the_driver_tells(state, cluster, domain):
    assert nvlink_domain(TOLD.format(state=state, clique=7, cluster=cluster)) == domain
    assert nvlink_domain("") == nvlink_domain("command not found") == ""


def found(domains, tp):
    """What is said of two nodes of two ranks in NVLink domains."""
    lowered = compile_plan("qwen3-8b", "qwen3", Sink(), world_size=4, settings=[f"tp={tp}"]).lowered
    every = [
        replace(RANK, host=f"node{rank // 2}", nvlink=domain) for rank, domain in enumerate(domains)
    ]
    return [finding.message for finding in judge_ranks(every, lowered, Needed())]


def test_an_axis_may_cross_nodes_in_one_domain():
    assert found(["one.1"] * 4, 4) == []
    assert found([""] * 4, 2) == []
    assert found([""] * 4, 4) == []  # no node has as many ranks
    [text] = found(["one.1", "two.1", "one.1", "two.1"], 2)
    assert text.startswith("the ranks [0, 1] of tp are on node0, in NVLink domain one.1 and two.1")
