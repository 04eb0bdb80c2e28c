"""Schedules from files: numbers compared with the single process, and what is refused."""

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.elaborate.sections import schedule_file as reader
from planc.lowering.schedules import orders, simulate_schedule
from planc.ops.document import dumps, loads
from planc.proof.layout_flow import flow

TEXT = """plan t for llama

mesh {{
    pp       = {ranks}
    dp_shard = auto
    tp       = 1
}}

pipeline on pp {{
    schedule     = file("schedule.csv")
    microbatches = {micro}
    stages       = even(model.layers.*, each = {each})
}}

fsdp on dp_shard {{
    model.layers.* : unit
    root           : unit
}}
"""


def of_torch(name, ranks, micro, each):
    """A schedule of torch as it writes it to a file, without those passes that it overlaps."""
    rows = get_schedule_ops(name, ranks, micro, each)
    return "\n".join(",".join("" if a is None else str(a) for a in row) for row in rows)


def one_stage_each(ranks, micro, name="1f1b"):
    """A schedule of one stage a rank (torch lists other passes for 1f1b than it runs)."""
    rows = orders(name, ranks, 1, micro)
    return "\n".join(
        ",".join(f"{i}{'F' if a.forward else 'B'}{a.micro_batch}" for a in row)
        for i, row in enumerate(rows)
    )


def compiled(folder, rows, *, ranks=2, micro=4, each=1, world_size=2):
    folder.joinpath("schedule.csv").write_text(rows)
    folder.joinpath("t.plan").write_text(TEXT.format(ranks=ranks, micro=micro, each=each))
    sink = Sink()
    done = compile_plan("llama-3.2-1b", str(folder / "t.plan"), sink, world_size=world_size)
    return done, [(d.code, d.message) for d in sink if d.severity == "error"]


@pytest.mark.parametrize(
    ("name", "schedule"), [("Interleaved1F1B", "timetable"), ("ZBVZeroBubble", "timetable_v")]
)
def test_numbers(tmp_path, name, schedule):
    done, errors = compiled(tmp_path, of_torch(name, 2, 4, 2), each=2)
    assert errors == []
    assert done.lowered.pipeline.schedule == schedule
    assert loads(dumps(done.lowered), "t", Sink()) == done.lowered
    found = flow(done, Sink())
    assert found.verdict == "proved"


@pytest.mark.parametrize(("micro", "each"), [(8, 2), (6, 1)])
def test_it_has_its_own_number_of_microbatches(tmp_path, micro, each):
    """A trial runs all of them, though other schedules are tried with as many as stages."""
    rows = of_torch("Interleaved1F1B", 2, micro, each) if each > 1 else one_stage_each(2, micro)
    done, errors = compiled(tmp_path, rows, micro=micro, each=each)
    assert errors == []
    assert flow(done, Sink()).verdict == "proved"


def test_a_schedule_file_runs_on_its_own_number_of_ranks(tmp_path):
    done, errors = compiled(tmp_path, one_stage_each(4, 4), ranks=4, world_size=8)
    assert errors == []
    assert flow(done, Sink()).verdict == "proved"


def test_a_pass_in_other_order_is_run_in_that_order(tmp_path):
    rows = "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0"
    done, errors = compiled(tmp_path, rows, micro=2)
    assert errors == [] and done.lowered.pipeline.rank_passes == tuple(rows.splitlines())
    assert flow(done, Sink()).verdict == "proved"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("0F0,0B0,0F1,0B1", "it has 1 rows"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1", "1B1 runs never"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1,1B1", "1B1 runs 2 times"),
        ("0F0,0B0,0F1,0B1\n1F0,1I0,1F1,1B1", "1W0 runs never"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1,1F2", "1F2 runs 1 times, and the plan has no such pass"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,2F1,1B1", "1F1 runs never"),
        ("1F0,1B0,1F1,1B1\n0F0,0B0,0F1,0B1", "neither in turn nor there and back"),
        ("0B0,0F0,0F1,0B1\n1F0,1B0,1F1,1B1", "0B0 of rank 0 waits forever"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "waits forever"),
        ("0F1,0F0,0B1,0B0\n1F1,1F0,1B1,1B0", "1F1 is before 1F0"),
        ("0F0,0SEND_F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1", "0SEND_F0 has no 1RECV_F0"),
        ("0F0,0B0,0F1,0B1,1RECV_F0\n1F0,1B0,1F1,1B1", "1RECV_F0 has no 0SEND_F0"),
        ("0F0,secret\n", "entry 2 of row 1 is no pass"),
        ("(0F0;0B1)OVERLAP_F_B\n", "entry 1 of row 1 is no pass"),
    ],
)
def test_mistakes(rows, said):
    with pytest.raises(reader.ScheduleFileError) as error:
        reader.read_schedule(rows, ranks=2, stages=2, microbatches=2)
    assert said in str(error.value) and "secret" not in str(error.value)


def test_a_mistake_is_a_finding_at_the_line(tmp_path):
    _, errors = compiled(tmp_path, "0F0,0B0\n1F0", micro=1)
    assert errors == [("PL568", "this schedule cannot be run: 1B0 runs never")]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_an_estimate_reads_it(schedule):
    text = one_stage_each(4, 8, schedule)
    name, rows = reader.read_schedule(text, ranks=4, stages=4, microbatches=8)
    assert name == "timetable"
    assert orders("timetable", 4, 1, 8, rows) == orders(schedule, 4, 1, 8)
    pace = dict(ranks=4, chunks=1, micro_batches=8, forward=[1.0] * 4, backward=[2.0] * 4)
    pace["hops"] = [(0.1, 0.2)] * 3
    assert simulate_schedule("timetable", rows=rows, **pace) == simulate_schedule(schedule, **pace)
