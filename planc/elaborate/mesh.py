"""The mesh section -> a mesh whose axes all have sizes."""

from dataclasses import dataclass, replace
from math import prod

from planc.diagnostics.diagnostic import Label, did_you_mean, one_of
from planc.diagnostics.source import Span
from planc.elaborate.evaluate import describe, evaluate, is_integer
from planc.elaborate.expert_axes import expert_mesh
from planc.elaborate.program import Program
from planc.elaborate.rule_conflicts import expand_conditions, nothing_to_override
from planc.elaborate.scope import Failed
from planc.ir.mesh_axes import EXPERT_TENSOR, EXPERTS, SHARD
from planc.ir.nodes import Mesh
from planc.ops.base import AxisRole
from planc.ops.lowered import MeshAxis
from planc.sections import is_sized
from planc.syntax import ast


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The axes with their sizes in the plan, 0 for `auto`."""

    pairs: tuple[tuple[ast.Setting, int], ...]

    @property
    def product(self) -> int:
        return prod(size for _, size in self.pairs if size)

    @property
    def text(self) -> str:
        return " * ".join(f"{setting.name} {size}" for setting, size in self.pairs if size)

    def labels(self, program: Program) -> list[Label]:
        return [
            Label(span=_where(setting, program), text=f"{setting.name} is {size}")
            for setting, size in self.pairs
            if size > 1
        ]


def solve(program: Program) -> Mesh | None:
    """The mesh of a program, computed once; None after a finding.

    The size of an axis is a positive integer or `auto`, the world size divided by all other sizes.
    An optional axis of one rank is left out.
    Without a world size `auto` counts as 1.
    """
    if not program.sized:
        program.sized = True
        program.mesh = _solve(program)
    return program.mesh


def _solve(program: Program) -> Mesh | None:
    sections = program.sections
    if sections and all(is_sized(section.name) for section in sections):
        return Mesh(axes=(), origin=sections[0].origin)
    settings = _settings(program)
    if settings is None:
        return None
    expert_settings = {s.name: s for s in settings if s.name in (EXPERTS, EXPERT_TENSOR)}
    ranks, inside = (
        _experts(expert_settings[name], program) if name in expert_settings else None
        for name in (EXPERTS, EXPERT_TENSOR)
    )
    written = [(s, _size(s, program)) for s in settings if s.name not in expert_settings]
    sizes = _Sizes(tuple((s, size) for s, size in written if size is not None))
    if len(sizes.pairs) < len(written):
        return None
    ones = {s.name for s, size in sizes.pairs if s.optional and size == 1}
    ones |= {s.name for s in expert_settings.values() if s.optional and ranks is None}
    gone = set(program.scope.replaced_axes).difference(s.name for s in settings)
    sizes = _Sizes(tuple(pair for pair in sizes.pairs if pair[0].name not in ones))
    autos = [s for s, size in sizes.pairs if size == 0]
    if len(autos) > 1:
        message = f"{one_of((f'`{s.name}`' for s in autos), last='and')} are both `auto`"
        hint = "one axis takes what the others leave; give the other a size"
        program.sink.error("PL302", message, *(s.value.origin for s in autos), help=hint)
        return None
    left = _auto_size(autos, sizes, program)
    if left is None:
        return None
    axes = tuple(
        MeshAxis(name=s.name, size=size or left, inferred=size == 0, origin=_where(s, program))
        for s, size in sizes.pairs
    )
    mesh = Mesh(
        axes=axes,
        assumed=bool(autos) and program.world_size is None,
        left_out=tuple(sorted(ones | gone)),
        origin=next(iter(program.sections_named("mesh"))).origin,
    )
    return expert_mesh(mesh, ranks, inside, program) if ranks or inside else mesh


def _experts(setting: ast.Setting, program: Program) -> MeshAxis | None:
    """The ranks that divide experts, or each of them; None for one rank, and after a finding."""
    size = _size(setting, program)
    if size == 0:
        message = f"axis `{setting.name}` cannot be `auto`"
        hint = "it is made of ranks of other axes: write their number"
        program.broken.add("expert")
        program.sink.error("PL300", message, setting.value.origin, help=hint)
    origin = _where(setting, program)
    if size is None or size < 2:
        return None
    return MeshAxis(name=setting.name, size=size, role=AxisRole.EXPERT, origin=origin)


def _settings(program: Program) -> list[ast.Setting] | None:
    """The axes, in the order in which they are first named, after overrides."""
    sections = list(program.sections_named("mesh"))
    if not sections:
        program.sink.error(
            "PL308",
            "the plan has no mesh",
            *([program.header.origin] if program.header else []),
            help="write `mesh { dp_shard = auto  tp = 1 }`, one axis a line",
        )
        return None
    settings: dict[str, ast.Setting] = {}
    for section in sections:
        for item in expand_conditions(section.items, program.scope):
            if not isinstance(item, ast.Setting):
                program.sink.error(
                    "PL011", "a mesh section contains axes: `tp = 8`, one a line", item.origin
                )
                continue
            _axis(item, settings, program)
    if not settings:
        program.sink.error("PL308", "the mesh has no axis", sections[0].name_origin)
        return None
    return list(settings.values())


def _axis(item: ast.Setting, settings: dict[str, ast.Setting], program: Program) -> None:
    earlier = settings.get(item.name)
    if earlier and not (item.override or earlier.optional):
        program.sink.error(
            "PL304",
            f"axis `{item.name}` is named twice",
            Label(span=item.name_origin, text="again here"),
            Label(span=earlier.name_origin, text="first here"),
            help=f"write `override {item.name} = ...` to replace the size in an extended plan",
        )
        return
    if item.override and not earlier:
        help = did_you_mean(item.name, settings, "remove `override`")
        nothing_to_override(program.sink, f"axis `{item.name}`", item.name_origin, help)
    if program.scope.definitions.get(item.name):
        program.sink.error(
            "PL107",
            f"`{item.name}` is an axis and also an option or a let",
            item.name_origin,
            program.scope.definitions[item.name].origin,
            help="give one of them another name",
        )
    settings[item.name] = replace(
        item, optional=item.optional or bool(earlier and earlier.optional)
    )


def _size(setting: ast.Setting, program: Program) -> int | None:
    """The size in the plan, 0 for `auto`, None after a finding."""
    value = program.settings.get(setting.name) or setting.value
    plain = isinstance(value, ast.Name) and value.path == "auto"
    if plain or (isinstance(value, ast.Literal) and value.value == "auto"):
        return 0
    name = value.path if isinstance(value, ast.Name) else ""
    wrong = bool(name) and not program.scope.knows(name)
    if wrong and (help := did_you_mean(name, ("auto",))):
        message = f"axis `{setting.name}` has no size: `{name}` names nothing"
        program.sink.error("PL300", message, value.origin, help=help)
        return None
    size = evaluate(value, program.scope)
    if is_integer(size) and size > 0:
        return size
    if not isinstance(size, Failed):
        message = f"axis `{setting.name}` cannot have the size {describe(size)}"
        help = "a size is a positive integer, or `auto`"
        if isinstance(size, str) and size.isdecimal():
            help = f"write `{setting.name} = {size}`, without quotes"
        elif isinstance(size, str) and "=" in size:
            help = "each setting is a text of its own: `--set tp=2 --set dp_shard=4`"
        program.sink.error("PL300", message, value.origin, help=help)
    return None


def _where(setting: ast.Setting, program: Program) -> Span:
    given = program.settings.get(setting.name)
    return given.origin.source.span(0, given.origin.end) if given else setting.origin


def _auto_size(autos: list[ast.Setting], sizes: _Sizes, program: Program) -> int | None:
    """The value of `auto` (1 where no axis is `auto`), or None after a finding."""
    if not autos:
        return _check_product(sizes, program)
    auto, world, product = autos[0], program.world_size, sizes.product
    if world is None:
        message = f"`{auto.name} = auto` counts as 1, because no world size is given"
        program.sink.info("PL307", message, auto.value.origin, help="give `--world-size N`")
        return 1
    if world % product:
        program.sink.error(
            "PL303",
            f"{world:,} ranks are not divisible by {product:,}: nothing is left for "
            f"`{auto.name} = auto` ({sizes.text})",
            Label(span=auto.value.origin, text="auto"),
            *sizes.labels(program),
            help=f"the world size must be a multiple of {product:,}",
        )
        return None
    return world // product


def _check_product(sizes: _Sizes, program: Program) -> int | None:
    """Every axis has a size, so their product must be the world size."""
    world, product = program.world_size, sizes.product
    if world is None or world == product:
        return 1
    help = "make one axis `auto`"
    shard = next((size for setting, size in sizes.pairs if setting.name == SHARD), 0)
    if shard and world % (product // shard) == 0:
        help = f"{SHARD} = {world // (product // shard)} would fit, or `auto`"
    section = next(iter(program.sections_named("mesh")))
    message = f"the mesh has {product:,} ranks, the world {world:,}: {sizes.text} = {product:,}"
    program.sink.error(
        "PL301", message, *(sizes.labels(program) or [Label(span=section.name_origin)]), help=help
    )
    return None
