"""The rules of an fsdp section -> units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from planc.diagnostics.diagnostic import did_you_mean, one_of
from planc.diagnostics.source import Span
from planc.elaborate.call_arguments import Arguments, unknown
from planc.elaborate.rule_conflicts import Claims, Placed
from planc.elaborate.scope import Scope
from planc.elaborate.sections.auto_wrap import by_dtype, by_size
from planc.elaborate.sections.fsdp_policies import DTYPES, PRECISION, precision
from planc.elaborate.selectors import select
from planc.ir.local_shapes import AUTO
from planc.ir.mesh_axes import expand_axes
from planc.ir.nodes import Precision, SpreadRule, Unit
from planc.model.facts import Modules
from planc.model.indices import Indices
from planc.ops.base import AxisRole
from planc.syntax import ast

_RESHARD = {"always": True, "never": False, "except_last": "except_last"}
FOUND = ("auto", "dtype")
_KNOWN = ("reshard", "precision(...)", "on", "shard_dim")


class UnitTerms(NamedTuple):
    """A unit without its members: one for each module, or of a group.

    Args:
        except_last: whether only the last entry of the lists is not resharded.
        group: the entry that a group is of, or -1 for all of its members; None for no group.
    """

    unit: Unit
    except_last: bool = False
    group: int | None = None

    def for_entry(self, *, last: bool, group: int | None = None) -> UnitTerms:
        """The terms of a last entry, or of another one."""
        unit = replace(self.unit, reshard=not last) if self.except_last else self.unit
        return UnitTerms(unit, group=group)


def rule(item: ast.Rule, placed: Placed, claims: Claims[UnitTerms], scope: Scope) -> None:
    """Adds the units of one rule, by name."""
    if item.action.name != "unit":
        unknown(item.action, ("unit", "spread"), "fsdp action", scope)
        return
    terms = _terms(item, scope)
    if terms is None:
        return
    if isinstance(item.target, ast.Call):
        members = _members(item, item.target, placed, scope)
        # a group is one unit, so it is its own last
        pairs = [(m, terms.for_entry(last=True, group=-1)) for m in members]
        if item.target.name == "groups":
            pairs = list(_one_by_one(members, terms, item.target, scope))
        claims.add_all(pairs, "unit", item.origin, override=item.override)
        return
    root = item.target.path == "root" and not placed.nested
    selected: tuple[Modules, ...] = (scope.facts.model,)
    if not root:
        selected = select(item.target, placed.bases, scope, optional=item.optional)
    _claim(selected, terms, item, claims)


def _terms(item: ast.Rule, scope: Scope) -> UnitTerms | None:
    arguments = Arguments(item.action, scope, _KNOWN)
    staged = _has_stages(scope)
    reshard = arguments.word("reshard", _RESHARD, not staged, 1, counts=True)
    except_last = isinstance(reshard, str)
    if except_last and staged:
        except_last, reshard = False, False  # the next microbatch needs every block again
    policy = _precision(arguments)
    shard = _axes(arguments)
    shard_dim = _dim(arguments)
    if not arguments.done(positional=int(policy is not None)):
        return None
    unit = Unit(
        members=(),
        reshard=except_last or reshard,
        precision=policy,
        shard=shard,
        shard_dim=shard_dim,
        explicit={a.name or "precision": a.origin.text for a in item.action.arguments},
        origin=item.origin,
    )
    return UnitTerms(unit, except_last)


def _has_stages(scope: Scope) -> bool:
    """Whether the mesh has pipeline stages.

    Each microbatch would all-gather what the previous one resharded, so units keep their parameters
    gathered by default: torchtitan's rule (`reshard_after_forward = "default"`).
    """
    mesh = scope.solve()
    return mesh is not None and any(a.size > 1 for a in mesh.of_role(AxisRole.STAGE))


def _dim(arguments: Arguments) -> int:
    """`shard_dim = 1`, counted from 0, or `shard_dim = auto`."""
    return arguments.word("shard_dim", {"auto": AUTO}, 0, least=0)  # type: ignore[no-any-return]


def spread(item: ast.Rule, placed: Placed, claims: Claims[SpreadRule | None], scope: Scope) -> None:
    """Adds `SELECTOR : spread(on = ..., shard_dim = ...)`, which places parameters inside units."""
    arguments = Arguments(item.action, scope, ("on", "shard_dim"))
    shard, dim = _axes(arguments), _dim(arguments)
    if isinstance(item.target, ast.Call):
        arguments.wrong(item.target, "`spread` applies to modules", "name them by a selector")
    if shard is None and not dim and arguments.ok:
        hint = "write `spread(on = ep_shard, shard_dim = auto)`"
        arguments.wrong(item.action, "`spread` names neither axes nor a dim", hint)
    if arguments.done() and isinstance(item.target, ast.Selector):
        modules = select(item.target, placed.bases, scope, optional=item.optional)
        rule = SpreadRule(modules=scope.facts.model, shard=shard, shard_dim=dim, origin=item.origin)
        claims.add(modules, "spreading", rule, item.origin, override=item.override)


def _precision(arguments: Arguments) -> Precision | None:
    """`unit(precision(param = fp32))`: a unit's own precision."""
    call = arguments.positional[0].value if arguments.positional else None
    if not isinstance(call, ast.Call) or call.name != "precision":
        return None
    inner = Arguments(call, arguments.scope, PRECISION)
    policy = precision(inner, call.origin)
    arguments.ok &= inner.done()
    return policy


