"""A delta as text and as JSON."""

from collections.abc import Iterator, Mapping
from typing import Any

from planc.diagnostics.source import Span
from planc.diffing.compare import Change, Delta
from planc.ops import phrases
from planc.ops.base import Value

FORMAT_VERSION = 1
_UNITS = {"memory": (2**30, "GiB"), "time": (1e-3, "ms"), "sent": (2**30, "GiB")}
_WIDEST = (58, 64)  # widths of the first two columns


def render(delta: Delta) -> str:
    """The diff as text; the last line has the counts, or is `No changes.`."""
    if delta.same:
        return "No changes.\n"
    signs = (("~", delta.changed), ("-", delta.removed), ("+", delta.added))
    rows = [_row(sign, change) for sign, changes in signs for change in changes]
    lines = phrases.table(rows, widest=_WIDEST)
    titles = (("parameters", delta.parameters), ("largest gathered unit", delta.gathered))
    texts = ((title, *phrases.sizes(*pair)) for title, pair in titles if pair[0] != pair[1])
    totals = "; ".join(f"{title} {old} -> {new}" for title, old, new in texts)
    if totals:
        lines.append(f"  per rank: {totals}")
    lines.append(
        f"{len(delta.added)} to add, {len(delta.removed)} to remove, {len(delta.changed)} to change"
    )
    return "".join(f"{line}\n" for line in lines)


def _row(sign: str, change: Change) -> tuple[str, str, str]:
    kind = change.kind.partition(" ")[0]
    if change.modules and kind == "tensor":  # the style shows the kind
        kind = ""
    head = " ".join(filter(None, (sign, kind, change.subject)))
    reason = f"  ({change.reason})" if change.reason else ""
    return head, f"{change.summary}{reason}".lstrip(), _place(sign, change)


def _place(sign: str, change: Change) -> str:
    """The lines of the `.plan` files; empty where an axis caused the change on an equal line."""
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


def estimates(sides: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """The lines of memory, time and bytes sent in a step, from `old` and `new` of each quantity;
    and of the rows of a rank's pass where they differ, from which activations follow.
    """
    for name, values in sides.items():
        old, new = values["old"], values["new"]
        if name == "rows":
            if old != new:
                yield f"rows: {old:g} -> {new:g} in a pass of a rank, of the same batch"
            continue
        scale, unit = _UNITS[name]
        change = f"  {new / old - 1:+.1%}" if old else ""
        if old == new:
            yield f"{name}: {old / scale:,.2f} {unit}, unchanged"
        else:
            yield f"{name}: {old / scale:,.2f} -> {new / scale:,.2f} {unit}{change}"


# JSON --------------------------------------------------------------------------------------------


def document(delta: Delta) -> dict[str, Any]:
    """The delta in the form of `grammars/diff.schema.json`."""
    return {
        "format_version": FORMAT_VERSION,
        "same": delta.same,
        "added": [_entry(c) for c in delta.added],
        "removed": [_entry(c) for c in delta.removed],
        "changed": [_entry(c) for c in delta.changed],
        "per_rank": {
            name: dict(zip(("old", "new"), getattr(delta, name), strict=True))
            for name in ("parameters", "gathered")
        },
    }


def _entry(change: Change) -> dict[str, Any]:
    return {
        "kind": change.kind,
        "axis": " * ".join(change.over),
        "subject": change.subject,
        "modules": [str(m) for m in change.modules],
        "parts": [{n: _plain(getattr(p, n)) for n in ("name", "old", "new")} for p in change.parts],
        "reason": change.reason,
        "old_place": change.old,
        "new_place": change.new,
    }


def _plain(value: Value) -> Any:
    return list(value) if isinstance(value, tuple) else value
