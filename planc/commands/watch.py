"""Runs a check again whenever one of its files changes (`--watch`)."""

import time
from collections.abc import Callable
from pathlib import Path

from planc.compiler import Compiled

_POLL = 0.3  # seconds


def repeat(check: Callable[[], tuple[int, list[Compiled]]]) -> int:
    """Runs a check until the user interrupts it; returns its last exit code.

    Args:
        check: gives the exit code and what it compiled, whose files are watched.
    """
    code, seen = 0, None
    try:
        while True:
            code, compiled = check()
            files = {Path("pyproject.toml"), *_files(compiled)}
            print("\nwaiting for a change (Ctrl-C ends)", flush=True)
            seen = {f: _changed(f) for f in files}
            while seen == {f: _changed(f) for f in files}:
                time.sleep(_POLL)
            print("\n" + "-" * 60, flush=True)
    except KeyboardInterrupt:
        return code


def _files(compiled: list[Compiled]) -> set[Path]:
    found = set()
    for one in compiled:
        files = one.files if isinstance(one.files, tuple) else ()
        found |= {Path(f.origin.source.name) for f in files}
        found |= {Path(one.facts.config_name)} if one.facts else set()
    return found


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
