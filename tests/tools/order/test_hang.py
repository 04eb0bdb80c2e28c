"""What ranks that hang wrote, laid beside the plan.

Real hangs are in test_hangs.py; one of them made the files of `hangs`, in which rank 1 of four does
not clip its gradients in its third step.
Those of NCCL's format have the same calls, in the form that torch's own analyzer describes; those
of `h100` are of the same fault over NCCL, of four ranks that shared an H100.
"""

import json
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from console import call
from hanging import SIZES

from planc.answers import apply
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.model.load import load_values
from planc.runtime.safeguards import watchdog
from planc.tools.order import dumps, hang
from planc.tools.order.findings import known_order

FILES = Path(__file__).parent / "hangs"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    **SIZES,
}


def compiled(*settings):
    sink = Sink()
    facts = load_values(CONFIG, "llama", sink)
    made = compile_plan(facts, "llama", sink, world_size=4, settings=settings)
    assert made.lowered, sink.diagnostics
    return made


@pytest.fixture(scope="module")
def planned():
    made, sink = compiled("tp=2"), Sink()
    order = known_order(made, sink)
    assert order is not None, sink.diagnostics
    return made.lowered, order


@pytest.mark.parametrize("format", ["gloo", "nccl", "h100"])
def test_who_waits_where(planned, format):
    found = hang.explain(dumps.read(FILES / format), *planned)
    lines = [*hang.lines(found)]
    assert found.cycle and not found.absent
    at = lines.index("rank 1: in all-reduce of 2 int64 over dp_shard * tp")
    assert at == 2  # first, for it has left something out
    where = {"gloo": (56, 58), "nccl": (56, 58), "h100": (64, 66)}[format]
    assert lines[at + 1] == f"  the loop; at train.py:{where[0]}"
    # where the call was made: over NCCL the process is in the next step already
    assert lines[lines.index("rank 0: in all-reduce of 1 fp32 over tp") + 1] == (
        f"  clipping; at train.py:{where[1]}"
    )
    call = "all-reduce (sum) of 1 fp32 over dp_shard (clipping)"
    assert f"  rank 1 has left out before it: {call}, and 2 more" in lines
    assert found.ranks[0].planned.during == "clipping" and found.ranks[0].axes == ("tp",)
    assert {rank: one.awaited for rank, one in found.ranks.items()} == {
        0: (1,),
        1: (0, 2, 3),
        2: (3,),
        3: (1,),
    }


def test_a_rank_without_a_file(planned, tmp_path):
    for rank in (0, 2, 3):
        for path in (FILES / "gloo").glob(f"rank_{rank}.*"):
            shutil.copy(path, tmp_path)
    found = hang.explain(dumps.read(tmp_path), *planned)
    assert found.absent == (1,) and not found.cycle
    text = "\n".join(hang.lines(found))
    assert "rank 1: no dump: ended, stopped, or cut off from the folder" in text
    assert "not there: rank 1, which left no dump" in text


def _ended(dump, error):
    """The dump of a rank over gloo, whose calls have all ended, and that has ended too."""
    entries = tuple(replace(one, done=True) for one in dump.entries)
    return replace(dump, entries=entries, about={**dump.about, "error": error})


def test_a_rank_that_ended_with_an_error_of_its_own_waits_for_nobody(planned):
    read = dumps.read(FILES / "gloo")
    read[1] = _ended(read[1], "ValueError: bad sample")
    found = hang.explain(read, *planned)
    lines = [*hang.lines(found)]
    assert lines[1] == "rank 1: ended with ValueError: bad sample, at train.py:56"
    assert "  not there: rank 1, which has ended with ValueError: bad sample" in lines
    assert not found.cycle and not any("left out" in line for line in lines)


def test_a_rank_that_was_killed_is_named(planned):
    """Of the others one lost its connection, and torchrun stopped the rest."""
    read = dumps.read(FILES / "gloo")
    del read[3]
    read[0] = _ended(read[0], "RuntimeError: [gloo/pair.cc:553] Connection closed by peer")
    read |= {
        rank: replace(read[rank], about={**read[rank].about, "error": "SIGTERM"}) for rank in (1, 2)
    }
    found = hang.explain(read, *planned)
    lines = [*hang.lines(found)]
    why = "killed, if it is the first that ended: the ranks with a dump ended without it"
    assert lines[1] == f"rank 3: no dump: {why}"
    assert found.ranks[0].entry is not None and found.ranks[2].entry is not None
    text = "\n".join(hang.lines(hang.explain({0: read[0]}, *planned)))
    assert "ranks 1, 2, 3: no dump" in text


def test_a_rank_alone_at_its_place_has_left_out_nothing(planned):
    """Only the calls of other ranks say which calls are expected of it."""
    found = hang.explain({1: dumps.read(FILES / "gloo")[1]}, *planned)
    assert not found.ranks[1].left_out


