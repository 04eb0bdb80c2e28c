"""Plans that torch takes and trains wrong, or drops in the first step: each is found beforehand.

What each does at run time was seen on four gloo processes with torch 2.13.
"""

from pathlib import Path

import pytest

from planc.checks import check
from planc.diagnostic import Sink
from planc.model.facts import Child, Facts, Module, Parameter
from planc.model.load import load
from planc.plan import elaborate
from planc.source import Source
from planc.syntax import parse
from planc.syntax.plan_files import read

BLOCK = "model.layers.*"
UNITS = "fsdp on dp_shard {\n root : unit\n}\n"
NEW = ["PL152", "PL162", "PL163", "PL205", "PL350", "PL351", "PL352", "PL418", "PL419"]
NEW += ["PL433", "PL434", "PL435"]


def judged(text, model="llama-3.1-8b", world=4):
    sink = Sink()
    facts = model if isinstance(model, Facts) else load(model, sink)
    files = [parse(Source("t.plan", text), sink)]
    plan = elaborate(files, facts, sink, world_size=world)
    assert plan is not None and not sink.failed, [d.message for d in sink]
    check(plan, facts, sink)
    return [d for d in sink if d.severity != "info"]


def codes(findings):
    return [d.code for d in findings]


def plan(*, tensor="", mesh="dp_shard = auto\n tp = 2", units=UNITS, rest="", family="llama"):
    section = f"tensor on tp {{\n{tensor}\n}}\n" if tensor else ""
    return f"plan t for {family}\nmesh {{\n {mesh}\n}}\n{section}{rest}{units}"


def spread(*, units=UNITS, rest=""):
    return plan(mesh="dp_shard = auto", units=units, rest=rest)


MLP = BLOCK + ".mlp.gate_proj : colwise{0}\n" + BLOCK + ".mlp.up_proj : colwise{1}\n"
MLP += BLOCK + ".mlp.down_proj : rowwise"
ATTENTION = "{0}_proj : colwise\n" + BLOCK + ".self_attn.o_proj : rowwise"
ATTENTION = BLOCK + ".self_attn." + ATTENTION


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (MLP.format("", "(-> replicate)"), "`gate_proj` of `model.layers[0:32].mlp` is split over"),
        (MLP.format("", "(local = false)"), "`up_proj`, which its output meets, is not split"),
        (ATTENTION.format("{q,v}"), "tp = 2, and `k_proj`, which its output meets, is not"),
        (ATTENTION.format("q"), "`k_proj` and `v_proj`, which its output meets, are not"),
        (ATTENTION.format("{k,v}"), "`q_proj`, which its output meets"),
    ],
)
def test_projections_that_meet_are_split_alike(rules, message):
    findings = judged(plan(tensor=rules))
    assert codes(findings) == ["PL205"]
    assert message in findings[0].message
    assert [label.text for label in findings[0].labels][-1] == "tp is 2"


def test_a_part_of_the_layers_may_be_the_one_that_differs():
    rules = MLP.format("", "").replace(f"{BLOCK}.mlp.up", "model.layers[1:].mlp.up")
    assert codes(judged(plan(tensor=rules))) == ["PL205"]


@pytest.mark.parametrize(
    "rules",
    [
        MLP.format("", ""),
        MLP.format("(local = false)", "(local = false)"),
        MLP.format("(-> replicate)", "")
        .replace("up_proj : colwise", "up_proj : colwise(-> replicate)")
        .replace(": rowwise", ": rowwise(replicate -> replicate)"),
        ATTENTION.format("{q,k,v}"),
    ],
)
def test_projections_that_are_split_alike(rules):
    assert codes(judged(plan(tensor=rules))) == []


def test_sequence_on_a_whole_stream():
    norms = BLOCK + ".{input,post_attention}_layernorm : sequence"
    findings = judged(plan(tensor=norms))
    assert codes(findings) == ["PL163", "PL163"]
    assert "takes 1/2 of dim 1, and nothing in the plan splits that dim" in findings[0].message
    assert "2 times too large" in findings[0].facts[0]


STREAM = f"""{BLOCK} {{
 {{input,post_attention}}_layernorm : sequence
 self_attn.{{q,k,v}}_proj : colwise(shard(1) -> shard(-1))
 self_attn.o_proj : rowwise(-> shard(1), local = false)
 mlp.{{gate,up}}_proj : colwise(shard(1) -> shard(-1))
 mlp.down_proj : rowwise(-> shard(1), local = false)
}}
model.embed_tokens : rowwise(-> shard(1), local = false)
lm_head : colwise(shard(1) -> replicate)
"""


def test_the_norm_behind_the_blocks():
    findings = judged(plan(tensor=STREAM))
    assert codes(findings) == ["PL162"]
    assert findings[0].message == "`model.norm` gets a part of the sequence, and has no rule"
    assert codes(judged(plan(tensor=STREAM + "model.norm : sequence"))) == []


def pair(cls, out, into, *, facts=()):
    """A model of one module with two linears, the first wider than the second takes."""

    def linear(rows, columns):
        weight = (Parameter("weight", (rows, columns)),)
        return Module(cls="Linear", kind="linear", parameters=weight)

    inner = Module(
        cls=cls,
        kind="other",
        facts=facts,
        children=(
            Child(module=linear(out, 16), name="Wi"),
            Child(module=linear(16, into), name="Wo"),
        ),
    )
    root = Module(cls="Own", kind="other", children=(Child(module=inner, name="mlp"),))
    return Facts(name="Own", family="own", config={}, config_name="config.json", root=root)


