"""The code that a model runs and that its libraries did not ship, as a digest.

A verdict is of functions: the forwards of modules, their hooks, and what these call. Functions of
torch and transformers are known by the versions of these libraries. A script can put others in
their place: in a class, in an instance, in a library's module, in transformers' registry of
attention functions. Here such functions are found, and those of the user's own modules, by a walk
over the names that compiled code has; no code is run. Imports no torch.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from planc.model.facts import OwnCode
from planc.model.shipped import LIBRARIES, content, functions_in, imports, is_shipped, library_of

_FOLLOWED = ("transformers", "diffusers")
"""Libraries whose functions are walked through, for what a script has put into their modules."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TOLD = ("planc_inputs", "planc_loss", "forward")
_CALLED = (FunctionType, MethodType, functools.partial)
_UNIMPLEMENTED = "_forward_unimplemented"  # of torch's lists
_OF_A_COPY = ("training", "name_or_path")
_MOST = 64  # values of one list that are read


def own_code(model: Any, *, alone: bool = False) -> OwnCode:
    """The code that a model runs and that no library shipped.

    Args:
        model: an nn.Module, before a plan is applied.
        alone: whether no configuration says what the model is, so that the numbers that all of its
            modules hold are read.
    """
    walk = _Walk(implementations=_implementations(model))
    values: list[str] = []
    known: dict[type, bool] = {}
    for name, module in model.named_modules():
        cls = type(module)
        if cls not in known:
            known[cls] = walk.of_class(cls)
        patched = [text for text in walk.of_instance(module) if text]
        if patched or known[cls] or alone:
            values.append(f"{name} {patched} {walk.held_values(module)}")
    for hook in _global_hooks():
        if not is_shipped(hook):
            walk.note_replacement("every module", hook)
    walk.of_loss(model)
    walk.follow()
    if not walk.found and not alone:
        return OwnCode()
    return OwnCode(
        code=_digest(sorted(walk.found)), values=_digest(values), attention=walk.attention
    )


def replaced_loss(model: Any) -> str:
    """The name of a model's loss, where it is another one than transformers' of causal language
    models, or a script has changed a function in it; empty otherwise, and for a model without.
    """
    loss = getattr(model, "loss_function", None)
    if loss is None:
        return ""
    shared = sys.modules.get("transformers.loss.loss_utils")
    walk = _Walk(implementations=frozenset())
    walk.of_loss(model)
    walk.follow()
    if loss is getattr(shared, "ForCausalLMLoss", None) and not walk.found:
        return ""
    return str(getattr(loss, "__name__", type(loss).__name__))


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode(errors="replace")).hexdigest()


def _implementations(model: Any) -> frozenset[str]:
    """The names under which the model's configurations choose functions in a registry."""
    configs = {id(c): c for m in model.modules() if (c := m.__dict__.get("config")) is not None}
    fields = (vars(config) for config in configs.values() if hasattr(config, "__dict__"))
    return frozenset(
        value
        for values in fields
        for name, value in values.items()
        if name.startswith("_") and "_implementation" in name and isinstance(value, str)
    )


def _global_hooks() -> Iterator[Any]:
    shared = sys.modules.get("torch.nn.modules.module")
    for name in _HOOKS:
        yield from getattr(shared, f"_global{name}", {}).values()


