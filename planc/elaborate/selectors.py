"""Selectors -> module sets, on the compressed module table, so the cost is independent of depth.

A selector is a path of steps. Each step maps a set of modules to the sets one level below (or, for
`**`, any number of levels); where a step matches nothing, the help names what exists there.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache, partial

from planc.diagnostics.diagnostic import Label, did_you_mean, one_of
from planc.elaborate.scope import Failed, Scope
from planc.model.facts import Modules, merge_sets
from planc.model.indices import Indices
from planc.syntax import ast

_MAX_ALTERNATIVES = 1_000


@dataclass(frozen=True, slots=True)
class NamedChild:
    """A child by name; `*` inside the name matches any run of characters."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Level:
    """`*`: every child, including the entries of a list."""


@dataclass(frozen=True, slots=True)
class Deep:
    """`**`: the module itself and everything below."""


@dataclass(frozen=True, slots=True)
class Picked:
    """`[0:4]`, `[-1]`, `[::2]`, `[0:3,5]`: entries of a list."""

    text: str


@dataclass(frozen=True, slots=True)
class Kept:
    """`<Class>` and `has ...`: the matched modules that are, or contain, such a module."""

    cls: str | None
    has: ast.Selector | None


SelectorStep = NamedChild | Level | Deep | Picked | Kept


@dataclass(frozen=True, slots=True)
class _Miss:
    """A pattern that matched nothing: the modules reached, and the step that failed."""

    at: tuple[Modules, ...]
    step: SelectorStep
    depth: int


def select(
    selector: ast.Selector, bases: Iterable[Modules], scope: Scope, *, optional: bool = False
) -> tuple[Modules, ...]:
    """The modules that a selector matches, relative to the root or to what enclosing blocks
    selected.

    Each alternative and part of a list must match (PL101), unless optional; PL112 is for an index.
    The result is disjoint, modules of one structure in one set; empty after a finding.
    """
    bases = tuple(bases)
    modules: list[Modules] = []
    for part in selector.parts or (selector,):
        for steps in _every_alternative(part, scope, optional=optional):
            matched = _match(bases, steps, scope)
            for each in () if optional else (matched, *_by_entry(bases, steps, scope)):
                if isinstance(each, _Miss):
                    _report(part, each, scope)
                    return ()
            modules.extend(() if isinstance(matched, _Miss) else matched)
    return tuple(merge_sets(modules, alike=True))


def _every_alternative(
    selector: ast.Selector, scope: Scope, *, optional: bool = False
) -> tuple[tuple[SelectorStep, ...], ...]:
    try:
        return tuple(_alternatives(selector, scope, optional=optional))
    except RecursionError:
        message = f"`{selector.path}` goes through too many `let`s, or through itself"
        scope.sink.error("PL108", message, selector.origin, help="a `let` can't use its own name")
        return ()


def _alternatives(
    selector: ast.Selector, scope: Scope, *, optional: bool
) -> Iterator[tuple[SelectorStep, ...]]:
    """The patterns that braces expand to, each as steps."""
    prefixes: list[tuple[SelectorStep, ...]] = [()]
    path = selector.path
    if path.startswith("$"):
        match = re.match(r"\$(\w+)\.?", path)
        if match is None:
            message = "`$` needs the name of a let or of a role"
            scope.sink.error("PL100", message, selector.origin)
            return
        name = ast.Name(origin=selector.origin, path=match[1])
        value = scope.modules(name, optional=optional)
        if isinstance(value, Failed):
            return
        if not isinstance(value, ast.Selector):
            message = f"`${match[1]}` is not a path of modules"
            help = f"write `let {match[1]} = model.layers.*`, or the like"
            scope.sink.error("PL109", message, selector.origin, help=help)
            return
        prefixes = [
            steps
            for inner in value.parts or (value,)
            for steps in _alternatives(inner, scope, optional=optional)
        ]
        path = path[match.end() :]
    texts = list(itertools.islice(expand_braces(path), _MAX_ALTERNATIVES + 1))
    if len(texts) * len(prefixes) > _MAX_ALTERNATIVES:
        text = f"the braces of `{selector.path}` give more than {_MAX_ALTERNATIVES:,} alternatives"
        scope.sink.error("PL112", text, selector.origin)
        return
    for part in re.findall(r"\[([^\]]*)\]", path):
        if not all(re.fullmatch(r"-?\d+|-?\d*(:-?\d*){1,2}", p) for p in part.split(",")):
            hint = "pick entries as Python does: `[0:4]`, `[-1]`, `[::2]`, or a list `[0:3,-1]`"
            scope.sink.error("PL112", f"`[{part}]` picks nothing", selector.origin, help=hint)
            return
    kept = (Kept(selector.cls, selector.has),) if selector.cls or selector.has else ()
    for before, text in itertools.product(prefixes, texts):
        yield (*before, *_steps(text), *kept)