@pytest.mark.parametrize(
    ("model", "style", "expected"),
    [
        (pair("GLU", 64, 32), "colwise", ["PL151"]),
        (pair("GLU", 64, 32), "colwise(local = false)", []),
        (pair("MLP", 32, 32), "colwise", []),
        (pair("MLA", 64, 32, facts=(("num_heads", 4),)), "colwise", []),
    ],
)
def test_two_parts_in_one_weight_under_any_name(model, style, expected):
    rules = f"mlp.Wi : {style}\nmlp.Wo : rowwise"
    assert codes(judged(plan(tensor=rules, family="own"), model)) == expected


GROUP = "fsdp on dp_shard {\n model.embed_tokens : unit\n model.layers.* : unit\n"
GROUP += " group(model.norm, lm_head) : unit\n%s}\n"


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        (GROUP % "", ["PL418"]),
        (GROUP % " root : unit\n", []),
        ("fsdp on dp_shard {\n model : unit\n lm_head : unit\n}\n", ["PL419"]),
        ("fsdp on dp_shard {\n model.layers.* : unit\n}\n", ["PL413"]),
        (UNITS, []),
    ],
)
def test_roots(units, expected):
    assert codes(judged(spread(units=units))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (spread(units="fsdp on dp_shard {\n model.layers : unit\n root : unit\n}\n"), ["PL152"]),
        (spread(rest="checkpoint {\n model.layers : full\n}\n"), ["PL152"]),
        (spread(rest="checkpoint {\n model.layers.* : full\n}\n"), []),
        (spread(rest="compile {\n model.layers : block\n}\n"), ["PL152"]),
        (plan(tensor="model.layers : input(shard(1) -> replicate)"), ["PL152"]),
        (spread(rest="checkpoint {\n **<LlamaForCausalLM> : full\n}\n"), ["PL433"]),
    ],
)
def test_what_is_never_called(text, expected):
    assert codes(judged(text)) == expected


INNER = "fsdp on dp_shard {\n model.layers.*.mlp : unit\n root : unit\n}\n"
BLOCKS = "fsdp on dp_shard {\n model.layers.* : unit\n root : unit\n}\n"
ONE_GRAPH = "compile {\n model.layers.* : block(fullgraph = true)\n}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (spread(units=INNER, rest=ONE_GRAPH), ["PL434"]),
        (spread(units=BLOCKS, rest=ONE_GRAPH), []),
        (spread(units=INNER, rest=ONE_GRAPH.replace("(fullgraph = true)", "")), []),
    ],
)
def test_one_graph_around_a_unit(text, expected):
    assert codes(judged(text)) == expected


def test_a_compiled_embedding():
    sharded = "model.embed_tokens : rowwise(-> shard(1), local = false)"
    whole = "compile {\n model : block\n}\n"
    assert codes(judged(plan(tensor=sharded, rest=whole))) == ["PL435"]
    columns = "model.embed_tokens : colwise(-> replicate)"
    assert codes(judged(plan(tensor=columns, rest=whole))) == []
    blocks = "compile {\n model.layers.* : block\n}\n"
    assert codes(judged(plan(tensor=sharded, rest=blocks))) == []


def test_axes():
    head = "lm_head : colwise(-> replicate)"
    both = UNITS.replace("on dp_shard", "on dp_shard * tp")
    assert codes(judged(plan(tensor=head, units=both))) == ["PL350"]
    again = f"tensor on tq {{\n{head}\n}}\n"
    mesh = "dp_shard = auto\n tp = 2\n tq = 2"
    findings = judged(plan(tensor=head, rest=again, mesh=mesh))
    assert codes(findings) == ["PL352"]
    assert findings[0].message == "`lm_head` is split over `tp` and over `tq`"
    assert codes(judged(plan(tensor=head, rest=again, mesh=mesh.replace("tq = 2", "tq = 1")))) == []
    context = UNITS.replace("on dp_shard", "on dp_shard * cp")
    assert codes(judged(plan(mesh="dp_shard = auto\n cp = 2", units=context))) == ["PL351"]


def test_all_findings_in_one_run():
    rules = MLP.format("", "(-> replicate)") + "\n" + BLOCK + ".input_layernorm : sequence"
    units = "fsdp on dp_shard {\n model : unit\n lm_head : unit\n}\n"
    rest = "compile {\n model.layers : block\n}\n"
    found = codes(judged(plan(tensor=rules, units=units, rest=rest)))
    assert set(found) == {"PL205", "PL163", "PL419", "PL152"}


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("sequence_parallel", ["true", "false"])
@pytest.mark.parametrize(
    ("model", "name"),
    [("llama-3.1-8b", "llama"), ("qwen3-8b", "qwen3"), ("phi-4", "phi3"), ("gemma-3-1b", "gemma3")],
)
def test_shipped_plans_have_none_of_these(model, name, tp, sequence_parallel):
    sink = Sink()
    facts = load(model, sink)
    settings = [f"tp={tp}", f"sequence_parallel={sequence_parallel}"]
    ir = elaborate(read(name, sink), facts, sink, world_size=16, settings=settings)
    check(ir, facts, sink)
    assert not set(codes(sink)) & set(NEW)


def test_every_new_code_has_a_page():
    pages = Path(__file__).parent.parent / "docs" / "diagnostics"
    assert all((pages / f"{code}.md").is_file() for code in NEW)
