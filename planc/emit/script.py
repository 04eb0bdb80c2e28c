"""The lowered plan as Python that needs no planc: what one would write by hand.

The file imports torch alone. Its functions are the stages of the plan, in order; what a line of the
`.plan` asked for says so in a comment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import dedent
from typing import TypeVar, assert_never

from planc.emit.python import Group, Source, assign, imports, lay, quoted, remark, style_source
from planc.emit.reach import entries, loop_over, parameter, replace
from planc.lowering.ops import (
    Adapt,
    AnyOp,
    Checkpoint,
    Compile,
    Configure,
    Freeze,
    FullyShard,
    Lowered,
    Parallelize,
    Tie,
)
from planc.model.facts import Modules, Segment
from planc.model.indices import Indices

_IN = "    "  # the body of a function

Lines = Iterator[str]


@dataclass(frozen=True, slots=True)
class _Stage:
    """A function of the script.

    Args:
        name: of the function; a stage that comes again is numbered.
        about: its docstring.
        meshed: whether it works over the mesh.
    """

    name: str
    about: str
    meshed: bool = False


_CONFIGURE = _Stage("configure", "Sets what training needs of the configuration.")
_ADAPT = _Stage("add_adapters", "Puts LoRA around layers, and freezes all else.")
_TENSOR = _Stage("tensor_parallel", "Splits weights and activations over the tensor axes.", True)
_CHECKPOINT = _Stage("checkpoint", "Computes activations again in backward, to save memory.")
_COMPILE = _Stage("compile_blocks", "Compiles the blocks, each by itself.")
_SHARD = _Stage("shard", "Shards parameters, gradients and optimizer state.", True)


def render(lowered: Lowered, *, digest: str) -> str:
    """Python source with `build_mesh` and `parallelize`; the same for the same plan.

    It is laid out as `ruff format` would.

    Args:
        lowered: the plan.
        digest: of it, in hex, for the docstring.
    """
    names: list[str] = []
    functions: list[str] = []
    calls: list[str] = []
    for stage, group in groupby(lowered.ops, key=_stage):
        names.append(stage.name)
        again = names.count(stage.name)
        name = stage.name if again == 1 else f"{stage.name}_{again}"
        arguments = "(model, mesh)" if stage.meshed else "(model)"
        body = "\n".join(_body(stage, list(group), lowered))
        functions.append(f'def {name}{arguments}:\n    """{stage.about}"""\n{body}\n')
        calls.append(f"    {name}{arguments}\n")
    body = "\n\n".join([_mesh(lowered), *functions, _main("".join(calls))])
    return f"{_docstring(lowered, digest)}\n{imports(body)}\n{body}"


def _stage(op: AnyOp) -> _Stage:
    match op:
        case Configure():
            return _CONFIGURE
        case Adapt():
            return _ADAPT
        case Parallelize() | Freeze() | Tie():
            return _TENSOR
        case Checkpoint():
            return _CHECKPOINT
        case Compile():
            return _COMPILE
        case FullyShard():
            return _SHARD
        case _:
            assert_never(op)


def _body(stage: _Stage, ops: Sequence[AnyOp], lowered: Lowered) -> Lines:
    if stage is _TENSOR:
        yield from _tensor(ops, lowered)
        return
    if stage is _SHARD:
        yield from _shard([op for op in ops if isinstance(op, FullyShard)], lowered)
        return
    for op in ops:
        match op:
            case Configure():
                note = remark(op.reason)
                yield from lay(f"model.config.{op.name} = {op.value}", _IN, note=note)
            case Adapt():
                yield from _adapt(op, lowered)
            case Checkpoint():
                loop = loop_over(op.modules, lowered.layers, assigned=True)
                how = "checkpoint_impl=CheckpointImpl.NO_REENTRANT"
                yield from _looped(loop.head, replace(loop, "checkpoint_wrapper", how), op.place)
            case Compile():
                loop = loop_over(op.modules, lowered.layers)
                how = "fullgraph=True" if op.fullgraph else ""
                yield from _looped(loop.head, f"{loop.item}.compile({how})", op.place)


def _adapt(op: Adapt, lowered: Lowered) -> Lines:
    """One `inject_adapter_in_model`, with values that are the same on every rank."""
    arguments = [f"r={op.rank}", f"lora_alpha={op.alpha}"]
    arguments += [f"lora_dropout={op.dropout}"] if op.dropout else []
    if op.init != "default":
        arguments.append(f"init_lora_weights={quoted(op.init) if op.init != 'random' else False}")
    arguments.append(f'target_modules=r"{op.pattern}"')
    yield from lay("with torch.random.fork_rng(devices=[]):", _IN, note=remark(op.place))
    yield f"{_IN}    torch.manual_seed({op.seed})"
    yield from lay(Group("config = LoraConfig(", tuple(arguments)), f"{_IN}    ")
    yield f"{_IN}    inject_adapter_in_model(config, model)"
    if op.dtype is None:
        return
    for members in op.members:
        loop = loop_over(members, lowered.layers)
        for half in ("lora_A", "lora_B"):
            yield from _looped(loop.head, f"{loop.item}.{half}.to(torch.{op.dtype})", "")


def _looped(head: Sequence[str], statement: Source, place: str) -> Lines:
    """A statement in its loops; what asked for it stands at the first line."""
    note = remark(place)
    for number, line in enumerate(head):
        yield from lay(line, _IN, note="" if number else note)
    indent = _IN + "    " * len(head)
    yield from lay(statement, indent, note="" if head else note)


# The frame ---------------------------------------------------------------------------------------


def _docstring(lowered: Lowered, digest: str) -> str:
    needed = "torch alone"
    if any(isinstance(op, Adapt) for op in lowered.ops):
        needed = "torch and peft alone"
    return (
        f'"""{lowered.plan} for {lowered.model} on {lowered.world_size:,} ranks.\n\n'
        f"Written by planc from the lowered plan {digest[:12]}; it needs {needed}.\n\n"
        '    model = parallelize(model, build_mesh("cuda"))\n"""\n'
    )


