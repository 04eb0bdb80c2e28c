"""The folders that ship with the code: the repository's, or those inside a wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_SHIPPED = _PACKAGE / "_share"
SHARE = _SHIPPED if _SHIPPED.is_dir() else _PACKAGE.parent

GRAMMARS = SHARE / "grammars"
PLANS = SHARE / "plans"
PAGES = SHARE / "docs" / "diagnostics"
