"""The answers of planc, each written once: the Python API and the commands call them."""

from typing import Any

from planc.diagnostics.notebook import DRAW, TEXT


def _draw(result: Any) -> str:
    from planc.tools.show.changes import notebook

    return notebook(result)


def _write(result: Any) -> str:
    from planc.diffing.compare import Delta
    from planc.diffing.render import render as changes
    from planc.emit.text import render
    from planc.ops.document import digest
    from planc.ops.lowered import Lowered

    if isinstance(result, Delta):
        return changes(result).rstrip()
    plan = isinstance(result, Lowered)
    return str(render(result, digest=digest(result)) if plan else result.describe()).rstrip()


DRAW[:], TEXT[:] = [_draw], [_write]