def _mesh(lowered: Lowered) -> str:
    items = tuple(f"{quoted(a.name)}: {a.size}" for a in lowered.axes)
    notes = tuple(remark(a.place) for a in lowered.axes)
    constant = "\n".join(lay(Group("MESH = {", items, "}", notes)))
    return constant + dedent('''


        def build_mesh(device_type="cuda"):
            """The device mesh, axes outermost first."""
            sizes, names = tuple(MESH.values()), tuple(MESH)
            return init_device_mesh(device_type, sizes, mesh_dim_names=names)
        ''')


def _main(calls: str) -> str:
    return (
        "def parallelize(model, mesh=None):\n"
        '    """Spreads the model over the mesh, in place, and returns it."""\n'
        "    mesh = build_mesh() if mesh is None else mesh\n"
        f"{calls}    return model\n"
    )


# Tensor parallelism ------------------------------------------------------------------------------


def _tensor(ops: Sequence[AnyOp], lowered: Lowered) -> Lines:
    styled = [op for op in ops if isinstance(op, Parallelize)]
    names = {axis: _variable(axis) for axis in dict.fromkeys(op.axis for op in styled)}
    for axis, name in names.items():
        yield f"{_IN}{name} = mesh[{quoted(axis)}]"
    for (axis, block), group in groupby(styled, key=lambda op: (op.axis, _block(op.modules))):
        for batch in _batches(group, len(block)):
            yield from _styles(names[axis], batch, len(block), lowered)
    frozen = [op for op in ops if isinstance(op, Freeze)]
    if frozen:
        yield f"{_IN}# SequenceParallel makes parameters anew, trainable"
    for still in frozen:
        loop = loop_over(still.modules, lowered.layers)
        yield from _looped(loop.head, f"{loop.item}.requires_grad_(False)", still.place)
    ties = [op for op in ops if isinstance(op, Tie)]
    if ties:
        yield f"{_IN}# a split weight is a new parameter: what was one is tied again"
    for tie in ties:
        yield from assign(parameter(tie.parameter), parameter(tie.source), _IN)


def _variable(axis: str) -> str:
    """A name that no other of the function has."""
    return re.sub(r"\W", "_", f"{axis}_mesh")


def _block(modules: Modules) -> tuple[Segment, ...]:
    """The path of the repeated block that the modules are in (or are); empty for none."""
    last = max((i + 1 for i, s in enumerate(modules.path) if isinstance(s, Indices)), default=0)
    return modules.path[:last]


def _batches(ops: Iterable[Parallelize], depth: int) -> list[list[Parallelize]]:
    """Styles that one dictionary can hold, in order; a style on the block itself goes alone.

    A dictionary has a module once, so an input or output style on a styled module comes after.
    """
    batches: list[list[Parallelize]] = []
    taken: set[tuple[Segment, ...]] = {()}
    for op in ops:
        name = op.modules.path[depth:]
        if () in taken or not name or name in taken:
            batches.append([])
            taken = set()
        batches[-1].append(op)
        taken.add(name)
    return batches


def _styles(mesh: str, ops: Sequence[Parallelize], depth: int, lowered: Lowered) -> Lines:
    """One `parallelize_module` for each block, with the styles of everything inside it."""
    first = ops[0].modules
    loop = loop_over(Modules(first.path[:depth], first.module), lowered.layers)
    if len(ops) == 1 and len(first.path) == depth:
        call = Group("parallelize_module(", (loop.item, mesh, style_source(ops[0].style)))
        yield from _looped(loop.head, call, ops[0].place)
        return
    entries = tuple(style_source(op.style, f"{quoted(_key(op.modules, depth))}: ") for op in ops)
    notes = tuple(remark(op.place) for op in ops)
    plan = Group("{", entries, "}", notes)
    call = Group("parallelize_module(", (loop.item, mesh, plan), notes=("", "", ""))
    yield from _looped(loop.head, call, "")


