"""Lists what can be written at a place of a plan."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from planc.diagnostics.source import Span
from planc.elaborate.elaborate import SECTIONS
from planc.elaborate.evaluate import describe, evaluate
from planc.elaborate.scope import Failed
from planc.elaborate.settings import SETTINGS
from planc.files.resources import PLANS
from planc.ir.mesh_axes import valid_axes
from planc.model.config import shipped_models
from planc.model.roles import LACKS
from planc.syntax import ast
from planc.syntax.plan_files import families, plans_in
from planc.tools.editor.cursor import Cursor, cursor
from planc.tools.editor.hover import meanings, module_text
from planc.tools.editor.judge import Judged

Item = tuple[str, str, str]
"""A word, its kind (`module`, `word`, `value`, `class` or `file`), and what it is or means."""

_PATHS = ("fsdp", "replicate", "pipeline")  # sections with calls that take paths
_INSIDE = ("optional", "override", "when", "ignore")
_TOP = ("plan", "language", "extend", "option", "let", "require", "style", "override", "when")


_TARGET = re.compile(r"(?:(?:override|optional|ignore)\s+)*(?:[^\s:=]+,\s+)*\S*")
"""The selectors in front of a rule, as far as they are typed."""


def complete(judged: Judged, offset: int) -> tuple[str, tuple[Item, ...]]:
    """The part of a word that is typed already at an offset, and what it can become."""
    text = judged.source.text
    line = text[text.rfind("\n", 0, offset) + 1 : offset].removeprefix("\ufeff")
    if comment := re.match(r"#[ \t]*planc:[ \t]*(\S*)$", line):
        return comment[1], tuple((model, "file", "") for model in shipped_models())
    if extend := re.match(r'extend "([^"]*)$', line):
        path = Path(judged.source.name)
        ships = [p.stem for p in plans_in(PLANS)]
        beside = sorted(p.name for p in path.parent.glob("*.plan") if p.name != path.name)
        return extend[1], tuple((name, "file", "") for name in (*beside, *ships))
    if family := re.match(r"plan [^#\"]* for (?:[^#\"]*,)?[ \t]*([\w-]*)$", line):
        known = {name for path in plans_in(PLANS) for name in families(path)}
        return family[1], tuple((name, "value", "family") for name in sorted(known))
    if "#" in line or line.count('"') % 2:
        return "", ()
    at = cursor(text.replace("\ufeff", " ", 1), offset)
    return re.split(r"[.,{}<$]", at.typed)[-1], tuple(dict.fromkeys(_items(at, judged)))


def _items(at: Cursor, judged: Judged) -> Iterator[Item]:
    section = at.section
    if path := re.search(r"(\S+)<\w*$", at.before):
        modules_of_path = judged.select_modules(*at.blocks, _selector(path[1]))
        yield from ((modules.module.cls, "class", str(modules)) for modules in modules_of_path)
    elif at.typed.startswith("config."):
        yield from _fields(at.typed, judged)
    elif re.search(r"\bon (?:\w+\s*\*\s*)*\w*$", at.before):
        yield from _axes(judged)
    elif not section and re.fullmatch(r"(?:override\s+)?\w*", at.before):
        yield from _words("keywords", "", _TOP)
        yield from ((name, "word", meanings(name)["about"]) for name in SECTIONS)
    elif section and _TARGET.fullmatch(at.before):
        if meanings(section, "actions"):  # its lines are rules for modules
            yield from _modules(at, judged)
        if not re.search(r"[.$]", at.typed):
            yield from _words(section, "items")
            yield from _words("keywords", "", _INSIDE)
    elif section and re.match(r"[^(]*:\s*\w*$", at.before):
        yield from _words(section, "actions")
        styles = judged.styles if section == "tensor" else {}
        yield from ((name, "word", path) for name, path in styles.items())
    else:
        yield from _words(section, "values")
        yield from _words("layouts") if section == "tensor" else ()
        if section in _PATHS or at.before.startswith("let") or "." in at.typed:
            yield from _modules(at, judged)
        yield from _names(at, judged)


def _words(section: str, kind: str = "", only: Iterable[str] = ()) -> Iterator[Item]:
    table = meanings(section, kind)
    return ((word, "word", table[word]) for word in only or table)


def _selector(path: str) -> ast.Selector:
    return ast.Selector(origin=Span.from_place(""), path=path)


def _modules(at: Cursor, judged: Judged) -> Iterator[Item]:
    """The modules one level below what is typed, inside the enclosing blocks; or lets."""
    above, dot, _ = at.typed.rpartition(".")
    if at.typed.startswith("$") and not dot:
        yield from _names(at, judged)
        return
    for base in judged.select_modules(*at.blocks, *([_selector(above)] if dot else [])):
        for child, inner in zip(base.module.children, base.children, strict=True):
            yield "*" if child.indices else child.name, "module", module_text(inner)


def _fields(typed: str, judged: Judged) -> Iterator[Item]:
    value: object = judged.scope.facts.config if judged.scope else {}
    for key in typed.split(".")[1:-1]:
        value = value.get(key) if isinstance(value, dict) else None
    for key, held in value.items() if isinstance(value, dict) else ():
        yield str(key), "value", "..." if isinstance(held, dict | list) else describe(held)


def _axes(judged: Judged) -> Iterator[Item]:
    names = judged.scope.axis_names if judged.scope else ()
    return ((name, "value", "axis") for name in valid_axes(names))


def _names(at: Cursor, judged: Judged) -> Iterator[Item]:
    """Options, lets, settings, axes and `config`; after `$` lets and roles alone."""
    lets, scope = at.typed.startswith("$"), judged.scope
    if scope is None:
        return
    for name, known in scope.definitions.items():
        value = evaluate(ast.Name(origin=known.origin, path=name), scope)
        if known.kind == "let" or not lets:
            shown = "" if isinstance(value, Failed) else f" = {describe(value)}"
            yield name, "value", f"{known.kind}{shown}"
    if lets:
        yield from ((name, "value", "role") for name in LACKS if name not in scope.definitions)
    else:
        others = (s for s in SETTINGS.values() if not scope.knows(s.word))
        yield from ((s.word, "value", s.meaning) for s in others if not s.axis)
        yield from _axes(judged)
        yield "config", "value", "the fields of config.json"
