"""`planc why`: what decides a module; held against the lowered plan that it speaks of."""

import json
import re
from dataclasses import replace

import jsonschema
import pytest
from console import call
from helpers import compiled_of, sampled
from test_library import CASES

from planc.cli import main
from planc.diagnostics.diagnostic import Sink
from planc.files.resources import GRAMMARS
from planc.infer.apply_adapters import adapt_plan
from planc.ops import phrases as words
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.contract import Split
from planc.ops.fsdp import FullyShard
from planc.ops.tensor_parallel import Parallelize
from planc.provenance import answer as render
from planc.provenance.query import _spread, why

Validator = jsonschema.Draft202012Validator
SCHEMA = Validator(json.loads((GRAMMARS / "why.schema.json").read_text()))
LOWERED = json.loads((GRAMMARS / "lowered.schema.json").read_text())
OP = Validator({"$ref": "#/$defs/op", "$defs": LOWERED["$defs"]})


def ask(compiled, name, plan=True):
    sink = Sink()
    if not plan:  # as one that was read back from JSON
        compiled = replace(compiled, plan=None, applied=None)
    answer = why(name, compiled, sink)
    assert not sink.has_errors and answer is not None, [d.message for d in sink]
    return answer


def text_of(answer):
    return "".join("".join(t for t, _ in line).rstrip() + "\n" for line in render.lines(answer))


def valid(answer, lowered):
    """The answer as JSON, which is as the schema says."""
    document = json.loads(json.dumps(render.document(answer, lowered)))
    problems = [e.message for e in SCHEMA.iter_errors(document)]
    for section in render.decision_names():
        for reason in document[section]:
            problems += [e.message for e in OP.iter_errors(reason["op"])]
    assert problems == []
    assert text_of(answer)
    return document


@pytest.fixture
def llama():
    return compiled_of("llama-3.1-8b", "llama", ["tp=8"], 64)


@pytest.mark.parametrize(("model", "plan", "settings"), sampled(CASES, 4))
def test_every_shipped_plan_is_explained_whole(model, plan, settings):
    """Every operation is the reason of some module, and the bytes add up to those of the plan."""
    compiled = compiled_of(model, plan, settings)
    lowered, facts = compiled.lowered, compiled.facts
    again = {name for group in facts.ties for name in group[1:]}
    told, rest, units = set(), 0, {}
    for modules in facts.model.below():
        for name in modules.names():
            answer = ask(compiled, name)
            assert answer.like.has(name)
            if name == next(modules.names()):
                valid(answer, lowered)
            for section in render.decision_names():
                for reason in getattr(answer, section):
                    told.add(reason.op)
                    assert bool(reason.place) == bool(reason.text), reason
            for held in answer.parameters:
                full = f"{name}.{held.name}" if name else held.name
                assert held.ties == tuple(
                    n for group in facts.ties if full in group for n in group if n != full
                )
                if full not in again:
                    rest += held.at_rest
                    unit = answer.unit[0].op, answer.unit[0].target
                    units[unit] = units.get(unit, 0) + held.gathered
                    assert answer.unit_bytes is not None
    assert rest == lowered.parameters
    for (op, target), gathered in units.items():
        assert gathered == lowered.ops[op].gathered, target
    missed = [op for i, op in enumerate(lowered.ops) if i not in told]
    assert {type(op).__name__ for op in missed} <= {
        "Configure",
        "ResetStates",
        "SyncRng",
    }  # of the whole model


@pytest.mark.parametrize(("model", "plan", "settings"), CASES[:4])
def test_every_op_on_a_module_is_in_its_answer(model, plan, settings):
    """By torch's names, without the algebra of module sets."""
    compiled = compiled_of(model, plan, settings)
    for i, op in enumerate(compiled.lowered.ops):
        match op:
            case Parallelize():
                for name in op.modules.names():
                    assert i in [r.op for r in ask(compiled, name).tensor]
            case Checkpoint():
                for name in op.modules.names():
                    assert i in [r.op for r in ask(compiled, name).checkpoint]
            case FullyShard():
                for name in (n for m in op.members for n in m.names()):
                    assert i in [r.op for r in ask(compiled, name).unit]