def expand_braces(text: str) -> Iterator[str]:
    """The texts that `a.{b,c}` stands for, in order."""
    match = re.search(r"\{([^{}]*)\}", text)
    if match is None:
        yield text
        return
    for option in match[1].split(","):
        for rest in expand_braces(text[match.end() :]):
            yield text[: match.start()] + option + rest


@lru_cache(maxsize=4096)  # a search of plans reads the same lines many times
def _steps(text: str) -> tuple[SelectorStep, ...]:
    return tuple(map(_step, re.findall(r"[^.\[\]]+|\[[^\]]*\]", text)))


def _step(piece: str) -> SelectorStep:
    if piece.startswith("["):
        return Picked(piece)
    if piece == "**":
        return Deep()
    if piece == "*":
        return Level()
    if piece.isdecimal():
        return Picked(f"[{piece}]")
    return NamedChild(piece)


def _match(
    bases: tuple[Modules, ...], steps: tuple[SelectorStep, ...], scope: Scope
) -> tuple[Modules, ...] | _Miss:
    """The modules that steps match from any of the bases."""
    results = [_walk(base, steps, scope) for base in bases]
    matched = [modules for r in results if not isinstance(r, _Miss) for modules in r]
    misses = [r for r in results if isinstance(r, _Miss)]
    return max(misses, key=lambda m: m.depth) if misses and not matched else tuple(matched)


def _by_entry(
    bases: tuple[Modules, ...], steps: tuple[SelectorStep, ...], scope: Scope
) -> Iterator[tuple[Modules, ...] | _Miss]:
    """Yields the modules that each part of a list `[0,5]` matches alone."""
    for i, step in enumerate(steps):
        parts = step.text[1:-1].split(",") if isinstance(step, Picked) else []
        for part in parts if len(parts) > 1 else ():
            yield _match(bases, (*steps[:i], Picked(f"[{part}]"), *steps[i + 1 :]), scope)


def _walk(
    base: Modules, steps: tuple[SelectorStep, ...], scope: Scope
) -> tuple[Modules, ...] | _Miss:
    current: tuple[Modules, ...] = (base,)
    for depth, step in enumerate(steps):
        following = tuple(dict.fromkeys(m for at in current for m in _advance(at, step, scope)))
        if not following:
            return _Miss(current, step, depth)
        current = following
    return current


def _advance(at: Modules, step: SelectorStep, scope: Scope) -> Iterator[Modules]:
    match step:
        case Deep():
            yield from at.below()
        case Level():
            yield from at.children
        case NamedChild(pattern):
            plain = pattern.isidentifier()  # most are
            matches = pattern.__eq__ if plain else partial(fnmatchcase, pat=pattern)
            for child in at.module.children:
                if child.indices is None and matches(child.name):
                    yield Modules((*at.path, child.name), child.module)
        case Picked(text):
            yield from at.entries_in(_indices(text, _length(at)))
        case Kept(cls, has):
            if cls is not None and at.module.cls != cls:
                return
            inside = _every_alternative(has, scope) if has else ()
            if has is None or any(not isinstance(_walk(at, s, scope), _Miss) for s in inside):
                yield at


