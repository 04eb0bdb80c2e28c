"""Lines that decide one thing: they conflict, unless one says `override`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from planc.diagnostics.diagnostic import Label, Sink
from planc.diagnostics.source import Span
from planc.elaborate.evaluate import truth
from planc.elaborate.scope import Scope
from planc.elaborate.selectors import select
from planc.ir.nodes import Ruled
from planc.model.facts import Modules
from planc.syntax import ast

SectionLine = ast.Setting | ast.Directive
AnyItem = ast.Item | ast.Statement


@dataclass(slots=True)
class Settings:
    """The lines in force and the values (None if wrong) of one section, by name; reports PL102 (a
    repeated line) and PL103 (an `override` of none).
    """

    sink: Sink
    lines: dict[str, SectionLine] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def add(self, item: SectionLine, read: Callable[[Any], Any] = lambda item: item) -> None:
        """Adds a line and the value that `read` returns for it; an earlier one may be in force."""
        name = item.name if isinstance(item, ast.Setting) else item.call.name
        earlier = self.lines.get(name)
        if isinstance(item, ast.Setting) and item.optional:
            message = "an axis of the mesh can be optional, no setting of a section"
            self.sink.error("PL011", message, item.origin, help="remove `optional`")
        if earlier is not None and not item.override:
            conflict(self.sink, "line", f"`{name}`", item.origin, earlier.origin)
            return
        if earlier is None and item.override:
            nothing_to_override(self.sink, f"`{name}`", item.origin)
        self.lines[name] = item
        self.values[name] = read(item)


def conflict(sink: Sink, word: str, what: str, origin: Span, earlier: Span) -> None:
    """PL102: two lines, or two rules, decide the same."""
    sink.error(
        "PL102",
        f"two {word}s decide {what}",
        Label(span=origin, text=f"this {word}"),
        Label(span=earlier, text="and this one"),
        help="remove one, or write `override` before the one that applies",
    )


def nothing_to_override(
    sink: Sink, what: str, origin: Span, help: str | None = "remove `override`"
) -> None:
    """PL103: an `override` without an earlier line."""
    sink.error("PL103", f"there is no earlier {what} to override", origin, help=help)


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An item of a section and the modules that its enclosing blocks select."""

    item: ast.Item
    bases: tuple[Modules, ...]
    nested: bool


def expand_conditions(items: Iterable[AnyItem], scope: Scope) -> Iterator[AnyItem]:
    """Items, with those of the taken branch in the place of a `when`."""
    for item in items:
        if not isinstance(item, ast.When):
            yield item
        elif (condition := truth(item.condition, scope)) is not None:
            yield from expand_conditions(item.then if condition else item.otherwise, scope)


def flatten(section: ast.Section, scope: Scope) -> Iterator[Placed]:
    """The items of a section, with `when`s decided and blocks opened."""
    yield from _flatten(section.items, (scope.facts.model,), False, scope)


def _flatten(
    items: Iterable[AnyItem], bases: tuple[Modules, ...], nested: bool, scope: Scope
) -> Iterator[Placed]:
    for item in expand_conditions(items, scope):
        match item:
            case ast.Block():
                inner = select(item.target, bases, scope, optional=item.optional)
                if inner:
                    yield from _flatten(item.items, inner, True, scope)
            case ast.Rule() | ast.Setting() | ast.Ignore() | ast.Directive() | ast.Placement():
                yield Placed(item=item, bases=bases, nested=nested)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(Generic[T]):
    """A rule's decision about a set of modules, in one `aspect`, in which claims conflict."""

    modules: Modules
    aspect: str
    value: T
    origin: Span


@dataclass(slots=True)
class Claims(Generic[T]):
    """Claims in order; claims with the same aspect are disjoint."""

    sink: Sink
    claims: list[Claim[T]] = field(default_factory=list)

    def add(
        self, modules: Iterable[Modules], aspect: str, value: T, origin: Span, *, override: bool
    ) -> None:
        """Adds a rule's claim on several sets; PL102 for a conflict, PL103 for an idle override."""
        self.add_all([(m, value) for m in modules], aspect, origin, override=override)

    def add_all(
        self, decisions: Sequence[tuple[Modules, T]], aspect: str, origin: Span, *, override: bool
    ) -> None:
        """Adds a rule's claims where it decides differently for each of its sets."""
        met = False
        claimed: list[Modules] = []
        for wanted, value in decisions:
            rest: list[Claim[T]] = []
            for claim in self.claims:
                both = claim.modules.overlap(wanted) if claim.aspect == aspect else None
                if both is None:
                    rest.append(claim)
                    continue
                met = True
                if any(both.overlap(earlier) for earlier in claimed):
                    message = f"this rule decides the {aspect} of `{both}` twice"
                    self.sink.error("PL102", message, origin, help="name it once")
                elif not override:
                    count = f", {len(both)} modules" if len(both) > 1 else ""
                    what = f"the {claim.aspect} of `{both}`{count}"
                    conflict(self.sink, "rule", what, origin, claim.origin)
                rest += (replace(claim, modules=left) for left in claim.modules.minus(wanted))
            claimed.append(wanted)
            self.claims = [*rest, Claim(modules=wanted, aspect=aspect, value=value, origin=origin)]
        if override and decisions and not met:
            nothing_to_override(self.sink, f"rule for `{decisions[0][0]}`", origin)

    def rules(self: Claims[Ruled | None]) -> tuple[Ruled, ...]:
        """The rules of all claims that decide one, each on its modules."""
        return tuple(
            replace(claim.value, modules=claim.modules, origin=claim.origin)
            for claim in self.claims
            if claim.value is not None
        )
