"""Layouts inferred from weight splits: the same as those that shipped plans stated, and never right
by chance.
"""

import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from helpers import STATED, facts, sampled
from inferred import compiled_for, different, plan_of, sent, splits_of, styles
from test_library import CASES

from planc.compiler import compile, compile_plan, read
from planc.diagnostics.diagnostic import Sink
from planc.infer.flow_types import Clash
from planc.infer.infer_layouts import has_sequence_shards, infer_layouts, layout_errors
from planc.infer.propagate import infer
from planc.model.dataflow import Operation, decode, encode
from planc.model.facts import Facts
from planc.model.load import load
from planc.ops.document import digest
from planc.ops.styles import Colwise, Input, MlaKv, Replicate, Rowwise, Sequence
from planc.proof.layout_flow import flow
from planc.proxy.flow import flow_of, flow_source

GATHERED_AROUND = {"gpt2", "gpt_bigcode", "codegen", "persimmon", "mpt", "phi3", "glm", "glm4"}
"""The gather stands at the module in place of its one linear; the same bytes."""

OTHERWISE = {
    **{(plan, True): 2 for plan in GATHERED_AROUND},
    ("falcon", True): 4,
    ("olmo", True): 3,  # norms without weights need no rule
    ("jetmoe", False): 2,  # the sum at the router's only layer
    ("jetmoe", True): 4,  # the experts' sum is scattered at once: 18 % fewer bytes
    ("llama4", False): 2,
    # `sequence(dim, local = true)` for `replicate(gradient = sum)`
    ("gemma3_vision", False): 2,
    ("gemma4", False): 2,
    ("qwen3_vl", False): 2,
    ("diffusion_gemma", False): 4,
    ("classifier", True): 1,  # the scores are gathered, not the hidden states
}
"""How many kinds of modules have other rules, with or without sequence parallelism."""

REFUSED = {("falcon", False)}
"""Its code adds in place to a style's local output."""


def shipped():
    """(model, plan) with layouts that a plan states; one a plan."""
    return list({plan: (model, plan) for model, plan, _ in CASES}.values())


@pytest.mark.parametrize(("model", "plan"), sampled(shipped(), 6))
def test_what_shipped_plans_stated(model, plan):
    known = load(model, Sink())
    for sequence in (False, True):
        base, same_way = compiled_for(known, str(STATED / f"{plan}.plan"), sequence)
        if base is None or not same_way:
            continue
        made, errors = plan_of(base, known, sequence)
        if (plan, sequence) in REFUSED:
            assert made is None and "PL525" in errors[0]
            continue
        assert made is not None, errors
        found = different(styles(made.lowered), styles(base.lowered))
        assert len(found) == OTHERWISE.get((plan, sequence), 0), found
        assert sent(made.lowered, known) <= sent(base.lowered, known)


@pytest.mark.parametrize(("model", "plan"), sampled(shipped(), 6))
def test_what_is_inferred_goes_together_as_stated(model, plan):
    """Written out, the layouts of a shipped plan lack nothing and contradict nothing."""
    known = load(model, Sink())
    for sequence in ("auto", "false"):
        sink, settings = Sink(), ["tp=2", f"sequence={sequence}"]
        made = compile_plan(known, plan, sink, world_size=8, settings=settings).plan
        if any(d.code in ("PL201", "PL525") for d in sink):
            continue  # heads that two ranks do not divide; falcon adds in place
        assert made is not None and made.tensor, [d.message for d in sink]
        assert [*layout_errors(replace(made, sequence=()), known)] == []


@pytest.mark.parametrize(("model", "plan"), sampled(shipped(), 6))
def test_plans_that_state_all_layouts_are_found_right(model, plan):
    known = load(model, Sink())
    for sequence in ("true", "false"):
        sink, settings = Sink(), ["tp=2", f"sequence={sequence}"]
        path = str(STATED / f"{plan}.plan")
        done = compile_plan(known, path, sink, world_size=8, settings=settings)
        if done.lowered is not None:
            assert not {d.code for d in sink} & {"PL160", "PL161", "PL162"}


def flow_and_rules(model="llama-3.1-8b", plan="llama", *, sequence=True):
    known = load(model, Sink())
    base, _ = compiled_for(known, str(STATED / f"{plan}.plan"), sequence)
    source = flow_source(known, {}, 2)
    return flow_of(source, known), splits_of(base.plan, sequence=sequence), known


