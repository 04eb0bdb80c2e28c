"""Sets of modules as the regular expressions that peft matches layer names with."""

import re
from collections.abc import Iterable, Sequence

from planc.model.facts import Modules, Segment


def spelled(segment: Segment) -> str:
    """A name, or a set of indices such as `([0-9]|[12][0-9]|3[01])`, as a regular expression."""
    if isinstance(segment, str):
        return re.escape(segment)
    tens: dict[str, list[str]] = {}
    for number in map(str, segment):
        tens.setdefault(number[:-1], []).append(number[-1])
    heads: dict[str, list[str]] = {}
    for head, digits in tens.items():
        heads.setdefault(_any(digits), []).append(head)
    parts: list[str] = []
    for ending, some in heads.items():
        parts += [ending] if "" in some else []
        if more := [head for head in some if head]:
            parts.append((_any(more) if max(map(len, more)) == 1 else either(more)) + ending)
    return parts[0] if len(parts) == 1 else either(parts)


def _any(digits: Sequence[str]) -> str:
    if len(digits) == 1:
        return digits[0]
    return "[0-9]" if len(digits) == 10 else f"[{''.join(digits)}]"


def either(parts: Iterable[str]) -> str:
    """A regular expression that matches any of several."""
    return f"({'|'.join(parts)})"


def pattern_of(every: Iterable[Modules]) -> str:
    last: dict[tuple[Segment, ...], list[str]] = {}
    for members in every:
        last.setdefault(members.path[:-1], []).append(spelled(members.path[-1]))
    return "|".join(
        r"\.".join([*map(spelled, path), names[0] if len(names) == 1 else either(names)])
        for path, names in last.items()
    )
