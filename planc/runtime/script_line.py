"""The line of the training script that a finding is about."""

import linecache
import sys
import sysconfig
from pathlib import Path
from types import FrameType

from planc.diagnostics.diagnostic import Label
from planc.diagnostics.source import Source

_INSTALLED = ("site-packages", "dist-packages")
_FOLDERS = (
    Path(__file__).absolute().parent.parent,
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "scripts")),
)
"""planc itself, the standard library, and the commands that packages install."""


def script_line(text: str = "") -> tuple[Label, ...]:
    """The line of the user's code that led here, as the labels of a finding; empty if no text is
    known of it.

    It is in the innermost frame outside planc, the standard library and installed packages: these
    may call the model themselves, as a trainer does, and then it is the line that called them.

    Args:
        text: what the line has to do with the finding.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not of_the_user(frame):
        frame = frame.f_back
    if frame is None:
        return ()
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    if not 0 < frame.f_lineno <= len(lines):
        return ()
    source = Source(_shown(frame.f_code.co_filename), "".join(lines))
    start, line = source.offset(frame.f_lineno), source.line(frame.f_lineno)
    begin, end = start + len(line) - len(line.lstrip()), start + len(line.rstrip())
    return (Label(span=source.span(begin, end), text=text),)


def of_the_user(frame: FrameType) -> bool:
    """Whether a frame is of code outside planc, the standard library and installed packages."""
    name = frame.f_code.co_filename
    if name.startswith("<"):  # what is typed in, or generated: `<stdin>`, `<string>`
        return frame.f_globals.get("__name__") == "__main__"
    path = Path(name).absolute()
    return not any(map(path.is_relative_to, _FOLDERS)) and set(_INSTALLED).isdisjoint(path.parts)


def _shown(name: str) -> str:
    """The path as a user writes it: from the working folder, if the file is inside it."""
    here = Path.cwd()
    return str(Path(name).relative_to(here)) if Path(name).is_relative_to(here) else name
