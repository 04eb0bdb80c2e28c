"""Pieces of Python source: imports, calls that break over lines, loops over module sets, styles."""

from __future__ import annotations

from dataclasses import dataclass

from planc.ir import style as ir
from planc.model.facts import Modules
from planc.model.indices import Indices

_WIDTH = 100

IMPORTS = (
    ("torch", ()),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        ("CheckpointImpl", "checkpoint_wrapper"),
    ),
    ("torch.distributed.device_mesh", ("init_device_mesh",)),
    ("torch.distributed.fsdp", ("MixedPrecisionPolicy", "fully_shard")),
    ("torch.distributed.tensor", ("Partial", "Replicate", "Shard")),
    (
        "torch.distributed.tensor.parallel",
        (
            "ColwiseParallel",
            "PrepareModuleInput",
            "PrepareModuleOutput",
            "RowwiseParallel",
            "SequenceParallel",
            "parallelize_module",
        ),
    ),
)


def call(
    head: str, arguments: list[str], *, room: int = 0, place: str = "", brackets: bool = True
) -> str:
    """A call on one line, or with each argument on its own where it does not fit.

    Args:
        head: what stands before the bracket.
        arguments: their sources; one empty text is no argument.
        room: columns that are taken already.
        place: a comment for the first line.
        brackets: False for an import of one name.
    """
    inner = ", ".join(arguments)
    if not brackets:
        return f"{head}{inner}"
    imported = head.startswith("from ")
    line = f"{head}{inner}" if imported else f"{head}({inner})"
    if len(line + place) + room <= _WIDTH:
        return line + place
    rest = "".join(f"    {a},\n" for a in arguments)
    return f"{head}({place}\n{rest})"


@dataclass(frozen=True, slots=True)
class Loop:
    """A way to reach each module of a set.

    Args:
        item: the expression of one module inside the loops, to assign to or to use.
        read: a shorter one to use where the other is assigned to.
        head: the lines of the loops around.
        indent: what stands before a line inside them.
    """

    item: str
    read: str
    head: tuple[str, ...] = ()
    indent: str = ""


def loop_over(
    modules: Modules, layers: int, *, inside: bool = False, assigned: bool = False, place: str = ""
) -> Loop:
    """Loops over all modules of a set.

    Args:
        modules: the set.
        layers: the length of the model's list of blocks.
        inside: whether to stop at the innermost list, and leave the path below it to the caller.
        assigned: whether the item is assigned to, so that it must be reached by its index.
        place: a comment for the first loop.
    """
    path = modules.path
    last = max((i for i, s in enumerate(path) if isinstance(s, Indices)), default=len(path) - 1)
    kept = path[: last + 1] if inside else path
    head: list[str] = []
    reached: list[str] = []
    letters = iter("ijkl")
    for at, segment in enumerate(kept):
        if isinstance(segment, str):
            reached.append(segment)
            continue
        if len(segment) == 1:
            reached.append(f"[{segment.first}]")
            continue
        letter, items, indent = next(letters), reach(reached), "    " * len(head)
        whole = segment.runs() == (range(layers),)
        if whole and not head:
            own = assigned and at == len(kept) - 1
            each = f"{letter}, block in enumerate({items})" if own else f"block in {items}"
            head.append(f"{indent}for {each}:{place}")
            if own:
                return Loop(f"{items}[{letter}]", "block", tuple(head), "    ")
            reached = ["block"]
        else:
            head.append(f"{indent}for {letter} in {_range(segment)}:{place}")
            reached.append(f"[{letter}]")
        place = ""
    item = reach(reached)
    return Loop(item, item, tuple(head), "    " * len(head))


def _range(indices: Indices) -> str:
    runs = indices.runs()
    if len(runs) == 1:
        run = runs[0]
        return f"range({run.start}, {run.stop}{f', {run.step}' if run.step > 1 else ''})"
    texts = [
        f"{r.start}"
        if len(r) == 1
        else f"*range({r.start}, {r.stop}{f', {r.step}' if r.step > 1 else ''})"
        for r in runs
    ]
    return f"({', '.join(texts)})"


def reach(parts: list[str]) -> str:
    """`model.model.layers[i].mlp`; what starts with `block` is a loop's own name."""
    text = "" if parts[:1] == ["block"] else "model"
    for part in parts:
        if part.startswith("["):
            text += part
        elif part.isidentifier():
            text += f".{part}" if text else part
        else:
            text += f'.get_submodule("{part}")'
    return text


def style_source(style: ir.Style) -> str:
    """A style as Python; torch's defaults are left out."""
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
            for argument, side in (("input_kwarg_layouts", 0), ("desired_input_kwarg_layouts", 1)):
                pairs = (f'"{n}": {_layout((c.source, c.target)[side])}' for n, c in style.named)
                if style.named:
                    arguments.append(f"{argument}={{{', '.join(pairs)}}}")
        case ir.Output():
            name = "PrepareModuleOutput"
            arguments += _sides("output_layouts", "desired_output_layouts", style.positional)
    if style.local != local:
        arguments.append(f"use_local_output={style.local}")
    return f"{name}({', '.join(arguments)})"


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
