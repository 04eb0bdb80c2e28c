"""A diff as a page, with both plans side by side, and what a notebook shows of results."""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

from planc.diffing.compare import Delta, compare
from planc.diffing.render import render as differences
from planc.emit import text
from planc.ops import phrases
from planc.ops.document import digest
from planc.ops.lowered import Lowered
from planc.tools.show.html import Html, page, tag
from planc.tools.show.page import tiles
from planc.tools.show.picture import picture

_SIGNS = {"~": ("changed", "#b8801a"), "-": ("gone", "#d9485a"), "+": ("come", "#2a9a58")}


def render(old: Lowered, new: Lowered, estimates: Sequence[str] = ()) -> str:
    """The page of two lowered plans, and lines about the estimates of both."""
    delta = compare(old, new)
    pairs = {
        "ranks": (f"{old.world_size:,}", f"{new.world_size:,}"),
        "parameters at rest": phrases.sizes(*delta.parameters),
        "largest gathered unit": phrases.sizes(*delta.gathered),
    }
    numbers = [(k, b, "unchanged" if a == b else f"was {a}") for k, (a, b) in pairs.items()]
    said = (tag("p", line, class_="note") for line in estimates)
    name = " → ".join(dict.fromkeys((old.plan, new.plan)))
    title = tag("h1", tag("b", "Changes of "), name, f" for {new.model}")
    both = tag("div", tag("table", *_sides(old, new)), class_="wide")
    return page(
        f"Changes of {name}",
        tag("header", title, tiles(numbers), *said),
        tag("section", tag("h2", "Changes"), _lines(delta), id="changes"),
        tag("section", tag("h2", "Side by side"), both, id="both"),
    )


def _lines(delta: Delta) -> Html:
    """The text that `planc diff` prints, in color; without a style sheet too."""
    rows = []
    for line in differences(delta).splitlines():
        kind, color = _SIGNS.get(line.strip()[:1], ("", "inherit"))
        rows.append(tag("div", line, class_=kind, style=f"color:{color}"))
    return tag("pre", *rows)


def _sides(old: Lowered, new: Lowered) -> Iterator[Html]:
    """Rows of both texts, in color where they differ in more than the width of a column."""
    old_lines, new_lines = (
        text.render(side, digest=digest(side)).splitlines() for side in (old, new)
    )
    keys = [[" ".join(line.split()) for line in side] for side in (old_lines, new_lines)]
    for kind, a, b, c, d in SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_opcodes():
        classes = ("", "") if kind == "equal" else ("gone", "come")
        for i in range(max(b - a, d - c)):
            cells = zip((old_lines[a:b], new_lines[c:d]), classes, strict=True)
            yield tag("tr", *(tag("td", *x[i : i + 1], class_=k * (i < len(x))) for x, k in cells))


def notebook(of: Any) -> str:
    """The page that a notebook shows of a lowered plan, a run, or a diff; no style leaves it."""
    if isinstance(of, Delta):
        return _lines(of)
    lowered = getattr(of, "lowered", of)
    drawn = b64encode(picture(lowered, None).encode()).decode()
    mesh = Html(f'<img alt="the mesh" src="data:image/svg+xml;base64,{drawn}">')
    return tag("div", mesh, tag("pre", text.render(lowered, digest=digest(lowered))))