def _length(at: Modules) -> int:
    return 1 + max((c.indices.last for c in at.module.children if c.indices), default=-1)


def _indices(text: str, length: int) -> Indices:
    """The entries of a list that `[...]` selects; slices and negative indices are Python's."""
    result = Indices(0)
    for part in text[1:-1].split(","):
        numbers = [_integer(n) if n.strip() not in ("", "-") else None for n in part.split(":")]
        if len(numbers) == 1:
            index = numbers[0]
            if index is not None and -length <= index < length:
                result |= Indices.from_numbers([index % length])
        elif len(numbers) <= 3 and numbers[-1] != 0 and all(abs(n or 0) < 2**31 for n in numbers):
            result |= Indices.from_numbers(range(length)[slice(*numbers)])
    return result


def _integer(digits: str) -> int:
    """An index; Python does not convert one of thousands of digits, which no list has."""
    return int(digits) if len(digits) < 1_000 else 2**63


def _report(selector: ast.Selector, miss: _Miss, scope: Scope) -> None:
    written = selector.path + (f"<{selector.cls}>" if selector.cls else "")
    at = miss.at[0]
    where = f"`{at}`" if at.path else "the model"
    names = list(dict.fromkeys(c.name for m in miss.at for c in m.module.children if c.name))
    facts = [f"{where} is a {at.module.cls}"]
    hint: str | None = None
    match miss.step:
        case NamedChild(pattern) if _holds(at, pattern):
            reason = f"`{pattern}` is a parameter, and a selector is a path of modules"
            hint = f"write {where}, the module that holds it"
            if not at.path:
                hint = "the model itself holds it: in an fsdp section, `root : unit` is its unit"
        case NamedChild(pattern):
            reason = f"{where} has no `{pattern}`"
            hint = _of_class(selector.path, scope) or _instead(pattern, at, names, scope)
        case Picked(text):
            length = _length(at)
            reason = f"{where} has {length} entries" if length else f"{where} is not a list"
            reason += f", none of them in `{text}`" if length else ""
        case Kept(cls, has):
            classes = one_of(dict.fromkeys(m.module.cls for m in miss.at), last="and")
            reason = f"the modules there are {classes}"
            if cls is None and has is not None:
                reason = f"none of them has `{has.path}`"
        case _:
            reason = f"{where} has no modules inside"
    message = f"`{written}` matches nothing: {reason}"
    named = re.match(r"\$(\w+)", selector.path)
    defined = scope.definitions.get(named[1]) if named else None
    labels = [Label(span=defined.origin, text=f"`${defined.name}` is this")] if defined else []
    scope.sink.error("PL101", message, selector.origin, *labels, facts=facts, help=hint)


def _holds(at: Modules, parameter: str) -> bool:
    return any(p.name == parameter for p in at.module.parameters)


def _of_class(path: str, scope: Scope) -> str | None:
    """The help for a selector that is a class, maybe with the name of the file that has it."""
    name = path.rpartition(".")[2]
    if any(m.module.cls == name for m in scope.facts.model.below()):
        return f"it is a class; its modules are `**<{name}>`"
    return None


def _instead(pattern: str, at: Modules, names: list[str], scope: Scope) -> str | None:
    """The names that the user may have meant by an unknown name."""
    if pattern == "root":
        return "`root` is a unit of an `fsdp` section alone: all modules of the model are `*`"
    if close := did_you_mean(pattern, names if at.path else [*names, "root"]):
        return close
    if _length(at):
        return f"`{at}` is a list: write `{at}.*.{pattern}`, or pick entries with `[0:4]`"
    elsewhere = [m for m in scope.facts.model.below() if m.path and m.path[-1] == pattern]
    if elsewhere:
        return f"there is `{elsewhere[0]}`"
    if holder := next((m for m in scope.facts.model.below() if _holds(m, pattern)), None):
        where = f"`{holder}`" if holder.path else "the model itself"
        return f"`{pattern}` is a parameter of {where}, and a selector is a path of modules"
    if names:
        return f"it has {one_of((f'`{n}`' for n in names[:12]), last='and')}"
    return None
