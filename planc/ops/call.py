"""Torch calls as data: operations yield them, one printer writes them, one executor makes them.

A function is named by `package.module:name`, or by `.name` where it is a method of its first
argument. `standalone.file:name` is a definition of `planc/runtime/standalone/`, which emitted
scripts inline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import TYPE_CHECKING, Self

from planc.model.facts import Modules

if TYPE_CHECKING:
    from planc.ops.lowered import MeshAxis

Keywords = tuple[tuple[str, "Value"], ...]

PARALLELIZE = "torch.distributed.tensor.parallel:parallelize_module"
"""The one function whose calls a script gathers, one dictionary of styles for each block."""

# Values ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variable:
    """What every stage of a script is given: `model`, or `mesh`, the mesh of all axes."""

    name: str


@dataclass(frozen=True, slots=True)
class ImportedName:
    """Something to import that is not called, such as a dtype: `package.module:name`."""

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
    """A dictionary with texts as keys."""

    entries: Keywords


@dataclass(frozen=True, slots=True)
class Members:
    """A list of all modules of some sets."""

    sets: tuple[Modules, ...]


@dataclass(frozen=True, slots=True)
class Numbered:
    """A list of pairs: the index of an entry of the outermost list, and a module in that entry."""

    modules: Modules


@dataclass(frozen=True, slots=True)
class MeshOf:
    """The device mesh of some axes, as `fully_shard` takes it.

    Args:
        shard: one dimension; several axes are flattened to it, in the order of the mesh.
        replicate: axes of a dimension before it, flattened too; with `shard` empty the only one.
    """

    shard: tuple[str, ...]
    replicate: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function and what it is called with.

    Args:
        keywords: by name; a value under an empty name is a `Table` of further ones.
    """

    function: str
    arguments: tuple[Value, ...] = ()
    keywords: Keywords = ()


@dataclass(frozen=True, slots=True)
class Shared:
    """A value that is made once and used by several calls; a variable of the script.

    Args:
        name: of the variable; different values of one name are numbered.
        note: a comment on it.
    """

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
    """Calls for each module of a set, with the module as their first argument.

    Args:
        replaces: whether the result of the only call takes the place of the module.
        note: a comment: the plan's line that asked for it.
    """

    modules: Modules
    calls: tuple[FunctionCall, ...]
    replaces: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """One call.

    Args:
        replaces: modules in whose places the call puts others, under the same names.
    """

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
    """The function of a script that holds the calls of one kind of operation.

    Args:
        name: of the function; a stage that comes again is numbered.
        about: its docstring.
    """

    name: str
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What calls depend on beside their operation.

    Args:
        axes: the sizes of the mesh's axes by name, outermost first.
        fills: whether weights are read into the model afterwards.
    """

    axes: Mapping[str, int]
    fills: bool = False

    @classmethod
    def of(cls, axes: Iterable[MeshAxis], *, fills: bool = False) -> Self:
        return cls(axes={axis.name: axis.size for axis in axes}, fills=fills)

    def size(self, axes: Iterable[str]) -> int:
        """The number of ranks along some axes."""
        return prod(self.axes[axis] for axis in axes)


# Looking into them -------------------------------------------------------------------------------


def values_of(step: Step) -> tuple[Value, ...]:
    """The values of a step."""
    match step:
        case Each():
            return step.calls
        case Once():
            return (step.call,)
        case Assign():
            return step.target, step.value


def inside(value: Value) -> Iterator[Value]:
    """What a value is made of."""
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
                values += inside(value)


# Helpers -----------------------------------------------------------------------------------------


def given(**keywords: Value) -> Keywords:
    """Keyword arguments without those that are None."""
    return tuple((name, value) for name, value in keywords.items() if value is not None)


def dtype(name: str | None) -> ImportedName | None:
    """A dtype by torch's name for it."""
    return None if name is None else ImportedName(f"torch:{name}")


def mesh_source(mesh: MeshOf, axes: Mapping[str, int]) -> Value:
    """The calls that make a mesh out of the one of all axes.

    The root mesh gives its axes in their order alone, so other pairs of dimensions are put together
    as FSDP itself does it (torch.distributed.fsdp._fully_shard._fsdp_init).

    Args:
        mesh: what is wanted.
        axes: the sizes of all axes by name, outermost first.
    """
    if not mesh.replicate or not mesh.shard:
        return _dimension(mesh.shard or mesh.replicate, axes)
    names = (*mesh.replicate, *mesh.shard)
    if len(names) == 2 and names == tuple(a for a in axes if a in names):
        return Index(MESH, names)
    pair = Items((_dimension(mesh.replicate, axes), _dimension(mesh.shard, axes)))
    return Shared(
        "hsdp_mesh", FunctionCall("torch.distributed.device_mesh:DeviceMesh._concatenate", (pair,))
    )


def _dimension(some: tuple[str, ...], axes: Mapping[str, int]) -> Value:
    # an axis of one rank adds nothing but another process group
    wide = tuple(a for a, size in axes.items() if a in some and size > 1)
    if len(wide) < 2:
        return Index(MESH, (wide or some)[:1])
    name = "_".join(wide)
    return Shared(f"{name}_mesh", FunctionCall("._flatten", (Index(MESH, wide), name)))
