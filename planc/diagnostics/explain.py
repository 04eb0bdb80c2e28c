"""`planc explain CODE`: the pages of `docs/diagnostics`, and their index."""

import re
import sys

from planc.diagnostics.codes import CODES
from planc.diagnostics.color import paint
from planc.files.resources import PAGES

GROUPS = {
    "PL0": "Reading and syntax",
    "PL1": "Names and paths",
    "PL2": "Shapes and heads",
    "PL3": "The mesh",
    "PL4": "Composition, order and apply",
    "PL5": "Layout flow",
    "PL6": "Models and families",
    "PL7": "Memory and time, editors",
    "PL9": "planc itself",
}
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_SPAN = re.compile(r"`([^`\n]+)`")


def explain(code: str) -> str | None:
    """The Markdown page of a code in any case, or None if there is no such code."""
    name = code.strip().upper()
    page = PAGES / f"{name}.md"
    return page.read_text(encoding="utf-8") if name in CODES else None


def terminal(text: str, color: bool, width: int = 0) -> str:
    """A page for the terminal: headings without `#`, links without their address.

    Args:
        text: the Markdown of the page.
        width: of the terminal, to which prose is wrapped; 0 keeps the lines as they are.
    """
    if width:
        text = "\n\n".join(_wrap(block, width) for block in text.split("\n\n"))
    return "".join(f"{_line(line, color)}\n" for line in text.splitlines())


def index() -> str:
    """The text of `docs/diagnostics/README.md`: every code with its title, by group."""
    out = ["# Diagnostics\n", "One page a code; `planc explain CODE` prints the same text.\n"]
    for group, heading in GROUPS.items():
        listed = [f"- [{n}]({n}.md): {c.title}\n" for n, c in CODES.items() if n[:3] == group]
        if listed:
            out.append(f"## {group}: {heading}\n\n{''.join(listed).rstrip()}\n")
    out.append("```{toctree}\n:hidden:\n:glob:\n\nPL*\n```\n")  # the pages' place in the site
    return "\n".join(out)


def _wrap(block: str, width: int) -> str:
    """A paragraph or a list; headings and examples stay, and so does what is between backticks."""
    if block.startswith(("#", "    ")):
        return block
    import textwrap

    rows = []
    fill = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    for item in re.split(r"\n(?=- )", _LINK.sub(r"\1", block)):
        whole = _SPAN.sub(lambda span: span[0].replace(" ", "\0"), " ".join(item.split()))
        fill.subsequent_indent = "  " if item.startswith("- ") else ""
        rows.append(fill.fill(whole).replace("\0", " "))
    return "\n".join(rows)


def _line(line: str, color: bool) -> str:
    if line.startswith("#"):
        return paint([(line.lstrip("# "), "bold")], color)
    if line.startswith("    "):
        return paint([(line, "code")], color)
    line = _LINK.sub(r"\1", line)
    if not color:
        return line
    pieces = _SPAN.split(line)  # text, code, text, code, ..., text
    return paint([(p, "code" if i % 2 else "") for i, p in enumerate(pieces)], color)


if __name__ == "__main__":
    sys.stdout.write(index())