def test_a_linear(llama):
    answer = ask(llama, "model.layers.3.self_attn.o_proj")
    [style] = answer.tensor
    assert style.what == "rowwise -> shard(1), dtensor, on tp = 8"
    assert re.fullmatch(r"plans/llama.plan:\d+", style.place)
    assert style.text == "self_attn.o_proj, mlp.down_proj : rowwise"
    assert "its sum is needed as sequence shards" in style.inferred
    [around] = answer.around
    assert around.target == "model.layers.3.self_attn" and around.what.startswith("input ")
    [held] = answer.parameters
    assert (held.shape, held.local, held.shard) == ((4096, 4096), (4096, 512), (512, 512))
    assert (held.at_rest, held.gathered) == (512 * 512 * 2, 4096 * 512 * 2)
    assert answer.unit[0].target == "model.layers.3" == answer.checkpoint[0].target
    assert answer.missing == {"compile": "no rule: it runs as written"}
    assert str(answer.like) == "model.layers[0:32].self_attn.o_proj"


def test_a_parameter_is_its_module_less_the_others(tmp_path):
    compiled = compiled_of("gpt2", "gpt2")
    whole, one = (ask(compiled, f"transformer.h.2.attn.c_attn{n}") for n in ("", ".bias"))
    assert [h.name for h in whole.parameters] == ["weight", "bias"] and one.parameter == "bias"
    assert one.parameters == whole.parameters[1:] and one.unit == whole.unit


def test_a_tie():
    compiled = compiled_of("llama-3.2-1b", "llama", ["tp=4"])
    answer = ask(compiled, "lm_head.weight")
    assert answer.parameters[0].ties == ("model.embed_tokens.weight",)
    assert [r.what for r in answer.ties] == ["tied again after tensor parallelism"]
    assert "the same tensor as model.embed_tokens.weight" in text_of(answer)


PLAN = """plan p for llama
mesh {{
    dp_shard = auto
    tp       = 1
}}
tensor on tp {{
    lm_head : colwise(-> replicate)
}}
{rest}
"""


FSDP = """fsdp on dp_shard {
    model.layers.* : unit
    root           : unit
}"""


def test_what_nothing_decides_is_said(tmp_path):
    plan = tmp_path / "p.plan"
    plan.write_text(
        PLAN.format(rest="fsdp on dp_shard {\n    model.layers.* : unit\n    root : unit\n}")
    )
    compiled = compiled_of("llama-3.1-8b", plan)
    head = ask(compiled, "lm_head")
    assert head.tensor == ()
    assert head.missing["tensor"] == f"colwise has no effect: tp has one rank ({plan}:7)"
    assert "no rule" in ask(compiled, "lm_head", plan=False).missing["tensor"]
    norm = ask(compiled, "model.norm")
    assert set(norm.missing) == {"tensor", "checkpoint", "compile"}
    assert norm.unit[0].target == "root"
    compiled = compiled_of("llama-3.1-8b", "llama", ["tp=8"])
    rotary = ask(compiled, "model.rotary_emb")
    assert rotary.missing["tensor"] == "no rule" and rotary.parameters == ()


def test_uneven_parts(tmp_path):
    plan = tmp_path / "p.plan"
    text = PLAN.replace("tp       = 1", "tp       = 7").format(
        rest="fsdp on dp_shard {\n    root : unit\n}"
    )
    plan.write_text(text)
    [held] = ask(compiled_of("llama-3.1-8b", plan, world=7), "lm_head").parameters
    assert held.local == (18323, 4096) and held.spread == ((6, 18323), (1, 18318))
    assert sum(n * size for n, size in held.spread) == 128256
    assert "not even over the ranks: 6 x 18323, 1 x 18318" in text_of(
        ask(compiled_of("llama-3.1-8b", plan, world=7), "lm_head")
    )


SETTINGS = """train {
    model              : frozen
    model.layers.*.mlp : trainable
}
fsdp on dp_shard {
    precision(param = bf16, reduce = fp32)
    divide = 3
    prefetch(forward = 2)
    ignore model.embed_tokens
    model.layers.* : unit(shard_dim = 1)
    root           : unit
}"""