def _key(modules: Modules, depth: int) -> str:
    """How `parallelize_module` names a module inside another; empty for that one itself."""
    return ".".join(str(s) for s in modules.path[depth:])


# FSDP --------------------------------------------------------------------------------------------


def _shard(ops: Sequence[FullyShard], lowered: Lowered) -> Lines:
    flat: dict[tuple[str, ...], str] = {}
    for axes in (axes for op in ops for axes in (op.replicate, op.shard)):
        if len(axes) > 1 and axes not in flat:
            flat[axes] = _variable("_".join(_ordered(axes, lowered)))
            yield from lay(_flat(flat[axes], _ordered(axes, lowered)), _IN)
    paired = _numbered("hsdp_mesh", (pair for op in ops if (pair := _pair(op, flat, lowered))))
    for pair, name in paired.items():
        yield from lay(Group(f"{name} = DeviceMesh._concatenate([", pair, "])"), _IN)
    policies = _numbered("policy", (policy for op in ops if (policy := _policy(op))))
    for policy, name in policies.items():
        yield from lay(Group(f"{name} = MixedPrecisionPolicy(", policy), _IN)
    kinds = {
        op: (
            paired.get(_pair(op, flat, lowered)) or _data(op, flat),
            policies.get(_policy(op)),
        )
        for op in ops
    }
    names = _numbered("fsdp", kinds.values())
    for (mesh, rule), name in names.items():
        items = (f'"mesh": {mesh}', *([f'"mp_policy": {rule}'] if rule else []))
        yield from lay(Group(f"{name} = {{", items, "}"), _IN)
    for op in ops:
        yield from _unit(op, f"**{names[kinds[op]]}", lowered)


Key = TypeVar("Key")


def _numbered(name: str, keys: Iterable[Key]) -> dict[Key, str]:
    """A variable for each of the different keys, numbered where they are several."""
    different = list(dict.fromkeys(keys))
    if len(different) == 1:
        return {different[0]: name}
    return {key: f"{name}_{number}" for number, key in enumerate(different, start=1)}


def _unit(op: FullyShard, shared: str, lowered: Lowered) -> Lines:
    reshard = f"reshard_after_forward={op.reshard}"
    if op.group:
        members = Group("[", tuple(e for m in op.members for e in entries(m)), "]")
        call = Group("fully_shard(", (members, shared, reshard))
        yield from _looped((), call, op.place)
        return
    loop = loop_over(op.members[0], lowered.layers)
    yield from _looped(loop.head, Group("fully_shard(", (loop.item, shared, reshard)), op.place)


def _data(op: FullyShard, flat: Mapping[tuple[str, ...], str]) -> str:
    """The mesh of a unit, where the root mesh can give it."""
    if op.replicate:
        return f"mesh[{quoted(op.replicate[0])}, {quoted(op.shard[0])}]"
    return _dimension(op.shard, flat)


def _pair(op: FullyShard, flat: Mapping[tuple[str, ...], str], lowered: Lowered) -> tuple[str, ...]:
    """The two meshes of a hybrid unit that the root mesh cannot give as one.

    It gives its own axes, in their order: neither flattened ones nor the reverse.
    """
    names = (*op.replicate, *op.shard)
    if not op.replicate or (len(names) == 2 and names == _ordered(names, lowered)):
        return ()
    return _dimension(op.replicate, flat), _dimension(op.shard, flat)


def _dimension(axes: tuple[str, ...], flat: Mapping[tuple[str, ...], str]) -> str:
    return flat.get(axes) or f"mesh[{quoted(axes[0])}]"


def _flat(name: str, axes: tuple[str, ...]) -> Group:
    """The statement that makes several axes, outermost first, one dimension."""
    names = ", ".join(quoted(a) for a in axes)
    return Group(f"{name} = mesh[{names}]._flatten(", (quoted("_".join(axes)),))


def _ordered(axes: tuple[str, ...], lowered: Lowered) -> tuple[str, ...]:
    """Axes in the order of the mesh, outermost first."""
    return tuple(a.name for a in lowered.axes if a.name in axes)


def _policy(op: FullyShard) -> tuple[str, ...]:
    """The arguments of a unit's precision; none where it has none of its own."""
    dtypes = (("param_dtype", op.param), ("reduce_dtype", op.reduce), ("output_dtype", op.output))
    parts = [f"{argument}=torch.{value}" for argument, value in dtypes if value]
    return tuple(parts if op.cast_inputs else [*parts, "cast_forward_inputs=False"])
