"""Reads a call's arguments one by one, each with a type; any argument left over is a finding."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from planc.diagnostics.diagnostic import Label, did_you_mean, one_of
from planc.elaborate.evaluate import describe, evaluate, is_integer, number, size
from planc.elaborate.scope import Failed, Scope, Value
from planc.syntax import ast

_RENAMED = {
    "r": "rank",
    "lora_r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "use_rslora": "rslora",
    "use_dora": "dora",
    "target_parameters": "parameters",
    "param_dtype": "param",
    "reduce_dtype": "reduce",
    "output_dtype": "output",
    "cast_forward_inputs": "cast_inputs",
}
"""Arguments of peft and torch that have another name in a plan."""

Default = TypeVar("Default", float, float | None)


@dataclass(slots=True)
class Arguments:
    """Reads the arguments of one call. `ok` turns false with the first finding (PL012)."""

    call: ast.Call
    scope: Scope
    known: tuple[str, ...] = ()
    ok: bool = True
    _named: dict[str, ast.Argument] = field(default_factory=dict)
    positional: list[ast.Argument] = field(default_factory=list)

    def __post_init__(self) -> None:
        for argument in self.call.arguments:
            if argument.name is None:
                self.positional.append(argument)
            elif argument.name in self._named:
                self.wrong(argument, f"`{argument.name}` is given twice")
            else:
                self._named[argument.name] = argument

    def wrong(self, node: ast.Node, message: str, help: str | None = None) -> None:
        self.ok = False
        self.scope.sink.error("PL012", message, node.origin, help=help)

    def take(self, name: str) -> ast.Expr | None:
        argument = self._named.pop(name, None)
        return argument.value if argument else None

    def remaining(self) -> list[ast.Argument]:
        """The named arguments that were not read, for a call that accepts any."""
        rest = list(self._named.values())
        self._named.clear()
        return rest

    def read(
        self,
        name: str,
        default: Any,
        wanted: str,
        valid: Callable[[Any], bool],
        read: Callable[[ast.Expr, Scope], Value] = evaluate,
    ) -> Any:
        """An argument's value (`wanted` in messages) if it is valid, else the default."""
        expression = self.take(name)
        if expression is None:
            return default
        value = read(expression, self.scope)
        if valid(value):
            return value
        self._type(expression, name, wanted, value)
        return default

    def truth(self, name: str, default: bool) -> bool:
        return bool(self.read(name, default, "true or false", lambda v: isinstance(v, bool)))

    def integer(
        self, name: str, default: int, read: Callable[[ast.Expr, Scope], Value] = evaluate
    ) -> int:
        """An integer; `read` is `size` where it counts features, heads or ranks."""
        return self.read(name, default, "an integer", is_integer, read)  # type: ignore[no-any-return]

    def number(
        self, name: str, default: Default, wanted: str, valid: Callable[[float], bool]
    ) -> float | Default:
        """A number; the arguments are those of `read`."""
        return self.read(name, default, wanted, lambda v: number(v) and valid(v))  # type: ignore[no-any-return]

    def word(
        self,
        name: str,
        words: dict[str, Any],
        default: Any,
        least: int | None = None,
        counts: bool = False,
    ) -> Any:
        """One of a few words, bare, as a text, or by an option; from `least` on an integer may
        stand for them, one that `counts` features, heads or ranks.
        """
        expression = self.take(name)
        if expression is None:
            return default
        value = word(expression, self.scope)
        if isinstance(value, str) and value in words:
            return words[value]
        if counts and isinstance(value, int):
            value = size(expression, self.scope)
        if least is not None and is_integer(value) and value >= least:
            return value
        wanted = [f"`{w}`" for w in words]
        if least is not None:
            wanted.append("a positive integer" if least else "an integer from 0")
        hint = did_you_mean(value, words) if isinstance(value, str) else None
        if isinstance(value, bool):
            hint = next(
                (f"{describe(value)} is `{w}`" for w, v in words.items() if v is value), None
            )
        self._type(expression, name, one_of(wanted), value, hint)
        return default

    def _type(
        self, node: ast.Expr, name: str, wanted: str, value: Value, hint: str | None = None
    ) -> None:
        self.ok = False
        wrong_value(node, name, wanted, value, self.scope, hint=hint)

    def done(self, *, positional: int = 0) -> bool:
        """Whether all arguments were valid; reports those that were not read."""
        names = one_of((f"`{k}`" for k in self.known), last="and")
        takes = f"it takes {names}" if self.known else "it takes none"
        for argument in self.positional[positional:][:1]:
            self.wrong(argument, f"`{self.call.name}` takes no argument without a name", takes)
        for name, argument in self._named.items():
            hint = did_you_mean(name, self.known, takes)
            if (renamed := _RENAMED.get(name)) in self.known:
                hint = f"`{name}` is `{renamed}`: write `{renamed} = {argument.value.origin.text}`"
            self.wrong(argument, f"`{self.call.name}` takes no argument `{name}`", hint)
        return self.ok


def plain_arguments(arguments: Arguments) -> tuple[tuple[str, Value], ...]:
    """All named arguments left, for a class of the user's: numbers, texts, truth values, lists."""
    given = tuple((str(a.name), size(a.value, arguments.scope)) for a in arguments.remaining())
    for name, value in given:
        arguments.ok = arguments.ok and not isinstance(value, Failed)
        if isinstance(value, ast.Selector):
            message = f"`{name}` is a path of modules, and not a value"
            arguments.wrong(arguments.call, message)
    return given


def names_class(path: object) -> bool:
    """Whether a text is `package.module:Class`."""
    form = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
    return isinstance(path, str) and re.fullmatch(form, path, re.ASCII) is not None


def word(expression: ast.Expr, scope: Scope) -> Value:
    """An expression where a bare word is expected."""
    if isinstance(expression, ast.Name) and not scope.knows(expression.path):
        if expression.path.startswith("config."):
            return scope.value(expression)
        return expression.path
    return evaluate(expression, scope)


def wrong_value(
    node: ast.Node, name: str, wanted: str, value: Value, scope: Scope, *, hint: str | None = None
) -> None:
    """PL012: an argument or a setting is not what is `wanted`, unless its value is a finding."""
    if not isinstance(value, Failed):
        shown = f"`{value}`" if isinstance(value, str) else describe(value)
        known = scope.definitions.get(node.path) if isinstance(node, ast.Name) else None
        said = (known.given or known.value).origin if known else node.origin
        labels = [] if said == node.origin else [Label(span=said, text="set here")]
        message = f"`{name}` is {wanted}, not {shown}"
        scope.sink.error("PL012", message, node.origin, *labels, help=hint)


def unknown(
    call: ast.Call, known: tuple[str, ...], what: str, scope: Scope, help: str | None = None
) -> None:
    """PL105: an action that the section does not have; `help` replaces the nearest names."""
    hint = help or did_you_mean(call.name, known, f"there is {one_of(known, last='and')}")
    scope.sink.error("PL105", f"there is no {what} `{call.name}`", call.origin, help=hint)