def test_a_flow_is_read_back_as_it_was_and_small():
    flow, _, _ = flow_and_rules()
    text = encode(flow)
    again = decode(text)
    assert encode(again) == text and again.width == flow.width == 128
    assert len(text) < 30_000
    for wrong in ("", "nonsense", text[:-40], 3, None):
        assert decode(wrong) is None


def test_the_same_rules_are_inferred_once_for_a_model(monkeypatch):
    """A search tries many plans with them; what is remembered goes to no other process."""
    model, files = facts(), read("llama", Sink())

    def compiled(model, *more, files=files):
        settings = ["tp=2", *more]
        return compile(files, model, Sink(), world_size=8, settings=settings)

    first = compiled(model, "sequence=true")
    assert model.memo and not replace(model).memo and not pickle.loads(pickle.dumps(model)).memo
    monkeypatch.setattr("planc.infer.infer_layouts.flow_source", None)
    again = compiled(model, "sequence=true", "recompute=false")
    assert again.plan.tensor == first.plan.tensor and again.lowered != first.lowered
    assert compiled(model, "sequence=false").plan.tensor != first.plan.tensor
    for other, text in ((facts(), files), (model, read("llama", Sink()))):
        with pytest.raises(TypeError, match="not callable"):
            compiled(other, files=text)


def test_what_a_model_remembers_has_an_end():
    model = facts()
    for number in range(1000):
        model.remember(number, number)
        assert model.memo[number] == number
    assert len(model.memo) < 300


