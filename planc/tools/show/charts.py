"""Bars of what a rank holds, and of what a step's time is spent on."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from planc.tools.show.html import Html, tag

Bars = Mapping[str, Sequence[tuple[str, float, str, str]]]
"""By title, the parts: a name, bytes or seconds, how these come about, a line of the plan."""


def chart(bars: Bars, unit: Callable[[float], str], *, in_turn: bool) -> Iterator[Html]:
    """The bars with a legend; `in_turn` starts each where the one before ends.

    The legend adds up what is in turn; of what is not it has the largest part of each name.
    """
    sums = {title: sum(size for _, size, _, _ in bar) for title, bar in bars.items()}
    whole = (sum if in_turn else max)(sums.values()) or 1
    legend: dict[str, list[tuple[float, str, str]]] = {}
    for bar in bars.values():
        for name in dict.fromkeys(part[0] for part in bar):
            here = [part[1:] for part in bar if part[0] == name]
            known = legend.get(name, [])
            legend[name] = known + here if in_turn else max(known or here, here, key=_total)
    kinds = list(dict.fromkeys(map(_kind, legend)))
    color, start = {name: f"c{kinds.index(_kind(name)) % 10}" for name in legend}, 0.0
    for title, bar in bars.items():
        parts = []
        for name, size, how, place in bar:
            share = f"flex:{1e3 * size / (sums[title] or 1):.3f}"
            said = {"title": f"{name}: {unit(size)} ({how})", "data_by": place}
            parts.append(tag("i", class_=color[name], style=share, **said))
        room = f"margin-left:{start / whole:.3%};width:{sums[title] / whole:.3%}"
        yield tag("p", tag("span", title), tag("b", unit(sums[title])), class_="bar")
        yield tag("div", *parts, class_="stack", style=room)
        start += sums[title] * in_turn
    rows = []
    for name, same in sorted(legend.items(), key=lambda pair: -_total(pair[1])):
        how = tag("small", "; ".join(dict.fromkeys(how for _, how, _ in same)))
        dot, label = tag("i", class_=f"dot {color[name]}"), tag("span", tag("b", name), how)
        rows.append(tag("li", dot, label, tag("em", unit(_total(same))), data_by=same[0][2]))
    yield tag("ul", *rows, class_="legend")


def _total(parts: Sequence[tuple[float, str, str]]) -> float:
    return sum(size for size, _, _ in parts)


def _kind(name: str) -> str:
    """Parts of one kind have one color: gradients before and after their reduction."""
    kinds = (word for word in ("gradients", "activations", "gathered") if word in name)
    return next(kinds, name.partition(" ")[0])
