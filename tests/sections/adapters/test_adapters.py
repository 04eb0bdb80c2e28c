"""The adapters section: what it means, what is wrong in it, and what it lowers to."""

import json
import re
import sys
from dataclasses import replace

import jsonschema
import pytest
from helpers import elaborated, facts, judged

from planc.compiler import Compiled
from planc.diagnostics.diagnostic import PlanError, Sink
from planc.diffing.compare import compare
from planc.diffing.render import document
from planc.emit.python.script import render as script
from planc.emit.text import render
from planc.files.resources import GRAMMARS
from planc.infer.apply_adapters import of_layer
from planc.lowering import lower
from planc.model.facts import Module, Modules, parse_path
from planc.model.load import load
from planc.ops.document import digest, dumps, loads
from planc.ops.freeze import Freeze
from planc.ops.fsdp import FullyShard
from planc.ops.lora import Adapt
from planc.ops.styles import (
    Colwise,
    Input,
    Output,
    Partial,
    Replicate,
    Rowwise,
    Sequence,
    Shard,
)
from planc.ops.tensor_parallel import Parallelize
from planc.provenance.query import why
from planc.sections.quantization.ops import Quantize

MESH = "mesh {\n dp_shard = auto\n tp = 2\n}\n"  # lines 2 to 5
TENSOR = (
    "tensor on tp {\n model.layers.*.self_attn.{q,k,v}_proj : colwise\n"
    " model.layers.*.self_attn.o_proj : rowwise\n model.norm : sequence\n}\n"  # to line 10
)
UNITS = "fsdp on dp_shard {\n model.layers.* : unit\n root : unit\n}\n"
Q = "model.layers.*.self_attn.q_proj"
O_PROJ = "model.layers.*.self_attn.o_proj"
BF16 = UNITS.replace("{\n", "{\n precision(param = bf16, reduce = fp32)\n", 1)


def plan_of(body, tensor=TENSOR, units=UNITS, world=8, mesh=MESH):
    """(plan or None, facts, findings) of a plan with this adapters section, from line 12 on.

    The adapters are in the plan and in the facts.
    """
    text = f"plan t for llama\n{mesh}{tensor}adapters {{\n{body}\n}}\n{units}"
    plan, facts, found = judged(text, world=world)
    # the lonely norm is there for what `sequence` does to frozen weights
    return plan, facts, [d for d in found if d.code != "PL160"]


def lowered(body, **others):
    plan, facts, found = plan_of(body, **others)
    assert not found, [d.message for d in found]
    return lower(plan, facts)


def ops(plan, kind):
    return [op for op in plan.ops if isinstance(op, kind)]


def styles(plan):
    return {str(op.modules): op.style for op in ops(plan, Parallelize)}


# Meaning -----------------------------------------------------------------------------------------


def test_the_arguments_of_lora():
    (op,) = ops(lowered(f"{Q} : lora(rank = 4, alpha = 2.5, dtype = fp32)"), Adapt)
    assert (op.rank, op.alpha, op.dropout, op.dtype, op.init) == (4, 2.5, 0.0, "float32", "default")
    (op,) = ops(lowered(f"{Q} : lora(rank = 4, init = gaussian)"), Adapt)
    assert (op.alpha, op.dtype, op.init, op.seed) == (4, None, "gaussian", 0)


def test_one_operation_for_a_rule_each_with_its_seed():
    body = f"{Q} : lora(rank = 4)\nlm_head : lora(rank = 4)\nseed = 7"
    two = ops(lowered(body), Adapt)
    assert [(str(op.members[0]), op.seed) for op in two] == [
        ("model.layers[0:32].self_attn.q_proj", 7),
        ("lm_head", 8),
    ]


def test_none_takes_layers_out():
    body = f"{Q} : lora(rank = 4)\noverride model.layers[1:32:2].self_attn.q_proj : none"
    (op,) = ops(lowered(body), Adapt)
    assert [str(m) for m in op.members] == ["model.layers[0:31:2].self_attn.q_proj"]
    own = {n for n in styles(lowered(body)) if "q_proj" in n}
    assert own == {
        "model.layers[0:31:2].self_attn.q_proj.base_layer",
        "model.layers[0:31:2].self_attn.q_proj.lora_A.default",
        "model.layers[0:31:2].self_attn.q_proj.lora_B.default",
        "model.layers[1:32:2].self_attn.q_proj",
    }


def test_everything_else_is_frozen():
    _, facts, _ = plan_of(
        f"{Q} : lora(rank = 4)\noverride model.layers[0:3].self_attn.q_proj : none"
    )
    trained = {
        f"{modules}.{p.name}": p.shape
        for modules in facts.model.below()
        for p in modules.module.parameters
        if p.trainable
    }
    assert trained == {
        "model.layers[3:32].self_attn.q_proj.lora_A.default.weight": (4, 4096),
        "model.layers[3:32].self_attn.q_proj.lora_B.default.weight": (4096, 4),
    }


