"""The mesh section -> a mesh with every axis sized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from planc.diagnostic import Label, nearest, one_of
from planc.ir.evaluate import describe, evaluate, truth
from planc.ir.plan import Axis, Mesh
from planc.ir.program import Program
from planc.ir.scope import Failed
from planc.source import Span
from planc.syntax import tree


def solve(program: Program) -> Mesh | None:
    """The mesh of a program, worked out once; None after a finding.

    A mesh axis is a positive integer or `auto`, which takes what the others leave of the world
    size. Without a world size `auto` counts as 1.
    """
    if not program.sized:
        program.sized = True
        program.mesh = _solve(program)
    return program.mesh


def _solve(program: Program) -> Mesh | None:
    settings = _settings(program)
    if settings is None:
        return None
    sized = [(s, _size(s, program)) for s in settings]
    if any(size is None for _, size in sized):
        return None
    autos = [s for s, size in sized if size == 0]
    product = prod(size for _, size in sized if size)
    if len(autos) > 1:
        program.sink.error(
            "PL302",
            f"{one_of((f'`{s.name}`' for s in autos), last='and')} are both `auto`",
            *(s.value.origin for s in autos),
            help="one axis takes what the others leave; give the other a size",
        )
        return None
    left = _left(autos, product, sized, program)
    if left is None:
        return None
    axes = tuple(
        Axis(name=s.name, size=size or left, inferred=size == 0, origin=_where(s, program))
        for s, size in sized
        if size is not None
    )
    return Mesh(axes=axes, origin=next(iter(program.named("mesh"))).origin)


def _settings(program: Program) -> list[tree.Setting] | None:
    """The axes, in the order in which they are first named, after overrides."""
    sections = list(program.named("mesh"))
    if not sections:
        program.sink.error(
            "PL308",
            "the plan has no mesh",
            *([program.header.origin] if program.header else []),
            help="write `mesh { dp_shard = auto  tp = 1 }`, one axis a line",
        )
        return None
    found: dict[str, tree.Setting] = {}
    for section in sections:
        for item in _flat(section.items, program):
            if not isinstance(item, tree.Setting):
                program.sink.error("PL011", "a mesh holds axes: `tp = 8`, one a line", item.origin)
                continue
            _axis(item, found, program)
    if not found:
        program.sink.error("PL308", "the mesh has no axis", sections[0].name_origin)
        return None
    return list(found.values())


def _axis(item: tree.Setting, found: dict[str, tree.Setting], program: Program) -> None:
    earlier = found.get(item.name)
    if earlier and not item.override:
        program.sink.error(
            "PL304",
            f"axis `{item.name}` is named twice",
            Label(span=item.name_origin, text="again here"),
            Label(span=earlier.name_origin, text="first here"),
            help=f"write `override {item.name} = ...` to replace the size in an extended plan",
        )
        return
    if item.override and not earlier:
        close = nearest(item.name, found)
        program.sink.error(
            "PL103",
            f"there is no earlier axis `{item.name}` to override",
            item.name_origin,
            help=f"did you mean `{close[0]}`?" if close else "take `override` away",
        )
    if program.scope.definitions.get(item.name):
        program.sink.error(
            "PL107",
            f"`{item.name}` is an axis and also an option or a let",
            item.name_origin,
            program.scope.definitions[item.name].origin,
            help="give one of them another name",
        )
    found[item.name] = item


def _flat(items: Iterable[tree.Item | tree.Statement], program: Program) -> Iterator[tree.Node]:
    for item in items:
        if isinstance(item, tree.When):
            condition = truth(item.condition, program.scope)
            if condition is not None:
                yield from _flat(item.then if condition else item.otherwise, program)
        else:
            yield item


def _size(setting: tree.Setting, program: Program) -> int | None:
    """The size that is written, 0 for `auto`, None after a finding."""
    value = program.settings.get(setting.name) or setting.value
    plain = isinstance(value, tree.Name) and value.path == "auto"
    if plain or (isinstance(value, tree.Literal) and value.value == "auto"):
        return 0
    size = evaluate(value, program.scope)
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    if not isinstance(size, Failed):
        text = isinstance(size, str) and size.isdecimal()
        program.sink.error(
            "PL300",
            f"axis `{setting.name}` cannot have the size {describe(size)}",
            value.origin,
            help=f"write `{setting.name} = {size}`, without quotes"
            if text
            else "a size is a positive integer, or `auto`",
        )
    return None


def _where(setting: tree.Setting, program: Program) -> Span:
    """The place that decided a size: `--set` before the plan."""
    given = program.settings.get(setting.name)
    return given.origin.source.span(0, given.origin.end) if given else setting.origin


def _left(
    autos: list[tree.Setting],
    product: int,
    sized: list[tuple[tree.Setting, int | None]],
    program: Program,
) -> int | None:
    """What `auto` comes to (1 where there is none), or None after a finding."""
    world = program.world_size
    factors = " * ".join(f"{s.name} {size}" for s, size in sized if size)
    labels = [
        Label(span=_where(s, program), text=f"{s.name} is {size}")
        for s, size in sized
        if size and size > 1
    ]
    if not autos:
        if world is None or world == product:
            return 1
        sizes = [s.name for s, _ in sized]
        told = "make one axis `auto`"
        if "dp_shard" in sizes and product and world % (product // _known(sized, "dp_shard")) == 0:
            fits = world // (product // _known(sized, "dp_shard"))
            told = f"dp_shard = {fits} would fit, or `auto`"
        program.sink.error(
            "PL301",
            f"the mesh has {product:,} ranks, the world {world:,}: {factors} = {product:,}",
            *(labels or [Label(span=next(iter(program.named("mesh"))).name_origin)]),
            help=told,
        )
        return None
    if world is None:
        program.sink.info(
            "PL307",
            f"`{autos[0].name} = auto` counts as 1, because no world size is given",
            autos[0].value.origin,
            help="give `--world-size N`",
        )
        return 1
    if world % product:
        program.sink.error(
            "PL303",
            f"{world:,} ranks do not divide by {product:,}: nothing is left for "
            f"`{autos[0].name} = auto` ({factors})",
            Label(span=autos[0].value.origin, text="auto"),
            *labels,
            help=f"the world size must be a multiple of {product:,}",
        )
        return None
    return world // product


def _known(sized: list[tuple[tree.Setting, int | None]], name: str) -> int:
    return next((size for s, size in sized if s.name == name and size), 1)
