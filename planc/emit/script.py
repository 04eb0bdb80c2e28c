"""The lowered plan as Python that needs no planc: what one would write by hand.

The file imports torch alone. Its functions are the stages of the plan, in order; each line that a
line of the `.plan` asked for says so in a comment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from planc.emit import words
from planc.emit.python import IMPORTS, call, loop_over, reach, style_source
from planc.lowering.ops import (
    Checkpoint,
    Compile,
    Configure,
    FullyShard,
    Lowered,
    Parallelize,
    Tie,
)

Lines = Iterator[str]


def render(lowered: Lowered, *, digest: str) -> str:
    """Python source with `build_mesh` and `parallelize`, formatted, the same for the same plan.

    Args:
        lowered: the plan.
        digest: of it, in hex, for the docstring.
    """
    stages = [
        ("configure", "what training needs of the configuration", _configure(lowered)),
        ("tensor_parallel", "splits weights over the tensor axes", _tensor(lowered)),
        ("checkpoint", "computes activations again in backward", _checkpoint(lowered)),
        ("compile_blocks", "compiles the blocks, each by itself", _compile(lowered)),
        ("shard", "shards parameters, gradients and optimizer state", _shard(lowered)),
    ]
    written = [(name, about, body) for name, about, lines in stages if (body := list(lines))]
    functions = [_function(name, about, body) for name, about, body in written]
    calls = "".join(f"    {name}(model, mesh)\n" for name, _, _ in written)
    source = "\n\n".join([_mesh(lowered), *functions, _main(calls)])
    return f"{_docstring(lowered, digest)}\n{_imports(source)}\n{source}"


def _docstring(lowered: Lowered, digest: str) -> str:
    shape = " | ".join(f"{a.name} {a.size}" for a in lowered.axes)
    return (
        f'"""{lowered.plan} for {lowered.model} on {lowered.world_size:,} ranks: {shape}.\n\n'
        f"Written by planc from the lowered plan {digest[:12]}; it needs torch alone.\n\n"
        '    model = parallelize(model, build_mesh("cuda"))\n"""\n'
    )


def _imports(body: str) -> str:
    """The imports that the body uses, sorted as isort does."""
    lines = []
    for module, names in IMPORTS:
        used = [n for n in names if f"{n}(" in body or f"{n}." in body]
        if module == "torch" and "torch." in body:
            lines.append("import torch")
        elif used:
            lines.append(call(f"from {module} import ", used, brackets=len(used) > 1))
    return "\n".join(lines) + "\n"


def _mesh(lowered: Lowered) -> str:
    sizes = "".join(f'    "{a.name}": {a.size},{_note(a.place)}\n' for a in lowered.axes)
    return (
        f"MESH = {{\n{sizes}}}\n\n\n"
        'def build_mesh(device_type="cuda"):\n'
        '    """The device mesh, axes outermost first."""\n'
        "    sizes, names = tuple(MESH.values()), tuple(MESH)\n"
        "    return init_device_mesh(device_type, sizes, mesh_dim_names=names)\n"
    )


def _main(calls: str) -> str:
    return (
        "def parallelize(model, mesh):\n"
        '    """Spreads the model over the mesh, in place."""\n'
        f"{calls}    return model\n"
    )


def _function(name: str, about: str, body: list[str]) -> str:
    lines = "\n".join(f"    {line}" if line else "" for line in body)
    return f'def {name}(model, mesh):\n    """{about[0].upper()}{about[1:]}."""\n{lines}\n'


def _note(place: str) -> str:
    return f"  # {place}" if place else ""


# Stages ------------------------------------------------------------------------------------------


def _configure(lowered: Lowered) -> Lines:
    for op in lowered.ops:
        if isinstance(op, Configure):
            yield f"model.config.{op.name} = {op.value}  # {op.reason}"


def _tensor(lowered: Lowered) -> Lines:
    ops = [op for op in lowered.ops if isinstance(op, Parallelize)]
    for axis in dict.fromkeys(op.axis for op in ops):
        yield f'{axis} = mesh["{axis}"]'
    for (axis, _), group in groupby(ops, key=lambda op: (op.axis, words.block(op.modules))):
        yield from _styles(axis, list(group), lowered)
    ties = [op for op in lowered.ops if isinstance(op, Tie)]
    if ties:
        yield "# parallelize_module made new parameters, so those that are one are tied again"
    yield from (f"model.{op.parameter} = model.{op.source}" for op in ties)


def _styles(axis: str, ops: list[Parallelize], lowered: Lowered) -> Lines:
    """One `parallelize_module` for each block, with the styles of everything inside it."""
    for batch in _batches(ops):
        first = batch[0]
        if words.is_block(first.modules) or not first.modules.path:
            yield from _alone(axis, first, lowered)
            continue
        item, indent = "model", ""
        if words.block(first.modules):
            loop = loop_over(first.modules, lowered.layers, inside=True)
            item, indent = loop.item, loop.indent
            yield from loop.head
        yield f"{indent}parallelize_module("
        yield f"{indent}    {item},"
        yield f"{indent}    {axis},"
        yield f"{indent}    {{"
        for op in batch:
            yield from _entry(f"{indent}        ", words.inside(op.modules), op)
        yield f"{indent}    }},"
        yield f"{indent})"


