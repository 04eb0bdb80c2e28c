"""The JSON Schema of a lowered plan, generated from its types, and the errors it finds.

`python -m planc.ops.schema` prints it; `grammars/lowered.schema.json` is that output.
"""

import inspect
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, assert_never

from planc.diagnostics.diagnostic import one_of
from planc.ops.base import Form, Where, cut, kind_of, short
from planc.ops.codec import Either, Leaf, Many, Named, Record, Shape, Tagged, dump, shape_of
from planc.ops.lowered import FORMAT_VERSION, Lowered

Schema = dict[str, Any]


@cache
def schema() -> Schema:
    """The schema of a lowered plan."""
    definitions = _Definitions()
    shape = shape_of(Lowered)
    assert isinstance(shape, Record)
    body = definitions.object(shape, {"format_version": {"const": FORMAT_VERSION}})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A lowered plan",
        **body,
        "description": "What `planc lower --format json` writes and `planc.apply` runs: the torch "
        "calls of a plan for one model on one mesh, in order. Bytes and shapes are those of the "
        "rank that holds most.",
        "$defs": dict(sorted(definitions.made.items())),
    }


@dataclass(slots=True)
class _Definitions:
    """Schemas of types; `made` has the named definitions."""

    made: dict[str, Schema] = field(default_factory=dict)

    def schema_of(self, shape: Shape) -> Schema:
        """The schema of one type, or a reference to it."""
        match shape:
            case Leaf():
                return self._reference(shape.form, {**shape.form.schema})
            case Many():
                body: Schema = {"type": "array", "items": self.schema_of(shape.item)}
                return self._reference(shape.form, {**body, **shape.form.schema})
            case Named():
                body = {"propertyNames": self.schema_of(shape.name)}
                body["additionalProperties"] = self.schema_of(shape.item)
                return self._reference(shape.form, {"type": "object", **body, **shape.form.schema})
            case Either():
                return self._reference(shape.form, self._either(shape))
            case Tagged():
                return self._tagged_union(shape)
            case Record():
                return self._record(shape, {})
        assert_never(shape)

    def _reference(self, form: Form, body: Schema) -> Schema:
        if not form.name:
            return body
        known = self.made.setdefault(form.name, body)
        assert known == body, f"two definitions are called {form.name}"
        return {"$ref": f"#/$defs/{form.name}"}

    def _either(self, shape: Either) -> Schema:
        """The schema of a union of plain types.

        A keyword of JSON Schema such as `minimum` applies only to values of its own type, so the
        keywords of all types can be joined.
        """
        bodies = [self._resolve(self.schema_of(s)) for s in (*shape.plain, shape.listed) if s]
        values = [v for body in bodies for v in body.get("enum", ())]
        if values:
            return {"enum": [*values, None]}
        joined = {k: v for body in bodies for k, v in body.items()}
        kinds = [body["type"] for body in bodies]
        return {**joined, "type": kinds, **shape.form.schema}

    def _resolve(self, body: Schema) -> Schema:
        name = body.get("$ref", "").removeprefix("#/$defs/")
        return self.made[name] if name else body

    def _tagged_union(self, shape: Tagged) -> Schema:
        rules = []
        for kind, record in shape.kinds.items():
            tagged = {shape.key: {"enum": [kind]}}
            only = {"type": "object", "required": [shape.key], "properties": tagged}
            rules.append({"if": only, "then": self._record(record, {shape.key: {"const": kind}})})
        body: Schema = {"type": "object", "required": [shape.key]}
        body |= {"properties": {shape.key: {"enum": list(shape.kinds)}}, "allOf": rules}
        return self._reference(Form(name="style" if shape.key == "name" else shape.key), body)

    def _record(self, record: Record, extra: Schema) -> Schema:
        if record.row:
            items = [self.schema_of(f.shape) for f in record.fields]
            count = {"minItems": len(items), "maxItems": len(items)}
            body: Schema = {"type": "array", "prefixItems": items, "items": False, **count}
        else:
            body = self.object(record, extra)
        return self._reference(Form(name=kind_of(record.cls)), body)

    def object(self, record: Record, extra: Schema) -> Schema:
        """The schema of a dataclass as an object; `extra` properties come first."""
        properties = dict(extra)
        descriptions = _arguments(record.cls)
        summary = (inspect.getdoc(record.cls) or "").partition("\n\n")[0]
        for each in record.fields:
            about = {"description": descriptions[each.name]} if each.name in descriptions else {}
            # a field that is omitted at its default must not state it
            omit = {"not": {"const": dump(each.default, each.shape)}} if each.omit else {}
            properties[each.key] = {**about, **self.schema_of(each.shape), **omit}
        return {
            "description": " ".join(summary.split()),
            "type": "object",
            "additionalProperties": False,
            "required": [*extra, *(f.key for f in record.fields if not f.omit)],
            "properties": properties,
        }


def _arguments(cls: type) -> dict[str, str]:
    """The descriptions of fields in the `Args:` of docstrings; `a, b:` describes both."""
    arguments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        lines = (base.__doc__ or "").partition("Args:")[2]
        for names, about in re.findall(r"^ {4,8}([\w, ]+): (.*(?:\n {9,}.*)*)", lines, re.M):
            arguments |= dict.fromkeys(names.split(", "), " ".join(about.split()))
    return arguments


# What it says of a document -----------------------------------------------------------------------


@cache
def _validator() -> Any:
    import jsonschema

    base = jsonschema.Draft202012Validator
    # JSON Schema accepts 8.0 as an integer; torch does not
    strict = base.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    kind = jsonschema.validators.create(base.META_SCHEMA, base.VALIDATORS, type_checker=strict)
    return kind(schema())


def against_schema(data: Any) -> list[tuple[Where, str]]:
    """All violations of the schema: where in the document, and a message."""
    errors = sorted(_validator().iter_errors(data), key=lambda p: _order(p.absolute_path))
    # jsonschema has an error for each missing field of an object; one per object is enough
    once = {(tuple(p.absolute_path), "" if p.validator == "required" else id(p)): p for p in errors}
    return [(tuple(p.absolute_path), _problem_text(p)) for p in once.values()]


def _order(path: Iterable[str | int]) -> list[tuple[int, str]]:
    return [(p, "") if isinstance(p, int) else (-1, p) for p in path]


def _problem_text(problem: Any) -> str:
    value, rule = problem.instance, problem.validator_value
    match problem.validator:
        case "additionalProperties":
            known = problem.schema["properties"]
            unknown = one_of([short(k) for k in value if k not in known], last="and")
            return f"{cut(unknown)} is not known here; known are {one_of(known, last='and')}"
        case "required":
            missing = [n for n in rule if n not in value]
            return f"{one_of(missing, last='and')} {'is' if len(missing) == 1 else 'are'} missing"
        case "pattern":
            return f"{short(value)} is not {problem.schema['title']}"
        case "enum" | "const":
            allowed = rule if problem.validator == "enum" else [rule]
            return f"{short(value)} is not {one_of([json.dumps(v) for v in allowed])}"
        case "not":
            return f"{short(value)} is the default, which is left out"
        case "type":
            return f"{short(value)} is not of type {one_of([rule] if type(rule) is str else rule)}"
        case "minimum" | "maximum":
            side = "less" if problem.validator == "minimum" else "more"
            return f"{short(value)} is {side} than {rule}"
        case "minItems" | "maxItems":
            side = "fewer" if problem.validator == "minItems" else "more"
            return f"there are {side} than {rule} here: {short(value)}"
    return cut(problem.message)


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
