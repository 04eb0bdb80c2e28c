"""Python that reaches modules: attribute chains, and loops over the entries of lists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planc.emit.python.printer import Group, Source, attribute, lay, quoted, remark
from planc.model.facts import Modules, Segment
from planc.model.indices import Indices

IN = "    "  # the body of a function

Lines = Iterator[str]


@dataclass(frozen=True, slots=True)
class Loop:
    """A way to reach each module of a set.

    Args:
        item: the expression of one module inside the loops.
        head: the lines of the loops around it.
        owner: the module that holds it, to assign to.
        place: how the owner names it: `.mlp`, `[i]`, or a name that is no attribute.
    """

    item: str
    head: tuple[str, ...] = ()
    owner: str = "model"
    place: str = ""

    @property
    def indent(self) -> str:
        return "    " * len(self.head)


def loop_over(modules: Modules, layers: int, *, assigned: bool = False) -> Loop:
    """Loops over all modules of a set.

    Args:
        modules: the set.
        layers: the length of the longest list of the model, so that a loop over all of it can say
            so.
        assigned: whether the modules are replaced, so that their indices are needed.
    """
    head: list[str] = []
    owner = item = "model"
    place = ""
    for at, segment in enumerate(modules.path):
        owner = item
        if isinstance(segment, str):
            item, place = step(owner, segment), segment
            continue
        if len(segment) == 1:
            place = f"[{segment.first}]"
            item = owner + place
            continue
        letter = "ijkl"[len(head) % 4] * (1 + len(head) // 4)
        indent = "    " * len(head)
        place = f"[{letter}]"
        if head or segment.runs() != (range(layers),):
            head.append(f"{indent}for {letter} in {_range(segment)}:")
            item = owner + place
        elif assigned and at == len(modules.path) - 1:
            head.append(f"{indent}for {letter}, block in enumerate({owner}):")
            item = "block"
        else:
            head.append(f"{indent}for block in {owner}:")
            item = "block"
    return Loop(item, tuple(head), owner, place)


def replace(loop: Loop, call: str, *arguments: Source) -> Group:
    """The statement that puts `call(module, ...)` in a module's place."""
    inner = Group(f"{call}(", (loop.item, *arguments))
    if loop.place.startswith("["):
        return Group(f"{loop.owner}{loop.place} = {inner.head}", inner.items)
    if attribute(loop.place):
        return Group(f"{loop.owner}.{loop.place} = {inner.head}", inner.items)
    return Group(f"{loop.owner}.register_module(", (quoted(loop.place), inner))


def entries(modules: Modules) -> Iterator[Source]:
    """The modules of a set as the items of a Python list."""
    *rest, last = modules.path or ("",)
    several = isinstance(last, Indices) and len(last) > 1
    single = all(isinstance(s, str) or len(s) == 1 for s in rest)
    if several and single and isinstance(last, Indices):
        owner = _chain(tuple(rest))
        for run in last.runs():
            if len(run) == 1:
                yield f"{owner}[{run.start}]"
            else:
                stride = f":{run.step}" if run.step > 1 else ""
                yield f"*{owner}[{run.start}:{run.stop}{stride}]"
        return
    yield from _each("model", modules.path)


def _each(owner: str, path: tuple[Segment, ...]) -> Iterator[str]:
    if not path:
        yield owner
        return
    first, *rest = path
    if isinstance(first, str):
        yield from _each(step(owner, first), tuple(rest))
        return
    for index in first:
        yield from _each(f"{owner}[{index}]", tuple(rest))


def _chain(path: tuple[Segment, ...]) -> str:
    return next(_each("model", path))


def step(owner: str, name: str) -> str:
    """A child of a module by its name."""
    return f"{owner}.{name}" if attribute(name) else f"{owner}.get_submodule({quoted(name)})"


def parameter(path: str) -> str:
    """A parameter by torch's name, such as `lm_head.weight`, to read or to assign to."""
    owner, _, name = path.rpartition(".")
    if all(attribute(part) for part in owner.split(".")):
        return f"model.{owner}.{name}"
    return f"model.get_submodule({quoted(owner)}).{name}" if owner else f"model.{name}"


def _range(indices: Indices) -> str:
    runs = indices.runs()
    if len(runs) == 1:
        return _run(runs[0])
    return f"({', '.join(str(r.start) if len(r) == 1 else f'*{_run(r)}' for r in runs)})"


def _run(run: range) -> str:
    return f"range({run.start}, {run.stop}{f', {run.step}' if run.step > 1 else ''})"


def looped(head: Sequence[str], statement: Source, place: str) -> Lines:
    """A statement in its loops; what asked for it stands at the first line."""
    note = remark(place)
    for number, line in enumerate(head):
        yield from lay(line, IN, note="" if number else note)
    indent = IN + "    " * len(head)
    yield from lay(statement, indent, note="" if head else note)


def variable(axis: str) -> str:
    """A name that no other of the function has."""
    return re.sub(r"\W", "_", f"{axis}_mesh")
