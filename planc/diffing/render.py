"""A delta as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from planc.diffing.compare import Change, Delta, Part
from planc.diffing.entries import Value
from planc.emit import phrases
from planc.source import Span

FORMAT_VERSION = 1
_WIDEST = (58, 64)  # columns of a subject and of what changes, before a line moves on alone


def render(delta: Delta) -> str:
    """The diff as a person reads it; the last line counts, or says `No changes.`."""
    if delta.same:
        return "No changes.\n"
    signs = (("~", delta.changed), ("-", delta.removed), ("+", delta.added))
    rows = [_row(sign, change) for sign, changes in signs for change in changes]
    lines = phrases.table(rows, widest=_WIDEST)
    totals = _totals(delta)
    if totals:
        lines.append(f"  per rank: {totals}")
    lines.append(
        f"{len(delta.added)} to add, {len(delta.removed)} to remove, {len(delta.changed)} to change"
    )
    return "".join(f"{line}\n" for line in lines)


def _totals(delta: Delta) -> str:
    titles = (("parameters", delta.parameters), ("largest gathered unit", delta.gathered))
    texts = ((title, *phrases.sizes(*pair)) for title, pair in titles if pair[0] != pair[1])
    return "; ".join(f"{title} {old} -> {new}" for title, old, new in texts)


def _row(sign: str, change: Change) -> tuple[str, str, str]:
    kind = change.kind.partition(" ")[0]
    if change.modules and kind == "tensor":  # a style says enough
        kind = ""
    head = " ".join(filter(None, (sign, kind, change.subject)))
    said = _changed(change) if sign == "~" else _whole(change)
    if change.reason:
        said = f"{said}  ({change.reason})".lstrip()
    return head, said, _place(sign, change)


def _place(sign: str, change: Change) -> str:
    """The `.plan` lines; none where an axis brought the change about and the line is the same."""
    if sign == "-":
        return f"{change.old} (old)" if change.old else ""
    if sign == "+" or change.old == change.new:
        return "" if sign == "~" and change.reason else change.new
    if change.old.startswith("--set ") and change.new.startswith("--set "):
        return f"{change.old} -> {change.new.removeprefix('--set ')}"
    file, line = Span.parse_place(change.new)
    if line and Span.parse_place(change.old)[0] == file:
        return f"{change.old} -> :{line}"
    return " -> ".join(filter(None, (change.old, change.new)))


# What differs ------------------------------------------------------------------------------------


_TITLES = {
    "shard": "over",
    "replicate": "",
    "param": "parameters",
    "reduce": "gradients",
    "cast_inputs": "cast inputs",
    "nbytes": "a rank",
    "reshard": "",
    "style": "",
    "value": "",
    "source": "",
    "class": "",
    "axes": "over",
    "group": "unit",
    "local": "",
    "fullgraph": "",
    "trainable": "",
    "factor": "gradients by",
    "shard_dim": "dim",
    "pin": "pinned",
}
_BYTES = {"nbytes", "gathered", "parameters"}


def _changed(change: Change) -> str:
    """Before and after, part by part; what says nothing new is left to the JSON."""
    split = {p.name: p for p in change.parts}
    telling = [p for p in change.parts if not _follows(p, split)] or change.parts
    return ", ".join(_part(p, change.kind) for p in telling)


def _follows(part: Part, parts: dict[str, Part]) -> bool:
    """Bytes that round to the same, and a local shape that is the same share of a new shape."""
    if part.name in _BYTES:
        return phrases.alike(part.old, part.new)
    whole = parts.get(f"{part.name.removesuffix('.local')}.shape")
    if not part.name.endswith(".local") or whole is None:
        return False
    return _shares(whole.old, part.old) == _shares(whole.new, part.new)


def _shares(whole: Value, local: Value) -> list[float]:
    """How many ranks each dim is split over."""
    if not isinstance(whole, tuple) or not isinstance(local, tuple):
        return []
    dims = [(a, b) for a, b in zip(whole, local, strict=False)]
    return [a / b for a, b in dims if isinstance(a, int) and isinstance(b, int) and b]


def _part(part: Part, kind: str) -> str:
    if part.name in _BYTES and isinstance(part.old, int) and isinstance(part.new, int):
        old, new = phrases.sizes(part.old, part.new)
    else:
        old, new = _value(part, part.old, kind), _value(part, part.new, kind)
    return f"{_title(part)} {old} -> {new}".lstrip()


def _title(part: Part) -> str:
    if part.name in _TITLES:
        return _TITLES[part.name]
    owner, _, aspect = part.name.rpartition(".")
    if aspect in ("shape", "local"):
        return aspect if owner == "weight" else f"{owner} {aspect}"
    return part.name.replace(".", " ")


def _value(part: Part, value: Value, kind: str) -> str:
    if part.name == "replicate":
        names = " * ".join(map(str, value)) if isinstance(value, tuple) else ""
        return f"replicated over {names}" if names else "not replicated"
    if value is None and kind == "checkpoint" and part.name not in ("save", "offload"):
        return "true"
    if value is None or value == ():
        return {"group": "alone", "axes": "no axis"}.get(part.name, "none")
    if part.name == "reshard":
        assert isinstance(value, int)
        return phrases.reshard(value)
    if part.name == "trainable":
        return "trainable" if value else "frozen"
    if part.name == "fullgraph":
        return "full graph" if value else "graph with breaks"
    if part.name == "offload" and kind == "checkpoint":
        return "cpu"
    if part.name == "local":
        return "local" if value else "dtensor"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        if all(isinstance(v, int) for v in value):
            return str(list(value))
        if part.name == "save":
            return f"[{', '.join(map(str, value))}]"
        return (" | " if kind == "mesh" else " * ").join(map(str, value))
    if part.name in _BYTES and isinstance(value, int):
        return phrases.size(value)
    return phrases.dtype(str(value))


def _whole(change: Change) -> str:
    """What an operation that comes or goes says, as far as it tells it from others."""
    parts = {p.name: p.new if p.old is None else p.old for p in change.parts}
    match change.kind:
        case "layers":
            operations = parts["operations"]
            assert isinstance(operations, tuple)
            return f"as those before: {', '.join(map(str, operations))}"
        case "configure":
            return f"= {str(parts['value']).lower()}"
        case "tie":
            return f"= {parts['source']}"
        case "adapters":
            alpha, dtype = parts["alpha"], parts.get("dtype")
            assert isinstance(alpha, float | int)
            kept = f", {phrases.dtype(str(dtype))}" if dtype else ""
            return f"lora, rank {parts['rank']}, alpha {phrases.number(alpha)}{kept}"
        case "checkpoint":
            return ", ".join(_recomputed(parts))
        case "load":
            return ", ".join(f"{name} {phrases.dtype(str(v))}" for name, v in parts.items())
        case "training":
            return "trainable" if parts["trainable"] else "frozen"
        case "quantize":
            return f"{parts['kind']} in {phrases.dtype(str(parts['storage']))}"
        case "divide":
            return f"gradients by {parts['factor']}"
        case "prefetch":
            ways = (f"{parts[w]} ahead in {w}" for w in ("forward", "backward") if parts[w])
            return ", ".join(ways)
        case "compile":
            return "full graph" if parts["fullgraph"] else ""
        case "fsdp":
            return ", ".join(_unit(parts))
        case "spread":
            return ", ".join(_spread(parts))
        case "megatron":
            return f"{parts['strategy']}, over {_listed(parts['shard'])}"
        case "megatron unit" | "random":
            return "drawn alike on all ranks" if change.kind == "random" else ""
    over = "" if change.reason else f" on {' * '.join(change.over)}"  # a reason names the axis
    return ", ".join([f"{parts['style']}{over}", *_locals(change.parts)])


def _recomputed(parts: dict[str, Value]) -> Iterator[str]:
    """How a module is checkpointed, where it is not in full alone."""
    yield "ops" if "save" in parts else "full"
    for name, value in parts.items():
        part = Part(name=name, old=None, new=value)
        yield f"{_title(part)} {_value(part, value, 'checkpoint')}"


def _locals(parts: Sequence[Part]) -> Iterator[str]:
    for part in parts:
        if part.name.endswith(".local"):
            value = part.new if part.old is None else part.old
            yield f"{_title(part)} {_value(part, value, 'tensor')}"


def _listed(value: Value) -> str:
    return " * ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _unit(parts: dict[str, Value]) -> Iterator[str]:
    if parts.get("group"):
        yield f"in {parts['group']}"
    reshard, nbytes = parts["reshard"], parts["nbytes"]
    assert isinstance(reshard, int) and isinstance(nbytes, int)
    yield phrases.reshard(reshard)
    yield f"{phrases.size(nbytes)} a rank"
    if parts.get("shard_dim"):
        yield f"split along dim {parts['shard_dim']}"
    if parts.get("offload"):
        yield "offloaded"


def _spread(parts: dict[str, Value]) -> Iterator[str]:
    for name, word in (("shard", "over"), ("replicate", "replicated over")):
        axes = parts.get(name)
        if isinstance(axes, tuple) and axes:
            yield f"{word} {' * '.join(map(str, axes))}"
    if parts.get("shard_dim"):
        yield f"split along dim {parts['shard_dim']}"


# JSON --------------------------------------------------------------------------------------------


def document(delta: Delta) -> dict[str, Any]:
    """The delta as `grammars/diff.schema.json` has it."""
    return {
        "format_version": FORMAT_VERSION,
        "same": delta.same,
        "added": [_entry(c) for c in delta.added],
        "removed": [_entry(c) for c in delta.removed],
        "changed": [_entry(c) for c in delta.changed],
        "per_rank": {
            "parameters": {"old": delta.parameters[0], "new": delta.parameters[1]},
            "gathered": {"old": delta.gathered[0], "new": delta.gathered[1]},
        },
    }


def _entry(change: Change) -> dict[str, Any]:
    return {
        "kind": change.kind,
        "axis": " * ".join(change.over),
        "subject": change.subject,
        "modules": [str(m) for m in change.modules],
        "parts": [
            {"name": p.name, "old": _plain(p.old), "new": _plain(p.new)} for p in change.parts
        ],
        "reason": change.reason,
        "old_place": change.old,
        "new_place": change.new,
    }


def _plain(value: Value) -> Any:
    return list(value) if isinstance(value, tuple) else value
