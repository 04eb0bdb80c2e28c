"""The lowered plan as Python that needs no planc: what one would write by hand.

The file imports torch alone. Its functions are the stages of the plan, in order; what a line of the
`.plan` asked for says so in a comment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import dedent, fill
from typing import assert_never

from planc.emit.python import activation_checkpoint, megatron_fsdp
from planc.emit.python.fsdp import divide, prefetch, shard
from planc.emit.python.inlined_source import carried
from planc.emit.python.load_weights import filled, initial, prepared
from planc.emit.python.module_loops import (
    IN,
    Lines,
    loop_over,
    looped,
    parameter,
    replace,
    variable,
)
from planc.emit.python.printer import (
    WIDTH,
    Group,
    assign,
    imports,
    lay,
    quoted,
    remark,
    style_source,
)
from planc.model.facts import Modules, Segment
from planc.model.indices import Indices
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.compile import Compile
from planc.ops.configure import Configure
from planc.ops.freeze import Freeze
from planc.ops.fsdp import Divide, FullyShard, Prefetch
from planc.ops.load import Load
from planc.ops.lora import Adapt
from planc.ops.lowered import Lowered
from planc.ops.megatron_fsdp import MegatronShard
from planc.ops.quantization import Quantize
from planc.ops.registry import AnyOp
from planc.ops.rng import Draw
from planc.ops.tensor_parallel import Parallelize, Tie


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


_WHOLE = "full_state_dict"
_PACKED = """
Weights of several projections are held rank by rank, and not in the model's own order:
`full_state_dict(model)` gives them in that order.
"""
_CONFIGURE = _Stage("configure", "Sets what training needs of the configuration.")
_LOAD = _Stage("prepare", "Says where weights begin, and what type they are kept in.")
_ADAPT = _Stage("add_adapters", "Puts LoRA around layers, and freezes all else.")
_TENSOR = _Stage("tensor_parallel", "Splits weights and activations over the tensor axes.", True)
_FREEZE = _Stage("freeze", "Says which parameters take gradients.")
_QUANTIZE = _Stage("quantize_weights", "Keeps frozen weights in 4 bits.", True)
_CHECKPOINT = _Stage("checkpoint", "Computes activations again in backward, to save memory.")
_COMPILE = _Stage("compile_blocks", "Compiles the blocks, each by itself.")
_SHARD = _Stage("shard", "Shards parameters, gradients and optimizer state.", True)
_REPLICATE = _Stage("copies", "Averages the gradients of whole copies.", True)
_MEGATRON = _Stage("shard", "Hands the whole model to Megatron-FSDP.", True)
_DIVIDE = _Stage("divide", "Sets what summed gradients are divided by.", True)
_DRAW = _Stage("draw", "Lets ranks that work on the same activations draw alike.", True)
_PREFETCH = _Stage("prefetch", "Gathers the parameters of the next blocks ahead of time.")


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
    functions += filled(lowered)
    own = carried("\n\n".join(functions))
    packed = any(source.startswith("def repack(") for source in own)
    if packed:  # what leaves such a model has to be put in order
        own = carried("\n\n".join([*functions, _WHOLE]))
    body = "\n\n".join([_mesh(lowered), *own, *functions, _main("".join(calls))])
    modules = {path.partition(":")[0] for path in lowered.code}
    return f"{_docstring(lowered, digest, packed)}\n{imports(body, modules)}\n{body}"


def _stage(op: AnyOp) -> _Stage:
    match op:
        case Configure():
            return _CONFIGURE
        case Load():
            return _LOAD
        case Adapt():
            return _ADAPT
        case Parallelize() | Tie():
            return _TENSOR
        case Freeze():
            return _FREEZE
        case Quantize():
            return _QUANTIZE
        case Checkpoint():
            return _CHECKPOINT
        case Compile():
            return _COMPILE
        case FullyShard():
            return _SHARD if op.shard else _REPLICATE
        case MegatronShard():
            return _MEGATRON
        case Divide():
            return _DIVIDE
        case Prefetch():
            return _PREFETCH
        case Draw():
            return _DRAW
        case _:
            assert_never(op)


def _body(stage: _Stage, ops: Sequence[AnyOp], lowered: Lowered) -> Lines:
    if stage is _TENSOR:
        yield from _tensor(ops, lowered)
        return
    if stage in (_SHARD, _REPLICATE):
        yield from shard([op for op in ops if isinstance(op, FullyShard)], lowered)
        return
    for op in _inner_first(ops) if stage is _CHECKPOINT else ops:
        match op:
            case Configure():
                note = remark(op.reason)
                yield from lay(f"model.config.{op.name} = {op.value}", IN, note=note)
            case Load():
                yield from prepared(op)
            case Adapt():
                yield from _adapt(op, lowered)
            case Freeze():
                loop = loop_over(op.modules, lowered.layers)
                call = f"{loop.item}.requires_grad_({op.trainable})"
                yield from looped(loop.head, call, op.place)
            case Quantize():
                yield from _quantize(op, lowered)
            case Checkpoint():
                loop = loop_over(op.modules, lowered.layers, assigned=True)
                wrapped = replace(loop, "checkpoint_wrapper", *activation_checkpoint.arguments(op))
                yield from looped(loop.head, wrapped, op.place)
            case Compile():
                loop = loop_over(op.modules, lowered.layers)
                how = "fullgraph=True" if op.fullgraph else ""
                yield from looped(loop.head, f"{loop.item}.compile({how})", op.place)
            case MegatronShard():
                yield from megatron_fsdp.shard(op, lowered)
            case Divide():
                yield from divide(op, lowered)
            case Prefetch():
                yield from prefetch(op)
            case Draw():
                note = remark(", ".join(op.fields))
                yield from lay(f"draw_alike(mesh, {quoted(op.axis)})", IN, note=note)


def _adapt(op: Adapt, lowered: Lowered) -> Lines:
    """One `inject_adapter_in_model`, with values that are the same on every rank."""
    arguments = [f"r={op.rank}", f"lora_alpha={op.alpha}"]
    arguments += [f"lora_dropout={op.dropout}"] if op.dropout else []
    if op.init != "default":
        arguments.append(f"init_lora_weights={initial(op)}")
    arguments.append(f'target_modules=r"{op.pattern}"')
    yield from lay("with torch.random.fork_rng(devices=[]):", IN, note=remark(op.place))
    yield f"{IN}    torch.manual_seed({op.seed})"
    yield from lay(Group("config = LoraConfig(", tuple(arguments)), f"{IN}    ")
    yield f"{IN}    inject_adapter_in_model(config, model)"
    if op.dtype is None:
        return
    for members in op.members:
        loop = loop_over(members, lowered.layers)
        for half in ("lora_A", "lora_B"):
            yield from looped(loop.head, f"{loop.item}.{half}.to(torch.{op.dtype})", "")


def _quantize(op: Quantize, lowered: Lowered) -> Lines:
    """Each weight by itself, where the mesh is: a model on meta gets room for it alone."""
    loads = any(isinstance(other, Load) and other.weights for other in lowered.ops)
    name = "quantize_filled" if loads else "quantize"
    arguments = [quoted(op.kind), f"torch.{op.storage}", "mesh.device_type"]
    arguments += [f"compute=torch.{op.compute}"] if op.compute else []
    arguments += ["double=True"] if op.double else []
    arguments += [f"block={op.block}"] if op.block != 64 else []
    for members in op.members:
        loop = loop_over(members, lowered.layers)
        call = Group(f"{name}(", (loop.item, *arguments))
        yield from looped(loop.head, call, op.place)


def _inner_first(ops: Sequence[AnyOp]) -> Sequence[AnyOp]:
    """Operations with what is inside another's modules before it: a wrapper hides its module.

    The plan's order where nothing nests.
    """
    own = [op for op in ops if isinstance(op, Checkpoint)]
    nested = any(
        len(inner.modules.path) > len(outer.modules.path) and inner.modules.within(outer.modules)
        for inner in own
        for outer in own
    )
    own.sort(key=lambda op: -len(op.modules.path) if nested else 0)
    return own


# The frame ---------------------------------------------------------------------------------------


def _docstring(lowered: Lowered, digest: str, packed: bool) -> str:
    needed = "torch alone"
    if any(isinstance(op, Load) and op.weights in ("slices", "rank0") for op in lowered.ops):
        needed = "torch and safetensors alone"
    if any(isinstance(op, Adapt) for op in lowered.ops):
        needed = "torch and peft alone"
    if any(isinstance(op, Quantize) for op in lowered.ops):
        needed = "torch, peft and bitsandbytes alone"
    if any(isinstance(op, MegatronShard) for op in lowered.ops):
        needed = f"CUDA, megatron_fsdp{',' if ' and ' in needed else ' and'} {needed}"
    if lowered.code:
        needed = needed.replace("alone", "and the styles of the plan's own")
    told = f"Written by planc from the lowered plan {digest[:12]}; it needs {needed}."
    return (
        f'"""{lowered.plan} for {lowered.model} on {lowered.world_size:,} ranks.\n\n'
        f"{fill(told, WIDTH)}\n\n"
        '    model = parallelize(model, build_mesh("cuda"))\n'
        f'{_PACKED if packed else ""}"""\n'
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
    names = {axes: variable("_".join(axes)) for axes in dict.fromkeys(op.axes for op in styled)}
    for axes, name in names.items():
        yield f"{IN}{name} = mesh[{', '.join(map(quoted, axes))}]"
    for (axes, block), group in groupby(styled, key=lambda op: (op.axes, _block(op.modules))):
        for batch in _batches(group, len(block)):
            yield from _styles(names[axes], batch, len(block), lowered)
    ties = [op for op in ops if isinstance(op, Tie)]
    if ties:
        yield f"{IN}# a split weight is a new parameter: what was one is tied again"
    for tie in ties:
        yield from assign(parameter(tie.parameter), parameter(tie.source), IN)


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
        yield from looped(loop.head, call, ops[0].place)
        return
    entries = tuple(style_source(op.style, f"{quoted(_key(op.modules, depth))}: ") for op in ops)
    notes = tuple(remark(op.place) for op in ops)
    plan = Group("{", entries, "}", notes)
    call = Group("parallelize_module(", (loop.item, mesh, plan), notes=("", "", ""))
    yield from looped(loop.head, call, "")


def _key(modules: Modules, depth: int) -> str:
    """How `parallelize_module` names a module inside another; empty for that one itself."""
    return ".".join(str(s) for s in modules.path[depth:])
