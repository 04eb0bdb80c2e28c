"""The lowered plan as Python that needs no planc.

The file imports torch alone. It has one function per kind of operation, in order; comments name the
lines of the `.plan` file.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from textwrap import dedent, fill
from typing import NamedTuple

from planc.diagnostics.diagnostic import one_of
from planc.emit.python.imports import imports
from planc.emit.python.inlined_source import global_names, imported_names, needed_definitions
from planc.emit.python.layout import WIDTH, Bracketed, lay, prepend, quote, remark
from planc.emit.python.load_weights import load_function
from planc.emit.python.module_loops import Lines, Lists, loop_lines
from planc.emit.python.printer import Printer, inner_first
from planc.model.facts import Modules, Segment
from planc.model.indices import Indices
from planc.ops.call import PARALLELIZE, Context, Each, FunctionCall, Step, Value
from planc.ops.lowered import Lowered, Stage
from planc.ops.uneven_groups import uneven_groups

_FRAME = {"init_device_mesh": "torch.distributed.device_mesh"}
_WHOLE = "full_state_dict"
_NAMES = "keep_class_names"
_PLAIN = '    model = parallelize(model, build_mesh("cuda"))\n'
_PIPELINED = """    mesh = build_mesh("cuda")
    model = parallelize(model, mesh)
    losses = forward_backward(model, mesh, batches)  # of the last stage's microbatches
    norm = clip_grad_norm(model, 1.0)  # of all stages
"""
_OPTIMIZER = "    optimizer = planned_optimizer(model, lr=1e-4, weight_decay=0.1)\n"
_PACKED = """
Packed weights of several projections are stored in the order of ranks:
`full_state_dict(model)` returns them in the model's order.
"""


def render(lowered: Lowered, *, digest: str) -> str:
    """Python source with `build_mesh` and `parallelize`; deterministic.

    It is laid out as `ruff format` would.
    """
    context = lowered.context(fills=lowered.load.weights is not None)
    lists = Lists(lowered.layers, lowered.module_dicts)
    printer = Printer(context, lists, {**_FRAME, **imported_names()})
    by_rank = [tuple(_stage_functions(stage, context, printer)) for stage in lowered.stages]
    functions, calls = [*_groups(lowered, context, printer)], dict[int, list[str]]()
    early = bool(functions)
    for rank, written in enumerate(by_rank):
        for part in written:
            shared = all(part in other for other in by_rank)
            name = part.name if shared else f"{part.name}_at_{rank}"
            if not (shared and rank):
                functions.append(part.source(name))
            calls.setdefault(rank, []).append(f"{name}{part.arguments}")
    functions += load_function(lowered)
    steps = "\n".join(_loop_functions(lowered))
    definitions = needed_definitions("\n\n".join([*functions, steps]))
    packed = any(source.startswith("def repack(") for source in definitions)
    if packed:  # its state dict must be reordered
        definitions = needed_definitions("\n\n".join([*functions, steps, _WHOLE]))
    body = "\n\n".join([_mesh(lowered), *definitions, *functions, _main(lowered, calls, early)])
    needed = imports(body, printer.modules, printer.names)
    return f"{_docstring(lowered, digest, packed)}\n{needed}\n{body}"


def _loop_functions(lowered: Lowered) -> Iterator[str]:
    """The inlined functions that no operation calls: those of the frame, and of training loops."""
    yield from [_NAMES] * bool(lowered.fsdp_units)
    yield from dict.fromkeys(name for op in lowered.ops for name in op.LOOP_FUNCTIONS)


class _Function(NamedTuple):
    """A function of the script that makes the calls of some operations."""

    name: str
    about: str
    body: str

    @property
    def arguments(self) -> str:
        return "(model, mesh)" if "mesh" in global_names(dedent(self.body)) else "(model)"

    def source(self, name: str) -> str:
        return f'def {name}{self.arguments}:\n    """{self.about}"""\n{self.body}\n'


def _stage_functions(stage: Stage, context: Context, printer: Printer) -> Iterator[_Function]:
    """Yields the functions of one pipeline rank, in order."""
    known: list[str] = []
    for function, group in groupby(stage.ops, key=lambda op: op.script):
        steps = [step for op in group for step in op.calls(context)]
        if steps:
            known.append(function.name)
            again = known.count(function.name)
            name = function.name if again == 1 else f"{function.name}_{again}"
            yield _Function(name, function.about, "\n".join(_body(steps, printer)))


def _body(steps: Sequence[Step], printer: Printer) -> Lines:
    yield from printer.shared(steps)
    ordered = sorted(inner_first(steps), key=_styles_a_module, reverse=True)
    for styled, group in groupby(ordered, key=_styles_a_module):
        if styled:
            yield from _tensor([step for step in group if isinstance(step, Each)], printer)
        else:
            for step in group:
                yield from printer.step(step)


# The frame ---------------------------------------------------------------------------------------


def _docstring(lowered: Lowered, digest: str, packed: bool) -> str:
    names = ["torch", *_packages(lowered)]
    for need in dict.fromkeys(op.NEEDS for op in lowered.ops if op.NEEDS):
        names.insert(0, need)
    needed = f"{one_of(names, last='and')} alone"
    if lowered.code:
        needed = needed.replace("alone", "and the user-defined classes")
    optimizes = any("planned_optimizer" in op.LOOP_FUNCTIONS for op in lowered.ops)
    note = f"Written by planc from the lowered plan {digest[:12]}; it needs {needed}."
    return (
        f'"""{lowered.plan} for {lowered.model} on {lowered.world_size:,} ranks.\n\n'
        f"{fill(note, WIDTH)}\n\n"
        f"{_PIPELINED if lowered.pipeline else _PLAIN}{_OPTIMIZER * optimizes}"
        f'{_PACKED if packed else ""}"""\n'
    )


