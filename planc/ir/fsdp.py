"""The fsdp section -> units."""

from __future__ import annotations

from dataclasses import dataclass, field

from planc.diagnostic import Label
from planc.ir.arguments import Arguments, unknown
from planc.ir.claims import Placed, flatten
from planc.ir.plan import Fsdp, Precision, Unit
from planc.ir.program import Program
from planc.ir.select import select
from planc.model.facts import Modules, Segment
from planc.model.indices import Indices
from planc.source import Span
from planc.syntax import tree

_RESHARD = {"always": True, "never": False, "except_last": "except_last"}
_PRECISION = ("param", "reduce", "output", "cast_inputs")
_DTYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp64": "float64",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float64": "float64",
}
_LATER = {"on", "shard_dim", "offload", "prefetch", "divide", "ignore"}


@dataclass(frozen=True, slots=True)
class _Terms:
    """What `unit(...)` says."""

    reshard: bool | int | str
    precision: Precision | None


@dataclass(slots=True)
class _Section:
    """What is known of the fsdp section while its items are read."""

    program: Program
    precision: Precision | None = None
    units: list[Unit] = field(default_factory=list)


def fsdp(program: Program) -> Fsdp | None:
    """The fsdp section of a plan, or None where it has none."""
    sections = list(program.named("fsdp"))
    if not sections:
        return None
    first = sections[0]
    state = _Section(program)
    for section in sections:
        if _axes(section) != _axes(first):
            program.sink.error(
                "PL010",
                "two fsdp sections over different axes are not supported yet",
                Label(span=section.name_origin, text="this one"),
                Label(span=first.name_origin, text="and this one"),
            )
            continue
        for placed in flatten(section, program.scope):
            _item(placed, state)
    if not first.axes:
        program.sink.error(
            "PL305",
            "an fsdp section names the axes that it shards over",
            first.name_origin,
            help="write `fsdp on dp_shard {`",
        )
    shard, replicate = _axes(first)
    for name in first.replicate:
        if name.path in shard:
            program.sink.error(
                "PL310",
                f"`{name.path}` cannot both shard and replicate",
                name.origin,
                help="take it out of one of the two",
            )
    return Fsdp(
        shard=shard,
        replicate=replicate,
        precision=state.precision,
        units=tuple(state.units),
        origin=first.origin.source.span(first.origin.start, first.name_origin.end),
    )


def _axes(section: tree.Section) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(a.path for a in section.axes), tuple(a.path for a in section.replicate)


def _item(placed: Placed, state: _Section) -> None:
    item = placed.item
    sink = state.program.sink
    match item:
        case tree.Rule():
            _rule(item, placed, state)
        case tree.Directive() if item.call.name == "precision":
            _section_precision(item, state)
        case tree.Ignore() | tree.Placement() | tree.Setting() | tree.Directive():
            named = item.call.name if isinstance(item, tree.Directive) else ""
            named = named or getattr(item, "name", "ignore")
            if named in {"ignore", "backend", "offload", "prefetch", "divide"}:
                sink.error(
                    "PL010", f"`{named}` in an fsdp section is not supported yet", item.origin
                )
            else:
                sink.error(
                    "PL011",
                    f"`{named}` has no place in an fsdp section",
                    item.origin,
                    help="it holds `precision(...)` and rules such as `model.layers.* : unit`",
                )
        case _:
            sink.error("PL011", "this has no place in an fsdp section", item.origin)


def _section_precision(item: tree.Directive, state: _Section) -> None:
    if state.precision is not None and not item.override:
        state.program.sink.error(
            "PL102",
            "two `precision` lines decide the same",
            Label(span=item.origin, text="this one"),
            Label(span=state.precision.origin, text="and this one"),
            help="write `override precision(...)` for the one that is to hold",
        )
        return
    if item.override and state.precision is None:
        state.program.sink.error(
            "PL103",
            "there is no earlier `precision` to override",
            item.origin,
            help="take `override` away",
        )
    arguments = Arguments(item.call, state.program.scope, _PRECISION)
    precision = _precision(arguments, item.origin)
    if arguments.done():
        state.precision = precision
        if precision is None:
            arguments.wrong(item, "`precision` says nothing", "write `precision(param = bf16)`")


def _precision(arguments: Arguments, origin: Span) -> Precision | None:
    """What the arguments say of precision, None where they say nothing."""
    said = {a.name for a in arguments.call.arguments} & set(_PRECISION)
    precision = Precision(
        param=arguments.word("param", _DTYPES, None),
        reduce=arguments.word("reduce", _DTYPES, None),
        output=arguments.word("output", _DTYPES, None),
        cast_inputs=arguments.truth("cast_inputs", True),
        origin=origin,
    )
    return precision if said else None


