"""Lowered plans for a small llama, written by hand: no parser, no elaboration, no lowering."""

from dataclasses import replace

from planc.diagnostics.source import Span
from planc.ir.mesh_axes import role_of
from planc.model.facts import Module, Modules, parse_path
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.base import Shape as ParameterShape
from planc.ops.configure import Configure
from planc.ops.fsdp import FullyShard
from planc.ops.lowered import Lowered, MeshAxis, Stage
from planc.ops.styles import (
    Colwise,
    Input,
    Partial,
    Redistribution,
    Replicate,
    Rowwise,
    Sequence,
    Shard,
)
from planc.ops.tensor_parallel import Parallelize, Tie
from planc.sections.compile.ops import Compile

BLOCKS = "model.layers[0:2]"
DIGEST = "0123456789abcdef" * 4
S1 = Shard(1)


def modules(path):
    return Modules(parse_path(path), Module(cls="", kind="other"))


def llama(
    axes,
    *,
    shard=("dp_shard",),
    replicate=(),
    data=None,
    sequence=False,
    checkpoint=False,
    compiled=False,
    tied=False,
    precision=None,
):
    """A plan for `numerics.MODELS["llama"]`, or for the tied one.

    Args:
        axes: sizes by name, outermost first; `tp` splits weights where there is one.
        shard, replicate: the axes of FSDP.
        data: the axes along which data differs; by default all of FSDP's.
        precision: what parameters are gathered in, or nothing.
    """
    line = Span.from_place("x.plan:40")
    whole = {"shard": shard, "replicate": replicate, "param": precision, "origin": line}
    ends = ("model.norm", "lm_head")
    group = ("model.embed_tokens", *ends) if tied else ends
    units = [
        FullyShard(members=(modules("model.layers[0]"),), reshard=True, **whole),
        FullyShard(members=(modules("model.layers[1]"),), reshard=False, **whole),
        FullyShard(members=tuple(map(modules, group)), group=True, reshard=False, **whole),
        FullyShard(members=(modules("root"),), reshard=False, **whole),
    ]
    ops = [Configure(name="use_cache", value=False, reason="no cache")]
    if axes.get("tp", 1) > 1:
        ops += [
            Parallelize(
                modules=modules(path),
                axes=("tp",),
                style=style,
                origin=Span.from_place(f"x.plan:{line}"),
            )
            for line, (path, style) in enumerate(styles(sequence).items(), start=10)
        ]
        if tied:
            ops.append(Tie(parameter="lm_head.weight", source="model.embed_tokens.weight"))
    if checkpoint:
        ops.append(Checkpoint(modules=modules(BLOCKS), origin=Span.from_place("x.plan:30")))
    if compiled:
        ops.append(Compile(modules=modules(BLOCKS), origin=Span.from_place("x.plan:35")))
    names = {*(shard + replicate if data is None else data)}
    return Lowered(
        plan="byhand",
        model="LlamaForCausalLM",
        family="llama",
        layers=2,
        axes=tuple(
            MeshAxis(
                name=n,
                size=s,
                role=role_of(n, tensor=("tp",), data=names),
                origin=Span.from_place("x.plan:3"),
            )
            for n, s in axes.items()
        ),
        data=tuple(n for n in axes if n in names),
        stages=(Stage(ops=(*ops, *units)),),
    )


def styles(sequence):
    """torch's own recipe for a llama, with and without sequence parallelism."""
    split = {
        f"{BLOCKS}.{path}": Colwise()
        for path in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    } | {f"{BLOCKS}.{path}": Colwise() for path in ("mlp.gate_proj", "mlp.up_proj")}
    if not sequence:
        return {
            **split,
            f"{BLOCKS}.self_attn.o_proj": Rowwise(),
            f"{BLOCKS}.mlp.down_proj": Rowwise(),
            "model.embed_tokens": Rowwise(input=Replicate()),
            "lm_head": Colwise(output=Replicate()),
        }
    gathered = Redistribution(S1, Replicate())
    return {
        **split,
        f"{BLOCKS}.input_layernorm": Sequence(),
        f"{BLOCKS}.post_attention_layernorm": Sequence(),
        f"{BLOCKS}.self_attn": Input(named=(("hidden_states", gathered),)),
        f"{BLOCKS}.self_attn.o_proj": Rowwise(output=S1, local=False),
        f"{BLOCKS}.mlp": Input(positional=(gathered,)),
        f"{BLOCKS}.mlp.down_proj": Rowwise(output=S1, local=False),
        "model.embed_tokens": Rowwise(input=Replicate(), output=S1, local=False),
        "model.norm": Sequence(),
        "lm_head": Colwise(input=S1, output=Replicate()),
    }


def restyled(lowered, path, style):
    """The same plan with another style on one set of modules; None for no style."""
    ops = []
    for op in lowered.ops:
        if isinstance(op, Parallelize) and str(op.modules) == path:
            if style is not None:
                ops.append(replace(op, style=style))
        else:
            ops.append(op)
    assert tuple(ops) != lowered.ops, f"the plan has no style on {path}"
    return lowered.map_ops(lambda _: tuple(ops))


def unreduced(lowered):
    """A rowwise linear whose parts nobody adds up: the mistake that torch does not see."""
    return restyled(lowered, f"{BLOCKS}.self_attn.o_proj", Rowwise(output=Partial()))


def shaped(lowered, path, name, shape):
    """The same plan, which says of one parameter that it has a shape."""
    ops = [
        replace(op, shapes=(ParameterShape(name=name, shape=shape, local=shape),))
        if isinstance(op, Parallelize) and str(op.modules) == path
        else op
        for op in lowered.ops
    ]
    return lowered.map_ops(lambda _: tuple(ops))
