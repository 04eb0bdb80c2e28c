"""Copies of modules whose own functions call modules of the copy."""

import copy
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from planc.model.shipped import content


def copy_module(module: nn.Module, known: dict[int, Any]) -> nn.Module:
    """A copy of a module: its own functions, such as a replaced forward, call modules of the copy.

    Args:
        known: what takes the place of objects, by their ids, as of `copy.deepcopy`.
    """
    module_copy = copy.deepcopy(module, known)
    for inner in module.modules():
        there = known[id(inner)].__dict__
        for name, value in inner.__dict__.items():
            if isinstance(value, FunctionType | MethodType):
                there[name] = _rebound(value, known)
            elif name.endswith("_hooks") and value:
                there[name].update({key: _rebound(hook, known) for key, hook in value.items()})
    return module_copy


def _rebound(value: Any, known: dict[int, Any]) -> Any:
    """A function with the copies of the modules that it holds, in its closure or its defaults."""
    match value:
        case FunctionType():
            cells = (CellType(_rebound(content(cell), known)) for cell in value.__closure__ or ())
            given = _rebound(value.__defaults__, known)
            function = FunctionType(
                value.__code__, value.__globals__, value.__name__, given, tuple(cells)
            )
            function.__kwdefaults__ = _rebound(value.__kwdefaults__, known)
            function.__dict__.update(value.__dict__)
            return function
        case MethodType():
            return MethodType(_rebound(value.__func__, known), _rebound(value.__self__, known))
        case tuple() if type(value) is tuple:
            return tuple(_rebound(item, known) for item in value)
        case dict() if type(value) is dict:
            return {name: _rebound(item, known) for name, item in value.items()}
        case nn.Module() | nn.Parameter():
            return known.get(id(value), value)
    return value
