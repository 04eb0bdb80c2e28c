"""The imports of an emitted script, sorted as `ruff` sorts them."""

import re
import sys
from collections.abc import Iterable, Mapping

from planc.emit.python.inlined_source import global_names
from planc.emit.python.layout import WIDTH, Bracketed, lay


def imports(body: str, modules: Iterable[str], names: Mapping[str, str]) -> str:
    """The import statements that Python source needs.

    Args:
        body: the source that follows them.
        modules: modules that the source may use by their names.
        names: the module of each name that the source may use; empty for a module.
    """
    used = global_names(body)
    names_by_module: dict[str, list[str]] = {}
    whole = {module for module in modules if module.partition(".")[0] in used}
    for name in used & names.keys():
        if names[name]:
            names_by_module.setdefault(names[name], []).append(name)
        else:
            whole.add(name)
    parts = (
        "\n".join(_section(whole, names_by_module, standard=standard)) for standard in (True, False)
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(
    whole: set[str], names_by_module: Mapping[str, list[str]], *, standard: bool
) -> Iterable[str]:
    def here(module: str) -> bool:
        return (module.partition(".")[0] in sys.stdlib_module_names) is standard

    yield from (f"import {module}" for module in sorted(filter(here, whole)))
    for module in sorted(filter(here, names_by_module)):
        names = tuple(sorted(names_by_module[module], key=_by_kind))
        line = f"from {module} import {', '.join(names)}"
        broken = lay(Bracketed(f"from {module} import (", names))
        yield from [line] if len(line) <= WIDTH else broken


def _by_kind(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if re.match("_*[A-Z]", name) else 2
    return kind, name.lower()
