"""The whole compiler on plans that are well formed and mostly nonsense: no exception ever.

What comes through without an error must lower, print, and survive JSON unchanged.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planc.checks import check
from planc.compiler import complete_plan
from planc.diagnostics import FORMATS, render
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.diffing import compare
from planc.diffing import render as diff_text
from planc.emit import text
from planc.emit.python import script
from planc.lowering import lower
from planc.model.load import load
from planc.ops.document import digest, dumps, loads
from planc.syntax.parse import parse

MODELS = {
    name: load(name, Sink())
    for name in ("llama-3.2-1b", "gpt2", "gemma-3-1b", "phi-3-mini", "qwen3-8b")
}
NAMES = ["model", "layers", "*", "**", "self_attn", "mlp", "{q,k,v}_proj", "o_proj", "norm"]
NAMES += ["lm_head", "transformer", "h", "wte", "embed_tokens", "[0:4]", "[-1]", "[::2]", "nothing"]
LAYOUT = st.sampled_from(["replicate", "partial", "shard(0)", "shard(1)", "shard(-1)", "shard(9)"])
SIZE = st.sampled_from(["1", "2", "3", "4", "8", "auto", "0", "-1", "true", '"2"', "tp", "o + 1"])
VALUE = st.sampled_from(["true", "1", "o", "tp", "config.hidden_size", "config.no", "null", '"x"'])


@st.composite
def selectors(draw):
    parts = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4))
    path = ".".join(parts).replace(".[", "[")
    if path.startswith("["):
        path = "model" + path
    suffix = draw(st.sampled_from(["", "", "", "<LlamaMLP>", " has mlp"]))
    return draw(st.sampled_from(["", "", "optional ", "override "])) + path + suffix


@st.composite
def styles(draw):
    kind = draw(st.sampled_from(["colwise", "rowwise", "sequence", "input", "output", "colwise("]))
    one, two = draw(LAYOUT), draw(LAYOUT)
    inside = {
        "colwise": f"({one} -> {two})",
        "rowwise": f"(-> {two}, local = false)",
        "sequence": "(dim = 2)",
        "input": f"({one} -> {two}, x = {two} -> {one})",
        "output": f"(null, {one} -> {two})",
        "colwise(": "(locl = 1)",
    }[kind]
    return kind.removesuffix("(") + draw(st.sampled_from(["", inside]))


@st.composite
def plans(draw):
    lines = [
        f"plan p for {draw(st.sampled_from(['llama', 'gpt2', 'gemma3_text', 'phi3', 'qwen3']))}"
    ]
    if draw(st.booleans()):
        lines.append("option o = 1")
    lines += ["mesh {", f" dp = {draw(SIZE)}", f" tp = {draw(SIZE)}", "}"]
    rules = draw(st.lists(st.tuples(selectors(), styles()), max_size=5))
    lines += ["tensor on tp {", *(f" {s} : {a}" for s, a in rules), "}"]
    if draw(st.booleans()):
        condition = (
            f"{draw(VALUE)} {draw(st.sampled_from(['==', '<', '%', 'and', 'in']))} {draw(VALUE)}"
        )
        lines += [f"when {condition} {{", "checkpoint {", f" {draw(selectors())} : full", "}", "}"]
    units = draw(st.lists(selectors(), max_size=4))
    ways = st.sampled_from(["unit", "unit(reshard = except_last)", "unit(reshard = 3)", "unitt"])
    lines += ["fsdp on dp {", " precision(param = bf16)"]
    lines += [f" {s} : {draw(ways)}" for s in units]
    if draw(st.booleans()):
        lines.append(" root : unit")
    return "\n".join([*lines, "}", ""])


@pytest.mark.parametrize("model", MODELS)
@given(plan=plans(), world=st.sampled_from([None, 1, 4, 6, 64]))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_plan_breaks_the_compiler(model, plan, world):
    facts, sink = MODELS[model], Sink()
    file = parse(Source("p.plan", plan), sink)
    if not sink.has_errors:
        ir = complete_plan([file], facts, sink, world_size=world, settings=["tp=2"])
        if ir is not None:
            check(ir, facts, sink)
            if not sink.has_errors:
                survives(lower(ir, facts))
    for format in FORMATS:
        render(sink, format)


def survives(lowered):
    own = digest(lowered)
    text.render(lowered, digest=own)
    compile(script.render(lowered, digest=own), "emitted.py", "exec")
    sink = Sink()
    back = loads(dumps(lowered), "p.json", sink)
    assert list(sink) == [] and back == lowered and digest(back) == own
    change = compare.compare(lowered, back)
    assert change.same and diff_text.render(change) == "No changes.\n"
