"""The lowered plan as JSON: versioned, checked by a schema, the same bytes for the same plan.

The digest leaves out what does not change the run: the places in the `.plan` file and the reasons.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from planc.diagnostic import Sink
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.aten_operators import Save
from planc.ops.compile import Compile
from planc.ops.configure import Configure
from planc.ops.freeze import Freeze
from planc.ops.fsdp import Divide, FullyShard, Prefetch, Spread
from planc.ops.load import Load
from planc.ops.lora import Adapt
from planc.ops.lowered import FORMAT_VERSION, Lowered, MeshAxis
from planc.ops.megatron_fsdp import MegatronShard
from planc.ops.quantization import Quantize
from planc.ops.registry import AnyOp
from planc.ops.rng import Draw
from planc.ops.schema import findings, modules_of, short
from planc.ops.style_json import read_style, style_data
from planc.ops.tensor_parallel import Parallelize, Shape, Tie


def dumps(lowered: Lowered) -> str:
    """The lowered plan as JSON text.

    Keys are in a fixed order, indented by two spaces; a field of an operation stays on its line;
    a newline ends the text.
    """
    return f"{_written(_plan(lowered))}\n"


def digest(lowered: Lowered) -> str:
    """The sha256, in hex, of the canonical JSON without `place` and `reason`.

    So neither a comment nor a line that moved changes it.
    """
    content = _plan(lowered)
    for part in (*content["mesh"], *content["ops"]):
        part.pop("place", None)
        part.pop("reason", None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def loads(text: str, name: str, sink: Sink) -> Lowered | None:
    """The lowered plan that `dumps` wrote, or None after findings (PL007).

    The modules know their paths alone: their `module` is empty.

    Args:
        text: JSON.
        name: what messages call it.
        sink: receives PL007 for text that is no JSON, of another version, against the schema, or
            that names an axis which its mesh lacks.
    """
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        said = "it nests too deep" if isinstance(error, RecursionError) else str(error)
        sink.error(
            "PL007",
            f"{name} is not JSON: {said[:1].lower()}{said[1:]}",
            help="`planc lower --format json` writes a lowered plan",
        )
        return None
    if not _known(data, name, sink):
        return None
    problems = findings(data)
    for where, said in problems:
        sink.error("PL007", f"{name}, at {where}: {said}")
    return None if problems else _read_plan(data)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; Python would drop all but the last of its like keys in silence."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [n for n, _ in pairs]
        twice = next(n for n in names if names.count(n) > 1)
        raise ValueError(f"an object has the key {short(twice)} twice")
    return result


def _known(data: Any, name: str, sink: Sink) -> bool:
    """Whether the format is one that this planc reads."""
    version = data.get("format_version") if isinstance(data, dict) else None
    if type(version) is int and version == FORMAT_VERSION:
        return True
    if version is None:
        message = f"{name} is not a lowered plan: it has no format_version"
        help = "`planc lower --format json` writes one"
    else:
        message = f"{name} has format_version {short(version)}; this planc reads {FORMAT_VERSION}"
        help = "write it again from its `.plan` with `planc lower --format json`"
    sink.error("PL007", message, help=help)
    return False


# Writing -----------------------------------------------------------------------------------------


def _written(value: Any, indent: str = "", levels: int = 3) -> str:
    """JSON with a line for each field of an operation; what is inside a field stays on its line."""
    if not levels or not isinstance(value, dict | list) or not value:
        return json.dumps(value)
    inner = f"{indent}  "
    if isinstance(value, dict):
        lines = [
            f"{inner}{json.dumps(k)}: {_written(v, inner, levels - 1)}" for k, v in value.items()
        ]
    elif isinstance(value[0], dict):
        lines = [f"{inner}{_written(v, inner, levels - 1)}" for v in value]
    else:
        return json.dumps(value)
    left, right = "{}" if isinstance(value, dict) else "[]"
    body = ",\n".join(lines)
    return f"{left}\n{body}\n{indent}{right}"


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


_ADAPT = ("rank", "alpha", "dropout", "dtype", "init", "seed")
_QUANTIZE = ("kind", "storage", "compute", "double", "block")


def _op(op: AnyOp) -> dict[str, Any]:
    match op:
        case Configure():
            body = {"op": "configure", "name": op.name, "value": op.value, "reason": op.reason}
        case Parallelize():
            body = {
                "op": "parallelize",
                "modules": str(op.modules),
                "axis": op.axis,
                "style": style_data(op.style),
                "shapes": [_shape(s) for s in op.shapes],
            }
        case Tie():
            body = {"op": "tie", "parameter": op.parameter, "source": op.source}
        case Load():
            own = {"fp32": [str(m) for m in op.fp32]} if op.fp32 else {}
            body = {"op": "load", "meta": op.meta, "weights": op.weights, "dtype": op.dtype, **own}
        case Freeze():
            body = {"op": "freeze", "modules": str(op.modules), "trainable": op.trainable}
        case Adapt() | Quantize():
            name, fields = ("adapt", _ADAPT) if isinstance(op, Adapt) else ("quantize", _QUANTIZE)
            body = {"op": name, "members": [str(m) for m in op.members]}
            body |= {field: getattr(op, field) for field in fields}
        case Checkpoint():
            body = {"op": "checkpoint", "modules": str(op.modules), **_recomputing(op)}
        case Compile():
            body = {"op": "compile", "modules": str(op.modules), "fullgraph": op.fullgraph}
        case FullyShard():
            body = _unit(op)
        case MegatronShard():
            body = _megatron(op)
        case Divide():
            own = {"units": [str(m) for m in op.units]} if op.units else {}
            body = {"op": "divide", "factor": op.factor, **own}
        case Draw():
            body = {"op": "draw", "axis": op.axis, "fields": list(op.fields)}
        case Prefetch():
            body = {"op": "prefetch", "units": [str(m) for m in op.units]}
            body |= {"forward": op.forward, "backward": op.backward}
    return {**body, "place": op.place}


def _shape(shape: Shape) -> dict[str, Any]:
    return {"name": shape.name, "shape": list(shape.shape), "local": list(shape.local)}


def _recomputing(op: Checkpoint) -> dict[str, Any]:
    """What an operation says beyond its modules; nothing that is as it always was."""
    body: dict[str, Any] = {}
    if op.save:
        body["save"] = [{"name": s.name, "every": s.every, "ops": list(s.ops)} for s in op.save]
    for name in ("offload", "pin", "preserve_rng", "early_stop"):
        if getattr(op, name) != (name != "offload"):
            body[name] = getattr(op, name)
    return body


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
        **_said(op),
    }


def _said(op: FullyShard) -> dict[str, Any]:
    """The fields that are not as they are by default: what says nothing is not written."""
    body: dict[str, Any] = {}
    if op.ignored:
        body["ignored"] = [str(m) for m in op.ignored]
    if op.shard_dim:
        body["shard_dim"] = op.shard_dim
    if op.offload:
        body |= {"offload": op.offload, "pin": op.pin}
    if op.spreads:
        body["spreads"] = [_spread(s) for s in op.spreads]
    return body


def _spread(spread: Spread) -> dict[str, Any]:
    body: dict[str, Any] = {"modules": str(spread.modules), "shard": list(spread.shard)}
    body |= {"replicate": list(spread.replicate)} if spread.replicate else {}
    return body | ({"shard_dim": spread.shard_dim} if spread.shard_dim else {})


_MEGATRON = (*("strategy", "outer", "main_params", "main_grads", "grad_comm", "summed", "experts"),)


def _megatron(op: MegatronShard) -> dict[str, Any]:
    return {
        "op": "megatron_shard",
        "members": [str(m) for m in op.members],
        "classes": list(op.classes),
        "shard": list(op.shard),
        "replicate": list(op.replicate),
        **{name: getattr(op, name) for name in _MEGATRON},
        "options": dict(op.options),
        "nbytes": op.nbytes,
        "gathered": op.gathered,
    }


# Reading -----------------------------------------------------------------------------------------


def _read_plan(data: dict[str, Any]) -> Lowered:
    return Lowered(
        plan=data["plan"],
        model=data["model"],
        family=data["family"],
        layers=data["layers"],
        axes=tuple(MeshAxis(**axis) for axis in data["mesh"]),
        data=tuple(data["data"]),
        ops=tuple(map(_read, data["ops"])),
        parameters=data["parameters"],
        gathered=data["gathered"],
    )


_PLAIN: dict[str, Callable[..., AnyOp]] = {"compile": Compile, "freeze": Freeze}


def _read(data: dict[str, Any]) -> AnyOp:
    if data["op"] != "megatron_shard":
        return _read_op(data)
    body = {k: v for k, v in data.items() if k != "op"}
    body["members"] = tuple(modules_of(m) for m in body["members"])
    body["options"] = tuple(body["options"].items())
    lists = {name: tuple(body[name]) for name in ("classes", "shard", "replicate")}
    return MegatronShard(**body | lists)


def _read_op(data: dict[str, Any]) -> AnyOp:
    body = {k: v for k, v in data.items() if k != "op"}
    if "modules" in body:
        body["modules"] = modules_of(body["modules"])
    match data["op"]:
        case "configure":
            return Configure(**body)
        case "parallelize":
            body["style"] = read_style(body["style"])
            body["shapes"] = tuple(
                Shape(name=s["name"], shape=tuple(s["shape"]), local=tuple(s["local"]))
                for s in body["shapes"]
            )
            return Parallelize(**body)
        case "tie":
            return Tie(**body)
        case "adapt" | "quantize":
            body["members"] = tuple(modules_of(m) for m in body["members"])
            return Adapt(**body) if data["op"] == "adapt" else Quantize(**body)
        case "checkpoint":
            body["save"] = tuple(
                Save(name=s["name"], every=s["every"], ops=tuple(s["ops"]))
                for s in body.get("save", ())
            )
            return Checkpoint(**body)
        case "compile" | "freeze" as name:
            return _PLAIN[name](**body)
        case "draw":
            return Draw(axis=body["axis"], fields=tuple(body["fields"]), place=body["place"])
        case "load":
            return Load(**{**body, "fp32": tuple(modules_of(m) for m in body.get("fp32", ()))})
        case "divide":
            body["units"] = tuple(modules_of(m) for m in body.get("units", ()))
            return Divide(**body)
        case "prefetch":
            return Prefetch(**{**body, "units": tuple(modules_of(m) for m in body["units"])})
        case _:
            return _read_unit(body)


def _read_unit(body: dict[str, Any]) -> FullyShard:
    for name in ("members", "ignored"):
        body[name] = tuple(modules_of(m) for m in body.get(name, ()))
    for name in ("shard", "replicate"):
        body[name] = tuple(body[name])
    body["spreads"] = tuple(_read_spread(s) for s in body.get("spreads", ()))
    return FullyShard(**body)


def _read_spread(data: dict[str, Any]) -> Spread:
    return Spread(
        modules=modules_of(data["modules"]),
        shard=tuple(data["shard"]),
        replicate=tuple(data.get("replicate", ())),
        shard_dim=data.get("shard_dim", 0),
    )