def test_settings_of_the_fsdp_section(tmp_path):
    plan = tmp_path / "p.plan"
    plan.write_text(PLAN.format(rest=SETTINGS))
    compiled = compiled_of("llama-3.1-8b", plan)
    linear = ask(compiled, "model.layers.3.mlp.up_proj")
    assert linear.parameters[0].trainable and linear.training[0].target == "model.layers.3.mlp"
    assert linear.parameters[0].shard == (14336, 512), "split along dim 1"
    told = {r.text: r.what for r in linear.unit}
    assert told["precision(param = bf16, reduce = fp32)"] == "parameters bf16, gradients fp32"
    assert told["divide = 3"] == "gradients are divided by 3"
    assert told["prefetch(forward = 2)"] == "gathers 2 ahead in forward"
    assert "split along dim 1" in told["model.layers.* : unit(shard_dim = 1)"]
    frozen = ask(compiled, "model.layers.3.self_attn.q_proj")
    assert not frozen.parameters[0].trainable and frozen.training[0].text == "model : frozen"
    ignored = ask(compiled, "model.embed_tokens")
    assert [(r.what, r.text) for r in ignored.unit] == [
        ("ignored: replicated", "ignore model.embed_tokens")
    ]
    assert ignored.parameters[0].shard == ignored.parameters[0].shape and ignored.unit_bytes is None
    for answer in (linear, frozen, ignored, ask(compiled, "root")):
        valid(answer, compiled.lowered)


ADAPTERS = """plan tuned for llama
extend "llama.plan"
adapters {
    model.layers.*.self_attn.{q,o}_proj           : lora(rank = 16, alpha = 32, dtype = fp32)
    override model.layers[0:8].self_attn.{q,o}_proj : none
}
"""


def test_a_style_that_is_code(tmp_path):
    plan = tmp_path / "p.plan"
    text = PLAN.format(rest=FSDP).replace("= 1", "= 2").replace("colwise(-> replicate)", "vocab")
    plan.write_text(text.replace("mesh", 'style vocab = python "a.b:C"\nmesh', 1))
    [reason] = ask(compiled_of("llama-3.1-8b", plan), "lm_head").tensor
    assert "vocab" in reason.what and "shapes and bytes are those without it" in reason.what


def test_what_weights_are_kept_in(tmp_path):
    plan = tmp_path / "p.plan"
    plan.write_text(PLAN.format(rest="load {\n    dtype = fp32\n}\n" + FSDP))
    compiled = compiled_of("llama-3.1-8b", plan)
    answer = ask(compiled, "model.norm")
    assert answer.parameters[0].dtype == "float32" and answer.parameters[0].at_rest == 4096 // 8 * 4
    assert answer.load[0].what == "kept in fp32"
    names = [n for m in compiled.facts.model.below() for n in m.names()]
    rest = sum(h.at_rest for n in names for h in ask(compiled, n).parameters)
    assert rest == compiled.lowered.parameters
    valid(answer, compiled.lowered)


def test_adapters(tmp_path):
    plan = tmp_path / "p.plan"
    plan.write_text(ADAPTERS)
    compiled = compiled_of("llama-3.1-8b", plan, ["tp=2"])
    layer = "model.layers.9.self_attn.q_proj"
    answer = ask(compiled, f"{layer}.base_layer.weight")
    assert answer.name == f"{layer}.weight" and answer.adapter[0].what.startswith("lora, rank 16")
    [held] = answer.parameters
    assert (held.local, held.trainable) == ((2048, 4096), False)
    assert answer.tensor[0].what == "colwise, on tp = 2"
    assert ask(compiled, "model.layers.2.self_attn.q_proj").adapter == ()
    half = ask(compiled, f"{layer}.lora_B.default.weight")
    assert half.parameters[0].local == (2048, 16) and half.parameters[0].trainable
    assert half.adapter == ask(compiled, layer).adapter
    valid(half, compiled.lowered)
    told, rest = set(), 0
    _, facts = adapt_plan(compiled.plan, compiled.facts)
    for modules in facts.model.below():
        for name in modules.names():
            answer = ask(compiled, name)
            told |= {r.op for s in render.decision_names() for r in getattr(answer, s)}
            rest += sum(h.at_rest for h in answer.parameters)
    assert rest == compiled.lowered.parameters
    left = set(range(len(compiled.lowered.ops))) - told
    assert [type(compiled.lowered.ops[i]).__name__ for i in left] == ["Configure"]