_BROUGHT = {"peft": ("transformers", "safetensors"), "transformers": ("safetensors",)}
"""Packages that other packages bring along."""


def _packages(lowered: Lowered) -> list[str]:
    """The packages that a script imports in addition to torch, without those that they bring."""
    names = dict.fromkeys(name for op in lowered.ops for name in op.packages)
    brought = {other for name in names for other in _BROUGHT.get(name, ())}
    return [name for name in names if name not in brought]


def _mesh(lowered: Lowered) -> str:
    items = tuple(f"{quote(a.name)}: {a.size}" for a in lowered.axes)
    notes = tuple(remark(a.place) for a in lowered.axes)
    constant = "\n".join(lay(Bracketed("MESH = {", items, "}", notes)))
    return constant + dedent('''


        def build_mesh(device_type="cuda"):
            """The device mesh, axes outermost first."""
            sizes, names = tuple(MESH.values()), tuple(MESH)
            return init_device_mesh(device_type, sizes, mesh_dim_names=names)
        ''')


def _groups(lowered: Lowered, context: Context, printer: Printer) -> Iterator[str]:
    if groups := uneven_groups(lowered, context):
        lines = (line for v in groups for line in loop_lines((), [printer.source(v.value)], ""))
        body = "\n".join(lines)
        about = "Creates the process groups that some stages use: every rank takes part."
        yield f'def make_groups(mesh):\n    """{about}"""\n{body}\n'


def _main(lowered: Lowered, calls: Mapping[int, Sequence[str]], early: bool) -> str:
    lines = [*calls.get(0, ())]
    if op := lowered.pipeline:
        lines = ["make_groups(mesh)"] * early
        lines += [f"pipeline_rank = mesh.get_local_rank({quote(op.axis)})"]
        for rank, rank_calls in calls.items():
            lines += [f"{'el' if rank else ''}if pipeline_rank == {rank}:"]
            lines += [f"    {c}" for c in rank_calls]
    lines += [f"{_NAMES}(model)"] * bool(lowered.fsdp_units)
    return (
        "def parallelize(model, mesh=None):\n"
        '    """Parallelizes the model over the mesh, in place, and returns it."""\n'
        "    mesh = build_mesh() if mesh is None else mesh\n"
        + "".join(f"    {line}\n" for line in (*lines, "return model"))
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
    # relative to the block, as `parallelize_module` takes them; empty for the block itself
    names = (".".join(map(str, step.modules.path[depth:])) for step in steps)
    styles = (printer.source(step.calls[0].arguments[1]) for step in steps)
    entries = map(prepend, (f"{quote(name)}: " for name in names), styles)
    plan = Bracketed("{", tuple(entries), "}", tuple(remark(step.note) for step in steps))
    call = printer.call(FunctionCall(PARALLELIZE), loop.item, printer.source(mesh), plan)
    yield from loop_lines(loop.head, [replace(call, notes=("", "", ""))], "")
