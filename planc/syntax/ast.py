"""The AST of a plan file, with spans. Equality ignores positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from planc.diagnostics.source import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    origin: Span = field(compare=False, repr=False)


# Expressions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Literal(Node):
    """A number, a string, `true`, `false` or `null`."""

    value: int | float | str | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Name(Node):
    """A dotted name: an option, an axis, `config.field`, a word such as `auto`, a module path."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector(Node):
    """A set of modules: a path pattern, a class, and what it must contain.

    Args:
        parts: of selectors joined by commas, each of them; the path is then empty.
    """

    path: str
    cls: str | None = None
    has: Selector | None = None
    parts: tuple[Selector, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class List(Node):
    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unary(Node):
    op: str
    operand: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary(Node):
    op: str
    left: Expr
    right: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Node):
    """`when CONDITION then A else B`, as a value."""

    condition: Expr
    then: Expr
    otherwise: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow(Node):
    """`from -> to`, or `-> to`: a change of layout. Only as an argument."""

    source: Expr | None
    target: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument(Node):
    name: str | None
    value: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Node):
    """`name(a, b = c)`; a bare name where an action is expected is a call without arguments."""

    name: str
    arguments: tuple[Argument, ...] = ()


Expr = Literal | Name | Selector | List | Unary | Binary | Choice | Arrow | Call


# Items inside a section ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Node):
    """`SELECTOR : ACTION`; the target of an fsdp rule may be `group(...)` or `root`."""

    target: Selector | Call
    action: Call
    optional: bool = False
    override: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(Node):
    """`SELECTOR { ... }`: the rules inside are relative to it."""

    target: Selector
    items: tuple[Item, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class When(Node):
    """`when CONDITION { ... } else { ... }`, inside a section or at the top."""

    condition: Expr
    then: tuple[Item | Statement, ...]
    otherwise: tuple[Item | Statement, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Node):
    """`name = value`: a mesh axis, or a setting of a section; an `optional` axis of one rank is
    left out.
    """

    name: str
    name_origin: Span = field(compare=False, repr=False)
    value: Expr
    optional: bool = False
    override: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignore(Node):
    """`ignore SELECTOR`."""

    target: Selector
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive(Node):
    """A call as a statement, such as `precision(param = bf16)`."""

    call: Call
    override: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement(Node):
    """`name on axis` inside a section, such as `vocabulary on tp`."""

    name: str
    axes: tuple[Name, ...]


Item = Rule | Block | When | Setting | Ignore | Directive | Placement


# Statements ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Header(Node):
    """`plan NAME for FAMILY, ...`; the families are `config.model_type` values or class names."""

    name: str
    families: tuple[Name, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Language(Node):
    """`language 1`: the version of the language in which the file is written."""

    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend(Node):
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Option(Node):
    name: str
    name_origin: Span = field(compare=False, repr=False)
    value: Expr
    override: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Let(Node):
    name: str
    name_origin: Span = field(compare=False, repr=False)
    value: Expr
    override: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Require(Node):
    condition: Expr
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Style(Node):
    """`style NAME = python "package.module:Class"`."""

    name: str
    name_origin: Span = field(compare=False, repr=False)
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section(Node):
    """`NAME on AXES, replicate on AXES { ... }`; axes are outermost first, `a * b` names two.

    Args:
        engine, sizes: of `NAME ENGINE(...) on a = 4, b WORD { ... }`.
    """

    name: str
    name_origin: Span = field(compare=False, repr=False)
    axes: tuple[Name, ...] = ()
    replicate: tuple[Name, ...] = ()
    items: tuple[Item, ...]
    override: bool = False
    engine: Call | None = None
    sizes: tuple[Setting, ...] = ()


Statement = Header | Language | Extend | Option | Let | Require | Style | Section | When


@dataclass(frozen=True, kw_only=True)
class File(Node):
    """A whole `.plan` file.

    Args:
        schedule_files: the texts of the files that `schedule = file(...)` names, by its span.
    """

    statements: tuple[Statement, ...]
    schedule_files: tuple[tuple[Span, str], ...] = field(default=(), compare=False)

    @cached_property
    def first_mentions(self) -> Mapping[str, Span]:
        """The first place of every name and every `$let` in it, in taken branches or not."""
        mentions: dict[str, Span] = {}
        for name, origin in _mentions(self):
            mentions.setdefault(name, origin)
        return mentions

    @cached_property
    def declared_names(self) -> frozenset[str]:
        """The names of its options and lets that replace no other, in taken branches or not."""
        declarations = (s for s in branches(self.statements) if isinstance(s, Option | Let))
        return frozenset(s.name for s in declarations if not s.override)


def children(node: Node) -> Iterator[Node]:
    """The nodes right inside a node."""
    for name in node.__dataclass_fields__:
        value = getattr(node, name)
        values = value if isinstance(value, tuple) else (value,)
        yield from (child for child in values if isinstance(child, Node))


def branches(items: Iterable[Item | Statement]) -> Iterator[Item | Statement]:
    """Yields items or statements in order, and in place of a `when` those in both its branches."""
    for item in items:
        if isinstance(item, When):
            yield from branches((*item.then, *item.otherwise))
        else:
            yield item


def walk(node: Node) -> Iterator[Node]:
    """A node and all that are inside it."""
    yield node
    for child in children(node):
        yield from walk(child)


def mentioned_names(node: Node) -> Iterator[str]:
    """Every name and every `$let` that a part of the AST mentions, in taken branches or not."""
    for name, _ in _mentions(node):
        yield name


def _mentions(node: Node) -> Iterator[tuple[str, Span]]:
    for each in walk(node):
        if isinstance(each, Name):
            yield each.path, each.origin
        elif isinstance(each, Selector) and each.path.startswith("$"):
            yield each.path[1:].partition(".")[0].partition("[")[0], each.origin


_LARGEST = 2**63
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}iB": 2 ** (10 * power) for power, unit in enumerate(_UNITS, 1)}


def number_of(text: str) -> int | float | None:
    """The value, or None for an integer of more than 64 bits; the grammar bounds the digits."""
    digits = text.rstrip("KMGTiB")
    scale = _UNITS.get(text[len(digits) :], 1)
    value: int | float = int(digits) if digits.isdigit() else float(digits)
    value *= scale
    if scale > 1 and value == int(value):
        value = int(value)
    return None if isinstance(value, int) and value >= _LARGEST else value