# Names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.up_proj",
        "model.layers[3].mlp.up_proj",
        "model.layers.3._checkpoint_wrapped_module.mlp.up_proj",
        "_orig_mod.model.layers.3._orig_mod.mlp.up_proj",
        "model.layers.3.mlp.up_proj._orig_mod",
    ],
)
def test_names_with_wrappers(llama, name):
    assert ask(llama, name).name == "model.layers.3.mlp.up_proj"


def test_the_root(llama):
    for name in ("root", ""):
        answer = ask(llama, name)
        assert answer.name == "root" and answer.unit[0].target == "root"
        assert len(answer.unit) > 4 and len(answer.inside) > 8


@pytest.mark.parametrize(
    ("name", "told", "help"),
    [
        ("model.layers.3.self_atn.q_proj", "`model.layers.3` has no `self_atn`", "self_attn`?"),
        ("model.layers.32", "`model.layers` has no `32`", "`model.layers.3"),
        ("model.norm.wieght", "`model.norm` has no `wieght`", "did you mean `model.norm.weight`?"),
        ("embed_tokens", "the model has no `embed_tokens`", "there is `model.embed_tokens`"),
        ("lm_heed", "the model has no `lm_heed`", "did you mean `lm_head`?"),
        ("model.layers.3.mlp.zzz", "has no `zzz`", None),
        ("model..norm", "`model` has no ``", None),
        ("model.layers.*", "has no `*`", None),
        ("model.layers.\u0663", "has no", None),
        ("model.layers.03", "has no `03`", "model.layers.0"),
        ("model.layers." + "9" * 5000, "has no", None),
    ],
)
def test_a_name_that_is_not_there(llama, name, told, help):
    sink = Sink()
    assert why(name, llama, sink) is None
    [found] = sink
    assert found.code == "PL130" and told in found.message
    assert (help is None) == (found.help is None) and (help or "") in (found.help or "")


# The command -------------------------------------------------------------------------------------


def test_the_command(monkeypatch):
    target = ["why", "llama-3.1-8b", "llama", "model.norm.weight", "--world-size", "8"]
    code, out, err = call(*target)
    assert (code, err) == (0, "") and out.startswith("model.norm.weight  a parameter of")
    with monkeypatch.context() as patch:
        patch.setenv("FORCE_COLOR", "1")
        colored = call(*target)[1]
    assert "\x1b[1mmodel.norm.weight\x1b[0m" in colored
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == out
    code, out, err = call(*target, "--format", "json")
    assert (code, err) == (0, "") and json.loads(out)["name"] == "model.norm.weight"
    code, out, err = call("why", "llama-3.1-8b", "llama", "model.nrm", "--world-size", "8")
    assert (code, out) == (2, "") and "PL130" in err and "did you mean `model.norm`?" in err
    code, out, err = call(*target, "--set", "tp=3")
    assert (code, out) == (1, "") and "PL303" in err


def test_a_lowered_file(tmp_path, capsys):
    """Without the plan there are places but no words of lines."""
    file = tmp_path / "l.json"
    run = ["llama-3.1-8b", "llama", "--world-size", "64", "--set", "tp=8"]
    assert main(["lower", *run, "--format", "json", "-o", str(file)]) == 0
    assert main(["why", "llama-3.1-8b", str(file), "model.layers.0.mlp.up_proj"]) == 0
    out = capsys.readouterr().out
    assert "colwise, on tp = 8\n              plans/llama.plan:7\n" in out
    assert words.size(1792 // 8 * 4096 * 2) in out


def test_any_number_of_ranks_is_counted_and_not_listed():
    assert _spread(Split(0), (14336,), 10**12) == ((14336, 1), (10**12 - 14336, 0))
