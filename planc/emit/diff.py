"""A delta as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from planc.emit import words
from planc.emit.delta import Change, Delta

FORMAT_VERSION = 1


def render(delta: Delta) -> str:
    """The diff as a person reads it; the last line counts, or says `No changes.`."""
    if delta.same:
        return "No changes.\n"
    changed, removed, added = (
        list(_together(c)) for c in (delta.changed, delta.removed, delta.added)
    )
    rows = [_row("~", *item) for item in changed]
    rows += [_row("-", *item) for item in removed]
    rows += [_row("+", *item) for item in added]
    lines = words.table(rows, indent="  ")
    per_rank = []
    for name, (old, new) in (
        ("parameters", delta.parameters),
        ("gathered at once", delta.gathered),
    ):
        if old != new:
            per_rank.append(f"{name} {words.size(old)} -> {words.size(new)}")
    if per_rank:
        lines.append(f"  per rank: {'; '.join(per_rank)}")
    lines.append(f"{len(added)} to add, {len(removed)} to remove, {len(changed)} to change")
    return "\n".join(lines) + "\n"


def _together(changes: Sequence[Change]) -> Iterator[tuple[str, Change]]:
    """Changes that say the same of modules whose last names alone differ, in one line."""
    groups: dict[object, list[Change]] = {}
    for change in changes:
        parent = change.subject.rpartition(".")[0] if change.modules is not None else change.subject
        key = (change.kind, change.parts, change.reason, change.old, change.new, parent)
        groups.setdefault(key, []).append(change)
    for group in groups.values():
        subjects = [c.subject for c in group]
        if group[0].modules is None:
            yield from ((s, c) for s, c in zip(subjects, group, strict=True))
            continue
        yield words.together(subjects)[0], group[0]


def _row(sign: str, subject: str, change: Change) -> tuple[str, str, str]:
    kind = change.kind.partition(" on ")[0]
    head = f"{sign} {kind}" if not subject else f"{sign} {kind} {subject}"
    said = ", ".join(filter(None, (_part(*part) for part in change.parts)))
    if change.reason:
        said += f"  ({change.reason})"
    return head, said, _place(sign, change)


def _part(name: str, old: str, new: str) -> str:
    title = f"{name} " if name and name != "style" else ""
    if old and new:
        return f"{title}{old} -> {new}"
    if name.startswith(("shape", "gathered", "precision", "over")):
        return ""  # of what comes or goes, what it is suffices
    return f"{title}{old or new}"


def _place(sign: str, change: Change) -> str:
    if sign == "-":
        return f"{change.old} (old)" if change.old else ""
    if sign == "~" and change.old and change.old != change.new:
        return f"{change.old} -> {change.new}"
    return change.new


def document(delta: Delta) -> dict[str, Any]:
    """The delta as `grammars/diff.schema.json` has it."""

    def changes(of: Sequence[Change]) -> list[dict[str, Any]]:
        return [
            {
                "kind": c.kind,
                "subject": c.subject,
                "parts": [{"name": n, "old": o, "new": w} for n, o, w in c.parts],
                "reason": c.reason,
                "old": c.old,
                "new": c.new,
            }
            for c in of
        ]

    return {
        "format_version": FORMAT_VERSION,
        "same": delta.same,
        "added": changes(delta.added),
        "removed": changes(delta.removed),
        "changed": changes(delta.changed),
        "per_rank": {
            "parameters": {"old": delta.parameters[0], "new": delta.parameters[1]},
            "gathered": {"old": delta.gathered[0], "new": delta.gathered[1]},
        },
    }
