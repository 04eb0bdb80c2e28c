"""Dataclasses to JSON and back, by the types of their fields.

A dataclass is an object, or an array where its fields are positional; a member of a union of
dataclasses also has a tag, the name of its kind. A tuple is an array, or an object where its type
is annotated with `pairs`. Modules and layouts are strings. A field with `OMIT` is left out at its
default, one with `NOT_WRITTEN` always; a field that equality ignores is no part of the digest.
Writing, reading and the schema need nothing else. (The idea is from sqlglot's serde.py.)
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property
from typing import Annotated, Any, Union, assert_never, get_args, get_origin, get_type_hints

from planc.model.facts import Module, Modules, parse_path
from planc.ops.base import Fact, Form, Where, kind_of, short, text

_UNKNOWN = Module(cls="", kind="other")
_INDEX = r"\[[0-9]{1,5}(:[0-9]{1,5}){0,2}(,[0-9]{1,5}(:[0-9]{1,5}){0,2})*\]"


def modules_of(path: str) -> Modules:
    """A set of modules from its text; the structure of the modules is unknown.

    Raises:
        ValueError: the text is no set of modules, or not in canonical form.
    """
    try:
        modules = Modules(parse_path(path), _UNKNOWN)
    except ValueError:
        modules = None
    if modules is None or "[]" in str(modules):
        raise ValueError(f"{short(path)} is not a set of modules")
    if str(modules) != path:
        raise ValueError(f"{short(path)} is written {short(str(modules))}")
    return modules


_PATH = rf"(\w+|{_INDEX})(\.\w+|{_INDEX})*"
_MODULES = dataclasses.replace(
    text("path", "a set of modules", _PATH, most=2000), write=str, read=modules_of
)
_NONE = Form()
_PLAIN: dict[Any, Form] = {
    str: Form({"type": "string"}),
    bool: Form({"type": "boolean"}),
    int: Form({"type": "integer"}),
    float: Form({"type": "number"}),
    type(None): Form({"type": "null"}),
    Any: _NONE,
    Modules: _MODULES,
}


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that is one string, number or boolean in JSON."""

    form: Form


@dataclass(frozen=True, slots=True)
class Many:
    """An array."""

    item: Shape
    form: Form = _NONE


@dataclass(frozen=True, slots=True)
class Named:
    """An object whose keys are names: a tuple of pairs in Python."""

    name: Shape
    item: Shape
    form: Form = _NONE


@dataclass(frozen=True, slots=True)
class Either:
    """A union of types whose values are written as they are, and of an array, if any."""

    plain: tuple[Leaf, ...]
    listed: Shape | None
    form: Form = _NONE


@dataclass(frozen=True, slots=True)
class Field:
    """A field: its names in Python and JSON, whether a default is left out, if it is digested."""

    name: str
    key: str
    shape: Shape
    omit: bool
    default: Any
    compared: bool


