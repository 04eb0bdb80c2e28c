"""Tells functions that libraries ship from functions that a script has made or has put into a
library.
"""

import ast
import functools
import inspect
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

LIBRARIES = ("torch", "transformers", "diffusers", "planc", "kernels")
"""The packages that ship functions; `kernels` puts functions of the hub into other packages."""


def functions_in(value: Any) -> list[FunctionType]:
    """The functions that a value is, calls or wraps, each once."""
    functions, waiting = dict[int, FunctionType](), [value]
    while waiting:
        match waiting.pop():
            case FunctionType() as function if id(function) not in functions:
                functions[id(function)] = function
                waiting += map(content, function.__closure__ or ())
                waiting.append(function.__dict__.get("__wrapped__"))
            case MethodType() | staticmethod() | classmethod() as method:
                waiting.append(method.__func__)
            case property() as made:
                waiting.append(made.fget)
            case functools.partial() as part:
                waiting.append(part.func)
    return [*functions.values()]


def content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


@functools.cache
def _folders() -> tuple[tuple[str, str], ...]:
    specs = ((name, find_spec(name)) for name in LIBRARIES)
    return tuple((n, f"{Path(at.origin).parent}/") for n, at in specs if at and at.origin)


@functools.lru_cache(maxsize=10_000)
def library_of(path: str) -> str:
    """The library that a file is of; `python` for its own, empty for all others."""
    for name, folder in _folders():
        if path.startswith(folder):
            return name
    standard = path.startswith((sysconfig.get_paths()["stdlib"], "<frozen"))
    return "python" if standard and "site-packages" not in path else ""


def is_shipped(value: Any) -> bool:
    """Whether a value has no function that a library did not ship, and is of no other class."""
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, type):
        return _of_library(value.__module__)
    functions = functions_in(value)
    if not functions:
        return _of_library(type(value).__module__)
    return all(library_of(f.__code__.co_filename) or _is_generated(f) for f in functions)


@functools.cache
def _of_library(module: str) -> bool:
    """Whether a module is of a library or of Python, and no file of a script with such a name."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return bool(library_of(file)) if file else module in sys.builtin_module_names


def _is_generated(function: FunctionType) -> bool:
    """Whether a library made the code as a text, as dataclasses do."""
    return function.__code__.co_filename == "<string>" and _of_library(function.__module__ or "")


def imports(module: str, name: str) -> bool:
    """Whether a library's module itself imports a function of another package under a name, such
    as a kernel that is installed.
    """
    if "." in name and name.rpartition(".")[0] in sys.modules:
        module, _, name = name.rpartition(".")
    return _bound(module).get(name) == "imported"


@functools.cache
def _bound(module: str) -> dict[str, str]:
    """The origin of each name that a module's source binds: `defined` by it or a library, else
    `imported`.
    """
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, SyntaxError, KeyError):
        return {}
    origins: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                origins[node.name] = "defined"
            case ast.ImportFrom():
                of_library = node.level or (node.module or "").partition(".")[0] in LIBRARIES
                for alias in node.names:
                    origins.setdefault(
                        alias.asname or alias.name, "defined" if of_library else "imported"
                    )
            case ast.Assign():
                for target in node.targets:
                    for inner in ast.walk(target):
                        if isinstance(inner, ast.Name):
                            origins.setdefault(inner.id, "imported")
    return origins
