"""Lowered plans by hand, and hypothesis strategies for any."""

import dataclasses

from hypothesis import strategies as st

from planc.diagnostics.source import Span
from planc.model.facts import Module, Modules, parse_path
from planc.model.indices import Indices
from planc.model.recurrent_states import UPDATES
from planc.ops.activation_checkpoint import Checkpoint, Save
from planc.ops.base import AxisRole, Shape
from planc.ops.configure import Configure
from planc.ops.freeze import Freeze
from planc.ops.fsdp import Divide, FullyShard, Prefetch, Spread
from planc.ops.load import Load
from planc.ops.lora import Adapt
from planc.ops.lowered import Lowered, MeshAxis, Stage
from planc.ops.registry import kinds
from planc.ops.styles import (
    Attributes,
    Colwise,
    Custom,
    Experts,
    Features,
    Input,
    MlaKv,
    Output,
    ParameterLayout,
    Parameters,
    Partial,
    Redistribution,
    Replicate,
    Replicated,
    Rowwise,
    Sequence,
    Shard,
)
from planc.ops.tensor_parallel import Parallelize, Tie
from planc.sections import NAMES
from planc.sections.megatron_fsdp.ops import MegatronShard

NOTHING = Module(cls="", kind="other")
TO_SEQUENCE = Rowwise(output=Shard(1), local=False)


def modules(path):
    return Modules(parse_path(path), NOTHING)


