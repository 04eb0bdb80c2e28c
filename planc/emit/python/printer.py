"""Prints calls as Python: the steps of one operation as the body of a function."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from planc.emit.python.layout import Bracketed, Source, lay, literal, prepend, quote, remark
from planc.emit.python.module_loops import (
    IN,
    Lines,
    Lists,
    Loop,
    assign,
    comprehension,
    loop_lines,
    loop_over,
    module_list,
    parameter,
    replacement,
)
from planc.model.facts import Modules
from planc.ops import call as calls


class Printer:
    """Prints the functions of one script.

    Args:
        context: the sizes of the mesh's axes.
        lists: of the model.
        names: the names that the script may import, each with its module.

    Attributes:
        modules: modules that the printed source uses by their names.
        names: with the names that the printed source uses.
    """

    def __init__(self, context: calls.Context, lists: Lists, names: Mapping[str, str]) -> None:
        self._context = context
        self._lists = lists
        self._variables: dict[calls.Shared, str] = {}
        self.modules = {"torch"}
        self.names = dict(names)

    def shared(self, steps: Iterable[calls.Step]) -> Lines:
        """Assigns the shared values of a function to variables, nested values first."""
        depths: dict[calls.Shared, int] = {}
        for step in steps:
            self._find(calls.values_of(step), depths)
        self._variables = _variable_names(depths)
        deep: dict[str, int] = {}
        for value, depth in depths.items():
            deep[value.name] = max(depth, deep.get(value.name, 0))
        for value in sorted(depths, key=lambda value: (deep[value.name], depths[value])):
            assignment = prepend(f"{self._variables[value]} = ", self.source(value.value))
            yield from lay(assignment, IN, note=remark(value.note))

    def loop(self, modules: Modules) -> Loop:
        return loop_over(modules, self._lists)

    def step(self, step: calls.Step) -> Lines:
        match step:
            case calls.Each():
                loop = loop_over(step.modules, self._lists, assigned=step.replaces)
                sources = [self.call(call, loop.item) for call in step.calls]
                body = [replacement(loop, sources[0])] if step.replaces else sources
                yield from loop_lines(loop.head, body, step.note)
            case calls.Once():
                yield from loop_lines((), [self.call(step.call)], step.note)
            case calls.Assign():
                yield from assign(self.source(step.target), self.source(step.value), step.note)
            case _:
                assert_never(step)

    def call(self, call: calls.FunctionCall, *first: Source) -> Bracketed:
        """A call, with further arguments before its first."""
        arguments = [*first, *map(self.source, call.arguments)]
        if call.function.startswith("."):
            head = f"{arguments.pop(0)}{call.function}"
        else:
            head = self._import(call.function)
        for name, value in call.keywords:
            arguments.append(prepend(f"{name}=" if name else "**", self.source(value)))
        return Bracketed(f"{head}(", tuple(arguments))

    def source(self, value: calls.Value) -> Source:
        match value:
            case None | bool() | int() | float() | str():
                return literal(value)
            case tuple():
                return Bracketed("(", tuple(map(self.source, value)), single=",")
            case calls.Variable():
                return value.name
            case calls.ImportedName():
                return self._import(value.path)
            case calls.ParameterRef():
                return parameter(value.name)
            case calls.Attribute():
                return f"{self.source(value.owner)}.{value.name}"
            case calls.Index():
                return f"{self.source(value.value)}[{', '.join(map(quote, value.keys))}]"
            case calls.Items():
                return Bracketed("[", tuple(map(self.source, value.values)), "]")
            case calls.Table():
                entries = value.entries
                items = (prepend(f"{quote(key)}: ", self.source(item)) for key, item in entries)
                return Bracketed("{", tuple(items), "}")
            case calls.Members():
                return module_list(value.sets, self._lists)
            case calls.Numbered():
                return self._numbered_list(value)
            case calls.MeshOf():
                return self.source(calls.mesh_source(value, self._context))
            case calls.FunctionCall():
                return self.call(value)
            case calls.Shared():
                return self._variables[value]
            case _:
                assert_never(value)

    def _numbered_list(self, value: calls.Numbered) -> Source:
        modules, entries = value.modules, value.modules.entries
        indexed = replace(self._lists, longest=0)
        index = "i" if len(entries) > 1 else str(entries.first)
        if len(modules) == 1:
            return f"[({index}, {loop_over(modules, indexed).item})]"
        return comprehension("[", modules, indexed, close="]", entry=index)

    def _import(self, path: str) -> str:
        """The name of an imported object: its own for torch and for what scripts inline, else
        `module.name`.
        """
        module, _, name = path.partition(":")
        if module.startswith("torch."):
            self.names[name.partition(".")[0]] = module
        elif not module.startswith(tuple(calls.INLINED)):
            self.modules.add(module)
            return f"{module}.{name}"
        return name

    def _find(self, value: calls.Value, depths: dict[calls.Shared, int]) -> int:
        """Adds the shared values inside a value to `depths`, each with its nesting depth."""
        if isinstance(value, calls.MeshOf):
            return self._find(calls.mesh_source(value, self._context), depths)
        if isinstance(value, calls.Shared):
            if value not in depths:
                depths[value] = self._find(value.value, depths)
            return depths[value] + 1
        return max((self._find(inner, depths) for inner in calls.parts_of(value)), default=0)


def _variable_names(values: Iterable[calls.Shared]) -> dict[calls.Shared, str]:
    """The variable of each value, numbered where several have one name."""
    like: dict[str, list[calls.Shared]] = {}
    for value in values:
        like.setdefault(re.sub(r"\W", "_", value.name), []).append(value)
    return {
        value: name if len(like_values) == 1 else f"{name}_{number}"
        for name, like_values in like.items()
        for number, value in enumerate(like_values, start=1)
    }


def inner_first(steps: Sequence[calls.Step]) -> list[calls.Step]:
    """Steps inside another step's modules first, because a wrapper hides its module.

    The plan's order where nothing is nested.
    """
    each = [step for step in steps if isinstance(step, calls.Each)]
    pairs = ((a.modules, b.modules) for a in each for b in each if b.replaces)
    nested = any(a.deeper(b) for a, b in pairs)
    if not nested or len(each) < len(steps):
        return list(steps)
    return sorted(steps, key=lambda s: -len(s.modules.path) if isinstance(s, calls.Each) else 0)