@pytest.mark.parametrize("other", [{"kind": "all_gather", "numel": 1}, {"numel": 3}])
def test_ranks_that_come_to_another_call(planned, other):
    """On one group, as that by which the others begin their step: no rank has missed a call."""
    read = dumps.read(FILES / "gloo")
    waits = read[1].waits
    assert waits.ranks == (0, 1, 2, 3) and waits.kind == "all_reduce"
    each = {rank: replace(dump, entries=read[1].entries) for rank, dump in read.items()}
    asked = [replace(one, **other) if one is waits else one for one in read[1].entries]
    each[2] = replace(read[2], entries=tuple(asked))
    found = hang.explain(each, *planned)
    assert {rank: one.awaited for rank, one in found.ranks.items()} == {
        **dict.fromkeys((0, 1, 3), (2,)),
        2: (0, 1, 3),
    }
    text = "\n".join(hang.lines(found))
    kind = other.get("kind", "all_reduce").replace("_", "-")
    assert "ranks 0, 1, 3: in all-reduce of 2 int64 over dp_shard * tp" in text
    assert f"not there: rank 2, which is in {kind} of {other['numel']} int64" in text


def test_without_an_order(planned):
    """A plan that cannot be run alone: the groups, the ranks and the script's lines are there."""
    found = hang.explain(dumps.read(FILES / "gloo"), planned[0], None)
    assert found.ranks[0].planned is None and found.ranks[0].axes == ("tp",)
    assert "not a call of the plan" in "\n".join(hang.lines(found))


def test_calls_of_the_script_are_passed_over(planned):
    read = dumps.read(FILES / "gloo")
    own = dumps.RecordedCall(kind="broadcast", ranks=(0, 1, 2, 3))
    with_own = {
        rank: replace(dump, entries=tuple(e for entry in dump.entries for e in (own, entry)))
        for rank, dump in read.items()
    }
    assert hang.explain(with_own, *planned).ranks == hang.explain(read, *planned).ranks


def test_the_sum_of_metrics_is_no_call_of_the_plan(planned):
    """It is over all ranks, as the call by which each step begins."""
    read = dumps.read(FILES / "gloo")
    own = dumps.RecordedCall(kind="all_reduce", ranks=(0, 1, 2, 3), numel=4, dtype="int64")

    def with_sums(dump, last=()):
        return replace(dump, entries=(*dump.entries[:-3], own, *dump.entries[-3:], *last))

    summed = {rank: with_sums(dump) for rank, dump in read.items()}
    assert hang.explain(summed, *planned).ranks == hang.explain(read, *planned).ranks
    done = replace(read[0], entries=tuple(replace(e, done=True) for e in read[0].entries))
    waits = with_sums(done, [replace(own, done=False)])
    found = hang.explain({0: waits}, *planned).ranks[0]
    assert found.what == "all-reduce of 4 int64 over dp_shard * tp"
    assert found.location == "sum of run.metrics"


def test_a_message(planned):
    made = compiled("pp=2", "microbatches=2")
    order = known_order(made, Sink())
    assert order is not None
    entry = dumps.RecordedCall(
        kind="recv", ranks=(0, 2), dtype="bfloat16", numel=9, done=False, peer=2
    )
    other = replace(entry, peer=0)
    found = hang.explain(
        {0: dumps.RankDump(rank=0, entries=(entry,)), 2: dumps.RankDump(rank=2, entries=(other,))},
        made.lowered,
        order,
    )
    assert found.cycle == (0, 2) and found.absent == (1, 3)
    assert all(one.planned.op.WORD == "pipeline" for one in found.ranks.values())


def test_a_layer_is_told_from_another(planned):
    """The calls before it say which one it is."""
    lowered, order = planned
    own = [c for c in order.later[0] if c.kind != "wait"]
    at = next(i for i, c in enumerate(own) if c.module == "model.layers.2.mlp")
    entries = [
        dumps.RecordedCall(
            kind=c.kind, ranks=c.ranks, numel=c.numel, dtype=c.dtype, done=c is not own[at]
        )
        for c in own[: at + 1]
    ]
    found = hang.explain({0: dumps.RankDump(rank=0, entries=tuple(entries))}, lowered, order)
    assert found.ranks[0].planned == own[at]


# files --------------------------------------------------------------------------------------------


