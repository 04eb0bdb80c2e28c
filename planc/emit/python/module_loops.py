"""Python that selects modules: attribute chains, and loops over lists."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planc.emit.python.layout import (
    WIDTH,
    Bracketed,
    Source,
    attribute,
    lay,
    prepend,
    quote,
    remark,
)
from planc.model.facts import Modules, Segment
from planc.model.indices import Indices

IN = "    "  # the body of a function

Lines = Iterator[str]


@dataclass(frozen=True, slots=True)
class Lists:
    """The lists of modules that loops go over.

    Args:
        longest: the length of the longest list; a loop over all of it has no indices.
        dicts: the lists that are an nn.ModuleDict (`Lowered.module_dicts`).
    """

    longest: int = 0
    dicts: tuple[str, ...] = ()

    def is_dict(self, path: Sequence[Segment]) -> bool:
        """Whether the entries of the list at a path have texts for keys."""
        return ".".join(s if isinstance(s, str) else "*" for s in path) in self.dicts


@dataclass(frozen=True, slots=True)
class Loop:
    """Loops over the modules of a set.

    Args:
        item: the expression of one module inside the loops.
        head: the lines of the `for` statements.
        owner: the parent module, to assign to.
        place: how the owner names the module: `.mlp`, `[i]`, or a name that is no attribute.
    """

    item: str
    head: tuple[str, ...] = ()
    owner: str = "model"
    place: str = ""


def loop_over(modules: Modules, lists: Lists, *, assigned: bool = False) -> Loop:
    """Loops over all modules of a set.

    Args:
        lists: of the model.
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
        keyed = lists.is_dict(modules.path[:at])
        if len(segment) == 1:
            place = f'["{segment.first}"]' if keyed else f"[{segment.first}]"
            item = owner + place
            continue
        letter = "ijkl"[len(head) % 4] * (1 + len(head) // 4)
        indent = "    " * len(head)
        place = f"[str({letter})]" if keyed else f"[{letter}]"
        if head or segment.runs() != (range(lists.longest),):
            head.append(f"{indent}for {letter} in {_range(segment)}:")
            item = owner + place
        elif assigned and at == len(modules.path) - 1:
            entries = f"{owner}.items()" if keyed else f"enumerate({owner})"
            head.append(f"{indent}for {letter}, block in {entries}:")
            item, place = "block", f"[{letter}]"
        else:
            head.append(f"{indent}for block in {owner}{'.values()' if keyed else ''}:")
            item = "block"
    return Loop(item, tuple(head), owner, place)


def replacement(loop: Loop, value: Source) -> Source:
    """The statement that replaces a module."""
    if loop.place.startswith("["):
        return prepend(f"{loop.owner}{loop.place} = ", value)
    if attribute(loop.place):
        return prepend(f"{loop.owner}.{loop.place} = ", value)
    return Bracketed(f"{loop.owner}.register_module(", (quote(loop.place), value))


def module_list(sets: Sequence[Modules], lists: Lists) -> Bracketed:
    """All modules of some sets as a list."""
    if len(sets) == 1 and len(sets[0]) > 1:
        return comprehension("[", sets[0], lists, close="]")
    items: list[Source] = []
    for modules in sets:
        items += _run_items(modules, lists) or [comprehension("*(", modules, lists)]
    return Bracketed("[", tuple(items), "]")


def comprehension(
    head: str, modules: Modules, lists: Lists, *, close: str = ")", entry: str = ""
) -> Bracketed:
    """A comprehension over the modules of a set.

    Args:
        head, close: the brackets.
        lists: of the model.
        entry: the expression that is paired with each module, such as `i`.
    """
    loop = loop_over(modules, lists)
    item = f"({entry}, {loop.item})" if entry else loop.item
    clauses = (line.strip().removesuffix(":") for line in loop.head)
    return Bracketed(head, (item, *clauses), close, comma="")


def _run_items(modules: Modules, lists: Lists) -> list[Source]:
    """One module, or slices of one list; empty for other sets."""
    loop = loop_over(modules, replace(lists, longest=0))
    if not loop.head:
        return [loop.item]
    last = modules.path[-1]
    if len(loop.head) > 1 or not isinstance(last, Indices) or len(last) == 1:
        return []
    if lists.is_dict(modules.path[:-1]):  # a dictionary has no slices
        return []
    return [_slice(loop.owner, run) for run in last.runs()]


def _slice(owner: str, run: range) -> str:
    if len(run) == 1:
        return f"{owner}[{run.start}]"
    stride = f":{run.step}" if run.step > 1 else ""
    return f"*{owner}[{run.start}:{run.stop}{stride}]"


def step(owner: str, name: str) -> str:
    """The expression of a child module."""
    return f"{owner}.{name}" if attribute(name) else f"{owner}.get_submodule({quote(name)})"


def parameter(path: str) -> str:
    """The expression of a parameter, such as `model.lm_head.weight`, to read or to assign to."""
    owner, _, name = path.rpartition(".")
    if all(attribute(part) for part in owner.split(".")):
        return f"model.{owner}.{name}"
    return f"model.get_submodule({quote(owner)}).{name}" if owner else f"model.{name}"


def _range(indices: Indices) -> str:
    runs = indices.runs()
    if len(runs) == 1:
        return _run(runs[0])
    return f"({', '.join(str(r.start) if len(r) == 1 else f'*{_run(r)}' for r in runs)})"


def _run(run: range) -> str:
    return f"range({run.start}, {run.stop}{f', {run.step}' if run.step > 1 else ''})"


def loop_lines(head: Sequence[str], statements: Sequence[Source], place: str) -> Lines:
    """Statements in their loops; the plan's line is a comment on the first line."""
    note = remark(place)
    for number, line in enumerate(head):
        yield from lay(line, IN, note="" if number else note)
    indent = IN + "    " * len(head)
    for statement in statements:
        yield from lay(statement, indent, note="" if head else note)


def assign(target: Source, value: Source, place: str) -> Lines:
    """An assignment, its right side in parentheses where the line would be too long."""
    line = f"{target} = {value}"
    if len(IN + line) <= WIDTH:
        yield from lay(line, IN, note=remark(place))
    else:
        yield from lay(Bracketed(f"{target} = (", (value,), comma=""), IN, note=remark(place))
