"""The context sections -> the axes over which the script slices each sequence."""

from __future__ import annotations

from collections.abc import Iterator

from planc.plan.call_arguments import word
from planc.plan.program import Program
from planc.plan.rule_conflicts import flatten
from planc.syntax import ast


def context(program: Program) -> Iterator[str]:
    """The axes whose ranks get slices of a sequence. `attention = script` is all that is supported:
    the training script slices the sequences, and its attention exchanges keys and values.
    """
    for section in program.named("context"):
        items = [placed.item for placed in flatten(section, program.scope)]
        for item in items:
            right = isinstance(item, ast.Setting) and item.name == "attention"
            if not (right and word(item.value, program.scope) == "script"):  # type: ignore[union-attr]
                items = []
        if items and section.axes:
            yield from (axis.path for axis in section.axes)
            continue
        program.sink.error(
            "PL010",
            "`context` sections (context parallelism) are not supported yet",
            section.name_origin,
            help="where the script slices the sequences and exchanges keys and values itself, "
            "write `context on cp { attention = script }`",
        )
