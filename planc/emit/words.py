"""Words that the text, the diff and the script share: sizes, shapes, and names put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from planc.lowering.ops import FullyShard, Lowered, Shape
from planc.model.facts import Modules
from planc.model.indices import Indices

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def size(count: int) -> str:
    """Bytes for a person: `27.3 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    raise AssertionError  # the loop ends at TiB


def shape(of: Shape) -> str:
    return f"{list(of.shape)} -> {list(of.local)}"


def shapes(of: Sequence[Shape]) -> str:
    """A weight's shape without its name, those of other parameters after it."""
    return ", ".join(shape(s) if s.name == "weight" else f"{s.name} {shape(s)}" for s in of)


def axes(names: Iterable[str], lowered: Lowered) -> str:
    """`dp_shard * cp = 8`."""
    names = list(names)
    return f"{' * '.join(names)} = {lowered.axis_size(*names)}"


def precision(op: FullyShard) -> str:
    """`bf16 / fp32`: what it computes in, what gradients are summed in."""
    words = [SHORT.get(op.param or "", op.param or "as it is")]
    words.append(SHORT.get(op.reduce or "", op.reduce or "as computed"))
    text = " / ".join(words) if op.param or op.reduce else "no mixed precision"
    if op.output:
        text += f", output {SHORT.get(op.output, op.output)}"
    return text + ("" if op.cast_inputs else ", inputs not cast")


def reshard(value: bool | int) -> str:
    """What a unit does with its gathered parameters after forward."""
    if value is True:
        return "reshard"
    return "keep" if value is False else f"reshard to {value}"


def unit(op: FullyShard) -> str:
    """What a plan calls the unit."""
    names = ", ".join(str(m) for m in op.members)
    return f"group({names})" if op.group else names


def block(modules: Modules) -> str:
    """The repeated block that the modules are in, or empty: `model.layers[0:32]`."""
    at = [i for i, s in enumerate(modules.path) if isinstance(s, Indices)]
    if not at or at[-1] == len(modules.path) - 1:
        return ""
    return str(Modules(modules.path[: at[-1] + 1], modules.module))


def is_block(modules: Modules) -> bool:
    """Whether the modules are entries of a list themselves."""
    return bool(modules.path) and isinstance(modules.path[-1], Indices)


def inside(modules: Modules) -> str:
    """The path of modules inside their block."""
    return str(modules).removeprefix(block(modules)).removeprefix(".")


def together(paths: Sequence[str]) -> list[str]:
    """Paths whose last names alone differ, as one with braces: `mlp.{gate,up}_proj`."""
    result = []
    for parent, group in groupby(paths, key=lambda p: p.rpartition(".")[0]):
        names = [p.rpartition(".")[2] for p in group]
        last = names[0] if len(names) == 1 else _braced(names)
        result.append(f"{parent}.{last}" if parent else last)
    return result


def _braced(names: list[str]) -> str:
    head = _common(names)
    tail = _common([n[::-1] for n in names])[::-1]
    shortest = min(len(n) for n in names)
    if len(head) + len(tail) >= shortest or not (head.endswith("_") or tail.startswith("_")):
        head = tail = ""
    head = head if head.endswith("_") else ""
    tail = tail if tail.startswith("_") else ""
    inner = ",".join(n[len(head) : len(n) - len(tail)] for n in names)
    return f"{head}{{{inner}}}{tail}"


def _common(names: list[str]) -> str:
    """The letters that all names begin with."""
    letters = []
    for column in zip(*names, strict=False):
        if len(set(column)) > 1:
            break
        letters.append(column[0])
    return "".join(letters)


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows in aligned columns, without spaces at the end."""
    if not rows:
        return []
    count = max(len(r) for r in rows)
    padded = [[*row, *[""] * (count - len(row))] for row in rows]
    widths = [max(len(r[i]) for r in padded) for i in range(count)]
    return [
        (indent + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True))).rstrip()
        for r in padded
    ]