def test_the_command(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    code, _, errors = call("hang", tmp_path, tmp_path, "llama", "--set", "tp=2")
    assert code == 2 and "PL617" in errors and "rank_0.pickle" in errors
    shutil.copytree(FILES / "gloo", tmp_path / "dumps")
    code, _, errors = call(
        "hang", tmp_path / "dumps", tmp_path, "llama", "--set", "tp=2", "--set", "param_dtype=fp32"
    )
    assert code == 2 and "PL618" in errors
    code, out, errors = call(
        "hang", tmp_path / "dumps", tmp_path, "llama", "--set", "tp=2", "--format", "json"
    )
    assert code == 1, errors
    ranks = json.loads(out)["ranks"]
    assert [one["plan"] for one in ranks] == ["clipping", "the loop", "clipping", "clipping"]
    assert [len(one["left_out"]) for one in ranks] == [0, 3, 0, 0]


def test_a_file_names_no_code(tmp_path):
    (tmp_path / "rank_0.pickle").write_bytes(pickle.dumps({"entries": Path("x")}))
    with pytest.raises(dumps.DumpError, match="which torch's recorder does not write"):
        dumps.read(tmp_path)
    (tmp_path / "rank_0.pickle").write_bytes(b"no pickle")
    with pytest.raises(dumps.DumpError, match="is no file of torch's recorder"):
        dumps.read(tmp_path)


# the thread ---------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A process group of one rank, and a watchdog on it."""
    from torch import distributed

    monkeypatch.setenv(watchdog.FOLDER, str(tmp_path / "dumps"))
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    lowered = namedtuple("Plan", "plan pipeline")("mine", None)
    made = watchdog.Watchdog(lowered, "0f", 0.5)
    made.start()
    yield made
    made.end()
    distributed.destroy_process_group()
    made.join(10)
    assert not made.is_alive() and sys.excepthook != made._write_error


def until(true):
    end = time.monotonic() + 20
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    assert true()


def test_a_rank_that_does_not_move_writes(alone, capfd):
    import torch
    from torch import distributed

    file = alone.folder / "rank_0.json"
    for _ in range(12):
        distributed.all_reduce(torch.ones(1))
        time.sleep(0.1)
    assert not file.exists()
    until(file.exists)
    about = json.loads(file.read_text())
    assert about["groups"] == {"0": [0]} and any("test_hang.py" in f for f in about["stack"])
    [dump] = dumps.read(alone.folder).values()
    assert [e.kind for e in dump.entries][-12:] == ["all_reduce"] * 12 and dump.waits is None
    distributed.all_reduce(torch.ones(1))
    until(lambda: not file.exists())
    time.sleep(0.5)
    assert "moves again" in capfd.readouterr().err


def test_a_rank_that_raises_writes(alone, capfd):
    import torch
    from torch import distributed

    distributed.all_reduce(torch.ones(1))
    try:
        raise RuntimeError("Connection closed by peer")
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    [dump] = dumps.read(alone.folder).values()
    assert dump.error == "RuntimeError: Connection closed by peer"
    assert dump.waits.kind == "all_reduce" and "test_hang.py" in dump.code
    assert "1 of 1 ranks wrote what they wait for" in capfd.readouterr().err


STOPPED = """
import os, signal, sys, time
from planc.runtime.safeguards.watchdog import StopSignal
stop = StopSignal(lambda: print("written", flush=True))
child = os.fork()
if not child:
    time.sleep(20)
    os._exit(0)
time.sleep(0.2)
os.kill(child, 15)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15
print("ready", flush=True)
if sys.argv[1] == "ended":
    stop.end()
else:  # the main thread sees nothing, as in a collective
    signal.pthread_sigmask(signal.SIG_BLOCK, [15])
time.sleep(20)
"""


@pytest.mark.parametrize("end, written", [("waits", "written"), ("ended", "")])
def test_a_rank_that_is_stopped_writes_and_ends_by_the_signal(end, written):
    """Its main thread may be in a collective; a forked worker that is stopped ends alone."""
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, end], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert out.strip() == written and process.returncode == -signal.SIGTERM


def test_the_line_of_a_script_whatever_its_folder_is_called():
    stack = ["/home/me/planc/train.py:9 main", "/venv/planc/runtime/run.py:3 forward_backward"]
    dump = dumps.RankDump(rank=0, entries=(), about={"stack": stack})
    assert dump.code == "train.py:9"


def test_a_watchdog_needs_time(monkeypatch):
    watchdog.require_usable(300)
    for wrong, kind in ((0, ValueError), (-1, ValueError), ("5", TypeError), (True, TypeError)):
        with pytest.raises(kind, match="number of seconds"):
            watchdog.require_usable(wrong)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    with pytest.raises(ValueError, match="TORCH_FR_BUFFER_SIZE"):
        watchdog.require_usable(300)


def test_the_environment_says_the_time(monkeypatch):
    assert apply._seconds_of(20) == 20 and apply._seconds_of(None) is None
    monkeypatch.setenv("PLANC_WATCHDOG", "300")
    assert apply._seconds_of(None) == 300 and apply._seconds_of(20) == 20
    monkeypatch.setenv("PLANC_WATCHDOG", "0")
    assert apply._seconds_of(None) is None
    monkeypatch.setenv("PLANC_WATCHDOG", "soon")
    with pytest.raises(ValueError, match="PLANC_WATCHDOG is a number of seconds, not 'soon'"):
        apply._seconds_of(None)
