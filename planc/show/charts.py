"""Bars of what a rank holds, and of what a step's time is spent on."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from planc.show.html import Html, tag

Bars = Mapping[str, Sequence[tuple[str, float, str, str]]]
"""By title, the parts: a name, bytes or seconds, how these come about, a line of the plan."""


def chart(bars: Bars, unit: Callable[[float], str], *, in_turn: bool) -> Iterator[Html]:
    """The bars with a legend; `in_turn` starts each where the one before ends."""
    sums = {title: sum(size for _, size, _, _ in bar) for title, bar in bars.items()}
    whole = (sum if in_turn else max)(sums.values()) or 1
    legend: dict[str, list[tuple[float, str, str]]] = {}
    for title, bar in bars.items():
        for name, size, how, place in bar:
            counts = in_turn or title == max(sums, key=lambda t: sums[t])
            legend.setdefault(name, []).extend([(size, how, place)] * counts)
    color, start = {name: f"c{i % 8}" for i, name in enumerate(legend)}, 0.0
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
    for name, same in sorted(legend.items(), key=lambda pair: -sum(p[0] for p in pair[1])):
        how = tag("small", "; ".join(dict.fromkeys(how for _, how, _ in same)))
        dot, told = tag("i", class_=f"dot {color[name]}"), tag("span", tag("b", name), how)
        total = tag("em", unit(sum(size for size, _, _ in same)))
        rows += [tag("li", dot, told, total, data_by=same[0][2])] if same else []
    yield tag("ul", *rows, class_="legend")