def test_what_sequence_makes_anew_is_frozen_again():
    plan = lowered(f"{Q} : lora(rank = 4)")
    assert [str(op.modules) for op in ops(plan, Freeze)] == ["model.norm"]
    kinds = [type(op).__name__ for op in plan.ops]
    assert kinds.index("Adapt") < kinds.index("Parallelize") < kinds.index("Freeze")
    assert kinds.index("Freeze") < kinds.index("FullyShard")


def test_what_load_casts_is_the_layer_and_not_what_a_rule_says_of_its_adapter():
    body = f"{Q} : lora(rank = 4, dtype = fp32)\n}}\nload {{\n dtype = bf16"
    plan, facts, found = plan_of(body)
    assert not found, [d.message for d in found]
    assert [type(op).__name__ for op in lower(plan, facts).ops][1:3] == ["Load", "Adapt"]
    dtypes = {
        plan.dtype(p): f"{m}.{p.name}" for m in facts.model.below() for p in m.module.parameters
    }
    assert dtypes.keys() == {"bfloat16", "float32"} and "lora_B" in dtypes["float32"]


def test_units_of_their_own():
    units = ops(lowered(f"{Q} : lora(rank = 4)\nunits = own"), FullyShard)
    assert [str(u.members[0]) for u in units] == [
        "model.layers[0:32].self_attn.q_proj.lora_A.default",
        "model.layers[0:32].self_attn.q_proj.lora_B.default",
        "model.layers[0:32]",
        "root",
    ]
    with_layer = ops(lowered(f"{Q} : lora(rank = 4)\nunits = with_layer"), FullyShard)
    assert len(with_layer) == 2
    assert units[2].gathered == with_layer[0].gathered - units[0].gathered - units[1].gathered


@pytest.mark.parametrize(
    "indices", ["[0]", "[3,7]", "[0:32]", "[5:18]", "[9:12]", "[0:126]", "[99:131:3]", "[0:12:2]"]
)
def test_the_pattern_finds_exactly_the_layers(indices):
    paths = [f"model.layers{indices}.self_attn.q_proj", f"model.layers{indices}.mlp.up_proj"]
    sets = tuple(Modules(parse_path(p), Module(cls="", kind="linear")) for p in paths)
    op = Adapt(members=sets, rank=1, alpha=1)
    wanted = {n for s in sets for n in s.names()}
    every = [
        f"{head}model.layers.{i}.{last}"
        for i in range(200)
        for head in ("", "a.")
        for last in ("self_attn.q_proj", "mlp.up_proj", "mlp.q_proj", "self_attn.q_proj.a")
    ]
    assert {n for n in every if re.fullmatch(op.pattern, n)} == wanted


# Styles ------------------------------------------------------------------------------------------

S1, R = Shard(1), Replicate()
DERIVED = [
    (Colwise(), (Input, Colwise())),
    (Colwise(output=R), (Input, Colwise(output=R))),
    (Colwise(input=S1, output=R), (Sequence(), Colwise(input=S1, output=R))),
    (Rowwise(), (Rowwise(), None)),
    (Rowwise(local=False), (Rowwise(), Output)),
    (Rowwise(output=S1, local=False), (Rowwise(output=S1, local=False), Sequence())),
    (Rowwise(output=S1), (Rowwise(output=S1, local=False), Sequence(local=True))),
    (Rowwise(output=Shard(-1)), (Rowwise(), Colwise())),
    (Sequence(dim=0), (Sequence(dim=0), Sequence(dim=0))),
]


@pytest.mark.parametrize(("base", "wanted"), DERIVED)
def test_the_styles_of_an_adapter_follow_from_the_layer(base, wanted):
    for style, want in zip(of_layer(base, "linear"), wanted, strict=True):
        assert isinstance(style, want) if isinstance(want, type) else style == want


@pytest.mark.parametrize(
    ("base", "kind"),
    [
        (Rowwise(output=Partial()), "linear"),
        (Colwise(input=Shard(-1)), "linear"),
        (Rowwise(input=R, output=S1, local=False), "embedding"),
    ],
)
def test_some_styles_have_none_that_follow(base, kind):
    assert isinstance(of_layer(base, kind), str)


def test_an_embedding_keeps_its_adapter_whole():
    tensor = "tensor on tp {\n model.embed_tokens : rowwise\n}\n"
    plan = lowered("model.embed_tokens : lora(rank = 4)", tensor=tensor)
    assert list(styles(plan)) == ["model.embed_tokens.base_layer"]


# Mistakes ----------------------------------------------------------------------------------------


