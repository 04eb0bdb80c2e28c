"""Evaluates the values of `planc.ops.call` in this process."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, assert_never

from torch import nn

from planc.ir.unit_lists import entries, of_entry
from planc.model.sources.isolation import quiet_imports
from planc.ops import call as calls
from planc.ops.requirements import Requirement


def resolve(path: str) -> Any:
    """The object that `package.module:name` names.

    Raises:
        Exception: any exception of the import.
    """
    module, _, name = path.partition(":")
    package = next((p for prefix, p in calls.INLINED.items() if module.startswith(prefix)), "")
    return attrgetter(name)(importlib.import_module(f"{package}{module}"))


def import_error(requirement: Requirement) -> Exception | None:
    """The error of the import of a required package; None if it can be imported."""
    try:
        with quiet_imports():
            importlib.import_module(requirement.package)
    except Exception as error:  # loading its shared libraries can raise any exception
        return error
    return None


def function_of(call: calls.FunctionCall) -> Callable[..., Any]:
    """The function of a call; for a method, a function that calls it on its first argument."""
    if not call.function.startswith("."):
        function: Callable[..., Any] = resolve(call.function)
        return function
    method = attrgetter(call.function[1:])
    return lambda owner, *arguments, **keywords: method(owner)(*arguments, **keywords)


class Values:
    """Evaluates the arguments of calls, which operations hold as data.

    Args:
        variables: the values of `model` and `mesh`.
        modules: the modules of the model by name.
        mesh: returns the submesh of some axes.
        known: values that several calls share; each is evaluated once.
    """

    def __init__(
        self,
        variables: Mapping[str, object],
        modules: Mapping[str, nn.Module],
        mesh: Callable[[calls.MeshOf], object],
        known: dict[calls.Shared, Any] | None = None,
    ) -> None:
        self._variables = variables
        self._modules = modules
        self._mesh = mesh
        self._known: dict[calls.Shared, Any] = {} if known is None else known

    def evaluate(self, value: calls.Value) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case tuple():
                return tuple(map(self.evaluate, value))
            case calls.Variable():
                return self._variables[value.name]
            case calls.ImportedName():
                return resolve(value.path)
            case calls.ParameterRef():
                owner, _, name = value.name.rpartition(".")
                return getattr(self._modules[owner], name)
            case calls.Attribute():
                return attrgetter(value.name)(self.evaluate(value.owner))
            case calls.Index():
                return self.evaluate(value.value)[
                    value.keys[0] if len(value.keys) == 1 else value.keys
                ]
            case calls.Items():
                return list(map(self.evaluate, value.values))
            case calls.Table():
                return {name: self.evaluate(entry) for name, entry in value.entries}
            case calls.Members():
                return [self._modules[name] for modules in value.sets for name in modules.names()]
            case calls.Numbered():
                return list(self._numbered_modules(value))
            case calls.MeshOf():
                return self._mesh(value)
            case calls.FunctionCall():
                arguments = map(self.evaluate, value.arguments)
                return function_of(value)(*arguments, **self.keywords(value.keywords))
            case calls.Shared():
                if value not in self._known:
                    self._known[value] = self.evaluate(value.value)
                return self._known[value]
            case _:
                assert_never(value)

    def keywords(self, given: calls.Keywords) -> dict[str, Any]:
        keywords: dict[str, Any] = {}
        for name, value in given:
            keywords |= {name: self.evaluate(value)} if name else self.evaluate(value)
        return keywords

    def _numbered_modules(self, value: calls.Numbered) -> Iterator[tuple[int, nn.Module]]:
        for index in entries((value.modules,)):
            members = of_entry(value.modules, index)
            for name in members.names() if members else ():
                yield index, self._modules[name]
