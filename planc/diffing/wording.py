"""The text of each difference."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from planc.ops import phrases
from planc.ops.entry import Value, Words

_BYTES = {"nbytes", "gathered", "parameters"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A difference, named as in the lowered JSON; None where one side has no such value."""

    name: str
    old: Value
    new: Value
    text: str = field(default="", compare=False)


def worded(name: str, old: Value, new: Value, words: Words) -> Part:
    """A part with its text; the shape of a weight comes without its name."""
    plain = name.removeprefix("weight.").replace(".", " ")
    title, value = words.get(name, (plain, phrases.value))
    if name in _BYTES and isinstance(old, int) and isinstance(new, int):
        texts = phrases.sizes(old, new)
    else:
        texts = value(old), value(new)
    return Part(name=name, old=old, new=new, text=f"{title} {texts[0]} -> {texts[1]}".lstrip())


def summary(parts: Sequence[Part]) -> str:
    """The text of all parts; those that follow from others are only in the JSON."""
    split = {p.name: p for p in parts}
    telling = [p for p in parts if not _follows(p, split)] or parts
    return ", ".join(p.text for p in telling)


def _follows(part: Part, parts: dict[str, Part]) -> bool:
    """Whether a part follows: bytes that round to the same text, or a local shape that is the
    same share of the new shape.
    """
    if part.name in _BYTES:
        return phrases.alike(part.old, part.new)
    whole = parts.get(f"{part.name.removesuffix('.local')}.shape")
    if not part.name.endswith(".local") or whole is None:
        return False
    return _shares(whole.old, part.old) == _shares(whole.new, part.new)


def _shares(whole: Value, local: Value) -> list[float]:
    """The number of ranks that each dim is sharded over."""
    if not isinstance(whole, tuple) or not isinstance(local, tuple):
        return []
    dims = [(a, b) for a, b in zip(whole, local, strict=False)]
    return [a / b for a, b in dims if isinstance(a, int) and isinstance(b, int) and b]
