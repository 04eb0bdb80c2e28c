"""A digest of planc's own sources for cache keys: a fix in planc invalidates earlier verdicts."""

import hashlib
import os
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
SOURCES = (
    "model",
    "ops",
    "plan/mesh_axes.py",
    "plan/unit_lists.py",
    "proof",
    "runtime",
    "trial",
)
"""Folders and files of the package that build and run small models and judge the runs."""


@cache
def source_digest() -> str:
    """The sha256 of these files, computed once per process; takes about a millisecond."""
    found = hashlib.sha256()
    for path in files():
        found.update(f"{path.removeprefix(str(PACKAGE))}\n".encode())
        with open(path, "rb", buffering=0) as stream:  # noqa: PTH123, half the time of pathlib
            found.update(stream.read())
    return found.hexdigest()


def files() -> list[str]:
    """The paths of the files, in a fixed order."""
    places = [f"{PACKAGE}/{name}" for name in SOURCES]
    found = [place for place in places if place.endswith(".py")]
    for place in places:
        for folder, _, names in os.walk(place):
            found += [f"{folder}/{name}" for name in names if name.endswith(".py")]
    return sorted(found)
