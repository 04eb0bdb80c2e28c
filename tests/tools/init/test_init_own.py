"""`planc init` of models of one's own: attention is split where a plan with that can be proved, and
what is not split, or draws random numbers, is told with the line of the code that is the reason.
"""

import json
from functools import partial
from shutil import copy

import drafted_models
import pytest
from helpers import sampled
from transformers import SwinConfig

from planc.cli import main
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.model.facts import Facts, Module
from planc.model.load import load
from planc.ops.styles import Colwise
from planc.ops.tensor_parallel import Parallelize
from planc.proof.layout_flow import flow
from planc.sections.draws import lowering as draws_lowering
from planc.sections.draws.ops import SyncRng
from planc.tools.init.init import draft
from planc.tools.init.part_sizes import PartSizes
from planc.tools.init.plan_text import parsed_text
from planc.tools.init.roles import Linear

SPLIT = {
    "fused_keys_values": [
        "attn.query : colwise",
        "attn.key_value : colwise(parts = 2)",
        "attn.proj : rowwise",
    ],
    "counted": [
        "attn : attributes(n_head = split, groups = split)",
        "parts = [",
        "parent.n_head * parent.head_size,",
        "attn.c_proj : rowwise",
    ],
    "one_head": ["attn.query : colwise", "attn.mix : rowwise"],
    "image": [
        "attn : attributes(num_heads = split, attn_dim = split)",
        "attn.qkv : colwise(parts = 3)",
        "attn.proj : rowwise",
    ],
}
NAMED = [
    "attn : attributes(n_q = split, n_kv = split)",
    "attn.{q,k,v} : colwise",
    "attn.o : rowwise",
]
_PATH = "kept = x.new_empty((len(x), *[1] * (x.ndim - 1))).bernoulli_(1 - self.rate)"
DRAWS = {
    "functional_dropout": "return F.dropout(self.fc2(F.gelu(self.fc1(x))), self.drop",
    "drop_path": _PATH,
    "image_drop_path": _PATH,
    "attention_dropout": "y = F.scaled_dot_product_attention(q, k, v, None, rate, is_causal=True",
}


def drafted(name):
    sink = Sink()
    facts = load(f"drafted_models:{name}", sink, allow_code=True)
    made = draft(facts, sink)
    assert made.outcome.verdict == "proved", made.text
    return facts, made, sink


def lines(text):
    """Without blanks in a row, and comments in one line each."""
    return [" ".join(line.split()) for line in text.splitlines()]


def checked(facts, text, folder, *settings, drafts=None):
    (folder / "own.plan").write_text(text)
    sink, settings = Sink(), ["tp=2", *settings]
    compiled = compile_plan(facts, str(folder / "own.plan"), sink, world_size=2, settings=settings)
    return compiled, flow(compiled, sink, draft=drafts), sink


@pytest.mark.parametrize("name", sampled(list(SPLIT), 2))
def test_attention_is_split_by_its_heads(name):
    _, made, _ = drafted(name)
    assert {*SPLIT[name]} <= {*lines(made.text)}, made.text
    assert "mlp.fc1 : colwise" in lines(made.text) and "mlp.fc2 : rowwise" in lines(made.text)


def test_a_rank_that_cannot_have_its_heads_is_told_by_the_line_that_needs_all():
    _, made, _ = drafted("whole")
    assert "attn.c_attn : colwise(-> replicate)" in lines(made.text)
    told = " ".join(made.text.replace("#", "").split())
    assert "the outputs are gathered, because no way to leave them sharded was proved" in told
    assert "is invalid for input of size" in told and "drafted_models.py" in told
    assert "p.view(shape).transpose(1, 2)" in told


def test_the_integers_to_divide_are_found_and_advised(tmp_path):
    facts, made, _ = drafted("named")
    assert {*NAMED} <= {*lines(made.text)}, made.text
    plan = "\n".join(n for n in made.text.splitlines() if "attributes(" not in n)
    _, verdict, sink = checked(facts, plan, tmp_path, drafts=lambda _: parsed_text(made.text))
    assert verdict.verdict == "refuted"
    [found] = [d for d in sink if d.severity == "error"]
    assert found.code == "PL503"
    assert found.help.startswith(f"add `blocks.*.{NAMED[0]}`")


def test_parts_of_a_small_model_are_those_of_a_larger_one(tmp_path):
    _, made, _ = drafted("counted")
    larger = load("drafted_models:counted_larger", Sink(), allow_code=True)
    compiled, verdict, sink = checked(larger, made.text, tmp_path)
    assert verdict.verdict == "proved", [d.message for d in sink]
    styles = [op.style for op in compiled.lowered.ops if isinstance(op, Parallelize)]
    assert (96, 16, 16) in [style.parts for style in styles if isinstance(style, Colwise)]


@pytest.mark.parametrize(
    ("integers", "config", "wanted"),
    [
        (
            {"n": 4, "groups": 2, "hd": 16},
            {},
            ["parent.n * parent.hd", "parent.groups * parent.hd"],
        ),
        ({"q_size": 64, "kv_size": 32}, {}, ["parent.q_size", "parent.kv_size"]),
        (
            {"n_embd": 64},
            {"n_layer": 2, "n_kv": 2, "n_head": 4},
            ["parent.n_embd", "config.n_kv * parent.n_embd // config.n_head"],
        ),
        ({"n_head": 4}, {}, []),
    ],
)
def test_sizes_of_parts_are_stated_by_integers_of_the_code(integers, config, wanted):
    fused = Linear(name="attn.qkv", inputs=64, outputs=128, parts=(64, 32, 32), counts=(4, 2, 2))
    parent = Module(cls="Attention", kind="other", facts=tuple(integers.items()))
    facts = Facts(name="Own", family="Own", config=config, config_name="", root=parent)
    found = PartSizes.from_facts(facts, parent, ("n", "kv")).expressions(fused)
    assert found == wanted + wanted[1:]


