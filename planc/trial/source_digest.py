"""planc's own sources as part of a verdict's key: a bug fixed in planc leaves none standing."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
SOURCES = (
    "lowering/megatron_mesh.py",
    "model",
    "ops",
    "plan/mesh_axes.py",
    "plan/unit_lists.py",
    "proof",
    "runtime",
    "trial",
)
"""What builds and runs small models and judges the runs, as folders and files of the package."""


@cache
def source_digest() -> str:
    """The sha256 of the contents of these files: about a millisecond, once in a process."""
    found = hashlib.sha256()
    for path in files():
        found.update(f"{path.relative_to(PACKAGE)}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def files() -> list[Path]:
    """The files, in a fixed order."""
    places = (PACKAGE / name for name in SOURCES)
    return [f for p in places for f in (sorted(p.rglob("*.py")) if p.is_dir() else (p,))]
