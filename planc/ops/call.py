"""Torch calls as data: operations yield them, a printer writes them, an executor makes them.

A function is named `package.module:name`, or `.name` for a method of its first argument.
`standalone.file:name` is a definition in `planc/runtime/standalone/`, and
`sections.NAME.standalone:name` one in the folder of a section; emitted scripts inline both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

from planc.model.facts import Modules

Keywords = tuple[tuple[str, "Value"], ...]

PARALLELIZE = "torch.distributed.tensor.parallel:parallelize_module"
"""The only function whose calls a script merges: one dictionary of styles per block."""

INLINED = {"standalone.": "planc.runtime.", "sections.": "planc."}
"""The prefixes of the modules that scripts inline, and the packages that hold them."""

# Values ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variable:
    """An argument of every function in a script: `model`, or `mesh`, the mesh of all axes."""

    name: str


@dataclass(frozen=True, slots=True)
class ImportedName:
    """An imported object that is not called, such as a dtype: `package.module:name`."""

    path: str


@dataclass(frozen=True, slots=True)
class ParameterRef:
    """A parameter of the model by its torch name, such as `lm_head.weight`."""

    name: str


@dataclass(frozen=True, slots=True)
class Attribute:
    owner: Value
    name: str


@dataclass(frozen=True, slots=True)
class Index:
    """`value["a", "b"]`."""

    value: Value
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A dictionary with strings as keys."""

    entries: Keywords


@dataclass(frozen=True, slots=True)
class Members:
    """The list of all modules in some sets."""

    sets: tuple[Modules, ...]


@dataclass(frozen=True, slots=True)
class Numbered:
    """Pairs: the index of a block in the outermost list, and a module inside that block."""

    modules: Modules


@dataclass(frozen=True, slots=True)
class MeshOf:
    """The device mesh over some axes, as `fully_shard` takes it.

    Args:
        shard: the axes of the shard dimension; several are flattened in the order of the mesh.
        replicate: the axes of the replicate dimension, which comes first, flattened as well; the
            only dimension where `shard` is empty.
    """

    shard: tuple[str, ...]
    replicate: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function and its arguments.

    Args:
        function: its name, see the module's docstring.
        arguments: positional.
        keywords: by name; a value under an empty name is a `Table` that is unpacked (`**`).
    """

    function: str
    arguments: tuple[Value, ...] = ()
    keywords: Keywords = ()


@dataclass(frozen=True, slots=True)
class Shared:
    """A value that several calls use: a variable of the script, numbered if names clash."""

    name: str
    value: Value
    note: str = ""


Value = (
    None
    | bool
    | int
    | float
    | str
    | tuple["Value", ...]
    | Variable
    | ImportedName
    | ParameterRef
    | Attribute
    | Index
    | Items
    | Table
    | Members
    | Numbered
    | MeshOf
    | FunctionCall
    | Shared
)

MODEL = Variable("model")
MESH = Variable("mesh")
DEVICE_TYPE = Attribute(MESH, "device_type")

# Steps -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Each:
    """Calls with each module of a set as first argument; `replaces` it by the only call's result;
    `note` is the line of the plan as a comment.
    """

    modules: Modules
    calls: tuple[FunctionCall, ...]
    replaces: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """One call, and the modules that it replaces, under the same names."""

    call: FunctionCall
    replaces: tuple[Modules, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    target: ParameterRef | Attribute
    value: Value
    note: str = ""


Step = Each | Once | Assign


@dataclass(frozen=True, slots=True)
class ScriptFunction:
    """A function of a script with the calls of one kind; a second of its name is numbered."""

    name: str
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The mesh and the settings that the calls of an operation depend on.

    Args:
        axes: the sizes of the mesh's axes by name, outermost first.
        experts: the sizes of the ranks with equal experts, and of those that divide experts, by
            name; empty where none do.
        expert_axes: of which both are made, outermost first.
        fills: whether weights are loaded into the model afterwards.
        rooted: whether the model itself is a unit of FSDP.
    """

    axes: Mapping[str, int]
    experts: Mapping[str, int] = field(default_factory=dict)
    expert_axes: tuple[str, ...] = ()
    fills: bool = False
    rooted: bool = True

    def size(self, axes: Iterable[str]) -> int:
        """The number of ranks along some axes."""
        sizes = {**self.axes, **self.experts}
        return prod(sizes[axis] for axis in axes)