def test_keys_and_values_for_all_heads_stay_whole_with_a_reason():
    _, made, _ = drafted("one_head")
    told = " ".join(made.text.replace("#", "").split())
    assert "key_value :" not in told
    assert "each rank needs all keys and values, so their weights are whole" in told


def test_why_there_is_no_sequence_parallelism():
    _, made, _ = drafted("image")
    told = " ".join(made.text.replace("#", "").split())
    assert "No sequence parallelism: planc knows a sequence by its token ids" in told


@pytest.mark.parametrize("name", sampled(list(DRAWS), 2))
def test_what_draws_takes_no_rule_away(name, tmp_path):
    facts, made, _ = drafted(name)
    plain = "image" if name.startswith("image") else "fused_keys_values"
    assert {*SPLIT[plain]} <= {*lines(made.text)}, made.text
    compiled, verdict, sink = checked(facts, made.text, tmp_path)
    assert verdict.verdict == "proved", [d.message for d in sink]
    by_name = {section.name: section.verdict for section in verdict.sections}
    assert by_name["random numbers"] == "proved"
    [field] = [f for op in compiled.lowered.ops if isinstance(op, SyncRng) for f in op.fields]
    assert DRAWS[name] in field and "drafted_models.py:" in field
    [drawn] = [d for d in sink if d.code == "PL670"]
    assert field in drawn.message


@pytest.mark.parametrize("name", sampled(["functional_dropout", "drop_path"], 2))
def test_ranks_that_do_not_draw_alike_are_refuted(name, tmp_path, monkeypatch):
    facts, made, _ = drafted(name)
    monkeypatch.setattr(draws_lowering, "drawing_fields", lambda *_: ())
    _, verdict, sink = checked(facts, made.text, tmp_path, "sequence=false")
    assert verdict.verdict == "refuted"
    assert "PL511" in {d.code for d in sink if d.severity == "error"}


STATED = """plan own for Gpt

mesh {
    dp_shard = auto
    tp       = 2
}

tensor on tp {
    blocks.* {
        {norm1,norm2}  : sequence
        attn           : input(NAME shard(1) -> replicate)
        mlp            : input(shard(1) -> replicate)
        attn.query     : colwise
        attn.key_value : colwise(parts = 2)
        attn.proj      : rowwise(-> shard(1), local = false)
        mlp.fc1        : colwise
        mlp.fc2        : rowwise(-> shard(1), local = false)
    }
    wte  : rowwise(-> shard(1), local = false)
    wpe  : output(replicate -> shard(0), local = false)
    norm : sequence
    head : colwise(shard(1) -> replicate)
}

fsdp on dp_shard {
    root : unit
}
"""


@pytest.mark.parametrize(
    ("written", "what"),
    [
        ("hidden_states =", "no tensor comes to `blocks.*.attn` by the keyword `hidden_states`"),
        ("null,", "no tensor comes to `blocks.*.attn` at position 2"),
    ],
)
def test_an_input_that_does_not_come_is_said_at_its_line(written, what, tmp_path):
    facts = load("drafted_models:fused_keys_values", Sink(), allow_code=True)
    compile_own = partial(compile_plan, facts, world_size=2)
    (tmp_path / "own.plan").write_text(STATED.replace("NAME", written))
    sink = Sink()
    assert compile_own(str(tmp_path / "own.plan"), sink).lowered is None
    [found] = [d for d in sink if d.severity == "error"]
    assert found.code == "PL528" and found.message == what
    assert found.labels[0].span.text.startswith(f"attn           : input({written}")
    assert "tensors that come: 1 by position" in found.facts
    assert "self.attn(self.norm1(x))" in found.facts[1]
    _, verdict, sink = checked(facts, STATED.replace("NAME ", ""), tmp_path)
    assert verdict.verdict == "proved", [d.message for d in sink]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["named", *SPLIT, *DRAWS])
def test_a_draft_is_verified_on_four_processes(name, tmp_path, monkeypatch, capsys):
    copy(drafted_models.__file__, tmp_path)
    monkeypatch.chdir(tmp_path)  # where the processes import it from
    model, plan = f"drafted_models:{name}", str(tmp_path / "own.plan")
    assert main(["init", model, "--allow-code", "-o", plan]) == 0
    words = ["--allow-code", "--world-size", "4", "--set", "tp=2"]
    assert main(["verify", model, plan, *words]) == 0
    assert "Verified on 4 processes" in capsys.readouterr().out


def test_stages_of_other_widths_and_heads_are_split(tmp_path):
    """Swin's, which drops paths: each stage has a width and a number of heads of its own."""
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 32, "window_size": 4}
    stages = {"depths": [2, 2], "num_heads": [2, 4], "drop_path_rate": 0.1}
    values = SwinConfig(**sizes, **stages).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": ["SwinModel"]}))
    sink = Sink()
    facts = load(str(tmp_path), sink)
    made = draft(facts, sink)
    assert made.outcome.verdict == "proved", made.text
    assert "blocks.*.mlp.fc1 : colwise" in lines(made.text)
    assert "blocks.*.attention.{q,k,v}_proj : colwise(-> replicate)" in lines(made.text)
    assert "modeling_swin.py:" in made.text
    compiled, verdict, sink = checked(facts, made.text, tmp_path)
    assert verdict.verdict == "proved", [d.message for d in sink]
    assert any(isinstance(op, SyncRng) for op in compiled.lowered.ops)
