"""The lowered plan as text."""

import dataclasses

import pytest
from hypothesis import given
from lowered import any_op, llama, modules, plans, rule, unit, with_fields, with_ops

from planc.diffing.matching import place_of
from planc.emit.text import render
from planc.ops import phrases
from planc.ops.activation_checkpoint import Checkpoint, Save
from planc.ops.backend import Backend
from planc.ops.base import Shape
from planc.ops.configure import Configure
from planc.ops.document import digest
from planc.ops.lowered import Lowered, MeshAxis, Stage
from planc.ops.registry import kinds
from planc.ops.styles import (
    Colwise,
    Input,
    Output,
    Redistribution,
    Replicate,
    Rowwise,
    Sequence,
    Shard,
)
from planc.ops.tensor_parallel import Tie


def text(*ops, **changes):
    """The text of a plan with these operations, without its head and its last line."""
    plan = dataclasses.replace(with_ops(llama(), *ops), **changes)
    lines = render(plan, digest="9f31c2aa00bb11").splitlines()
    return lines[4:-1]


def test_llama(golden):
    golden("llama.txt", render(llama(), digest=digest(llama())))


def test_one_rank(golden):
    plan = llama(ranks=1, tp=1, checkpoint=False)
    golden("llama-one-rank.txt", render(plan, digest=digest(plan)))


def test_a_line_has_no_more_than_a_hundred_columns():
    wide = [line for line in render(llama(), digest="0" * 64).splitlines() if len(line) > 100]
    assert wide == []


def test_a_reason_without_words():
    plan = llama().map_ops(lambda _: (Configure(name="use_cache", value=False, reason="\r"),))
    assert "configure   use_cache = false\n" in render(plan, digest="0" * 64)


@given(plans())
def test_any_plan(plan):
    """Same plan, same bytes; whole lines, and none with a space at its end."""
    one = render(plan, digest="0" * 64)
    assert one == render(plan, digest="0" * 64)
    assert one.endswith("\n")
    assert all(line == line.rstrip() for line in one.split("\n"))
    assert len(one.splitlines()) >= 5
    for op in plan.ops:
        if isinstance(op, Tie):
            alone = f"{op.parameter} = {op.source}: one parameter" in one
            assert alone or "parameters, one in the model each" in one


def test_head():
    axes = (MeshAxis(name="dp_shard", size=16384, inferred=True), MeshAxis(name="tp", size=1))
    plan = with_fields(llama(), axes=axes, layers=0, ops=())
    assert render(plan, digest="9f31c2aa00bb11").splitlines() == [
        "llama for LlamaForCausalLM, 16,384 ranks                              "
        "lowered 9f31c2aa00bb, format 2",
        "",
        "mesh        dp_shard 16384 (auto) | tp 1",
        "data        split 16,384 ways, over dp_shard",
        "nothing     to do: the model stays as it is",
        "per rank    239.3 MiB of parameters at rest; the largest unit is 125.2 MiB while gathered",
    ]


@pytest.mark.parametrize(
    "kind",
    [*(k for k in kinds() if k is not Backend), *Backend.all_installed()],
    ids=lambda kind: kind.__name__,
)
def test_every_kind_says_what_it_does(kind):
    """What `lower` and `diff` say of an operation is with the operation."""
    assert {"WORD", "headline"} <= vars(kind).keys()
    assert set(kind.ABOUT) <= {field.name for field in dataclasses.fields(kind)}


@given(any_op)
def test_any_operation_is_in_the_text_and_in_a_diff(op):
    assert list(type(op).section([op], llama()))
    entries = list(op.entries(set()))
    assert entries and all(place_of(entry.kind) for entry in entries)


def test_names_that_say_the_same_share_a_line():
    block = "model.layers[0:32]"
    assert text(
        rule(f"{block}.attn.q_proj", Colwise(), 8, 8, split=0),
        rule(f"{block}.attn.k_proj", Colwise(), 8, 8, split=0),
        rule(f"{block}.mlp.gate_proj", Colwise(), 8, 8, split=0),
        rule(f"{block}.attn.v_proj", Colwise(), 8, 8, split=0),
        rule("lm_head", Colwise(), 8, 8, split=0),
    ) == [
        "tensor      on tp = 8",
        "  model.layers[0:32]",
        "    attn.{q,k,v}_proj  colwise  [8, 8] -> [1, 8]",
        "    mlp.gate_proj      colwise  [8, 8] -> [1, 8]",
        "  lm_head  colwise  [8, 8] -> [1, 8]",
    ]