def test_a_tied_head_in_4_bits():
    tied = replace(facts(), ties=(("model.embed_tokens.weight", "lm_head.weight"),))
    text = f"plan t for llama\n{MESH}adapters {{\n lm_head : qlora(rank = 4)\n}}\n{UNITS}"
    found = [d for d in judged(text, model=tied)[2] if d.code == "PL682"]
    assert len(found) == 1 and found[0].labels[0].span.place == "t.plan:7"


# 4 bits ------------------------------------------------------------------------------------------


def test_the_arguments_of_qlora():
    (op,) = ops(lowered(f"{Q} : qlora(rank = 4)", units=BF16), Quantize)
    assert op == Quantize(members=op.members, kind="nf4", storage="bfloat16", block=64)
    assert [str(m) for m in op.members] == ["model.layers[0:32].self_attn.q_proj.base_layer"]
    said = "quant = fp4, storage = bf16, compute = fp32, double = true, block = 128"
    one = MESH.replace("2", "1")
    (op,) = ops(lowered(f"{Q} : qlora(rank = 4, {said})", mesh=one), Quantize)
    assert (op.kind, op.storage, op.compute, op.double, op.block) == (
        ("fp4", "bfloat16", "float32", True, 128)
    )
    (op,) = ops(lowered(f"{Q} : qlora(rank = 4)"), Quantize)
    assert op.storage == "bfloat16"  # the model's own: its configuration says so
    (op,) = ops(lowered(f"{Q} : qlora(rank = 4)\n}}\nload {{\n dtype = fp32"), Quantize)
    assert op.storage == "float32"  # what it is cast to before


def test_the_storage_of_4_bit_weights_is_a_part_of_the_rule():
    """From elaboration on: later stages change no rule."""
    body = f"adapters {{\n {Q} : qlora(rank = 4)\n}}\n"
    for units, cast, dtype in (
        (BF16.replace("bf16", "fp16"), "", "float16"),
        (UNITS, "", "bfloat16"),
        (UNITS, "load {\n dtype = fp32\n}\n", "float32"),
    ):
        plan, _, _ = elaborated(f"plan t for llama\n{MESH}{cast}{body}{units}")
        assert [rule.compressed.storage for rule in plan.adapters.rules] == [dtype]


def test_weights_are_packed_between_freezing_and_units():
    kinds = [type(op).__name__ for op in lowered(f"{Q} : qlora(rank = 4)").ops]
    assert kinds.index("Freeze") < kinds.index("Quantize") < kinds.index("FullyShard")