@dataclass(slots=True, kw_only=True)
class _Walk:
    """Follows functions, by the names in their code, to all that they call.

    Args:
        found: what no library shipped, as texts, each once.
        attention: the registered name of an attention function among them.
    """

    implementations: frozenset[str]
    found: set[str] = field(default_factory=set)
    attention: str = ""
    _waiting: list[tuple[FunctionType, type | None]] = field(default_factory=list)
    _seen: set[tuple[int, type | None]] = field(default_factory=set)
    _classes: dict[type, bool] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)  # so that no id is used twice

    # Modules -------------------------------------------------------------------------------------

    def of_class(self, cls: type) -> bool:
        """Records the forward of a class if it is user-defined; returns whether the class is."""
        for name in _TOLD:
            holder = next((c for c in cls.__mro__ if name in c.__dict__), None)
            function: Any = holder.__dict__[name] if holder else None
            if holder is None or getattr(function, "__name__", "") == _UNIMPLEMENTED:
                continue
            plain = function
            while hasattr(plain, "__wrapped__"):
                plain = plain.__wrapped__
            here = f"{holder.__module__}.{holder.__qualname__}.{name}"
            moved = is_shipped(holder) and _name(plain) != here
            if moved or not is_shipped(function):
                self.found.add(f"{cls.__name__}.{name} = {self.value(function, cls)}")
            self._wait(function, cls)
        if not is_shipped(cls):
            self.found.add(f"{cls.__name__} is a class of its own")
        return not is_shipped(cls)

    def of_instance(self, module: Any) -> Iterator[str]:
        """Yields the functions and hooks that are set on one module, and not on its class."""
        inside = module.__dict__
        replacement = inside.get("forward")
        if (
            replacement is not None
            and getattr(replacement, "__func__", replacement) is not type(module).forward
        ):
            yield self.note_replacement(type(module).__name__, replacement)
        for name in _HOOKS:
            for hook in inside[name].values() if inside.get(name) else ():
                if not is_shipped(hook):
                    yield self.note_replacement(f"{type(module).__name__}{name}", hook)
        for name, value in inside.items():
            if isinstance(value, _CALLED) and name != "forward" and not self._kernel(module, value):
                yield self.note_replacement(f"{type(module).__name__}.{name}", value)

    def _kernel(self, module: Any, value: Any) -> bool:
        """Whether a function attribute of a module is from a library, or imported by its file."""
        if is_shipped(value):
            return True
        home = type(module).__module__
        names = (name for name, at in vars(sys.modules[home]).items() if at is value)
        return any(imports(home, name) for name in names)

    def of_loss(self, model: Any) -> None:
        """Records the loss function of a transformers model, if it is user-defined."""
        loss = model.loss_function if hasattr(type(model), "loss_function") else None
        if loss is not None and not is_shipped(loss):
            self.found.add(f"the loss: {self.value(loss, None)}")
        self._wait(loss, None)

    def note_replacement(self, what: str, function: Any) -> str:
        """Records a function that a user set in place of a library's; planc's own are skipped.

        Returns:
            Its description, or an empty text.
        """
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None and library_of(code.co_filename) == "planc":
            return ""
        text = f"{what}: {self.value(function, None)}"
        self.found.add(text)
        return text

    def held_values(self, module: Any) -> str:
        """The attributes of a module as a text, without its parameters and buffers."""
        fields = sorted((n, v) for n, v in module.__dict__.items() if n not in _OF_A_COPY)
        return str([(n, self.value(v, type(module))) for n, v in fields if not n.startswith("_")])

    # Functions -----------------------------------------------------------------------------------

    def follow(self) -> None:
        """Reads the code of all functions that the recorded ones call, directly or indirectly."""
        while self._waiting:
            function, cls = self._waiting.pop()
            of_library = library_of(function.__code__.co_filename)
            names = {name for code in _codes(function.__code__) for name in code.co_names}
            reachable = self._reachable(function, names, cls, libraries_alone=bool(of_library))
            reached = sorted(reachable, key=lambda pair: pair[0])
            if of_library:
                for name, value in reached:
                    self._in_library(function, name, value, cls)
                continue
            inner = [(name, self.value(value, cls)) for name, value in reached]
            cells = [self.value(content(cell), cls) for cell in function.__closure__ or ()]
            given = self.value((function.__defaults__, function.__kwdefaults__), cls)
            self.found.add(f"{_text(function.__code__)} {given} {cells} {inner}")

    def _reachable(
        self, function: FunctionType, names: set[str], cls: type | None, *, libraries_alone: bool
    ) -> Iterator[tuple[str, Any]]:
        """Yields the globals, functions of imported modules and methods that a function's names may
        refer to.
        """
        inside = function.__globals__
        places, seen = [("", inside)], {id(inside)}
        while places:
            place, there = places.pop()
            for name in names & there.keys():
                value = there[name]
                if not isinstance(value, ModuleType):
                    yield f"{place}{name}", value
                elif id(vars(value)) not in seen and (
                    not libraries_alone or value.__name__.partition(".")[0] in LIBRARIES
                ):
                    seen.add(id(vars(value)))
                    places.append((f"{value.__name__}.", vars(value)))
        for name in names - inside.keys():
            holder = next((c for c in getattr(cls, "__mro__", ()) if name in c.__dict__), None)
            if holder is not None and name not in _TOLD:
                yield f"self.{name}", holder.__dict__[name]

    def _in_library(self, function: FunctionType, name: str, value: Any, cls: type | None) -> None:
        """Notes what a script has put into a library's module, class or registry."""
        if isinstance(getattr(value, "_global_mapping", None), Mapping):
            for key in sorted(self.implementations & {*value}):
                self._note_attention(key, value[key])
            return
        if is_shipped(value):
            self._wait(value, cls)
        elif not imports(function.__module__, name):
            self.found.add(f"{function.__module__} {name} = {self.value(value, cls)}")

    def _note_attention(self, key: str, function: Any) -> None:
        if is_shipped(function):
            self._wait(function, None)
            return
        self.found.add(f"{key} = {self.value(function, None)}")
        self.attention = key

    def _wait(self, value: Any, cls: type | None) -> None:
        """Keeps the functions in a value to be read: of torch none, and each once."""
        for function in functions_in(value):
            library = library_of(function.__code__.co_filename)
            key = (id(function), cls)
            if (not library or library in _FOLLOWED) and key not in self._seen:
                self._seen.add(key)
                self._kept.append(function)
                self._waiting.append((function, cls))

    def value(self, value: Any, cls: type | None, depth: int = 4) -> str:
        """A value as a text without addresses; functions in it are read later."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return repr(value)
        if depth == 0:
            return type(value).__name__
        if isinstance(value, Mapping):
            pairs = [(str(k), self.value(v, cls, depth - 1)) for k, v in [*value.items()][:_MOST]]
            return str(sorted(pairs))
        if isinstance(value, list | tuple):
            return str([self.value(v, cls, depth - 1) for v in value[:_MOST]])
        if isinstance(value, set | frozenset):
            return str(sorted(self.value(v, cls, depth - 1) for v in value))
        if isinstance(value, functools.partial):
            return self.value((value.func, value.args, value.keywords), cls, depth - 1)
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, type):
            return self._class(value)
        if hasattr(value, "named_modules") or hasattr(value, "untyped_storage"):
            return type(value).__name__  # modules have their own turn, tensors are drawn
        if functions := functions_in(value):
            self._wait(value, cls)
            user_code = [f.__code__ for f in functions if not library_of(f.__code__.co_filename)]
            return str([_text(code) for code in user_code] or _name(value))
        if isinstance(value, BuiltinFunctionType) or not hasattr(value, "__dict__"):
            return _name(value) if hasattr(value, "__name__") else _library_text(value)
        if is_shipped(type(value)):
            return _library_text(value)
        return f"{self._class(type(value))} {self.value(vars(value), cls, depth - 1)}"

    def _class(self, cls: type) -> str:
        """A class by its name; the methods of one that no library has are read too."""
        if cls not in self._classes:
            self._classes[cls] = is_shipped(cls)
            if not self._classes[cls]:
                for value in cls.__dict__.values():
                    self._wait(value, cls)
        return cls.__name__


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and those of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


@functools.lru_cache(maxsize=10_000)
def _text(code: CodeType) -> str:
    """A text that identifies the behavior of code, independent of its file and its lines."""
    instructions = [
        (c.co_name, c.co_code.hex(), c.co_names, c.co_varnames, c.co_freevars, c.co_flags)
        for c in _codes(code)
    ]
    constants = [
        sorted(map(repr, v)) if isinstance(v, frozenset) else repr(v)
        for c in _codes(code)
        for v in c.co_consts
        if not isinstance(v, CodeType)
    ]
    return f"{code.co_name} {_digest([str(instructions), str(constants)])}"


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"


def _library_text(value: Any) -> str:
    """An object of a library: a dtype, a size, an enum; others only by their class."""
    text = repr(value)
    return text if " at 0x" not in text and len(text) < 1000 else type(value).__name__
