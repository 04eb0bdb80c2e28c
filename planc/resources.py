"""The folders of the files that ship with the code: grammars, plans and diagnostics pages.

An editable install and a checkout read the repository's own folders, so there is one copy to edit;
a wheel carries them inside the package (`force-include` in pyproject.toml).
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_SHIPPED = _PACKAGE / "_share"
SHARE = _SHIPPED if _SHIPPED.is_dir() else _PACKAGE.parent

GRAMMARS = SHARE / "grammars"
PLANS = SHARE / "plans"
PAGES = SHARE / "docs" / "diagnostics"