# Looking into them -------------------------------------------------------------------------------


def values_of(step: Step) -> tuple[Value, ...]:
    """The values that a step uses."""
    match step:
        case Each():
            return step.calls
        case Once():
            return (step.call,)
        case Assign():
            return step.target, step.value


def parts_of(value: Value) -> Iterator[Value]:
    """The values that a value is built from."""
    if isinstance(value, tuple):
        yield from value
    elif isinstance(value, Attribute | Index | Items | Table | FunctionCall | Shared):
        yield from (getattr(value, part.name) for part in fields(value))


def modules_of(step: Step) -> Iterator[Modules]:
    """The sets of modules that a step works on."""
    if isinstance(step, Each):
        yield step.modules
    elif isinstance(step, Once):
        yield from step.replaces
    values = [*values_of(step)]
    while values:
        match value := values.pop():
            case Members():
                yield from value.sets
            case Numbered():
                yield value.modules
            case _:
                values += parts_of(value)


# Helpers -----------------------------------------------------------------------------------------


def drop_none(**keywords: Value) -> Keywords:
    """Keyword arguments without those that are None."""
    return tuple((name, value) for name, value in keywords.items() if value is not None)


def plain(value: Any) -> Value:
    """A number, a text, a truth value, or a list of such."""
    return Items(tuple(map(plain, value))) if isinstance(value, tuple) else value


def dtype(name: str | None) -> ImportedName | None:
    """A dtype by its name in torch."""
    return None if name is None else ImportedName(f"torch:{name}")


def mesh_source(mesh: MeshOf, context: Context) -> Value:
    """The calls that build a submesh of the mesh of all axes.

    Torch slices a root mesh only in the order of its axes. Other pairs of dimensions are
    concatenated as FSDP does it (torch.distributed.fsdp._fully_shard._fsdp_init).

    Args:
        context: the sizes of all axes.
    """
    if not mesh.replicate or not mesh.shard:
        return _dimension(mesh.shard or mesh.replicate, context)
    names = (*mesh.replicate, *mesh.shard)
    if len(names) == 2 and names == tuple(a for a in context.axes if a in names):
        return Index(MESH, names)
    pair = Items((_dimension(mesh.replicate, context), _dimension(mesh.shard, context)))
    function = "torch.distributed.device_mesh:DeviceMesh._concatenate"
    return Shared("hsdp_mesh", FunctionCall(function, (pair,)))


def _dimension(names: tuple[str, ...], context: Context) -> Value:
    if set(names) & context.experts.keys():
        return _of_experts(names, context)
    # an axis of one rank would only add a process group
    wide = tuple(a for a, size in context.axes.items() if a in names and size > 1)
    if len(wide) < 2:
        return Index(MESH, (wide or names)[:1])
    name = "_".join(wide)
    return Shared(f"{name}_mesh", FunctionCall("._flatten", (Index(MESH, wide), name)))


def _of_experts(names: tuple[str, ...], context: Context) -> Value:
    """A dimension of the ranks that divide experts, or of those with equal ones.

    Where whole axes divide them, their process groups serve; else an axis is cut in two.
    """
    (rest, _), (ranks, size) = context.experts.items()
    inner, count = list[str](), 1
    wide = [a for a in context.expert_axes if context.axes[a] > 1]
    while count < size:
        inner.insert(0, wide.pop())
        count *= context.axes[inner[0]]
    if count == size and wide:
        return _dimension(tuple(inner if ranks in names else wide), context)
    arguments = (MESH, context.expert_axes, (rest, ranks), size)
    function = "standalone.expert_parallel:mesh_of_experts"
    return Index(Shared("expert_mesh", FunctionCall(function, arguments)), names)
