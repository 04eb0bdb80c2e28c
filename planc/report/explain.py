"""The page behind each code: `planc explain` prints what docs/diagnostics holds.

Run as a program it prints the index of the pages, which is docs/diagnostics/README.md.
"""

from __future__ import annotations

import re
import textwrap

from planc.report.colour import BOLD, CYAN, paint
from planc.share import PAGES

_GROUPS = {
    "0": "Reading a plan",
    "1": "Names and paths",
    "2": "Shapes and heads",
    "3": "The mesh",
    "4": "Composition and order",
    "5": "Layout flow",
    "6": "Models and families",
    "9": "planc itself",
}


def codes() -> tuple[str, ...]:
    """Every code that has a page."""
    return tuple(sorted(p.stem for p in PAGES.glob("PL*.md")))


def explain(code: str) -> str | None:
    """The page of a code, or None where there is none."""
    if not re.fullmatch(r"PL\d{3}", code):
        return None
    page = PAGES / f"{code}.md"
    return page.read_text(encoding="utf-8") if page.is_file() else None


def terminal(text: str, colour: bool) -> str:
    """A page set for a terminal: headings stand out, links lose their addresses."""
    lines = []
    for line in text.splitlines():
        heading = re.fullmatch(r"#+ (.*)", line)
        if heading:
            lines.append(paint(heading[1], BOLD, colour))
            continue
        plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", line)
        if not line.startswith("    "):
            plain = re.sub(r"`([^`]+)`", lambda m: paint(f"`{m[1]}`", CYAN, colour), plain)
        lines.append(plain)
    return "\n".join(lines) + "\n"


def index() -> str:
    """docs/diagnostics/README.md: every code with its title, by group."""
    text = textwrap.dedent("""\
        # Diagnostics

        Every finding of planc has a code, and every code a page; `planc explain CODE` prints
        the same text. This list is written by `make pages`.
        """)
    group = ""
    for code in codes():
        if code[2] != group:
            group = code[2]
            text += f"\n## {_GROUPS[group]}\n\n"
        page = explain(code) or ""
        title = page.partition("\n")[0].partition(": ")[2]
        text += f"- [{code}]({code}.md): {title}\n"
    return text


if __name__ == "__main__":
    print(index(), end="")
