"""All families of the shipped pages of engines: the plan's slices are those of all ranks, and the
table fills the engine.
"""

import re

import pytest
import torch
from test_held import on_meta
from test_table import expected, run
from tiny_engines import facts_of, files_of, tiny_config

from planc.compiler import compile, compile_plan, read
from planc.diagnostics.diagnostic import Sink
from planc.files.resources import PLANS
from planc.ir.engine_layout import engine_side
from planc.ir.patches import volume
from planc.ir.serving import serving_of
from planc.model.facts import DTYPE_BYTES
from planc.ops.document import digest
from planc.runtime.executor import apply_lowered
from planc.runtime.transfer import _local_faults
from planc.simulate.thread_ranks import run_alone
from planc.syntax import plan_files
from planc.tools.transfer.document import traffic_of
from planc.tools.transfer.held import training_side
from planc.tools.transfer.table import table_of

pytestmark = pytest.mark.slow


def families(engine):
    text = (PLANS / "serve" / f"{engine}.plan").read_text()
    return re.findall(r'"(\w+)"', text.partition("require")[2].partition("]")[0])


PLANNED = {family for path in PLANS.glob("*.plan") for family in plan_files.families(path)}
SERVED = {
    family: None for engine in ("vllm", "sglang", "transformers") for family in families(engine)
}


@pytest.mark.parametrize("family", SERVED)
def test_the_slices_of_all_ranks(family):
    config, sink = tiny_config(family), Sink()
    facts, sets = facts_of(config), ["tp=2", "recompute=false", "param_dtype=fp32"]
    plan = None if family in PLANNED else str(PLANS / "decoder.plan")
    done = compile_plan(facts, plan, sink, world_size=4, settings=sets)
    assert not sink.has_errors, [*sink]
    side, faults = training_side(done.plan, facts), {}
    for rank in range(4):

        def program(_, rank=rank):
            applied = apply_lowered(
                on_meta(config), done.lowered, digest=digest(done.lowered), device_type="cpu",
                compare=0, require="nothing",
            )  # fmt: skip
            faults[rank] = _local_faults(applied.model, side.tensors_of(rank))

        assert run_alone(4, program, seconds=60, rank=rank) is None
    assert faults == dict.fromkeys(range(4), "")
    for engine in ("vllm", "sglang", "transformers"):
        if family in families(engine) and not (
            engine == "transformers" and facts.config.get("tie_word_embeddings")
        ):
            fill_engine(engine, facts, side)


def fill_engine(engine, facts, sources):
    """The table of a page writes each element once, and sends no byte more than that."""
    done = compile(read(f"serve/{engine}.plan", sink := Sink()), facts, sink, settings=["tp=2"])
    assert not sink.has_errors, (engine, [*sink])
    targets = engine_side(serving_of(done.plan), facts, sink)
    table, files = table_of(sources, targets), files_of(sources)
    got, written = run(table, sources, targets, files, most=3000)
    wanted = expected(targets, files)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[key], wanted[key]) for key in got)
    assert all((counts == (got[key] != 0)).all() for key, counts in written.items())
    least = sum(
        volume(held.patch.box) * len(held.ranks) * len(held.indices) * DTYPE_BYTES[held.dtype]
        for held in targets.held
    )
    assert traffic_of(table, 3000).bytes <= 1.05 * least
