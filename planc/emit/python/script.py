"""The lowered plan as Python that needs no planc.

The file imports torch alone. It has one function per kind of operation, in order; comments name the
lines of the `.plan` file.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from textwrap import dedent, fill

from planc.emit.python.imports import imports
from planc.emit.python.inlined_source import global_names, imported, inlined
from planc.emit.python.layout import WIDTH, Group, headed, lay, quoted, remark
from planc.emit.python.load_weights import load_function
from planc.emit.python.module_loops import Lines, looped
from planc.emit.python.printer import Printer, inner_first
from planc.model.facts import Modules, Segment
from planc.model.indices import Indices
from planc.ops.call import PARALLELIZE, Context, Each, FunctionCall, Step, Value
from planc.ops.context import ContextParallel
from planc.ops.load import Load
from planc.ops.lora import Adapt
from planc.ops.lowered import Lowered
from planc.ops.megatron_fsdp import MegatronShard
from planc.ops.quantization import Quantize

_FRAME = {"init_device_mesh": "torch.distributed.device_mesh"}
_WHOLE = "full_state_dict"
_PACKED = """
Packed weights of several projections are stored in the order of ranks:
`full_state_dict(model)` returns them in the model's order.
"""


def render(lowered: Lowered, *, digest: str) -> str:
    """Python source with `build_mesh` and `parallelize`; deterministic.

    It is laid out as `ruff format` would.
    """
    known: list[str] = []
    functions: list[str] = []
    calls: list[str] = []
    fills = any(isinstance(op, Load) and op.weights for op in lowered.ops)
    context = Context.of(lowered, fills=fills)
    printer = Printer(context, lowered.layers, {**_FRAME, **imported()})
    for function, group in groupby(lowered.ops, key=lambda op: op.script):
        steps = [step for op in group for step in op.calls(context)]
        if not steps:
            continue
        known.append(function.name)
        again = known.count(function.name)
        name = function.name if again == 1 else f"{function.name}_{again}"
        body = "\n".join(_body(steps, printer))
        arguments = "(model, mesh)" if "mesh" in global_names(dedent(body)) else "(model)"
        functions.append(f'def {name}{arguments}:\n    """{function.about}"""\n{body}\n')
        calls.append(f"    {name}{arguments}\n")
    functions += load_function(lowered)
    definitions = inlined("\n\n".join(functions))
    packed = any(source.startswith("def repack(") for source in definitions)
    if packed:  # its state dict must be reordered
        definitions = inlined("\n\n".join([*functions, _WHOLE]))
    body = "\n\n".join([_mesh(lowered), *definitions, *functions, _main("".join(calls))])
    needed = imports(body, printer.modules, printer.names)
    return f"{_docstring(lowered, digest, packed)}\n{needed}\n{body}"


def _body(steps: Sequence[Step], printer: Printer) -> Lines:
    yield from printer.shared(steps)
    for styled, some in groupby(inner_first(steps), key=_styles_a_module):
        if styled:
            yield from _tensor([step for step in some if isinstance(step, Each)], printer)
        else:
            for step in some:
                yield from printer.step(step)


# The frame ---------------------------------------------------------------------------------------


def _docstring(lowered: Lowered, digest: str, packed: bool) -> str:
    needed = "torch alone"
    kinds = {type(op) for op in lowered.ops}
    if any(isinstance(op, Load) and op.weights in ("slices", "rank0") for op in lowered.ops):
        needed = "torch and safetensors alone"
    if ContextParallel in kinds:
        needed = "torch and transformers alone"
    if Adapt in kinds:
        needed = "torch and peft alone"
    if Quantize in kinds:
        needed = "torch, peft and bitsandbytes alone"
    if MegatronShard in kinds:
        needed = f"CUDA, megatron_fsdp{',' if ' and ' in needed else ' and'} {needed}"
    if lowered.code:
        needed = needed.replace("alone", "and the user-defined styles")
    note = f"Written by planc from the lowered plan {digest[:12]}; it needs {needed}."
    return (
        f'"""{lowered.plan} for {lowered.model} on {lowered.world_size:,} ranks.\n\n'
        f"{fill(note, WIDTH)}\n\n"
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
        '    """Parallelizes the model over the mesh, in place, and returns it."""\n'
        "    mesh = build_mesh() if mesh is None else mesh\n"
        f"{calls}    return model\n"
    )


# Tensor parallelism ------------------------------------------------------------------------------


def _styles_a_module(step: Step) -> bool:
    return isinstance(step, Each) and step.calls[0].function == PARALLELIZE


def _tensor(steps: Sequence[Each], printer: Printer) -> Lines:
    def together(step: Each) -> tuple[Value, tuple[Segment, ...]]:
        return step.calls[0].arguments[0], _block(step.modules)

    for (_, block), group in groupby(steps, key=together):
        for batch in _batches(group, len(block)):
            yield from _styles(batch, len(block), printer)


def _block(modules: Modules) -> tuple[Segment, ...]:
    """The path of the block in a list that contains the modules (or is them); empty for none."""
    last = max((i + 1 for i, s in enumerate(modules.path) if isinstance(s, Indices)), default=0)
    return modules.path[:last]


def _batches(steps: Iterable[Each], depth: int) -> list[list[Each]]:
    """Styles that fit in one dictionary, in order; a style on the block itself is alone.

    A dictionary has one style per module, so an input or output style on a styled module comes
    later.
    """
    batches: list[list[Each]] = []
    taken: set[tuple[Segment, ...]] = {()}
    for step in steps:
        name = step.modules.path[depth:]
        if () in taken or not name or name in taken:
            batches.append([])
            taken = set()
        batches[-1].append(step)
        taken.add(name)
    return batches


def _styles(steps: Sequence[Each], depth: int, printer: Printer) -> Lines:
    """One `parallelize_module` call for each block, with the styles of all modules inside it."""
    first = steps[0].modules
    if len(steps) == 1 and len(first.path) == depth:
        yield from printer.step(steps[0])
        return
    loop = printer.loop(Modules(first.path[:depth], first.module))
    mesh, _ = steps[0].calls[0].arguments
    styles = ((_key(s.modules, depth), printer.source(s.calls[0].arguments[1])) for s in steps)
    entries = (headed(f"{quoted(key)}: ", style) for key, style in styles)
    plan = Group("{", tuple(entries), "}", tuple(remark(step.note) for step in steps))
    call = printer.call(FunctionCall(PARALLELIZE), loop.item, printer.source(mesh), plan)
    yield from looped(loop.head, [replace(call, notes=("", "", ""))], "")


def _key(modules: Modules, depth: int) -> str:
    """A module's name relative to a block, for `parallelize_module`; empty for the block itself."""
    return ".".join(str(s) for s in modules.path[depth:])
