"""The folders of the files that ship with the code (grammars, plans and diagnostics pages), and of
the cache.

An editable install and a checkout read the repository's own folders, so there is one copy to edit;
a wheel carries them inside the package (`force-include` in pyproject.toml).
"""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = _PACKAGE / "_share"
SHARE = _SHIPPED if _SHIPPED.is_dir() else _PACKAGE.parent

GRAMMARS = SHARE / "grammars"
PLANS = SHARE / "plans"
PAGES = SHARE / "docs" / "diagnostics"


def cache_folder() -> Path:
    """The folder of the cache: `PLANC_CACHE_DIR`, else `planc` in the user's cache folder."""
    chosen = os.environ.get("PLANC_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "planc"
