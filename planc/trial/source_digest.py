"""A digest of planc's own sources for cache keys: a fix in planc invalidates earlier verdicts."""

import hashlib
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
SOURCES = ("model", "ops", "plan/mesh_axes.py", "plan/unit_lists.py", "proof", "runtime", "trial")
"""Folders and files of the package that build and run small models and judge the runs."""


@cache
def source_digest() -> str:
    """The sha256 of these files, computed once per process; takes about a millisecond."""
    return digest_of(files())


def digest_of(paths: Iterable[str]) -> str:
    """The sha256 of files of the package: of their names and contents."""
    found = hashlib.sha256()
    for path in paths:
        found.update(f"{path.removeprefix(str(PACKAGE))}\n".encode())
        with open(path, "rb", buffering=0) as stream:  # noqa: PTH123, half the time of pathlib
            found.update(stream.read())
    return found.hexdigest()


def files(names: Iterable[str] = SOURCES) -> list[str]:
    """The paths of the files in some folders of the package, in a fixed order."""
    places = [f"{PACKAGE}/{name}" for name in names]
    found = [place for place in places if place.endswith(".py")]
    for place in places:
        for folder, _, inside in os.walk(place):
            found += [f"{folder}/{name}" for name in inside if name.endswith(".py")]
    return sorted(found)
