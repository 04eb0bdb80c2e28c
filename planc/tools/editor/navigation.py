"""Finds the definitions of names, and the outline of a plan."""

import re
from collections.abc import Iterator
from pathlib import Path

from planc.diagnostics.source import Source, Span
from planc.syntax import ast
from planc.syntax.plan_files import PlanFile, base_of
from planc.tools.editor.cursor import nodes_at
from planc.tools.editor.judge import Judged
from planc.tools.editor.target import place_of


def definition(judged: Judged, offset: int) -> Span | None:
    """The plan that an `extend` names, or the definition of a name; for a definition, the one that
    it overrides. None for anything else.
    """
    node, path = nodes_at(judged.file, offset)[-1], place_of(judged.source)
    if isinstance(node, ast.Extend):
        base = base_of(PlanFile(name=str(path), path=path), node.path).path
        return Source(str(base), "").span(0, 0) if base and Path(base).is_file() else None
    name = _name(node)
    places = [place for place in _definitions(judged) if place.text == name]
    here = (place_of(p.source) == path and p.start <= offset <= p.end for p in places)
    before = places[: next((i for i, itself in enumerate(here) if itself), None)]
    return before[-1] if before else None


def _name(node: ast.Node) -> str:
    match node:
        case ast.Name(path=name) | ast.Call(name=name):
            return name
        case ast.Option() | ast.Let() | ast.Setting() | ast.Style():
            return node.name
        case ast.Selector(path=path) if let := re.match(r"\$(\w+)", path):
            return let[1]
    return ""


def _definitions(judged: Judged) -> Iterator[Span]:
    """The names of options, lets, styles and axes, in the order of the files: bases come first."""
    for node in (n for file in judged.files for n in ast.walk(file)):
        match node:
            case ast.Option() | ast.Let() | ast.Style():
                yield node.name_origin
            case ast.Section(name="mesh"):
                yield from (n.name_origin for n in ast.walk(node) if isinstance(n, ast.Setting))


def outline_entry(
    node: ast.Statement | ast.Item,
) -> tuple[str, tuple[ast.Statement | ast.Item, ...]]:
    """The first line of a statement or an item, for an outline, and what is inside its braces."""
    inside: tuple[ast.Statement | ast.Item, ...] = ()
    match node:
        case ast.Section() | ast.Block():
            inside = node.items
        case ast.When():
            inside = (*node.then, *node.otherwise)
    return node.origin.text.partition("\n")[0].rstrip("{ "), inside
