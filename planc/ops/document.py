"""The lowered plan as JSON: versioned, validated by a schema, deterministic."""

import hashlib
import json
from typing import Any

from planc.diagnostics.diagnostic import Sink, one_of
from planc.ops.base import Where, cut, short
from planc.ops.codec import Reader, dump, shape_of
from planc.ops.lowered import FORMAT_VERSION, Lowered

_SHAPE = shape_of(Lowered)
_MOST = 50  # findings that are listed


def dumps(lowered: Lowered) -> str:
    """The lowered plan as JSON text.

    Keys have a fixed order, the indent is two spaces, each field of an operation is on one line,
    and a newline ends the text.
    """
    return f"{_format_json({'format_version': FORMAT_VERSION, **dump(lowered, _SHAPE)})}\n"


def digest(lowered: Lowered) -> str:
    """The sha256, in hex, of the canonical JSON of all fields that equality compares.

    Origins (lines of the `.plan` file) and reasons are not compared, so an edited comment or a
    moved line leaves the digest unchanged.
    """
    content = {"format_version": FORMAT_VERSION, **dump(lowered, _SHAPE, compared=True)}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def loads(text: str, name: str, sink: Sink) -> Lowered | None:
    """The lowered plan that `dumps` wrote, with paths of modules only, or None after PL007: invalid
    JSON, another format version, a violation of the schema, or an axis that the mesh lacks.
    """
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        message = "it nests too deep" if isinstance(error, RecursionError) else str(error)
        hint = "`planc lower --format json` writes a lowered plan"
        sink.error("PL007", f"{name} is not JSON: {message[:1].lower()}{message[1:]}", help=hint)
        return None
    if not _check_version(data, name, sink):
        return None
    problems, lowered = _read(data)
    for where, problem in problems[:_MOST]:
        sink.error("PL007", f"{name}, at {_path(where)}: {problem}")
    if len(problems) > _MOST:
        more = len(problems) - _MOST
        sink.error("PL007", f"{name}, at further places: {more:,} more findings")
    return None if problems else lowered


def _read(data: dict[str, Any]) -> tuple[list[tuple[Where, str]], Lowered | None]:
    from planc.ops.schema import against_schema  # slow to import, and only needed to read

    try:
        problems = against_schema(data)
        if problems:
            return problems, None
        reader = Reader()
        lowered = reader.load(data, _SHAPE)
    except RecursionError:
        return [((), "it nests too deep")], None
    names = [axis["name"] for axis in data["mesh"]]
    problems = reader.problems
    for i, name in enumerate(names):
        if name in names[:i]:
            twice = f"the mesh has two axes of the name {short(name)}"
            problems.append((("mesh", i, "name"), twice))
    if "experts" in data:
        names += [data["experts"][part]["name"] for part in ("rest", "ranks")]
    known = one_of(names, last="and")
    for where, axis in reader.axes:
        if axis not in names:
            problems.append((where, f"the mesh has no axis {short(axis)}; it has {known}"))
    return problems, lowered


def _path(where: Where) -> str:
    """`ops[3].style.input`, or `the top`."""
    keys = (
        f"[{p}]" if isinstance(p, int) else f".{p if p.isidentifier() else short(p)}" for p in where
    )
    return cut("".join(keys).removeprefix(".")) or "the top"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; `json` itself would silently keep only the last of several equal keys."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [n for n, _ in pairs]
        twice = next(n for n in names if names.count(n) > 1)
        raise ValueError(f"an object has the key {short(twice)} twice")
    return result


def _check_version(data: Any, name: str, sink: Sink) -> bool:
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


def _format_json(value: Any, indent: str = "", levels: int = 5) -> str:
    """JSON with one line for each field of an operation."""
    if not levels or not isinstance(value, dict | list) or not value:
        return json.dumps(value)
    inner = f"{indent}  "
    if isinstance(value, dict):
        items = ((json.dumps(k), _format_json(v, inner, levels - 1)) for k, v in value.items())
        lines = [f"{inner}{name}: {text}" for name, text in items]
    elif isinstance(value[0], dict):
        lines = [f"{inner}{_format_json(v, inner, levels - 1)}" for v in value]
    else:
        return json.dumps(value)
    left, right = "{}" if isinstance(value, dict) else "[]"
    body = ",\n".join(lines)
    return f"{left}\n{body}\n{indent}{right}"
