"""`planc preflight` on eight gloo processes, with a fault on one of them: each is named in time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planc.tools.launch.peers import join

pytestmark = pytest.mark.slow

JOBS = Path(__file__).parent / "preflight_jobs.py"
NAMED = {
    "none": "preflight of qwen3 on dp_replicate 2 | dp_shard 2 | tp 2, 8 ranks on 2 nodes: passed",
    "version": "PL643]: planc is 0.0.1 on rank 5 on node1",
    "plan": "PL491]: the plan of rank 5 on node1 is ",
    "no plan": "PL491]: rank 5 on node1 cannot read the plan: error[PL600]",
    "written for another plan": "PL491]: the job was written for plan 0123456789ab",
    "another world size": "PL490]: the plan is lowered for 4 ranks",
    "stale weights": "PL461]: weights/model.safetensors is another file on rank 5 on node1",
    "stale script": "PL461]: train.py is another file on rank 5 on node1",
    "no script": "PL461]: other.py is unreadable: No such file or directory on ranks 0, 1, ",
    "no weights": "PL461]: elsewhere is without weights on ranks 0, 1, ",
    "swapped": "PL641]: the ranks [2, 3] of tp are on node0 and node1",
    "local size": "PL643]: LOCAL_WORLD_SIZE is 8 on rank 5 on node1, where 4 ranks run",
    "disk": "PL646]: rank 5 on node1 has 1000 B of disk free",
    "memory": "PL646]: rank 5 on node1 has 1000 B of memory free",
    "slow": "PL645]: rank 5 on node1 computes ",
    "late": "PL645]: rank 5 on node1 is slow on each axis that it is on",
    "slow link": "PL645]: ranks [4, 5] on node1 need ",
    "dies": "PL644]: rank 5 on node1 gives no sign of life; its last was at: all-reduce of 2",
    "stops": "PL644]: rank 5 on node1 gives no sign of life; its last was at: all-reduce of ",
    "no network": "PL645]: rank 5 on node1 failed at starting the process group: no such interface",
    "wrong sums": "PL520]: ",
    "absent": "PL644]: rank 5 never came",
    "no rank 0": "PL644]: rank 0 does not answer rank 1 at 127.0.0.1:",
    "rank 0 dies": "and perhaps rank 0 on node0, whose last word was: ",
    "rank 0 stops": "PL644]: the store of all ranks has not answered for 16 s, and perhaps rank 0 ",
}
BESIDE = "rank 0 stops beside its store"
NAMED[BESIDE] = "PL644]: rank 0 on node0 gives no sign of life; its last was at: all-reduce of "
MISSED = (BESIDE, "dies", "stops", "absent", "no rank 0", "rank 0 dies", "rank 0 stops")
SAMPLED = ("none", "stale weights", "slow link", "dies")


@pytest.mark.parametrize(
    "fault", [f if f in SAMPLED else pytest.param(f, marks=pytest.mark.slow) for f in NAMED]
)
def test_a_fault_is_named(fault):
    code, report, seconds, others = ran("text", fault)
    said = " ".join(report.split())
    assert NAMED[fault] in said, report
    assert said.count("error[") <= (2 if fault == "no plan" else 1), report
    assert code == (fault != "none")
    assert seconds < 60
    if fault not in MISSED:
        assert {*others} == {code}


def ran(format, fault):
    """Exit code, standard output of all ranks, seconds, and the exit codes of the others."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(JOBS), format, fault],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout)[fault]


AS_DATA = {
    "none": (None, 8),
    "dies": ("rank 5 on node1 gives no sign of life", 8),
    "stops": ("rank 5 on node1 gives no sign of life", 8),
    "absent": ("rank 5 never came", 0),
    "no rank 0": ("rank 0 does not answer rank 1", 0),
    "rank 0 dies": ("and perhaps rank 0 on node0", 0),
    "rank 0 stops": ("has not answered for 16 s", 0),
    BESIDE: ("rank 0 on node0 gives no sign of life", 0),
}
"""What is said of a rank, and the number of ranks whose facts are known."""


@pytest.mark.parametrize(
    "fault", [f if f == "stops" else pytest.param(f, marks=pytest.mark.slow) for f in AS_DATA]
)
def test_a_report_is_one_document_whoever_is_missed(fault):
    code, written, _, others = ran("json", fault)
    message, known = AS_DATA[fault]
    document = json.loads(written)  # of all ranks
    assert code == (fault != "none") and document["passed"] == (fault == "none")
    assert len(document["ranks"]) == known and 0 < document["seconds"] < 60
    assert [d["code"] for d in document["diagnostics"]] == ["PL644"] * (fault != "none")
    assert message is None or message in document["diagnostics"][0]["message"]
    assert {*others} <= {code, 0, 9, -9, None}
    assert others.count(code) >= 6


@pytest.mark.slow
def test_what_was_found_before_is_in_the_report():
    code, written, _, _ = ran("json", "little memory, and dies")
    document = json.loads(written)
    assert code == 1 and [d["code"] for d in document["diagnostics"]] == ["PL646", "PL644"]


def test_no_thread_is_in_the_store_while_python_ends(monkeypatch):
    """C++ cannot be left by a thread that Python ends: such a process aborts."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    ranks = join(20, missed=lambda _found: None)
    assert all(thread.is_alive() for thread in ranks._threads) and len(ranks._threads) == 2
    assert ranks.end(0, show=lambda: None) == 0
    assert not any(thread.is_alive() for thread in ranks._threads)