@pytest.mark.parametrize(
    "other",
    [
        rule("b.k_proj", Colwise(), 8, 8, split=0),  # another parent
        rule("a.k_proj", Colwise(local=False), 8, 8, split=0),  # another style
        rule("a.k_proj", Colwise(), 16, 8, split=0),  # another shape
    ],
)
def test_names_that_say_something_else_have_their_own_line(other):
    assert len(text(rule("a.q_proj", Colwise(), 8, 8, split=0), other)) == 3


def test_layouts_are_shown_where_they_are_not_the_default():
    arrives = Redistribution(Shard(1), Replicate())
    rows = text(
        rule("a", Colwise()),
        rule("b", Rowwise(output=Shard(1), local=False)),
        rule("c", Rowwise(input=Replicate())),
        rule("d", Sequence()),
        rule("e", Sequence(dim=2, local=True)),
        rule("f", Input(positional=(None, arrives), named=(("x", arrives),))),
        rule("g", Input(positional=(arrives,), local=True)),
        rule("h", Output(positional=(arrives,), local=False)),
    )
    assert rows == [
        "tensor      on tp = 8",
        "  a  colwise",
        "  b  rowwise   -> shard(1), dtensor",
        "  c  rowwise   replicate -> replicate",
        "  d  sequence",
        "  e  sequence  dim = 2, local",
        "  f  input     null, shard(1) -> replicate, x = shard(1) -> replicate",
        "  g  input     shard(1) -> replicate, local",
        "  h  output    shard(1) -> replicate, dtensor",
    ]


def test_a_bias_that_is_split_is_shown():
    op = rule("lm_head", Colwise(), 8, 4, split=0)
    op = dataclasses.replace(op, shapes=(*op.shapes, Shape(name="bias", shape=(8,), local=(1,))))
    assert text(op)[1] == "  lm_head  colwise  [8, 4] -> [1, 4], bias [8] -> [1]"


def test_two_tensor_axes_are_two_sections():
    axes = tuple(MeshAxis(name=n, size=2) for n in ("tp", "ep"))
    ops = rule("a", Colwise(), axis="tp"), rule("b", Colwise(), axis="ep"), rule("c", Colwise())
    rows = text(*ops, axes=axes)
    assert rows == [
        "tensor      on tp = 2",
        "  {a,c}  colwise",
        "tensor      on ep = 2",
        "  b  colwise",
    ]


def test_what_is_not_tensor_parallelism():
    assert text(
        Configure(name="use_cache", value=False, reason="training keeps none"),
        Tie(parameter="lm_head.weight", source="model.embed_tokens.weight"),
        Checkpoint(modules=modules("model.layers[0:32].mlp")),
        Checkpoint(modules=modules("model.layers[0:32].self_attn")),
        Checkpoint(modules=modules("visual")),
    ) == [
        "configure   use_cache = false: training keeps none",
        "tie         lm_head.weight = model.embed_tokens.weight: one parameter in the model",
        "checkpoint  model.layers[0:32].{mlp,self_attn}",
        "            visual",
    ]


def test_checkpoints_that_keep_something():
    saves = (Save(name="attention", ops=("a.b.c",)), Save(name="matmul", every=2, ops=("d.e.f",)))
    assert text(
        Checkpoint(modules=modules("b[0]"), save=saves, offload=True),
        Checkpoint(modules=modules("b[1]"), early_stop=False),
        Checkpoint(modules=modules("b[2]")),
    ) == [
        "checkpoint  b[0]  ops(save = [attention, matmul(every = 2)], offload = cpu)",
        "            b[1]  full(early_stop = false)",
        "            b[2]",
    ]


