"""Names and their values: options, lets, mesh axes and the model's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final

from planc.diagnostics.diagnostic import Label, Sink, did_you_mean, one_of
from planc.diagnostics.source import Span
from planc.ir.mesh_axes import EXPERT_TENSOR, EXPERTS, axes_of, valid_axes
from planc.ir.nodes import Mesh
from planc.model.facts import Facts, Module, Modules, Parameter
from planc.model.indices import Indices
from planc.model.roles import LACKS, RoleModules, roles
from planc.syntax import ast


class Failed:
    """The value of an expression that could not be evaluated; its finding is in the sink."""

    def __repr__(self) -> str:
        return "FAILED"


FAILED: Final = Failed()

Value = int | float | str | bool | None | tuple[Any, ...] | ast.Selector | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """An option or a let: an expression, or the value given by `--set`."""

    name: str
    kind: str
    value: ast.Expr
    origin: Span
    given: ast.Literal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The facts of a proxy model and the sizes of its mesh, for the numbers in arguments."""

    facts: Facts
    axes: Mapping[str, int]


@dataclass(slots=True)
class Scope:
    """Resolves names for one plan and one model.

    Args:
        sink: receives PL100 (unknown name) and PL108 (a let that refers to itself).
        evaluate: the evaluator, passed in because it needs a scope itself.
        solve: sizes the mesh the first time an axis is looked up.
        kept: the dtype of a parameter after `load`, once the load section was read.
        sized: where a proxy model stands for this one, the scope of the numbers in arguments.
        decides: in a `sized` scope, the scope of the real model, which decides every condition.
        replaced_axes: optional axes of a mesh that another one replaces; each counts as 1.
        small: in a `sized` scope, the facts of the proxy model.
        parent: while a rule is read, the module that `parent` is there.
    """

    facts: Facts
    sink: Sink
    evaluate: Callable[[ast.Expr, Scope], Value]
    solve: Callable[[], Mesh | None]
    definitions: dict[str, Definition] = field(default_factory=dict)
    axis_names: tuple[str, ...] = ()
    kept: Callable[[Parameter], str] = attrgetter("dtype")
    sized: Scope | None = None
    decides: Scope | None = None
    replaced_axes: tuple[str, ...] = ()
    small: Facts | None = None
    parent: Module | None = None
    _roles: RoleModules | None = None
    _lacking: list[str] = field(default_factory=list)
    _values: dict[str, Value] = field(default_factory=dict)
    _pending: list[str] = field(default_factory=list)

    def sized_by(self, sizes: Sizes, mesh: Mesh) -> Scope:
        """A scope with the numbers of a proxy model and mesh; conditions keep those of this one."""
        small = mesh.with_sizes(sizes.axes)
        return replace(
            self,
            facts=replace(self.facts, config=sizes.facts.config),
            small=sizes.facts,
            solve=lambda: small,
            decides=self,
            _values={},
            _pending=[],
        )

    def child_scope(self, parent: Modules) -> Scope:
        """A scope for a rule on children of a module, whose integers are `parent.NAME`.

        In a proxy model, they are those of a module with the same name, if possible of the same
        class.
        """
        module, sized = parent.module, self.sized
        if self.small is not None:
            alike = [at.module for at in self.small.model.below() if at.key == parent.key]
            alike.sort(key=lambda other: other.cls != module.cls)
            module = alike[0] if alike else module
        return replace(self, parent=module, sized=sized and sized.child_scope(parent))

    def define(self, definition: Definition) -> None:
        self.definitions[definition.name] = definition
        self._values.pop(definition.name, None)

    def knows(self, name: str) -> bool:
        return name in self.definitions or self._is_axis(name)

    def modules(self, name: ast.Name, *, optional: bool) -> Value:
        """The modules of `$name`: those of a let, else of a role, which this model may lack."""
        word, known = name.path, self.definitions.get(name.path)
        if word not in LACKS or (known and known.kind == "let"):
            return self.value(name)
        self._roles = self._roles or roles(self.facts)
        modules = getattr(self._roles, word)
        if not modules and not optional and word not in self._lacking:
            self._lacking.append(word)
            self.sink.error(
                "PL114",
                f"{self.facts.name} has no role `{word}`: {LACKS[word]}",
                name.origin,
                help=f"name the modules by `let {word} = PATH`, or write `optional` before the rule"
                " or `override` a section that has no use for them",
            )
        return _selector(modules, name.origin) if modules else FAILED

    def _is_axis(self, name: str) -> bool:
        """Whether a name is an axis; `etp` is 1 where a mesh with experts leaves it out."""
        implied = name == EXPERT_TENSOR and EXPERTS in self.axis_names
        return implied or bool(axes_of(name, (*self.axis_names, *self.replaced_axes)))

    def value(self, name: ast.Name) -> Value:
        """The value of a dotted name; an unknown name is reported."""
        head, *rest = name.path.split(".")
        if head == "config":
            return self._config(name, rest)
        if head == "parent" and self.parent is not None:
            return self._parent(name, rest, self.parent)
        if rest:
            return self._unknown(name)
        if name.path in self.definitions:
            return self._defined_value(name)
        if self._is_axis(name.path):
            return self._axis(name)
        return self._unknown(name)

    def _defined_value(self, name: ast.Name) -> Value:
        definition = self.definitions[name.path]
        if name.path in self._values:
            return self._values[name.path]
        if name.path in self._pending:
            return self._circle(name, definition.origin)
        self._pending.append(name.path)
        expression = definition.given or definition.value
        try:
            if definition.kind == "let":
                value = self._module_path(expression)
            else:
                value = self.evaluate(expression, self)
        except RecursionError:
            message = f"the value of `{name.path}` goes through too many others"
            self.sink.error("PL108", message, name.origin, help="shorten the chain of definitions")
            value = FAILED
        finally:
            self._pending.pop()
        self._values[name.path] = value
        return value

    def _module_path(self, value: ast.Expr) -> Value:
        """A let's value may be a module path: a name that is nothing else is read as one."""
        if isinstance(value, ast.Choice):
            condition = self.evaluate(value.condition, self.decides or self)
            if isinstance(condition, bool):
                return self._module_path(value.then if condition else value.otherwise)
        if isinstance(value, ast.Name | ast.Selector) and not value.path.startswith("config."):
            if isinstance(value, ast.Selector):
                return value
            if not self.knows(value.path):
                return ast.Selector(origin=value.origin, path=value.path)
        return self.evaluate(value, self)

    def _axis(self, name: ast.Name) -> Value:
        if "mesh" in self._pending:
            return self._circle(name, name.origin)
        self._pending.append("mesh")
        try:
            mesh = self.solve()
        finally:
            self._pending.pop()
        return mesh.size(*mesh.expand([name.path])) if mesh else FAILED

    def _circle(self, name: ast.Name, origin: Span) -> Value:
        message = f"the value of `{name.path}` depends on itself"
        hint = "a mesh size may use options and config fields, not the size of another axis"
        self.sink.error(
            "PL108", message, name.origin, Label(span=origin, text="defined here"), help=hint
        )
        return FAILED

    def _config(self, name: ast.Name, path: list[str]) -> Value:
        value: Any = self.facts.config
        for i, key in enumerate(path):
            if isinstance(value, Mapping) and key in value:
                value = value[key]
                continue
            before = ".".join(["config", *path[:i]])
            known = [str(k) for k in value] if isinstance(value, Mapping) else []
            self.sink.error(
                "PL100",
                f"`{before}` has no field `{key}`",
                name.origin,
                facts=[f"model_type = {self.facts.family}  ({self.facts.config_name})"],
                help=did_you_mean(key, known),
            )
            return FAILED
        if not path:
            message = "`config` stands for no value itself"
            help = "name a field: `config.hidden_size`"
            self.sink.error("PL100", message, name.origin, help=help)
            return FAILED
        return _plain(value)

    def _parent(self, name: ast.Name, rest: list[str], parent: Module) -> Value:
        known, field = dict(parent.facts), ".".join(rest)
        if field in known:
            return known[field]
        self.sink.error(
            "PL100",
            f"`{parent.cls}` has no integer `{field}`",
            name.origin,
            facts=[f"its integers: {one_of((f'{n} = {v}' for n, v in known.items()), last='and')}"]
            if known
            else [],
            help=did_you_mean(field, known),
        )
        return FAILED

    def _unknown(self, name: ast.Name) -> Value:
        known = [*self.definitions, *valid_axes(self.axis_names)]
        hint = "declare an `option` or a `let`, or put a text in quotes"
        if known:
            hint = f"known are {one_of((f'`{k}`' for k in known), last='and')}, and `config.*`"
        hint = did_you_mean(name.path, [*known, "true", "false"], hint) or hint
        self.sink.error("PL100", f"`{name.path}` names nothing", name.origin, help=hint)
        return FAILED


def _selector(modules: tuple[Modules, ...], origin: Span) -> ast.Selector:
    """A selector of modules, with all entries of the lists that they are in."""
    paths = dict.fromkeys(
        ".".join("*" if isinstance(s, Indices) else s for s in m.path) for m in modules
    )
    first, *others = (ast.Selector(origin=origin, path=path) for path in paths)
    return ast.Selector(origin=origin, path="", parts=(first, *others)) if others else first


def _plain(value: Any) -> Value:
    if isinstance(value, list | tuple):
        return tuple(_plain(v) for v in value)
    if isinstance(value, Mapping):
        return tuple(value)
    return value if isinstance(value, int | float | str | bool | None) else str(value)