def _rule(rule: tree.Rule, placed: Placed, state: _Section) -> None:
    scope = state.program.scope
    if rule.action.name != "unit":
        unknown(rule.action, ("unit",), "fsdp action", scope)
        return
    if any(a.name in _LATER for a in rule.action.arguments):
        late = next(a for a in rule.action.arguments if a.name in _LATER)
        scope.sink.error("PL010", f"`unit({late.name} = ...)` is not supported yet", late.origin)
        return
    arguments = Arguments(rule.action, scope, ("reshard", "precision(...)"))
    reshard = arguments.word("reshard", _RESHARD, True, or_integer=True)
    precision = _unit_precision(arguments)
    if not arguments.done(positional=int(precision is not None)):
        return
    if isinstance(rule.target, tree.Call):
        _group(rule, rule.target, placed, _Terms(reshard, precision), state)
        return
    root = rule.target.path == "root" and not placed.nested
    found = (
        (scope.facts.model,)
        if root
        else select(rule.target, placed.bases, scope, optional=rule.optional)
    )
    last = max((m.path[i].last for m in found for i in _lists(m)), default=None)  # type: ignore[union-attr]
    for modules in found:
        for part, word in _parts(modules, reshard, last):
            _add(
                Unit(members=(part,), reshard=word, precision=precision, origin=rule.origin),
                rule,
                state,
            )


def _unit_precision(arguments: Arguments) -> Precision | None:
    """`unit(precision(param = fp32))`: a unit's own precision."""
    call = arguments.positional[0].value if arguments.positional else None
    if not isinstance(call, tree.Call) or call.name != "precision":
        return None
    inner = Arguments(call, arguments.scope, _PRECISION)
    precision = _precision(inner, call.origin)
    arguments.ok &= inner.done()
    return precision


def _lists(modules: Modules) -> list[int]:
    """The positions of a path where it picks entries of a list, the outermost only."""
    return [i for i, s in enumerate(modules.path) if isinstance(s, Indices)][:1]


def _parts(
    modules: Modules, reshard: bool | int | str, last: int | None
) -> list[tuple[Modules, bool | int]]:
    """`except_last`: the entry with the highest index of the rule's list keeps its parameters."""
    if not isinstance(reshard, str):
        return [(modules, reshard)]
    positions = _lists(modules)
    if not positions or last is None:
        return [(modules, True)]
    at = positions[0]
    indices = modules.path[at]
    assert isinstance(indices, Indices)
    final = indices & Indices.of([last])
    parts: list[tuple[Modules, bool | int]] = []
    for some, word in ((indices - final, True), (final, False)):
        if some:
            path: tuple[Segment, ...] = (*modules.path[:at], some, *modules.path[at + 1 :])
            parts.append((Modules(path, modules.module), word))
    return parts


def _group(
    rule: tree.Rule,
    call: tree.Call,
    placed: Placed,
    terms: _Terms,
    state: _Section,
) -> None:
    """`group(a, b) : unit`: all modules of all members are one unit."""
    scope = state.program.scope
    arguments = Arguments(call, scope)
    if call.name != "group":
        unknown(call, ("group",), "unit", scope)
        return
    if placed.nested:
        arguments.wrong(call, "a group stands outside blocks", "name its members in full")
        return
    members: list[Modules] = []
    for argument in arguments.positional:
        target = argument.value
        if isinstance(target, tree.Name):
            target = tree.Selector(origin=target.origin, path=target.path)
        if not isinstance(target, tree.Selector):
            arguments.wrong(target, "a group holds modules", "write `group(model.norm, lm_head)`")
            return
        found = select(target, placed.bases, scope, optional=rule.optional)
        if not found and not rule.optional:
            return
        members.extend(found)
    if not arguments.done(positional=len(arguments.positional)):
        return
    if not members:
        if not rule.optional:
            arguments.wrong(call, "the group is empty", "write `group(model.norm, lm_head)`")
        return
    # a group is one unit, so it is its own last
    word = False if isinstance(terms.reshard, str) else terms.reshard
    unit = Unit(
        members=tuple(members),
        group=True,
        reshard=word,
        precision=terms.precision,
        origin=rule.origin,
    )
    _add(unit, rule, state)


def _add(unit: Unit, rule: tree.Rule, state: _Section) -> None:
    """Adds a unit; one that meets an earlier one overrides it or conflicts (PL102)."""
    sink = state.program.sink
    met = False
    kept: list[Unit] = []
    for earlier in state.units:
        both = next(
            (
                shared
                for one in earlier.members
                for two in unit.members
                if (shared := one.overlap(two)) is not None
            ),
            None,
        )
        if both is None:
            kept.append(earlier)
            continue
        met = True
        same = earlier.origin == unit.origin
        if not rule.override and not same:
            sink.error(
                "PL102",
                f"two units hold `{both}`",
                Label(span=unit.origin, text="this unit"),
                Label(span=earlier.origin, text="and this one"),
                help="take one away, or write `override` before the one that is to hold",
            )
        kept.extend(_less(earlier, unit))
    if rule.override and not met:
        sink.error(
            "PL103",
            f"no earlier unit holds `{unit.members[0]}`: there is nothing to override",
            rule.origin,
            help="take `override` away",
        )
    state.units = [*kept, unit]


def _less(earlier: Unit, unit: Unit) -> list[Unit]:
    """What an override leaves of an earlier unit."""
    left: list[Modules] = list(earlier.members)
    for taken in unit.members:
        left = [rest for m in left for rest in m.minus(taken)]
    if not left:
        return []
    if earlier.group:
        members = tuple(left)
        return [_like(earlier, members, group=len(members) > 1 or len(members[0]) > 1)]
    return [_like(earlier, (m,), group=False) for m in left]


def _like(unit: Unit, members: tuple[Modules, ...], *, group: bool) -> Unit:
    return Unit(
        members=members,
        group=group,
        reshard=unit.reshard,
        precision=unit.precision,
        origin=unit.origin,
    )
