"""Runs a check again whenever one of its files changes (`--watch`)."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from planc.compiler import Compiled

_POLL = 0.3  # seconds


def repeat(
    check: Callable[[], tuple[int, list[Compiled]]], named: Callable[[], Iterable[str]]
) -> int:
    """Runs a check until the user interrupts it; returns its last exit code.

    Args:
        check: gives the exit code and what it compiled, whose files are watched.
        named: the models and plans that are asked for, which may not be there yet.
    """
    code, files = 0, {folder / "pyproject.toml" for folder in (Path.cwd(), *Path.cwd().parents)}
    try:
        while True:
            code, compiled = check()
            # those of before stay: a plan that cannot be read now names no files
            files |= {*_files(compiled), *(Path(name) for name in named())}
            print("\nwaiting for a change (Ctrl-C ends)", flush=True)
            seen = _state(files)
            while seen == _state(files):
                time.sleep(_POLL)
            print("\n" + "-" * 60, flush=True)
    except KeyboardInterrupt:
        return code


def _files(compiled: list[Compiled]) -> set[Path]:
    paths = set()
    for compiled_plan in compiled:
        files = compiled_plan.files if isinstance(compiled_plan.files, tuple) else ()
        paths |= {Path(f.origin.source.name) for f in files}
        paths |= {Path(compiled_plan.facts.config_name)} if compiled_plan.facts else set()
    return paths


def _state(files: set[Path]) -> dict[Path, float]:
    """When each file has changed, and each plan beside one: it may be extended before it exists."""
    folders = {file.parent for file in files if file.suffix == ".plan"}
    beside = (path for folder in folders for path in folder.glob("*.plan"))
    models = (file / "config.json" for file in files)
    return {file: _change_time(file) for file in {*files, *beside, *models}}


def _change_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
