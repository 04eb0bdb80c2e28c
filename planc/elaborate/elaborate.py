"""AST + model facts -> IR."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from planc.diagnostics.diagnostic import Sink, did_you_mean, elsewhere, one_of
from planc.elaborate.evaluate import evaluate
from planc.elaborate.mesh import solve
from planc.elaborate.program import Program, axis_names, gather, origin_of, require
from planc.elaborate.scope import Failed, Scope, Sizes
from planc.elaborate.sections.adapters import adapters
from planc.elaborate.sections.context import context
from planc.elaborate.sections.expert import expert
from planc.elaborate.sections.fsdp import fsdp
from planc.elaborate.sections.load import load
from planc.elaborate.sections.optimizer import optimizer
from planc.elaborate.sections.pipeline import pipeline
from planc.elaborate.sections.tensor import tensor
from planc.ir.mesh_axes import DERIVED, EXPERT_TENSOR, EXPERTS, expand_axes, role_of, valid_axes
from planc.ir.nodes import Mesh, Plan
from planc.model.facts import Facts
from planc.ops.base import AxisRole
from planc.ops.lowered import MeshAxis
from planc.sections import STATED, Hook
from planc.syntax import ast, plan_files

SECTIONS = (
    "mesh",
    "load",
    "tensor",
    "adapters",
    *STATED,
    "fsdp",
    "replicate",
    "context",
    "pipeline",
    "expert",
    "optimizer",
)


def elaborate(
    files: Sequence[ast.File],
    facts: Facts,
    sink: Sink,
    *,
    world_size: int | None = None,
    settings: Iterable[str] = (),
    sizes: Sizes | None = None,
) -> Plan | None:
    """Elaborates a plan (files, extended ones first) for one model on one mesh.

    Before, a syntax tree:
        let block = model.layers.*
        tensor on tp { $block.mlp.up_proj : colwise }
        mesh { dp_shard = auto  tp = 2 }

    After, for 8 ranks and 32 layers:
        Mesh(axes = (dp_shard 4, tp 2))
        TensorRule(modules = model.layers[0:32].mlp.up_proj, axis = "tp", style = Colwise())
        each with the span of its line

    Args:
        sink: receives PL01x, PL1xx (names), PL3xx (mesh) and PL650 (family).
        settings: `name=value` for options and mesh axes.
        sizes: where a proxy model stands for this one, the source of the numbers in arguments. All
            else is decided as without it: conditions, selectors, `auto`.

    Returns:
        None where the header or mesh is invalid; `Plan.broken` names sections with errors.
    """
    program = program_of(files, facts, sink, world_size=world_size, settings=settings)
    _family(program)
    mesh = _with_roles(solve(program), program)
    if mesh is None or program.header is None:
        return None
    if sizes is not None:
        program.scope.sized = program.scope.sized_by(sizes, mesh)

    part = program.part
    require(program)
    _axes(program, mesh)
    rules, sequence, images = part("tensor", lambda: tensor(program))
    parts, exchanges = part("context", lambda: context(program))
    options = _options(program)
    loaded = part("load", lambda: load(program))
    sharded = part("fsdp", lambda: fsdp(program))
    return Plan(
        name=program.header.name,
        families=tuple(f.path for f in program.header.families),
        options=options,
        mesh=mesh,
        load=loaded,
        tensor=rules,
        sequence=sequence,
        images=(*images, *(rule.images for rule in parts if rule.images)),
        fsdp=sharded,
        context=parts,
        attention=exchanges,
        adapters=part("adapters", lambda: adapters(program, loaded, sharded)),
        sections=_sections(program),
        pipeline=part("pipeline", lambda: pipeline(program)),
        experts=part("expert", lambda: expert(program)),
        optimizer=part("optimizer", lambda: optimizer(program)),
        broken=frozenset(program.broken),
        origin=program.header.origin,
    )


_READ = Hook[Callable[[Program], tuple[Any, ...]]]("section", "read")


def _sections(program: Program) -> Mapping[str, tuple[Any, ...]]:
    """The rules of sections that are folders; a section without rules is left out."""
    stated = [name for name in STATED if any(program.sections_named(name))]
    readers = {name: read for name in stated if (read := _READ.find(name))}
    rules = {name: program.part(name, partial(read, program)) for name, read in readers.items()}
    return {name: section_rules for name, section_rules in rules.items() if section_rules}


def _options(program: Program) -> dict[str, object]:
    options = {
        name: evaluate(definition.given or definition.value, program.scope)
        for name, definition in program.scope.definitions.items()
        if definition.kind == "option"
    }
    return {name: value for name, value in options.items() if not isinstance(value, Failed)}


def program_of(
    files: Sequence[ast.File],
    facts: Facts,
    sink: Sink,
    *,
    world_size: int | None = None,
    settings: Iterable[str] = (),
) -> Program:
    """The names of a plan and their values, before a section is read; as for `elaborate`."""
    scope = Scope(facts=facts, sink=sink, evaluate=evaluate, solve=lambda: solve(program))
    program = Program(facts=facts, sink=sink, world_size=world_size, scope=scope)
    gather(files, program, settings, SECTIONS)
    return program


def _family(program: Program) -> None:
    header, facts = program.header, program.facts
    if header is None:
        hint = f"start it with `plan {facts.family} for {facts.family}`"
        program.sink.error("PL009", "the plan has no header", origin_of(program), help=hint)
        return
    names = [f.path for f in header.families]
    if {*facts.names, plan_files.ANY} & {*names}:
        return
    program.sink.error(
        "PL650",
        f"plan `{header.name}` is for {one_of(names, last='and')}, the model is {facts.family}",
        *(f.origin for f in header.families),
        facts=[f"model_type = {facts.family}  ({facts.config_name})"],
        help=f"use a plan for {facts.family}, or add it to the header when the names match",
    )


def _with_roles(mesh: Mesh | None, program: Program) -> Mesh | None:
    """The mesh with the role of each axis, by the sections; leaves those that have no axis."""
    if mesh is None:
        return None

    def axes_of_sections(*sections: str) -> tuple[str, ...]:
        named_sections = (s for s in program.sections if s.name in sections)
        return expand_axes(
            (a.path for s in named_sections for a in (*s.axes, *s.replicate)), mesh.names
        )

    tensor, data = axes_of_sections("tensor"), axes_of_sections("fsdp", "replicate")
    context = axes_of_sections("context")
    axes = (
        replace(a, role=role_of(a.name, tensor=tensor, data=data, context=context))
        for a in mesh.axes
    )
    program.mesh = replace(mesh, axes=tuple(axes))
    program.sections = [*_over_axes(program, mesh)]
    return program.mesh


def _over_axes(program: Program, mesh: Mesh) -> Iterator[ast.Section]:
    """The sections without the axes that are left out, and without those over them alone, but for
    experts with a capacity, which one rank has too.

    A section over an optional axis is an offer, whose place one of an extending plan takes.
    """
    offered = {*axis_names(program, optional=True), *program.scope.replaced_axes}

    def is_covered(section: ast.Section, by: Iterable[ast.Section]) -> bool:
        axes = [axis.path for axis in section.axes]
        return (
            bool(axes)
            and offered.issuperset(axes)
            and any(
                other.name == section.name
                and [axis.path for axis in other.axes] == axes
                and other.origin.source is not section.origin.source
                and not any(getattr(item, "override", False) for item in other.items)
                for other in by
            )
        )

    def there(axes: tuple[ast.Name, ...]) -> tuple[ast.Name, ...]:
        return tuple(axis for axis in axes if axis.path not in mesh.left_out)

    for i, section in enumerate(program.sections):
        if is_covered(section, program.sections[i + 1 :]):
            continue
        if section.name == "expert" and _limits(section.items):
            yield section
            continue
        narrowed = replace(section, axes=there(section.axes), replicate=there(section.replicate))
        if bool(narrowed.axes or narrowed.replicate) is bool(section.axes or section.replicate):
            yield narrowed


def _limits(items: Iterable[object]) -> bool:
    """Whether a rule gives experts a capacity."""
    for item in items:
        match item:
            case ast.Rule() if any(a.name == "capacity" for a in item.action.arguments):
                return True
            case ast.Block() if _limits(item.items):
                return True
            case ast.When() if _limits((*item.then, *item.otherwise)):
                return True
    return False


def _axes(program: Program, mesh: Mesh) -> None:
    """Checks sizes from `--set`, that every `on` names an axis, and that a section uses every axis
    with several ranks. An axis may be unused because its name is misspelled or missing, so that is
    reported alone.
    """
    _settings(program, mesh)
    used, reported = set[str](), set[str]()
    misspelled = False
    for section in program.sections:
        # only sections over data axes can work over a derived axis
        data = section.name in ("fsdp", "replicate")
        names = valid_axes(mesh.names) if data else mesh.names
        names = (EXPERTS,) if section.name == "expert" and _divides(program) else names
        misspelled = misspelled or (data and not section.axes)
        for axis in (*section.axes, *section.replicate):
            used.update(mesh.expand([axis.path]))
            known = axis.path in names or axis.path in reported
            misspelled = misspelled or axis.path not in names
            if known:
                continue
            reported.add(axis.path)
            has = f"it has {one_of(names, last='and')}"
            made_of = DERIVED.get(axis.path) if data else None
            if made_of:
                has += f"; `{axis.path}` is made of {one_of(made_of, last='and')}"
            elif axis.path not in valid_axes(mesh.names):
                has += f"; a line of the mesh, `{axis.path} = 2`, adds {axis.path}"
            hint = has if made_of else did_you_mean(axis.path, names, has)
            if axis.path == EXPERTS and _divides(program):
                hint = (
                    "`ep` covers ranks of other axes; FSDP shards expert-parallel weights over the "
                    "rest of them: `unit(on = ep_shard)`"
                )
            program.sink.error(
                "PL305", f"the mesh has no axis `{axis.path}`", axis.origin, help=hint
            )
        axes = expand_axes((a.path for a in section.axes), mesh.names)
        for name in dict.fromkeys(a for i, a in enumerate(axes) if a in axes[:i]):
            program.sink.error("PL304", f"axis `{name}` is named twice", section.axes[0].origin)
    for sized in (*mesh.axes, *([mesh.experts.ranks] if mesh.experts else ())):
        if sized.size > 1 and sized.name not in used and not misspelled:
            _report_unused(sized, used, program)


def _settings(program: Program, mesh: Mesh) -> None:
    """Reports sizes from `--set` of axes that the mesh lacks under these options."""
    for name, literal in program.settings.items():
        there = name in (EXPERTS, EXPERT_TENSOR) and name in program.scope.axis_names
        if name not in (*mesh.names, *mesh.left_out) and not there:
            program.sink.error(
                "PL106",
                f"`--set {name}` sizes an axis that the mesh does not have here",
                literal.origin.source.span(0, len(name)),
                help=f"it has {one_of(mesh.names, last='and')}; an option of the plan adds {name}",
            )


def _divides(program: Program) -> bool:
    """Whether the mesh says how many ranks divide experts, which may be 1."""
    return EXPERTS in program.scope.axis_names


def _report_unused(axis: MeshAxis, used: Iterable[str], program: Program) -> None:
    unset = f"set `{axis.name} = 1`"
    wanted = {
        AxisRole.STAGE: f"write `pipeline on {axis.name}` with its schedule and stages, or {unset}",
        AxisRole.SEQUENCE: f"write `context on {axis.name} {{ attention = all_gather }}` and `fsdp "
        f"on dp_shard * {axis.name}`; or {unset}",
        AxisRole.EXPERT: f"write `expert on {axis.name} {{ model.layers.*.mlp.experts : "
        f"dispatch(all_to_all) }}`, or {unset}",
    }
    program.sink.error(
        "PL306",
        f"axis `{axis.name}` has {axis.size:,} ranks, and no section works over it",
        axis.origin,
        facts=["its ranks would all compute the same"],
        help=elsewhere(axis.name)
        or wanted.get(axis.role)
        or did_you_mean(axis.name, used, f"write a section `on {axis.name}`, or {unset}"),
    )
