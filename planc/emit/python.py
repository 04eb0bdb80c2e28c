"""Pieces of Python source, laid out as a formatter would: imports, calls, styles.

What does not fit on a line is broken with one item a line and a comma after the last, which
formatters leave as it is whatever their line length.
"""

from __future__ import annotations

import json
import keyword
from collections.abc import Iterator
from dataclasses import dataclass

from planc.ir import style as ir

WIDTH = 88  # the default of ruff and black

_PARALLEL = "torch.distributed.tensor.parallel"
_IMPORTS = (
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        ("CheckpointImpl", "checkpoint_wrapper"),
    ),
    ("torch.distributed.device_mesh", ("DeviceMesh", "init_device_mesh")),
    (
        "torch.distributed._composable.replicate_with_fsdp",
        ("replicate",),
    ),
    ("torch.distributed.fsdp", ("CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy")),
    ("torch.distributed.fsdp", ("fully_shard",)),
    ("torch.distributed.tensor", ("Partial", "Replicate", "Shard")),
    (_PARALLEL, ("ColwiseParallel", "PrepareModuleInput", "PrepareModuleOutput")),
    (_PARALLEL, ("RowwiseParallel", "SequenceParallel", "parallelize_module")),
)


@dataclass(frozen=True, slots=True)
class Group:
    """Something in brackets that can be broken over lines: a call, a list, a dictionary.

    Args:
        head: what stands before the items, with the opening bracket.
        items: in order.
        close: the closing bracket.
        notes: a comment for each item; a group with notes is broken always.
    """

    head: str
    items: tuple[Source, ...]
    close: str = ")"
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.head}{', '.join(str(i) for i in self.items)}{self.close}"


Source = str | Group


def lay(source: Source, indent: str = "", *, note: str = "", end: str = "") -> Iterator[str]:
    """Lines of source, a comment behind them or, where that is too far right, above them.

    Args:
        source: a statement or an item of one.
        indent: what stands before each line.
        note: the comment's text, or nothing.
        end: a comma, for an item.
    """
    flat = f"{indent}{source}{end}"
    broken = isinstance(source, Group) and source.items and (source.notes or len(flat) > WIDTH)
    beside = f"{flat}  # {note}" if note else flat
    if len(beside) <= WIDTH and not broken:
        yield beside
        return
    if note:
        yield f"{indent}# {note}"
    if not broken or isinstance(source, str):
        yield flat
        return
    yield f"{indent}{source.head}"
    for item, about in zip(source.items, source.notes or ("",) * len(source.items), strict=True):
        yield from lay(item, f"{indent}    ", note=about, end=",")
    yield f"{indent}{source.close}{end}"


def assign(target: str, value: str, indent: str = "") -> Iterator[str]:
    """An assignment, its right side in brackets where it is too long."""
    line = f"{indent}{target} = {value}"
    if len(line) <= WIDTH:
        yield line
        return
    yield from (f"{indent}{target} = (", f"{indent}    {value}", f"{indent})")


def remark(text: str) -> str:
    """The text of a comment, on one line whatever it was."""
    return "".join(c if c.isprintable() else "?" for c in text)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def attribute(name: str) -> bool:
    """Whether `module.name` is Python."""
    return name.isidentifier() and not keyword.iskeyword(name)


def imports(body: str) -> str:
    """The imports that a body needs, in order."""
    lines = ["import torch"] if "torch." in body else []
    found: dict[str, list[str]] = {}
    for module, names in _IMPORTS:
        found.setdefault(module, []).extend(n for n in names if _used(n, body))
    for module, used in found.items():
        line = f"from {module} import {', '.join(used)}"
        if used and len(line) <= WIDTH:
            lines.append(line)
        elif used:
            lines += [f"from {module} import (", *(f"    {n}," for n in used), ")"]
    return "\n".join(lines) + "\n"


def _used(name: str, body: str) -> bool:
    return any(f"{name}{end}" in body for end in ("(", ".", "):"))


def style_source(style: ir.Style, head: str = "") -> Group:
    """The call of a torch style; torch's defaults are left out.

    Args:
        style: of the plan.
        head: what stands before the call.
    """
    arguments: list[str] = []
    local = True
    match style:
        case ir.Colwise() | ir.Rowwise():
            name = "ColwiseParallel" if isinstance(style, ir.Colwise) else "RowwiseParallel"
            default = type(style)()
            if style.input != default.input:
                arguments.append(f"input_layouts={_layout(style.input)}")
            if style.output != default.output:
                arguments.append(f"output_layouts={_layout(style.output)}")
        case ir.Sequence():
            name, local = "SequenceParallel", False
            if style.dim != 1:
                arguments.append(f"sequence_dim={style.dim}")
        case ir.Input():
            name, local = "PrepareModuleInput", False
            arguments += _sides("input_layouts", "desired_input_layouts", style.positional)
            arguments += _named(style)
        case ir.Output():
            name = "PrepareModuleOutput"
            arguments += _sides("output_layouts", "desired_output_layouts", style.positional)
    if style.local != local:
        arguments.append(f"use_local_output={style.local}")
    return Group(f"{head}{name}(", tuple(arguments))


def _named(style: ir.Input) -> Iterator[str]:
    if not style.named:
        return
    for argument, side in (("input_kwarg_layouts", 0), ("desired_input_kwarg_layouts", 1)):
        pairs = (f"{quoted(n)}: {_layout((c.source, c.target)[side])}" for n, c in style.named)
        yield f"{argument}={{{', '.join(pairs)}}}"


def _sides(arrives: str, wanted: str, changes: tuple[ir.Change | None, ...]) -> list[str]:
    if not changes:
        return []
    before = ", ".join(_layout(c.source) if c else "None" for c in changes)
    after = ", ".join(_layout(c.target) if c else "None" for c in changes)
    comma = "," if len(changes) == 1 else ""
    return [f"{arrives}=({before}{comma})", f"{wanted}=({after}{comma})"]


def _layout(layout: ir.Layout) -> str:
    match layout:
        case ir.Replicate():
            return "Replicate()"
        case ir.Shard():
            return f"Shard({layout.dim})"
        case ir.Partial():
            return "Partial()"