def _axes(arguments: Arguments) -> tuple[str, ...] | None:
    """`unit(on = dp_shard * cp)`: axes, not the numbers that these names mean elsewhere."""
    expression = arguments.take("on")
    if expression is None:
        return None
    names = tuple(_factors(expression))
    if None in names:
        hint = "write `on = dp_shard`, or `on = dp_shard * cp`"
        arguments.wrong(expression, "`on` names axes of the mesh", hint)
        return None
    mesh = arguments.scope.solve()
    known = (n for n in names if n is not None)
    return mesh.expand(known) if mesh else expand_axes(known, arguments.scope.axis_names)


def _factors(expression: ast.Expr) -> Iterator[str | None]:
    match expression:
        case ast.Name():
            yield expression.path
        case ast.Binary(op="*"):
            yield from _factors(expression.left)
            yield from _factors(expression.right)
        case _:
            yield None


def _claim(
    selected: tuple[Modules, ...], terms: UnitTerms, item: ast.Rule, claims: Claims[UnitTerms]
) -> None:
    """Claims the modules; with `except_last` the last entries are claimed separately."""
    last = max((m.entries.last for m in selected if m.entries), default=None)
    pairs = [part for modules in selected for part in _parts(modules, terms, last)]
    claims.add_all(pairs, "unit", item.origin, override=item.override)


def _parts(modules: Modules, terms: UnitTerms, last: int | None) -> list[tuple[Modules, UnitTerms]]:
    """`except_last`: the entry with the highest index of the rule's list is not resharded."""
    if not terms.except_last or not modules.entries or last is None:
        return [(modules, terms.for_entry(last=False))]
    final = modules.entries & Indices.from_numbers([last])
    parts = ((modules.entries - final, False), (final, True))
    return [
        (modules.with_entries(entries), terms.for_entry(last=at))
        for entries, at in parts
        if entries
    ]


# Calls in the place of a selector ----------------------------------------------------------------


def found_units(
    placed: Placed, claims: Claims[UnitTerms], ignored: Sequence[Modules], scope: Scope
) -> None:
    """Adds the units of `auto(min_params = 100M) : unit` and `dtype(fp32) : unit`.

    They come after all rules that name modules, and leave what those decide unchanged.
    """
    item = placed.item
    assert isinstance(item, ast.Rule) and isinstance(item.target, ast.Call)
    if item.action.name != "unit":
        unknown(item.action, ("unit",), "fsdp action", scope)
        return
    terms = _terms(item, scope)
    known = ("min_params",) if item.target.name == "auto" else ()
    arguments = Arguments(item.target, scope, known)
    if placed.nested:
        arguments.wrong(item.target, f"`{item.target.name}` cannot be inside a block")
        return
    taken = [c.modules for c in claims.claims]
    search = _by_size if item.target.name == "auto" else _by_dtype
    searched = search(arguments, taken, ignored)
    if searched is None or terms is None:
        return
    unit_modules, message = searched
    if not unit_modules and not item.optional:
        total = f"the model has {scope.facts.count:,} parameters"
        scope.sink.error("PL448", message, item.origin, facts=[total], help="remove the rule")
    _claim(unit_modules, terms, item, claims)


_Found = tuple[tuple[Modules, ...], str]


def _by_size(
    arguments: Arguments, taken: Sequence[Modules], ignored: Sequence[Modules]
) -> _Found | None:
    least = arguments.integer("min_params", 0)
    if least <= 0 and arguments.ok:
        hint = "write `auto(min_params = 100M)`"
        arguments.wrong(arguments.call, "`auto` needs a number of parameters", hint)
    if not arguments.done():
        return None
    unit_modules = by_size(arguments.scope.facts, least, taken, ignored)
    return unit_modules, f"no module has {least:,} parameters that no other unit holds"


