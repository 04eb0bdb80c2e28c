"""The lowered plan as JSON: versioned, checked by a schema, the same bytes for the same plan.

The digest leaves out what does not change the run: the places in the `.plan` file and the reasons.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from planc.diagnostic import Sink
from planc.ir import style as ir
from planc.lowering.ops import (
    FORMAT_VERSION,
    AnyOp,
    Checkpoint,
    Compile,
    Configure,
    FullyShard,
    Lowered,
    MeshAxis,
    Parallelize,
    Shape,
    Tie,
)
from planc.model.facts import Module, Modules, parse_path
from planc.share import GRAMMARS

_MAX_FINDINGS = 20


def dumps(lowered: Lowered) -> str:
    """The lowered plan as JSON text; keys in a fixed order, two spaces, a newline at the end."""
    return json.dumps(_plan(lowered), indent=2) + "\n"


def digest(lowered: Lowered) -> str:
    """The sha256, in hex, of everything that decides what `apply` does and prints as numbers."""
    content = _without(_plan(lowered), {"place", "reason"})
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def loads(text: str, name: str, sink: Sink) -> Lowered | None:
    """The lowered plan that `dumps` wrote, or None after findings (PL007).

    Args:
        text: JSON.
        name: what messages call it.
        sink: receives PL007 for text that is no JSON, of another version, or against the schema.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        sink.error("PL007", f"{name} is not JSON: {str(error).lower()}")
        return None
    if not isinstance(data, dict) or data.get("format_version") != FORMAT_VERSION:
        version = data.get("format_version") if isinstance(data, dict) else None
        sink.error(
            "PL007",
            f"{name} is not a lowered plan of format {FORMAT_VERSION}: its format_version is "
            f"{json.dumps(version)[:40]}",
            help="write it with `planc lower --format json`",
        )
        return None
    if not _valid(data, name, sink):
        return None
    try:
        return _read_plan(data)
    except (ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        sink.error("PL007", f"{name} is not a lowered plan: {error}")
        return None


def _valid(data: Any, name: str, sink: Sink) -> bool:
    import jsonschema

    schema = json.loads((GRAMMARS / "lowered.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    problems = sorted(validator.iter_errors(data), key=lambda e: [str(p) for p in e.absolute_path])
    for problem in problems[:_MAX_FINDINGS]:
        where = "/".join(str(p) for p in problem.absolute_path) or "the top"
        sink.error("PL007", f"{name}, at {where}: {problem.message[:200]}")
    return not problems


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {k: _without(v, names) for k, v in value.items() if k not in names}
    return [_without(v, names) for v in value] if isinstance(value, list) else value


# Writing -----------------------------------------------------------------------------------------


def _plan(lowered: Lowered) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "plan": lowered.plan,
        "model": lowered.model,
        "family": lowered.family,
        "layers": lowered.layers,
        "mesh": [
            {"name": a.name, "size": a.size, "inferred": a.inferred, "place": a.place}
            for a in lowered.axes
        ],
        "data": list(lowered.data),
        "parameters": lowered.parameters,
        "gathered": lowered.gathered,
        "ops": [_op(op) for op in lowered.ops],
    }


def _op(op: AnyOp) -> dict[str, Any]:
    match op:
        case Configure():
            body = {"op": "configure", "name": op.name, "value": op.value, "reason": op.reason}
        case Parallelize():
            body = {
                "op": "parallelize",
                "modules": str(op.modules),
                "axis": op.axis,
                "style": _style(op.style),
                "shapes": [
                    {"name": s.name, "shape": list(s.shape), "local": list(s.local)}
                    for s in op.shapes
                ],
            }
        case Tie():
            body = {"op": "tie", "parameter": op.parameter, "source": op.source}
        case Checkpoint():
            body = {"op": "checkpoint", "modules": str(op.modules)}
        case Compile():
            body = {"op": "compile", "modules": str(op.modules), "fullgraph": op.fullgraph}
        case FullyShard():
            body = _unit(op)
    return {**body, "place": op.place}


def _unit(op: FullyShard) -> dict[str, Any]:
    return {
        "op": "fully_shard",
        "members": [str(m) for m in op.members],
        "group": op.group,
        "shard": list(op.shard),
        "replicate": list(op.replicate),
        "reshard": op.reshard,
        "param": op.param,
        "reduce": op.reduce,
        "output": op.output,
        "cast_inputs": op.cast_inputs,
        "nbytes": op.nbytes,
        "gathered": op.gathered,
    }


def _style(style: ir.Style) -> dict[str, Any]:
    body: dict[str, Any] = {"name": ir.style_name(style)}
    match style:
        case ir.Colwise() | ir.Rowwise():
            body |= {"input": str(style.input), "output": str(style.output)}
        case ir.Sequence():
            body |= {"dim": style.dim}
        case ir.Input():
            body |= {
                "positional": [_change(c) for c in style.positional],
                "named": {name: _change(c) for name, c in style.named},
            }
        case ir.Output():
            body |= {"positional": [_change(c) for c in style.positional]}
    return {**body, "local": style.local}


def _change(change: ir.Change | None) -> list[str] | None:
    return [str(change.source), str(change.target)] if change else None


# Reading -----------------------------------------------------------------------------------------


def _read_plan(data: dict[str, Any]) -> Lowered:
    return Lowered(
        plan=data["plan"],
        model=data["model"],
        family=data["family"],
        layers=data["layers"],
        axes=tuple(MeshAxis(**axis) for axis in data["mesh"]),
        data=tuple(data["data"]),
        ops=tuple(_read_op(op) for op in data["ops"]),
        parameters=data["parameters"],
        gathered=data["gathered"],
    )


def _modules(path: str) -> Modules:
    """A set whose structure is not known: a lowered plan names modules and no more."""
    return Modules(parse_path(path), Module(cls="", kind="other"))


def _read_op(data: dict[str, Any]) -> AnyOp:
    body = {k: v for k, v in data.items() if k != "op"}
    if "modules" in body:
        body["modules"] = _modules(body["modules"])
    match data["op"]:
        case "configure":
            return Configure(**body)
        case "parallelize":
            body["style"] = _read_style(body["style"])
            body["shapes"] = tuple(
                Shape(name=s["name"], shape=tuple(s["shape"]), local=tuple(s["local"]))
                for s in body["shapes"]
            )
            return Parallelize(**body)
        case "tie":
            return Tie(**body)
        case "checkpoint":
            return Checkpoint(**body)
        case "compile":
            return Compile(**body)
        case _:
            body["members"] = tuple(_modules(m) for m in body["members"])
            body["shard"] = tuple(body["shard"])
            body["replicate"] = tuple(body["replicate"])
            return FullyShard(**body)


def _read_style(data: dict[str, Any]) -> ir.Style:
    local = data["local"]
    match data["name"]:
        case "colwise" | "rowwise" as name:
            kind = ir.Colwise if name == "colwise" else ir.Rowwise
            one, two = _read_layout(data["input"]), _read_layout(data["output"])
            return kind(input=one, output=two, local=local)
        case "sequence":
            return ir.Sequence(dim=data["dim"], local=local)
        case "input":
            named = tuple((n, _read_pair(c)) for n, c in data["named"].items())
            return ir.Input(positional=_read_changes(data), named=named, local=local)
        case _:
            return ir.Output(positional=_read_changes(data), local=local)


def _read_changes(data: dict[str, Any]) -> tuple[ir.Change | None, ...]:
    return tuple(None if c is None else _read_pair(c) for c in data["positional"])


def _read_pair(pair: list[str]) -> ir.Change:
    return ir.Change(_read_layout(pair[0]), _read_layout(pair[1]))


def _read_layout(text: str) -> ir.Layout:
    if text == "replicate":
        return ir.Replicate()
    if text == "partial":
        return ir.Partial()
    return ir.Shard(int(text.removeprefix("shard(").removesuffix(")")))
