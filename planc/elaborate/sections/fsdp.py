"""The fsdp section, or the replicate section that replaces it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from planc.diagnostics.diagnostic import Label, elsewhere
from planc.elaborate.program import Program
from planc.elaborate.rule_conflicts import Claims, Placed, Settings, flatten
from planc.elaborate.scope import Scope
from planc.elaborate.sections import fsdp_policies, fsdp_units
from planc.elaborate.sections.word_settings import one_word
from planc.elaborate.selectors import select
from planc.ir.mesh_axes import expand_axes
from planc.ir.nodes import Fsdp, Ignored, SpreadRule
from planc.ops.backend import Backend, backend, names
from planc.syntax import ast

_TORCH = "torch"
_HOLDS = "it holds `precision(...)` and rules such as `model.layers.* : unit`"
_POLICIES: dict[str, Callable[[Any, Scope], object]] = {
    "precision": fsdp_policies.section_precision,
    "prefetch": fsdp_policies.prefetch,
    "offload": fsdp_policies.offload,
}


@dataclass(slots=True)
class _Section:
    """The state of a section while its items are read."""

    program: Program
    claims: Claims[fsdp_units.UnitTerms]
    ignored: Claims[Ignored | None]
    spreads: Claims[SpreadRule | None]
    settings: Settings
    found: list[Placed] = field(default_factory=list)


def fsdp(program: Program) -> Fsdp | None:
    """The section that shards parameters over data axes, or None where a plan has none."""
    sections = [*program.sections_named("fsdp"), *program.sections_named("replicate")]
    if not sections:
        return None
    first = sections[0]
    sink = program.sink
    state = _Section(program, Claims(sink), Claims(sink), Claims(sink), Settings(sink))
    for section in sections:
        if (section.name, *_axes(section, program)) != (first.name, *_axes(first, program)):
            sink.error(
                "PL446",
                "two sections spread the model over different axes",
                Label(span=section.name_origin, text="this one"),
                Label(span=first.name_origin, text="and this one"),
                help="keep one; `unit(on = ...)` gives a unit axes of its own",
            )
            continue
        for placed in flatten(section, program.scope):
            _item(placed, section.name, state)
    kept = [c.modules for c in state.ignored.claims]
    for placed in _in_order_of_search(state.found):
        fsdp_units.found_units(placed, state.claims, kept, program.scope)
    shard, replicate = _spread(first, program)
    values = state.settings.values
    return Fsdp(
        shard=shard,
        replicate=replicate,
        precision=values.get("precision"),
        units=tuple(fsdp_units.units(state.claims)),
        ignored=state.ignored.rules(),
        prefetch=values.get("prefetch"),
        offload=values.get("offload"),
        divide=values.get("divide"),
        spreads=state.spreads.rules(),
        experts=program.mesh.experts if program.mesh else None,
        backend=_backend(state, first.name),
        origin=first.origin.source.span(first.origin.start, first.name_origin.end),
    )


def _backend(state: _Section, section: str) -> Backend | None:
    """The operation of the backend that a section names, without its units and axes; None for
    torch's FSDP, and after a finding.
    """
    lines, chosen = state.settings.lines, state.settings.values.get("backend", _TORCH)
    kind = backend(chosen) if chosen != _TORCH and chosen in names() else None
    for name, item in lines.items() if chosen else ():
        known = name in (*_POLICIES, "divide", "backend", *(kind.SETTINGS if kind else ()))
        if not known and (word := _owner(name)):
            used, title = kind.TITLE if kind else "torch's FSDP", backend(word).TITLE
            message = f"`{name}` is a setting of {title}, and this section uses {used}"
            help = f"write `backend = {word}` in the section, or remove this"
            state.program.sink.error("PL498", message, item.origin, help=help)
    if kind is None:
        return None
    operation: Backend | None = kind.part("section").read(lines, section, state.program.scope)
    return operation


def _owner(name: str) -> str | None:
    """The word of an installed backend that has a setting of this name."""
    return next((word for word in names() if name in backend(word).SETTINGS), None)


def _in_order_of_search(rules: Sequence[Placed]) -> list[Placed]:
    """The rules that search modules: `dtype(...)` in reverse order, so that a plan decides before
    the plan that it extends; then `auto(...)`, which counts the parameters outside of other units.
    """
    sizes = [r for r in rules if isinstance(r.item, ast.Rule) and _target(r.item) == "auto"]
    return [*(r for r in reversed(rules) if r not in sizes), *sizes]


def _target(rule: ast.Rule) -> str:
    return rule.target.name if isinstance(rule.target, ast.Call) else ""


def _axes(section: ast.Section, program: Program) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = program.mesh.names if program.mesh else program.scope.axis_names
    shard, replicate = (a.path for a in section.axes), (a.path for a in section.replicate)
    return expand_axes(shard, names), expand_axes(replicate, names)


def _spread(section: ast.Section, program: Program) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes over which a section shards, and the axes over which it replicates."""
    axes, copies = _axes(section, program)
    if not axes:
        verb = "shards" if section.name == "fsdp" else "copies"
        message = f"a `{section.name}` section names the axes that it {verb} over"
        help = f"write `{section.name} on dp_shard {{`"
        program.sink.error("PL305", message, section.name_origin, help=help)
    for name in section.replicate:
        for axis in set(axes).intersection(expand_axes([name.path], program.scope.axis_names)):
            message = f"`{axis}` cannot both shard and replicate"
            program.sink.error("PL310", message, name.origin, help="remove it from one of the two")
    if section.name == "fsdp":
        return axes, copies
    for name in section.replicate:
        message = "a `replicate` section replicates over the axes that it is `on`"
        help = f"write `replicate on {' * '.join((*axes, *copies))} {{`"
        program.sink.error("PL305", message, name.origin, help=help)
    return (), axes


def _item(placed: Placed, section: str, state: _Section) -> None:
    item = placed.item
    scope = state.program.scope
    match item:
        case ast.Rule() if item.action.name == "spread":
            fsdp_units.spread(item, placed, state.spreads, scope)
        case ast.Rule(target=ast.Call(name=name)) if name in fsdp_units.FOUND:
            state.found.append(placed)
        case ast.Rule():
            fsdp_units.rule(item, placed, state.claims, scope)
        case ast.Ignore():
            modules = select(item.target, placed.bases, scope, optional=item.optional)
            rule = Ignored(modules=scope.facts.model, origin=item.origin)
            state.ignored.add(modules, "ignoring", rule, item.origin, override=False)
        case ast.Directive(call=ast.Call(name=name)) if name in _POLICIES:
            state.settings.add(item, lambda item: _POLICIES[name](item, scope))
        case ast.Setting(name="divide"):
            state.settings.add(item, lambda item: fsdp_policies.divide(item, scope))
        case ast.Setting(name="backend"):
            words = {word: word for word in (_TORCH, *names())}
            state.settings.add(item, lambda item: one_word(item, words, scope))
        case ast.Setting(name=name) | ast.Directive(call=ast.Call(name=name)) if _owner(name):
            state.settings.add(item)
        case ast.Placement() | ast.Setting() | ast.Directive():
            name = item.call.name if isinstance(item, ast.Directive) else item.name
            message = f"`{name}` has no place in a `{section}` section"
            known = f"write `{name}(...)`, with its arguments" if name in _POLICIES else _HOLDS
            scope.sink.error("PL011", message, item.origin, help=elsewhere(name) or known)
        case _:
            message = f"this has no place in a `{section}` section"
            scope.sink.error("PL011", message, item.origin)