def test_units_are_in_the_order_of_their_calls():
    shown = {"param": None, "reduce": None}
    rows = text(
        unit("b[0:31]", nbytes=2**20, gathered=2**23),
        unit("b[31]", reshard=8, nbytes=2**20, gathered=2**23),
        dataclasses.replace(unit("a", nbytes=1536, gathered=12288), **shown, output="float32"),
        dataclasses.replace(unit("norm", "head"), replicate=("pp",), cast_inputs=False),
        unit("root", reshard=False),
    )
    assert rows == [
        "fsdp        on dp_shard = 8, parameters bf16, gradients fp32",
        "  b[0:31]  reshard after forward       31 x 1.0 MiB per rank,  8.0 MiB gathered",
        "  b[31]    reshard to 8 after forward       1.0 MiB per rank,  8.0 MiB gathered",
        "  a        reshard after forward            1.5 KiB per rank, 12.0 KiB gathered  "
        "output fp32",
        "fsdp        on dp_shard = 8, replicated over pp = 1, parameters bf16, gradients fp32, "
        "inputs not cast",
        "  group(norm, head)  reshard after forward  no parameters of its own",
        "fsdp        on dp_shard = 8, parameters bf16, gradients fp32",
        "  root  keep  no parameters of its own",
    ]


# Words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (28_626_124, "27.3 MiB"),
        (1024**3 - 1, "1.0 GiB"),  # not 1,024.0 MiB
        (1002 * 1024**2, "1,002.0 MiB"),
        (5 * 1024**6, "5,120.0 PiB"),
    ],
)
def test_size(count, said):
    assert phrases.size(count) == said


def test_sizes_that_would_read_the_same_are_exact():
    assert phrases.sizes(2**20, 2**21) == ("1.0 MiB", "2.0 MiB")
    assert phrases.sizes(2**20, 2**20 + 1) == ("1,048,576 B", "1,048,577 B")
    assert phrases.sizes(2**20, 2**20) == ("1.0 MiB", "1.0 MiB")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["q_proj", "k_proj"], ["{q,k}_proj"]),
        (["ln_1", "ln_2"], ["ln_{1,2}"]),
        (["q_a_proj", "q_b_proj"], ["q_{a,b}_proj"]),
        (["fc1", "fc2"], ["{fc1,fc2}"]),
        (["x_proj", "x_x_proj"], ["{x_proj,x_x_proj}"]),
        (["a.q", "b.q", "a.k"], ["a.{q,k}", "b.q"]),
        (["h[0:2].q", "h[2:4].q"], ["h[0:2].q", "h[2:4].q"]),
        (["h[0:2]", "h[2:4]"], ["h[0:2]", "h[2:4]"]),
        (["root"], ["root"]),
        (
            [f"{n}_layernorm" for n in ("input", "post_attention", "pre_feedforward", "last")],
            ["{input,post_attention}_layernorm", "{pre_feedforward,last}_layernorm"],
        ),
    ],
)
def test_together(names, said):
    assert phrases.together(names) == said


def test_table():
    rows = [
        ("a", "bb", "c"),
        ("aaaaaa", "b", "c"),
        ("aa", "", ""),
        ("", "", "a very long last cell"),
    ]
    assert phrases.table(rows, widest=(3,)) == [
        "  a  bb  c",
        "  aaaaaa  b   c",
        "  aa",
        "         a very long last cell",
    ]


def test_a_plan_without_layers_and_data_says_so():
    plan = Lowered(
        plan="p",
        model="M",
        family="m",
        layers=0,
        axes=llama().axes,
        data=(),
        stages=(Stage(ops=()),),
    )
    lines = render(plan, digest="0" * 64).splitlines()
    assert lines[0].startswith("p for M, 64 ranks  ")
    assert lines[3] == "data        the same on every rank"
    assert lines[-1] == "per rank    0 B of parameters at rest"


def test_ties_of_two_modules_share_a_line():
    one, two = "h.1", "h.0"
    names = ("mlp.up.weight", "mlp.down.weight")
    ties = [Tie(parameter=f"{one}.{n}", source=f"{two}.{n}") for n in names]
    assert text(*ties) == [f"tie         {one} = {two}: 2 parameters, one in the model each"]
    alone = Tie(parameter="head.weight", source="embed.weight")
    assert text(alone) == [
        "tie         head.weight = embed.weight: one parameter in the model",
    ]
