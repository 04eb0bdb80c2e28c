"""Judges the JSON of a lowered plan: by its schema, and by what a schema cannot say."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from planc.diagnostic import one_of
from planc.model.facts import Module, Modules, parse_path
from planc.resources import GRAMMARS

_MOST = 50  # findings; more of them help nobody
_UNKNOWN = Module(cls="", kind="other")

Where = tuple[str | int, ...]


def findings(data: Any) -> list[tuple[str, str]]:
    """Where in the document, such as `ops[3].style.input`, and what is wrong there.

    Args:
        data: parsed JSON, an object.
    """
    try:
        problems = _against_schema(data) or list(_against_itself(data))
    except RecursionError:
        return [("the top", "it nests too deep")]
    said = [
        (_path(where), text if isinstance(text, str) else _said(text))
        for where, text in problems[:_MOST]
    ]
    if len(problems) > _MOST:
        said.append(("further places", f"{len(problems) - _MOST:,} more findings"))
    return said


def modules_of(path: str) -> Modules:
    """A set whose structure is not known: a lowered plan names modules and no more.

    Raises:
        ValueError: the text is no path of modules.
    """
    return Modules(parse_path(path), _UNKNOWN)


def _against_schema(data: Any) -> list[tuple[Where, Any]]:
    """All that the schema does not allow, as jsonschema's findings."""
    import jsonschema

    schema = json.loads((GRAMMARS / "lowered.schema.json").read_text(encoding="utf-8"))
    base = jsonschema.Draft202012Validator
    # the schema language takes 8.0 for an integer; torch does not
    strict = base.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    validator = jsonschema.validators.create(base.META_SCHEMA, base.VALIDATORS, type_checker=strict)
    found = sorted(validator(schema).iter_errors(data), key=lambda p: _order(p.absolute_path))
    # jsonschema has a finding for each field that an object lacks; one for the object will do
    once = {(tuple(p.absolute_path), "" if p.validator == "required" else id(p)): p for p in found}
    return [(tuple(p.absolute_path), p) for p in once.values()]


def _order(path: Iterable[str | int]) -> list[tuple[int, str]]:
    return [(p, "") if isinstance(p, int) else (-1, p) for p in path]


def _path(path: Iterable[str | int]) -> str:
    """`ops[3].style.input`, or `the top`."""
    keys = (
        f"[{p}]" if isinstance(p, int) else f".{p if p.isidentifier() else short(p)}" for p in path
    )
    return _cut("".join(keys).removeprefix(".")) or "the top"


def _said(problem: Any) -> str:
    """A finding of jsonschema in the words of planc."""
    value, rule = problem.instance, problem.validator_value
    match problem.validator:
        case "additionalProperties":
            known = problem.schema["properties"]
            unknown = one_of([short(k) for k in value if k not in known], last="and")
            return f"{_cut(unknown)} is not known here; known are {one_of(known, last='and')}"
        case "required":
            missing = [n for n in rule if n not in value]
            return f"{one_of(missing, last='and')} {'is' if len(missing) == 1 else 'are'} missing"
        case "pattern":
            return f"{short(value)} is not {problem.schema['title']}"
        case "enum" | "const":
            allowed = rule if problem.validator == "enum" else [rule]
            return f"{short(value)} is not {one_of([json.dumps(v) for v in allowed])}"
        case "type":
            return f"{short(value)} is not of type {one_of([rule] if type(rule) is str else rule)}"
        case "minimum" | "maximum":
            side = "less" if problem.validator == "minimum" else "more"
            return f"{short(value)} is {side} than {rule}"
    return _cut(problem.message)


def short(value: Any) -> str:
    """A JSON value for a message, cut where it is long."""
    return _cut(json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _against_itself(data: dict[str, Any]) -> Iterator[tuple[Where, str]]:
    """What a schema cannot say: that axes are of the mesh, and that sets of modules are written
    as `dumps` writes them."""
    names = [axis["name"] for axis in data["mesh"]]
    for i, name in enumerate(names):
        if name in names[:i]:
            yield ("mesh", i, "name"), f"the mesh has two axes of the name {short(name)}"
    uses: list[tuple[Where, str]] = [(("data", i), axis) for i, axis in enumerate(data["data"])]
    for i, op in enumerate(data["ops"]):
        uses += [(("ops", i, "axis"), op["axis"])] if "axis" in op else []
        for field in ("shard", "replicate"):
            uses += [(("ops", i, field, j), axis) for j, axis in enumerate(op.get(field, ()))]
        for k, spread in enumerate(op.get("spreads", ())):
            for field in ("shard", "replicate"):
                own = enumerate(spread.get(field, ()))
                uses += [(("ops", i, "spreads", k, field, j), axis) for j, axis in own]
        yield from _op_problems(i, op)
    for path, axis in uses:
        if axis not in names:
            yield path, f"the mesh has no axis {short(axis)}; it has {one_of(names, last='and')}"


def _op_problems(at: int, op: dict[str, Any]) -> Iterator[tuple[Where, str]]:
    paths: list[tuple[Where, str]] = []
    if "modules" in op:
        paths.append((("ops", at, "modules"), op["modules"]))
    for field in ("members", "ignored", "units", "fp32"):
        paths += [(("ops", at, field, i), m) for i, m in enumerate(op.get(field, ()))]
    for i, spread in enumerate(op.get("spreads", ())):
        paths.append((("ops", at, "spreads", i, "modules"), spread["modules"]))
        axes = [*spread["shard"], *spread.get("replicate", ())]
        if len(set(axes)) < len(axes):
            yield ("ops", at, "spreads", i), f"an axis is named twice: {', '.join(axes)}"
    for where, text in paths:
        try:
            canonical = str(modules_of(text))
        except ValueError:
            canonical = ""
        if not canonical or "[]" in canonical:
            yield where, f"{short(text)} is not a set of modules"
        elif canonical != text:
            yield where, f"{short(text)} is written {short(canonical)}"
    axes = [*op.get("shard", ()), *op.get("replicate", ())]
    if len(set(axes)) < len(axes):
        yield ("ops", at), f"an axis is named twice: {', '.join(axes)}"
    if op["op"] in ("fully_shard", "megatron_shard") and not axes:
        yield ("ops", at), "a unit works over no axis"
    if op["op"] == "fully_shard" and not op["group"] and len(op["members"]) > 1:
        yield ("ops", at, "members"), "only a group has several members"
    for i, shape in enumerate(op.get("shapes", ())):
        if len(shape["shape"]) != len(shape["local"]):
            yield ("ops", at, "shapes", i), "shape and local have different numbers of dims"