def _by_dtype(
    arguments: Arguments, taken: Sequence[Modules], ignored: Sequence[Modules]
) -> _Found | None:
    dtype = _dtype(arguments)
    if dtype is None or not arguments.done(positional=1):
        return None
    facts, kept = arguments.scope.facts, arguments.scope.kept
    dtypes = {kept(p) for m in facts.model.below() for p in m.module.parameters}
    if dtypes == {dtype}:
        return (), f"all parameters of the model are {dtype}"
    units = tuple(by_dtype(facts.model, dtype, (*taken, *ignored), kept))
    return units, f"no module has only {dtype} parameters"


def _dtype(arguments: Arguments) -> str | None:
    """`dtype(fp32)`."""
    value = arguments.positional[0].value if arguments.positional else None
    if isinstance(value, ast.Name) and value.path in DTYPES:
        return DTYPES[value.path]
    hint = f"it is {one_of(f'`{n}`' for n in DTYPES)}"
    if isinstance(value, ast.Name):
        hint = did_you_mean(value.path, DTYPES, hint) or hint
    arguments.wrong(value or arguments.call, "`dtype` needs the dtype of parameters", hint)
    return None


def _members(item: ast.Rule, call: ast.Call, placed: Placed, scope: Scope) -> tuple[Modules, ...]:
    """`group(a, b) : unit`: the members of one unit; empty after a finding."""
    if call.name not in ("group", "groups"):
        unknown(call, ("group", "groups", *FOUND), "unit", scope)
        return ()
    arguments = Arguments(call, scope)
    if placed.nested:
        arguments.wrong(call, "a group cannot be inside a block", "write its members' full paths")
        return ()
    members: list[Modules] = []
    for argument in arguments.positional:
        target = argument.value
        if isinstance(target, ast.Name):
            target = ast.Selector(origin=target.origin, path=target.path)
        if not isinstance(target, ast.Selector):
            arguments.wrong(target, "a group holds modules", "write `group(model.norm, lm_head)`")
            return ()
        selected = select(target, placed.bases, scope, optional=item.optional)
        if not selected and not item.optional:
            return ()
        members.extend(selected)
    if not arguments.done(positional=len(arguments.positional)):
        return ()
    if not members and not item.optional:
        arguments.wrong(call, "the group is empty", "write `group(model.norm, lm_head)`")
    return tuple(members)


def _one_by_one(
    members: tuple[Modules, ...], terms: UnitTerms, call: ast.Call, scope: Scope
) -> Iterator[tuple[Modules, UnitTerms]]:
    """`groups(a.*, b.*) : unit`: a group of entry 0 of each list, a group of entry 1, and so on."""
    entries: dict[tuple[str, ...], set[int]] = {}
    for member in members:
        indices = [s for s in member.path if isinstance(s, Indices)]
        if len(indices) != 1:
            hint = "write `groups(encoder.layers.*, decoder.layers.*)`"
            message = f"`{member}` does not name the entries of one list"
            Arguments(call, scope).wrong(call, message, hint)
            return
        entries.setdefault(member.key, set()).update(indices[0])
    if len({frozenset(e) for e in entries.values()}) > 1:
        sizes = one_of([f"{len(e)}" for e in entries.values()], last="and")
        hint = "each list needs the same entries"
        Arguments(call, scope).wrong(call, f"the lists have {sizes} entries", hint)
        return
    last = max((max(e) for e in entries.values()), default=-1)
    for member in members:
        for entry in member.entries:
            entry_modules = member.with_entries(Indices.from_numbers([entry]))
            yield entry_modules, terms.for_entry(last=entry == last, group=entry)


def units(claims: Claims[UnitTerms]) -> Iterator[Unit]:
    """The units that result from the claims, in the plan's order."""
    done: set[tuple[Span, int]] = set()
    for claim in claims.claims:
        unit, _, group = claim.value
        if group is None:
            yield replace(unit, members=(claim.modules,))
        elif (unit.origin, group) not in done:
            done.add((unit.origin, group))
            same = [c for c in claims.claims if c.value.group == group]
            members = tuple(c.modules for c in same if c.value.unit.origin == unit.origin)
            yield replace(unit, members=members, group=len(members) > 1 or len(members[0]) > 1)