def test_the_bytes_of_4_bits():
    four, whole = (lowered(f"{Q} : {w}(rank = 4)", units=BF16) for w in ("qlora", "lora"))
    weight = 4096 * 4096 // 2  # over tp = 2
    gathered = [ops(plan, FullyShard)[0].gathered for plan in (whole, four)]
    assert gathered[0] - gathered[1] == weight * 2 - weight // 2
    scales = 32 * weight // 64 * 4
    assert whole.parameters - four.parameters == 32 * (weight * 2 - weight // 2) // 4 - scales
    one = MESH.replace("2", "1")
    double = lowered(f"{Q} : qlora(rank = 4, double = true)", units=BF16, mesh=one)
    plain = lowered(f"{Q} : qlora(rank = 4)", units=BF16, mesh=one)
    blocks = 4096 * 4096 // 64
    assert plain.parameters - double.parameters == 32 * (4 * blocks - blocks - 4 * blocks // 256)


def test_4_bits_in_json_text_and_script():
    plan = lowered(f"{Q} : qlora(rank = 4, quant = fp4, compute = bf16)", units=BF16)
    sink = Sink()
    again = loads(dumps(plan), "t.json", sink)
    assert again is not None, [d.message for d in sink]
    assert digest(again) == digest(plan) and dumps(again) == dumps(plan)
    broken = dumps(plan).replace('"fp4"', '"fp5"')
    assert loads(broken, "t.json", sink) is None
    text = render(plan, digest="0" * 64)
    assert "quantize    frozen weights in 4 bits, by bitsandbytes\n" in text
    line = "model.layers[0:32].self_attn.q_proj  fp4 in bf16, blocks of 64, computes in bf16\n"
    assert line in text
    written = script(plan, digest="0" * 64)
    compile(written, "emitted.py", "exec")
    modules = set(re.findall(r"^(?:from|import) (\w+)", written, re.M))
    assert modules - sys.stdlib_module_names == {"torch", "peft", "bitsandbytes"}


def test_a_diff_and_why_of_4_bits():
    lora, four = (lowered(f"{Q} : {w}(rank = 4)", units=BF16) for w in ("lora", "qlora"))
    delta = compare(lora, four)
    assert [(c.kind, c.subject) for c in delta.added] == [
        ("quantize", "model.layers[0:32].self_attn.q_proj")
    ]
    schema = json.loads((GRAMMARS / "diff.schema.json").read_text())
    for one, two in ((lora, four), (lowered(f"{O_PROJ} : lora(rank = 4)"), lora)):
        jsonschema.validate(json.loads(json.dumps(document(compare(one, two)))), schema)
    sink = Sink()
    done = Compiled(facts=load("llama-3.1-8b", sink), lowered=four)
    answer = why("model.layers.3.self_attn.q_proj", done, sink)
    (held,) = answer.parameters
    assert (held.shape, held.local, held.shard) == ((4194304, 1), (2097152, 1), (524288, 1))
    assert held.at_rest == 4096 * 4096 // 2 // 8
    assert [r.what for r in answer.adapter][1] == "in 4 bits, nf4 in bf16, blocks of 64"


def test_without_bitsandbytes_apply_says_so(monkeypatch):
    from planc.runtime.preconditions import require_packages

    pytest.importorskip("peft")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(PlanError) as caught:
        require_packages(lowered(f"{Q} : qlora(rank = 4)"))
    assert [d.code for d in caught.value.diagnostics] == ["PL685"]
    require_packages(lowered(f"{Q} : lora(rank = 4)"))


def test_adapters_of_another_dtype_than_what_trains_beside_them():
    body = "lm_head : lora(rank = 4{})\n}}\ntrain {{\n model.norm : trainable"
    own = UNITS.replace(" root", " group(model.norm, lm_head) : unit\n root")
    (found,) = plan_of(body.format(", dtype = fp32"), units=own)[2]
    assert found.code == "PL415" and found.labels[0].span.place.startswith("t.plan:")
    assert any("lora_A" in fact and "float32" in fact for fact in found.facts)
    assert not plan_of(body.format(", dtype = bf16"), units=own)[2]


def test_freezing_again_is_a_mistake_and_training_more_is_not():
    body = f"{Q} : lora(rank = 4)\n}}\ntrain {{\n model.norm : "
    assert [d.code for d in plan_of(f"{body}frozen")[2]] == ["PL188"]
    assert [(str(op.modules), op.trainable) for op in ops(lowered(f"{body}trainable"), Freeze)] == [
        ("model.norm", False),
        ("model.norm", True),
    ]


# What it is lowered to ---------------------------------------------------------------------------


def test_json_there_and_back():
    plan = lowered(f"{Q} : lora(rank = 4, alpha = 8, dtype = bf16)\nunits = own")
    sink = Sink()
    again = loads(dumps(plan), "t.json", sink)
    assert again is not None, [d.message for d in sink]
    assert digest(again) == digest(plan) and dumps(again) == dumps(plan)
    broken = dumps(plan).replace('"rank": 4', '"rank": 0')
    assert loads(broken, "t.json", sink) is None
    assert "rank" in sink.diagnostics[-1].message


def test_the_text():
    text = render(lowered(f"{Q} : lora(rank = 4, dtype = fp32)"), digest="0" * 64)
    assert "adapters    all else is frozen\n" in text
    assert "model.layers[0:32].self_attn.q_proj  lora  rank 4, alpha 4, fp32\n" in text
    assert "self_attn.q_proj.lora_B" in text and "base_layer" not in text


def test_the_script_casts_and_names_peft_alone_beside_torch():
    text = script(lowered(f"{Q} : lora(rank = 4, dtype = fp32)"), digest="0" * 64)
    compile(text, "emitted.py", "exec")
    assert "block.self_attn.q_proj.lora_A.to(torch.float32)" in text
    assert "model.norm.requires_grad_(False)" in text
    modules = set(re.findall(r"^(?:from|import) (\w+)", text, re.M))
    assert modules - sys.stdlib_module_names == {"torch", "peft"}


def test_without_peft_apply_says_so_before_it_touches_the_model(monkeypatch):
    from planc.runtime.preconditions import require_packages

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(PlanError) as caught:
        require_packages(lowered(f"{Q} : lora(rank = 4)"))
    assert [d.code for d in caught.value.diagnostics] == ["PL187"]
    require_packages(lower(*plan_of(f"{Q} : none")[:2]))  # nothing to adapt, nothing to import


def test_why_names_the_layer_and_its_adapter():
    plan, facts, _ = plan_of(f"{Q} : lora(rank = 4)")
    sink = Sink()
    done = Compiled(facts=facts, plan=plan, applied=(plan, facts), lowered=lower(plan, facts))
    base = why("model.layers.3.self_attn.q_proj", done, sink)
    assert base.tensor[0].what == "colwise, on tp = 2" and not base.parameters[0].trainable
    assert [(r.what, r.place) for r in base.adapter] == [("lora, rank 4, alpha 4", "t.plan:12")]
    half = why("model.layers.3.self_attn.q_proj.lora_B.default", done, sink)
    assert half.parameters[0].local == (2048, 4) and half.parameters[0].trainable
    assert half.tensor[0].place == "t.plan:12" and not list(sink)