def test_a_warm_check_imports_no_torch(tmp_path):
    plan = tmp_path / "short.plan"
    plan.write_text(SHORT)
    code = (
        "import sys; from planc.compiler import compile_plan;"
        "from planc.diagnostics.diagnostic import Sink;"
        f"done = compile_plan('llama-3.1-8b', {str(plan)!r}, Sink(), world_size=4,"
        "settings=['tp=2']); assert done.lowered is not None; print('torch' in sys.modules)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[1].stdout.strip() == "False", runs[1].stderr


SHORT = """plan short for llama
mesh {
    dp_shard = auto
    tp = 1
}
tensor on tp {
    sequence = auto
    model.layers.* {
        self_attn.{q,k,v}_proj : colwise
        self_attn.o_proj : rowwise
        mlp.{gate,up}_proj : colwise
        mlp.down_proj : rowwise
    }
    model.embed_tokens : rowwise
    lm_head : colwise
}
fsdp on dp_shard {
    root : unit
}
"""


def short(tmp_path, text=SHORT, settings=("tp=2",), model="llama-3.1-8b"):
    plan, sink = tmp_path / "short.plan", Sink()
    plan.write_text(text)
    done = compile_plan(model, str(plan), sink, world_size=4, settings=settings)
    return done, sink


SPLITS = SHORT.replace("    sequence = auto\n", "").replace("for llama", "for llama, qwen3")
"""The same without the setting."""
COMPLETE = SPLITS.replace("lm_head : colwise", "lm_head : colwise(-> replicate)")
"""Splits whose layouts in torch are right for llama."""


def rules_of(done):
    return {str(rule.modules): rule for rule in done.plan.tensor}


@pytest.mark.parametrize("text", [SPLITS, COMPLETE])
def test_splits_without_the_setting_are_completed(text, tmp_path):
    done, sink = short(tmp_path, text, model="qwen3-8b")
    assert not [d for d in sink if d.code != "PL204"]
    rules = rules_of(done)
    assert rules["model.layers[0:36].self_attn.q_norm"].style == Sequence(dim=2, local=True)
    assert rules["lm_head"].style == Colwise(output=Replicate())
    assert "model.norm" not in rules, "hidden states stay whole"
    assert flow(done, sink).verdict == "proved"


def test_splits_that_lack_nothing_keep_their_meaning(tmp_path):
    stated = COMPLETE.replace("tensor on tp {", "tensor on tp {\n    layouts = stated")
    (done, _), (same, _) = short(tmp_path, COMPLETE), short(tmp_path, stated)
    assert digest(done.lowered) == digest(same.lowered) and done.plan.sequence == ()
    lacking = SPLITS.replace("model.layers.*", "optional model.layers.*.mlp.down_proj : rowwise\n#")
    assert not any(rule.inferred for rule in rules_of(done).values()), lacking


def test_layouts_that_are_stated_are_not_completed(tmp_path):
    stated = COMPLETE.replace("tensor on tp {", "tensor on tp {\n    layouts = stated")
    done, sink = short(tmp_path, stated, model="qwen3-8b")
    assert "model.layers[0:36].self_attn.q_norm" not in rules_of(done)
    assert "PL161" in {d.code for d in sink}
    assert flow(done, sink).verdict == "refuted"
    advice = "or write `sequence = auto` in the section, and planc infers such rules"
    found = [d.help for d in sink if d.code == "PL502"]
    assert found and all(help.endswith(advice) for help in found)


def test_splits_without_layouts_are_judged_as_they_stand(tmp_path):
    alone = SPLITS.replace("mlp.down_proj : rowwise", "")
    done, sink = short(tmp_path, alone)
    assert done.plan.sequence == () and "PL525" not in {d.code for d in sink}


@pytest.mark.parametrize(
    ("line", "code"),
    [("layouts = stated\n    sequence = auto", "PL102"), ("layouts = inferred", "PL012")],
)
def test_layouts_are_stated_or_inferred(line, code, tmp_path):
    text = SPLITS.replace("tensor on tp {", f"tensor on tp {{\n    {line}")
    assert code in {d.code for d in short(tmp_path, text)[1] if d.severity == "error"}


def test_every_rule_says_why(tmp_path):
    done, _ = short(tmp_path)
    [setting] = done.plan.sequence
    assert setting.wanted is None
    assert any(has_sequence_shards(rule.style) for rule in done.plan.tensor)
    by_style = {type(r.style): r for r in done.plan.tensor if r.inferred}
    assert {Input, Sequence, Rowwise, Colwise} == by_style.keys()
    gathered = by_style[Input].inferred
    assert "modeling_llama.py" in gathered.code and "_proj" in gathered.text
    assert by_style[Sequence].origin.line == 7, "the line of the setting"
    assert by_style[Input].origin.text.startswith(("self_attn.{q,k,v}_proj", "mlp.{gate,up}"))
    stated = {str(r.modules) for r in done.plan.tensor if isinstance(r.style, Colwise)}
    assert len(stated) == 6 and by_style[Colwise].modules.path == ("lm_head",)


def test_without_sequence_nothing_is_inferred(tmp_path):
    done, _ = short(tmp_path, SHORT.replace("    sequence = auto\n", ""))
    assert done.plan.sequence == ()
    assert not any(r.inferred for r in done.plan.tensor)
    assert {type(r.style) for r in done.plan.tensor} == {Colwise, Rowwise}


def test_one_rank_needs_no_flow(tmp_path, monkeypatch):
    monkeypatch.setattr("planc.infer.infer_layouts.flow_source", None)
    done, sink = short(tmp_path, settings=())
    assert done.lowered is not None and not sink.errors


def test_the_number_of_rotary_features_is_the_real_one(tmp_path):
    text = """plan t for deepseek_v3
mesh { tp = 2 }
tensor on tp {
    sequence = false
    model.layers.*.self_attn {
        {q,kv}_b_proj : colwise
        o_proj : rowwise
    }
}
"""
    plan = tmp_path / "t.plan"
    plan.write_text(text)
    sink = Sink()
    done = compile_plan("deepseek-v3", str(plan), sink, world_size=2)
    [rule] = [r for r in done.plan.tensor if isinstance(r.style, MlaKv)]
    known = facts("deepseek-v3")
    assert rule.style.rope == known.config["qk_rope_head_dim"] == 64
    assert len(rule.modules) == known.config["num_hidden_layers"]


def test_a_model_that_does_not_run_is_said_not_guessed(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "planc.infer.infer_layouts.flow_of", lambda *_: "the proxy model does not run"
    )
    done, sink = short(tmp_path)
    assert done.lowered is None
    [found] = [d for d in sink if d.code == "PL524"]
    assert "does not run" in found.message and found.labels[0].span.line == 7


def test_blocks_of_one_kind_with_other_layouts_are_said(tmp_path):
    """A cut of one block's output that its like does not have, as a shallow model could show it."""
    from planc.infer.infer_layouts import _Carried, _Section

    done, _ = short(tmp_path)
    plan = replace(done.plan, tensor=tuple(replace(r, open=True) for r in done.plan.tensor))
    plan = splits_of(plan, sequence=True)
    section = _Section(plan, done.facts, plan.sequence[0], Sink())
    _, state, small, flow = section.record(plan.tensor)
    layouts = section._layouts(flow, small)
    made = _Carried(flow, state, small, layouts, plan.sequence[0])
    assert made.uneven is None
    inner = [f for f in layouts.rules if f.module == "model.layers.1.mlp"]
    assert inner, "the proxy model has blocks between the first and the last"
    less = tuple(f for f in layouts.rules if f not in inner)
    made.layouts = replace(layouts, rules=less)
    assert made.uneven is not None


def test_an_interpretation_changes_no_state():
    """Two runs over one flow agree."""
    _, plan, known = flow_and_rules()
    quiet = Sink()
    one = infer_layouts(plan, known, quiet)
    two = infer_layouts(plan, known, quiet)
    assert one.tensor == two.tensor and not quiet.errors


def test_a_clash_names_the_line():
    flow, _, _ = flow_and_rules()
    splits = {
        f"model.layers.{i}.mlp.{n}_proj": (Colwise(),) for i in (0, 1) for n in ("up", "down")
    }
    with pytest.raises(Clash) as clash:
        infer(flow, splits, {}, sequence=False)
    assert "`mul` takes" in str(clash.value) and clash.value.rules == (
        "model.layers.0.mlp.up_proj",
    )
    assert "self.up_proj(x)" in flow.lines[clash.value.line].text


def test_a_users_model_is_recorded_as_it_is(tmp_path):
    """Its code is no library's: nothing of it is cached, and a forward that fails is PL524."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(64, 16)
            self.up = torch.nn.Linear(16, 32)
            self.down = torch.nn.Linear(32, 16)
            self.head = torch.nn.Linear(16, 64)

        def forward(self, input_ids):
            x = self.embed(input_ids)
            return self.head(x + self.down(self.up(x).relu()))

    from planc.answers.plan import check

    plan = tmp_path / "own.plan"
    plan.write_text(
        "plan own for Model\nmesh { tp = 2 }\ntensor on tp {\n    sequence = true\n"
        "    embed : rowwise\n    up : colwise\n    down : rowwise\n    head : colwise\n}\n"
    )
    found = check(Model(), str(plan), world_size=2)
    assert not [d for d in found if d.severity == "error"], str(found)
    Model.forward = lambda self, input_ids, mode: self.embed(input_ids) * mode
    found = check(Model(), str(plan), world_size=2)
    assert [d.code for d in found if d.severity == "error"] == ["PL524"]
    assert isinstance(facts(), Facts)


@pytest.mark.parametrize("sequence", ["auto", "false"])
def test_what_is_written_out_lowers_to_the_same(tmp_path, sequence):
    """`planc fmt --explicit`, of a plan whose blocks differ."""
    from planc.emit.explicit import explicit

    text = SHORT.replace("llama", "deepseek_v3").replace(
        "auto\n    model", f"{sequence}\n    model"
    )
    text = text.replace("{q,k,v}_proj", "{q,kv}_b_proj").replace("mlp.", "optional mlp.")
    done, sink = short(tmp_path, text, model="deepseek-v3")
    assert not sink.errors and any(r.inferred for r in done.plan.tensor), [d.message for d in sink]
    written = explicit(done.files, done.plan, done.facts)
    assert "sequence =" not in written and "mla_kv(rope = 64)" in written
    again, sink = short(tmp_path, written, model="deepseek-v3")
    assert not again.plan.sequence and not any(r.inferred for r in again.plan.tensor)
    assert styles(again.lowered) == styles(done.lowered)


def test_what_memory_held_before_is_no_fact_of_a_flow():
    """DeepSeek-V2 allocates its keys: where dims of `new_empty` go was read out of that memory."""
    flow, _, _ = flow_and_rules("deepseek-v2-lite", "deepseek_v3")
    inside = (e for call in flow.calls for e in call.body if isinstance(e, Operation))
    made = [e.moves for e in inside if e.name == "new_empty"]
    assert made and not any(made)