def rule(path, style, *shape, split=None, tp=8, line=0, axis="tp"):
    """A style; the weight of `shape` is split along the dim `split`."""
    local = tuple(n // tp if i == split else n for i, n in enumerate(shape))
    shapes = (Shape(name="weight", shape=shape, local=local),) if shape else ()
    origin = Span.from_place(f"plans/llama.plan:{line}" if line else "")
    axes = (axis,)
    return Parallelize(modules=modules(path), axes=axes, style=style, shapes=shapes, origin=origin)


def unit(*paths, reshard=True, nbytes=0, gathered=0, line=0, group=False, **more):
    return FullyShard(
        members=tuple(modules(p) for p in paths),
        group=group or len(paths) > 1,
        shard=("dp_shard",),
        reshard=reshard,
        param="bfloat16",
        reduce="float32",
        nbytes=nbytes,
        gathered=gathered,
        origin=Span.from_place(f"plans/llama.plan:{line}" if line else ""),
        **more,
    )


def styles(layers, tp):
    """The tensor-parallel rules of a llama of 8B, with sequence parallelism."""
    block = f"model.layers[0:{layers}]"

    def own(path, *rest, **more):
        return rule(f"{block}.{path}", *rest, tp=tp, **more)

    into = Redistribution(Shard(1), Replicate())
    return (
        own("self_attn.q_proj", Colwise(), 4096, 4096, split=0, line=17),
        own("self_attn.k_proj", Colwise(), 1024, 4096, split=0, line=17),
        own("self_attn.v_proj", Colwise(), 1024, 4096, split=0, line=17),
        own("mlp.gate_proj", Colwise(), 14336, 4096, split=0, line=18),
        own("mlp.up_proj", Colwise(), 14336, 4096, split=0, line=18),
        own("input_layernorm", Sequence(), line=20),
        own("post_attention_layernorm", Sequence(), line=20),
        own("self_attn", Input(named=(("hidden_states", into),)), line=21),
        own("self_attn.o_proj", TO_SEQUENCE, 4096, 4096, split=1, line=22),
        own("mlp", Input(positional=(into,)), line=23),
        own("mlp.down_proj", TO_SEQUENCE, 4096, 14336, split=1, line=24),
        rule(
            "model.embed_tokens",
            Rowwise(input=Replicate(), output=Shard(1), local=False),
            *(128256, 4096),
            split=0,
            tp=tp,
            line=31,
        ),
        rule("model.norm", Sequence(), tp=tp, line=32),
        rule(
            "lm_head",
            Colwise(input=Shard(1), output=Replicate()),
            *(128256, 4096),
            split=0,
            tp=tp,
            line=33,
        ),
    )


def llama(*, layers=32, ranks=64, tp=8, checkpoint=True):
    """A llama of 8B with tensor and sequence parallelism, checkpointing and FSDP."""
    shards = ranks // tp
    whole = {"layer": 436_224_000 // tp, "vocabulary": 1_050_673_152 // tp}
    bare = {name: count // shards for name, count in whole.items()}
    layer = {"nbytes": bare["layer"], "gathered": whole["layer"], "line": 48}
    vocabulary = {"nbytes": bare["vocabulary"], "gathered": whole["vocabulary"]}
    return Lowered(
        plan="llama",
        model="LlamaForCausalLM",
        family="llama",
        layers=layers,
        axes=(
            MeshAxis(
                name="pp", size=1, role=AxisRole.STAGE, origin=Span.from_place("plans/llama.plan:9")
            ),
            MeshAxis(
                name="dp_shard",
                size=shards,
                inferred=True,
                origin=Span.from_place("plans/llama.plan:10"),
            ),
            MeshAxis(
                name="tp", size=tp, role=AxisRole.TENSOR, origin=Span.from_place(f"--set tp={tp}")
            ),
        ),
        data=("dp_shard",),
        stages=(
            Stage(
                ops=_ops(layers, tp, layer, vocabulary, checkpoint),
                parameters=layers * bare["layer"] + 2 * bare["vocabulary"],
                gathered=whole["vocabulary"],
            ),
        ),
    )


def _ops(layers, tp, layer, vocabulary, checkpoint):
    block = modules(f"model.layers[0:{layers}]")
    return (
        Configure(name="use_cache", value=False, reason="training keeps no key/value cache"),
        *(styles(layers, tp) if tp > 1 else ()),
        *([Checkpoint(modules=block, origin=Span.from_place("plans/llama.plan:42"))] * checkpoint),
        unit(f"model.layers[0:{layers - 1}]", **layer),
        unit(f"model.layers[{layers - 1}]", reshard=False, **layer),
        unit("model.embed_tokens", line=52, **vocabulary),
        unit("model.norm", "lm_head", reshard=False, line=53, **vocabulary),
        unit("root", reshard=False, line=55),
    )


def with_ops(lowered, *ops):
    return lowered.map_ops(lambda _: ops)


def with_fields(lowered, **changes):
    """The plan with other fields, of its own or of its only stage."""
    of_stage = {n: v for n, v in changes.items() if n in Stage.__dataclass_fields__}
    rest = {n: v for n, v in changes.items() if n not in of_stage}
    stage = dataclasses.replace(lowered.stages[0], **of_stage)
    return dataclasses.replace(lowered, **rest, stages=(stage,))


def moved(lowered, lines=100):
    """The same plan with every line of the `.plan` moved down."""

    def place(old):
        file, _, line = old.rpartition(":")
        return f"{file}:{int(line) + lines}" if line.isdecimal() else old

    def each(nodes):
        return tuple(dataclasses.replace(n, origin=Span.from_place(place(n.place))) for n in nodes)

    return dataclasses.replace(
        lowered.map_ops(lambda _: each(lowered.ops)), axes=each(lowered.axes)
    )


# Any lowered plan --------------------------------------------------------------------------------

AXES = ("dp_shard", "tp", "ep")
layouts = st.sampled_from([Replicate(), Partial(), Shard(0), Shard(1), Shard(-1)])
changes = st.builds(Redistribution, layouts, layouts)
counts = st.integers(0, 2**40)
words = st.sampled_from(["weight", "bias", "place", "reason", "x"])
sizes = st.integers(1, 4) | st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
weighted = {
    "input": layouts,
    "output": layouts,
    "local": st.booleans(),
    "parts": sizes,
    "interleaved": st.booleans(),
    "transposed": st.booleans(),
}
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"', max_size=3),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
held = st.builds(ParameterLayout, layout=layouts, parts=sizes, interleaved=st.booleans())
bare = st.dictionaries(words, held, min_size=1, max_size=2).map(lambda d: tuple(d.items()))
any_style = st.one_of(
    st.builds(Colwise, **weighted),
    st.builds(Rowwise, **weighted),
    st.just(Replicated(summed=True)),
    st.builds(
        Custom,
        name=words,
        path=st.sampled_from(["a:B", "a.b:C"]),
        arguments=st.dictionaries(words, plain, max_size=2).map(lambda d: tuple(d.items())),
    ),
    st.just(Features()),
    st.builds(Attributes, names=st.lists(words, min_size=1, max_size=2, unique=True).map(tuple)),
    st.builds(MlaKv, rope=st.integers(1, 64)),
    st.builds(Parameters, layouts=bare),
    st.builds(Experts, layouts=bare, input=layouts, output=layouts, local=st.booleans()),
    st.builds(Sequence, dim=st.integers(-3, 3), local=st.booleans()),
    st.builds(
        Input,
        positional=st.lists(st.none() | changes, max_size=2).map(tuple),
        named=st.dictionaries(words, changes, max_size=2).map(lambda d: tuple(d.items())),
        local=st.booleans(),
    ),
    st.builds(
        Output,
        positional=st.lists(st.none() | changes, min_size=1, max_size=2).map(tuple),
        local=st.booleans(),
    ),
)
indices = st.sets(st.integers(0, 9), min_size=1).map(Indices.from_numbers)
paths = st.one_of(
    st.sampled_from(["root", "lm_head", "model.norm", "model.embed_tokens"]).map(modules),
    st.builds(
        lambda i, rest: Modules(("model", "layers", i, *rest), NOTHING),
        indices,
        st.sampled_from([(), ("mlp",), ("self_attn", "q_proj"), ("self_attn", "k_proj")]),
    ),
    st.builds(
        lambda i, j: Modules(("model", "layers", i, "experts", j, "up"), NOTHING), indices, indices
    ),
)
places = st.sampled_from(["", "a.plan:1", "a.plan:20", "b.plan:3", "--set tp=2"]).map(
    Span.from_place
)


@st.composite
def shapes(draw):
    dims = draw(st.lists(st.integers(1, 9), min_size=1, max_size=2))
    local = tuple(-(-d // 2) for d in dims)
    return Shape(name=draw(words), shape=tuple(dims), local=local)


some_shapes = st.lists(shapes(), max_size=2, unique_by=lambda s: s.name).map(tuple)
dtypes = st.sampled_from([None, "bfloat16", "float32"])
sharded = st.permutations(["dp_shard", "ep"]).flatmap(
    lambda names: st.sampled_from(
        [(tuple(names), ()), ((names[0],), ()), ((names[0],), (names[1],)), ((), (names[0],))]
    )
)


spreads = st.builds(
    lambda modules, names, dim, copied: Spread(
        modules=modules,
        shard=names[:1] if copied else names,
        replicate=names[1:] if copied else (),
        shard_dim=dim,
    ),
    paths,
    st.permutations(["dp_shard", "ep"]).map(tuple),
    st.integers(0, 2),
    st.booleans(),
)


@st.composite
def units(draw):
    group = draw(st.booleans())
    shard, replicate = draw(sharded)
    several = st.lists(paths, min_size=1, max_size=3, unique_by=str)
    return FullyShard(
        members=tuple(draw(several)) if group else (draw(paths),),
        group=group,
        shard=shard,
        replicate=replicate,
        reshard=draw(st.booleans() | st.integers(1, 8)),
        param=draw(dtypes),
        reduce=draw(dtypes),
        output=draw(dtypes),
        cast_inputs=draw(st.booleans()),
        nbytes=draw(counts),
        gathered=draw(counts),
        ignored=tuple(draw(st.lists(paths, max_size=2, unique_by=str))),
        shard_dim=draw(st.integers(0, 2)),
        offload=(offload := draw(st.booleans())),
        pin=offload and draw(st.booleans()),
        spreads=tuple(draw(st.lists(spreads, max_size=2))) if shard else (),
        origin=draw(places),
    )


blocks = st.builds(
    lambda i, rest: Modules(("model", "layers", i, *rest), NOTHING),
    indices,
    st.sampled_from([(), ("mlp",), ("mlp", "up_proj"), ("self_attn",)]),
)


dtypes = st.sampled_from(["float32", "bfloat16", "float16"])
PARTS = sorted({part for parts in UPDATES.values() for part in parts})
SECTION_OPS = {
    "quantization": {
        "Quantize": {
            "members": st.tuples(paths),
            "kind": st.sampled_from(["nf4", "fp4"]),
            "storage": dtypes,
            "compute": st.none() | dtypes,
            "double": st.booleans(),
            "block": st.sampled_from([32, 64, 4096]),
            "origin": places,
        },
    },
    "compile": {"Compile": {"modules": paths, "fullgraph": st.booleans(), "origin": places}},
    "documents": {
        "ResetStates": {"parts": st.lists(st.sampled_from(PARTS), min_size=1).map(tuple)},
    },
    "draws": {
        "SyncRng": {
            "axis": st.sampled_from(["tp", "ep"]),
            "fields": st.just(("resid_pdrop = 0.1",)),
        },
        "DrawApart": {"axes": st.sampled_from([("tp",), ("ep",), ("tp", "ep")])},
        "DrawByRank": {
            "modules": paths,
            "axis": st.sampled_from(["tp", "ep"]),
            "inside": st.sampled_from([None, True, False]),
            "after": st.booleans(),
            "origin": places,
        },
    },
}
"""The fields of operations, by section and kind: a copy of planc may lack a section."""


def section_ops():
    """Strategies for the operations of the sections that planc has."""
    known = {kind.__name__: kind for kind in kinds()}
    names = [name for name in SECTION_OPS if name in NAMES]
    cases = (case for name in names for case in SECTION_OPS[name].items())
    return [st.builds(known[kind], **fields) for kind, fields in cases]


any_op = st.one_of(
    st.builds(
        Adapt,
        members=st.tuples(paths),
        rank=st.integers(1, 64),
        alpha=st.sampled_from([1, 16, 0.5]),
        dropout=st.sampled_from([0.0, 0.1]),
        dtype=st.none() | dtypes,
        init=st.sampled_from(["default", "gaussian", "random"]),
        seed=st.integers(0, 9),
        origin=places,
    ),
    st.builds(Freeze, modules=paths, trainable=st.booleans(), origin=places),
    st.builds(
        Divide,
        factor=st.integers(1, 9) | st.sampled_from([0.5, 2.5]),
        units=st.lists(paths, max_size=2, unique_by=str).map(tuple),
        origin=places,
    ),
    st.builds(
        Prefetch,
        units=st.lists(blocks, min_size=1, max_size=3, unique_by=lambda m: m.key).map(tuple),
        forward=st.integers(0, 3),
        backward=st.integers(0, 3),
        origin=places,
    ),
    st.builds(
        Configure, name=st.just("use_cache"), value=st.booleans(), reason=st.text(max_size=9)
    ),
    st.builds(
        Parallelize,
        modules=paths,
        axes=st.sampled_from([("tp",), ("ep",)]),
        style=any_style,
        shapes=some_shapes,
        origin=places,
    ),
    st.builds(
        Load,
        meta=st.booleans(),
        weights=st.sampled_from([None, "slices", "rank0", "checkpoint"]),
        dtype=st.sampled_from([None, "bfloat16", "float32"]),
        origin=places,
    ),
    st.builds(Tie, parameter=st.sampled_from(["a.w", "b.w"]), source=st.just("c.w"), origin=places),
    st.builds(
        Checkpoint,
        modules=paths,
        save=st.lists(
            st.builds(
                Save,
                name=st.sampled_from(["matmul", "aten.mm.default"]),
                every=st.integers(1, 3),
                ops=st.just(("aten.mm.default",)),
            ),
            max_size=2,
        ).map(tuple),
        offload=st.booleans(),
        pin=st.booleans(),
        preserve_rng=st.booleans(),
        early_stop=st.booleans(),
        origin=places,
    ),
    st.builds(
        MegatronShard,
        members=st.lists(blocks, min_size=1, max_size=3, unique_by=lambda m: m.key).map(tuple),
        classes=st.sampled_from([("A",), ("A", "B")]),
        shard=st.just(("dp_shard",)),
        replicate=st.sampled_from([(), ("ep",)]),
        strategy=st.sampled_from(["optim", "optim_grads_params"]),
        outer=st.sampled_from(["no_shard", "optim"]),
        main_params=dtypes,
        main_grads=dtypes,
        grad_comm=dtypes,
        summed=st.booleans(),
        experts=st.booleans(),
        options=st.sampled_from([(), (("nccl_ub", True), ("overlap_grad_reduce", False))]),
        nbytes=counts,
        gathered=counts,
        origin=places,
    ),
    units(),
    *section_ops(),
)


@st.composite
def plans(draw):
    """Any lowered plan that the schema takes; it need not make sense as a whole."""
    sizes = [draw(st.sampled_from([1, 2, 4, 8])) for _ in AXES]
    return Lowered(
        plan="any",
        model=draw(st.sampled_from(["A", "B"])),
        family="any",
        layers=draw(st.integers(0, 10)),
        axes=tuple(
            MeshAxis(
                name=n,
                size=s,
                role=draw(st.sampled_from(AxisRole)),
                inferred=draw(st.booleans()),
                origin=draw(places),
            )
            for n, s in zip(AXES, sizes, strict=True)
        ),
        data=draw(st.sampled_from([(), ("dp_shard",), ("dp_shard", "ep")])),
        stages=(
            Stage(
                ops=tuple(draw(st.lists(any_op, max_size=7))),
                parameters=draw(counts),
                gathered=draw(counts),
            ),
        ),
    )
