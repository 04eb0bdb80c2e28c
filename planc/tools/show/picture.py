"""The mesh and the modules of a plan as one SVG."""

from collections.abc import Iterator

from planc.ops import phrases
from planc.ops.lowered import Lowered
from planc.tools.show import mesh
from planc.tools.show.html import Html, package_files, tag
from planc.tools.show.module_tree import Row

_LINE, _COLUMN = 20, 330  # pixels


def picture(lowered: Lowered, top: Row | None, per_node: int = 8) -> str:
    """The text of a file; without modules it has the mesh alone."""
    talks = mesh.groups(lowered, per_node, {})
    drawn, height = mesh.nodes(lowered, per_node, talks)
    colors = {group.names: f"g{i}" for i, group in enumerate(talks)}
    lines = [
        [_text(0, " * ".join(g.names), class_=f"g{i}"), _text(150, f"{g.size:,} ranks: {g.sends}")]
        for i, g in enumerate(talks)
    ]
    lines += [[], *_rows(top, 0, colors)] if top else []
    placed = (
        tag("g", *line, transform=f"translate(0 {height + (i + 1) * _LINE})")
        for i, line in enumerate(lines)
    )
    wide, high = mesh.WIDTH + 24, height + (len(lines) + 1) * _LINE + 24
    view = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"-12 -12 {wide} {high}"}
    style = tag("style", package_files("picture.css"))
    return f"{tag('svg', style, *drawn, *placed, width=wide, height=high, **view)}\n"


def _rows(row: Row, depth: int, colors: dict[tuple[str, ...], str]) -> Iterator[list[Html]]:
    """The line of a row, and those of the rows inside."""
    marks = [(mark.text, colors.get(mark.axes, mark.kind)) for mark in row.marks]
    marks += [(f"inside as {row.like}", "")] if row.like else []
    spans = (tag("tspan", f"{text}   ", class_=color) for text, color in marks)
    size = phrases.size(row.size) if row.size else ""
    yield [
        _text(16 * depth, row.name, class_="head"),
        _text(_COLUMN, *spans),
        _text(mesh.WIDTH - 70, size),
    ]
    for inner in row.inside:
        yield from _rows(inner, depth + 1, colors)


def _text(x: int, *content: str, class_: str = "") -> Html:
    return tag("text", *content, x=x, class_=class_)