def _alone(axis: str, op: Parallelize, lowered: Lowered) -> Lines:
    """A style on the blocks themselves."""
    loop = loop_over(op.modules, lowered.layers, place=_note(op.place))
    yield from loop.head
    arguments = [loop.item, axis, style_source(op.style)]
    lines = call("parallelize_module", arguments, room=4 + len(loop.indent))
    yield from (f"{loop.indent}{line}" for line in lines.split("\n"))


def _batches(ops: Iterable[Parallelize]) -> list[list[Parallelize]]:
    """A dictionary holds a module once: an input or output style on a styled module comes after."""
    batches: list[list[Parallelize]] = []
    for op in ops:
        name = "" if op.modules.path and words.is_block(op.modules) else words.inside(op.modules)
        fits = batches and name and all(words.inside(o.modules) != name for o in batches[-1])
        if fits:
            batches[-1].append(op)
        else:
            batches.append([op])
    return batches


def _entry(indent: str, key: str, op: Parallelize) -> Lines:
    source = style_source(op.style)
    line = f'{indent}"{key}": {source},'
    if len(line + _note(op.place)) <= 96:
        yield line + _note(op.place)
        return
    name, _, arguments = source.partition("(")
    yield f'{indent}"{key}": {name}({_note(op.place)}'
    for argument in _split(arguments.removesuffix(")")):
        yield f"{indent}    {argument},"
    yield f"{indent}),"


def _split(arguments: str) -> Iterator[str]:
    """Arguments at the commas that no bracket holds."""
    depth, start = 0, 0
    for i, char in enumerate(arguments):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            yield arguments[start:i].strip()
            start = i + 1
    yield arguments[start:].strip()


def _checkpoint(lowered: Lowered) -> Lines:
    for op in lowered.ops:
        if not isinstance(op, Checkpoint):
            continue
        loop = loop_over(op.modules, lowered.layers, assigned=True, place=_note(op.place))
        yield from loop.head
        yield from (
            f"{loop.indent}{line}"
            for line in call(
                f"{loop.item} = checkpoint_wrapper",
                [loop.read, "checkpoint_impl=CheckpointImpl.NO_REENTRANT"],
                room=4 + len(loop.indent),
            ).split("\n")
        )


def _compile(lowered: Lowered) -> Lines:
    for op in lowered.ops:
        if isinstance(op, Compile):
            loop = loop_over(op.modules, lowered.layers, place=_note(op.place))
            yield from loop.head
            yield f"{loop.indent}{loop.item}.compile({'fullgraph=True' if op.fullgraph else ''})"


def _shard(lowered: Lowered) -> Lines:
    ops = [op for op in lowered.ops if isinstance(op, FullyShard)]
    meshes = dict.fromkeys((op.shard, op.replicate) for op in ops)
    policies = dict.fromkeys(_policy(op) for op in ops)
    names: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
    for number, key in enumerate(meshes):
        names[key] = "data" if len(meshes) == 1 else f"data_{number}"
        yield from _data_mesh(names[key], *key)
    rules: dict[str, str] = {}
    for number, policy in enumerate(policies):
        rules[policy] = "policy" if len(policies) == 1 else f"policy_{number}"
        yield from call(f"{rules[policy]} = MixedPrecisionPolicy", [policy], room=4).split("\n")
    for op in ops:
        shared = [
            f"mesh={names[op.shard, op.replicate]}",
            f"reshard_after_forward={op.reshard}",
            f"mp_policy={rules[_policy(op)]}",
        ]
        yield from _unit(op, shared, lowered)


def _unit(op: FullyShard, shared: list[str], lowered: Lowered) -> Lines:
    if op.group:
        items = [_torch_path(n) for m in op.members for n in m.names()]
        yield "# one unit: what is gathered together"
        target = f"[{', '.join(items)}]"
        yield from call("fully_shard", [target, *shared], room=4, place=_note(op.place)).split("\n")
        return
    loop = loop_over(op.members[0], lowered.layers, place=_note(op.place))
    yield from loop.head
    place = "" if loop.head else _note(op.place)
    lines = call("fully_shard", [loop.item, *shared], room=4 + len(loop.indent), place=place)
    yield from (f"{loop.indent}{line}" for line in lines.split("\n"))


def _torch_path(name: str) -> str:
    """The expression of a module by its torch name."""
    return reach([f"[{p}]" if p.isdecimal() else p for p in name.split(".")] if name else [])


def _data_mesh(name: str, shard: tuple[str, ...], replicate: tuple[str, ...]) -> Lines:
    """The mesh that `fully_shard` takes; several axes are flattened to one."""
    dims = []
    for axes in filter(None, (replicate, shard)):
        if len(axes) > 1:
            inner = ", ".join(f'"{a}"' for a in axes)
            yield f'mesh[{inner}]._flatten("{"_".join(axes)}")'
        dims.append(f'"{"_".join(axes)}"')
    yield f"{name} = mesh[{', '.join(dims)}]"


def _policy(op: FullyShard) -> str:
    parts = [
        f"{argument}=torch.{value}"
        for argument, value in (
            ("param_dtype", op.param),
            ("reduce_dtype", op.reduce),
            ("output_dtype", op.output),
        )
        if value
    ]
    if not op.cast_inputs:
        parts.append("cast_forward_inputs=False")
    return ", ".join(parts)