@dataclass(frozen=True)
class Record:
    """A dataclass, whose fields are found when they are first asked for: a plan needs few kinds."""

    cls: type

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The fields that are written, those of the class that all others extend last."""
        hints = get_type_hints(self.cls, include_extras=True)
        bases = [base for base in self.cls.__mro__[1:] if dataclasses.is_dataclass(base)]
        inherited = {f.name for base in bases[-1:] for f in dataclasses.fields(base)}
        return tuple(
            Field(
                name=f.name,
                key=f.metadata.get("key", f.name),
                shape=shape_of(hints[f.name]),
                omit=f.metadata.get("omit", False),
                default=f.default,
                compared=f.compare,
            )
            for f in sorted(self._written_fields, key=lambda f: f.name in inherited)
        )

    @cached_property
    def row(self) -> bool:
        """Whether it is written as an array of its fields."""
        return bool(self._written_fields) and not any(f.kw_only for f in self._written_fields)

    @property
    def _written_fields(self) -> list[Any]:
        return [f for f in dataclasses.fields(self.cls) if f.metadata.get("written", True)]


@dataclass(frozen=True)
class Tagged:
    """A union of dataclasses; the value under `key` is the name of the kind."""

    key: str
    members: tuple[Any, ...]
    form: Form

    @cached_property
    def kinds(self) -> Mapping[str, Record]:
        """The kinds by name, operations in the order of their phases; a class that others extend
        stands for those that are installed.
        """
        unions = (
            cls.all_installed() if hasattr(cls, "all_installed") else (cls,) for cls in self.members
        )
        kinds = [cls for classes in unions for cls in classes]
        return {kind_of(c): _record(c) for c in sorted(kinds, key=lambda c: getattr(c, "PHASE", 0))}


Shape = Leaf | Many | Named | Either | Record | Tagged


@cache
def shape_of(hint: Any) -> Shape:
    """The JSON form of a type.

    Raises:
        TypeError: the type has no JSON form.
    """
    if get_origin(hint) is Annotated:
        inner, *forms = get_args(hint)
        return _annotated_shape(inner, forms)
    if hint in _PLAIN:
        return Leaf(_PLAIN[hint])
    if isinstance(hint, type) and issubclass(hint, Enum):
        values = {"enum": [e.value for e in hint]}
        return Leaf(Form(values, write=lambda e: e.value, read=hint))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _record(hint)
    if get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        return Many(shape_of(get_args(hint)[0]))
    if get_origin(hint) in (Union, types.UnionType):
        shapes = [shape_of(member) for member in get_args(hint)]
        plain = tuple(s for s in shapes if isinstance(s, Leaf))
        listed = [s for s in shapes if not isinstance(s, Leaf)]
        assert len(listed) <= 1, hint
        return Either(plain, listed[0] if listed else None)
    raise TypeError(f"{hint} has no form in JSON")


def _annotated_shape(inner: Any, forms: list[Form]) -> Shape:
    tag = next((f.tag for f in forms if f.tag), "")
    if tag:
        return Tagged(tag, get_args(inner), forms[-1])
    for form in forms:
        if form.pairs:
            name, item = get_args(get_args(inner)[0])
            return Named(shape_of(name), shape_of(item), _merge_forms(forms))
        if form.write is not _NONE.write:
            return Leaf(_merge_forms(forms))
    shape = shape_of(inner)
    assert not isinstance(shape, Record | Tagged)
    return dataclasses.replace(shape, form=_merge_forms([shape.form, *forms]))


def _merge_forms(forms: list[Form]) -> Form:
    """Several forms merged into one; the last name and the last functions win."""
    *_, last = forms
    named = next((f for f in reversed(forms) if f.name), last)
    filled = next((f for f in forms if f.write is not _NONE.write), last)
    schema = {k: v for f in forms for k, v in f.schema.items()}
    # a narrowed form is not the named definition
    name = named.name if named is last else ""
    axis = any(f.axis for f in forms)
    return Form(schema, name=name, write=filled.write, read=filled.read, axis=axis)


@cache
def _record(cls: type) -> Record:
    return Record(cls)


def dump(value: Any, shape: Shape, *, compared: bool = False) -> Any:
    """A value as JSON; `compared` leaves out the fields that equality ignores."""
    match shape:
        case Leaf():
            return shape.form.write(value)
        case Many():
            return [dump(v, shape.item, compared=compared) for v in value]
        case Named():
            return {name: dump(v, shape.item, compared=compared) for name, v in value}
        case Either():
            plain = value is None or shape.listed is None or isinstance(value, str | int | float)
            return value if plain else dump(value, shape.listed, compared=compared)  # type: ignore[arg-type]
        case Tagged():
            kind: Any = type(value)
            return {shape.key: kind_of(kind), **dump(value, _record(kind), compared=compared)}
        case Record():
            written = {
                f.key: dump(getattr(value, f.name), f.shape, compared=compared)
                for f in shape.fields
                if not (f.omit and getattr(value, f.name) == f.default)
                and (f.compared or not compared)
            }
            return list(written.values()) if shape.row else written
    assert_never(shape)


def facts(record: Any, *, without: tuple[str, ...] = ()) -> Iterator[Fact]:
    """The fields of a dataclass that equality compares, flattened.

    A value with a name is called by it: an option, the shapes of a parameter (`weight.shape`), the
    layouts of an argument (`hidden_states.source`).

    Args:
        without: the names of fields to leave out.
    """
    kind: Any = type(record)
    for f in _record(kind).fields:
        value = getattr(record, f.name)
        if f.compared and f.name not in without:
            usual = f.omit and value == f.default
            yield from (Fact(name, flat, usual) for name, flat in _flat(f.key, value, f.shape))


def _flat(name: str, value: Any, shape: Shape) -> Iterator[tuple[str, Any]]:
    if isinstance(shape, Either) and shape.listed and not isinstance(value, int | None):
        shape = shape.listed
    match shape:
        case Named():
            for key, item in value:
                yield from _flat(key, item, shape.item)
        case Record() if not _one_text(shape):
            for f in shape.fields:
                if f.name != "name":
                    yield from _flat(f"{name}.{f.key}", getattr(value, f.name), f.shape)
        case Record():
            yield name, str(value)
        case Tagged():
            kind: Any = type(value)
            yield name, kind_of(kind)
            for f in _record(kind).fields:
                yield from _flat(f.key, getattr(value, f.name), f.shape)
        case Many() if _one_text(shape.item):
            yield name, tuple(map(str, value))
        case Many() if not isinstance(shape.item, Leaf):
            for i, item in enumerate(value):
                if item is not None:
                    yield from _flat(getattr(item, "name", str(i)), item, shape.item)
        case _:
            written = dump(value, shape)
            nested = isinstance(shape, Leaf) and isinstance(written, list)
            plain = tuple(written) if isinstance(written, list) else written
            yield name, json.dumps(written) if nested else plain


def _one_text(shape: Shape) -> bool:
    return isinstance(shape, Record) and not shape.row and "__str__" in vars(shape.cls)


@dataclass(slots=True)
class Reader:
    """Builds values from JSON that the schema accepts; keeps places of problems and axes."""

    problems: list[tuple[Where, str]] = field(default_factory=list)
    axes: list[tuple[Where, str]] = field(default_factory=list)

    def load(self, data: Any, shape: Shape, at: Where = ()) -> Any:
        """A value; meaningless where problems were found."""
        match shape:
            case Leaf():
                return self._leaf(data, shape.form, at)
            case Many():
                return tuple(self.load(d, shape.item, (*at, i)) for i, d in enumerate(data))
            case Named():
                return tuple((n, self.load(d, shape.item, (*at, n))) for n, d in data.items())
            case Either():
                listed = isinstance(data, list | dict) and shape.listed is not None
                return self.load(data, shape.listed, at) if listed else data  # type: ignore[arg-type]
            case Tagged():
                return self._record(data, shape.kinds[data[shape.key]], at)
            case Record():
                return self._record(data, shape, at)
        assert_never(shape)

    def _leaf(self, data: Any, form: Form, at: Where) -> Any:
        if form.axis:
            self.axes.append((at, data))
        try:
            return form.read(data)
        except ValueError as error:
            self.problems.append((at, str(error)))
            return None

    def _record(self, data: Any, record: Record, at: Where) -> Any:
        problems, axes = len(self.problems), len(self.axes)
        if record.row:
            data = {f.key: value for f, value in zip(record.fields, data, strict=True)}
        values = {
            f.name: self.load(data[f.key], f.shape, (*at, f.key))
            for f in record.fields
            if f.key in data
        }
        names = [name for where, name in self.axes[axes:] if len(where) <= len(at) + 2]
        if len(set(names)) < len(names):
            self.problems.append((at, f"an axis is named twice: {', '.join(names)}"))
        if len(self.problems) > problems:
            return None
        instance = record.cls(**values)
        if hasattr(instance, "problems"):
            self.problems += [((*at, *where), problem) for where, problem in instance.problems()]
        return instance
