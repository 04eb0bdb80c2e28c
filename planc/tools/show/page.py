"""The page of one plan: its mesh, its modules, what a rank holds, a step, and the plan's lines."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planc.compiler import Compiled
from planc.diagnostics.diagnostic import Diagnostic
from planc.emit import text
from planc.lowering.lowered_file import LoweredFile
from planc.ops import phrases
from planc.ops.lowered import Lowered
from planc.provenance.answer import lines
from planc.tools.show import mesh
from planc.tools.show.charts import Bars, chart
from planc.tools.show.html import Html, page, tag
from planc.tools.show.module_tree import Row, tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The knowledge beyond the plan.

    Args:
        numbers: (what, value, remark) of a proof or an estimate.
        findings: of the compiler and the checks.
        memory, step: bytes of a rank, seconds of a step; empty for none.
        sent: bytes that a rank sends in a step, by group.
        per_node: ranks of a node.
    """

    numbers: tuple[tuple[str, str, str], ...] = ()
    findings: tuple[Diagnostic, ...] = ()
    memory: Bars = field(default_factory=dict)
    step: Bars = field(default_factory=dict)
    sent: Mapping[str, float] = field(default_factory=dict)
    per_node: int = 8


def render(compiled: Compiled, known: Known) -> str:
    """The page of a plan that has been lowered."""
    lowered, top = compiled.lowered, tree(compiled)
    assert lowered is not None
    talks = mesh.groups(lowered, known.per_node, known.sent)
    colors = {group.names: f"g{i}" for i, group in enumerate(talks)}
    hint = (
        "Choose a module or a line of the plan: what decides it, or what it decides, lights up. "
        "Sizes are those at rest, on a rank that holds the module."
    )
    calls = tag("pre", text.render(lowered, digest=compiled.digest))
    sections: dict[str, Sequence[str]] = {
        "Mesh": (*_mesh(lowered, known.per_node, talks),),
        "Modules": (tag("p", hint, class_="note"), _row(top, top.size, colors)),
        "Memory of a rank": (
            *chart(
                known.memory or _known_sizes(lowered), lambda b: phrases.size(int(b)), in_turn=False
            ),
        ),
        "Step": (*chart(known.step, lambda s: f"{s * 1e3:,.1f} ms", in_turn=True),)
        if known.step
        else (),
        "Calls": (tag("details", tag("summary", "What planc lower prints"), calls),),
    }
    main = (
        tag("section", tag("h2", title), *content, id=title.split()[0].lower())
        for title, content in sections.items()
        if content
    )
    side = tag("aside", tag("div", id="why"), tag("section", *_plan(compiled), id="plan"))
    grid = tag("div", tag("main", *main), side, class_="grid")
    return page(f"{lowered.plan} for {lowered.model}", _header(compiled, lowered, known), grid)


def _known_sizes(lowered: Lowered) -> Bars:
    """The numbers that are sure without an estimate; where some do not train, parameters alone."""
    whole = not any(op.SETS_TRAINING for op in lowered.ops)
    parts = [("parameters", 1, ""), ("gradients", 1, ""), ("optimizer state", 2, "of AdamW")]
    return {
        f"stage {i}" if len(lowered.stages) > 1 else "between two steps": [
            (name, times * stage.parameters, how, "")
            for name, times, how in (parts if whole else parts[:1])
        ]
        for i, stage in enumerate(lowered.stages)
    }


def _size(count: float) -> str:
    return phrases.size(int(count)) if count else ""


def tiles(numbers: Sequence[tuple[str, str, str]]) -> Html:
    """Numbers that are seen first: what, value and remark of each."""
    boxes = (tag("div", tag("small", a), tag("b", b), tag("span", c)) for a, b, c in numbers)
    return tag("div", *boxes, class_="tiles")


def _header(compiled: Compiled, lowered: Lowered, known: Known) -> Html:
    facts = compiled.applied[1] if compiled.applied else compiled.facts
    nodes, count = -(-lowered.world_size // known.per_node), facts.count if facts else 0
    numbers = (
        ("ranks", f"{lowered.world_size:,}", f"{nodes:,} node{'s' * (nodes > 1)}"),
        ("parameters", f"{count / 1e9:.3g} B" if count > 1e8 else f"{count:,}", "in the model"),
        ("at rest", phrases.size(lowered.parameters), "of parameters on a rank"),
        *known.numbers,
    )
    items = (
        tag("li", tag("b", f"{d.severity} {d.code}"), f" {d.message}", class_=str(d.severity))
        for d in known.findings
    )
    title = tag("h1", tag("b", lowered.plan), f" for {lowered.model}")
    axes = " × ".join(f"{a.name} {a.size}" for a in lowered.axes)
    about = tag("p", f"{lowered.layers} layers on {axes}", class_="note")
    return tag("header", title, about, tiles(numbers), tag("ul", *items, class_="findings"))


def _mesh(lowered: Lowered, per_node: int, talks: tuple[mesh.RankGroup, ...]) -> Iterator[Html]:
    axes = (
        tag("li", tag("b", a.name), f" {a.size}", data_by=a.place, class_="one" * (a.size == 1))
        for a in lowered.axes
    )
    yield tag("ul", *axes, class_="axes")
    drawn, _ = mesh.nodes(lowered, per_node, talks)
    left = -(-lowered.world_size // per_node) - len(drawn)
    more = tag("span", f"and {left:,} more nodes", class_="note") if left > 0 else ""
    yield tag("div", *drawn, more, class_="nodes")
    rank = tag(
        "span",
        tag("b", "rank 0", id="rank"),
        "communicates with" if talks else "communicates with none",
    )
    rows = [tag("li", tag("i", class_="dot me"), rank)]
    for i, group in enumerate(talks):
        where = "in its node" if group.near == group.size else "across nodes"
        words = f"{group.size:,} ranks {where}: {group.sends}"
        sent = f"{_size(group.sent)} a step" if group.sent else ""
        with_whom = tag("span", tag("b", " * ".join(group.names)), words)
        rows.append(tag("li", tag("i", class_=f"dot g{i}"), with_whom, tag("em", sent)))
    yield tag("ul", *rows, class_="groups")


def _row(row: Row, whole: int, colors: Mapping[tuple[str, ...], str]) -> Html:
    chips = []
    for mark in row.marks:
        kind = f"chip {mark.kind} {colors.get(mark.axes, '')}"
        chips.append(tag("span", mark.text, class_=kind, title=mark.about))
    like = tag("small", f"inside as {row.like}") if row.like else ""
    kinds = {"bold": "b", "secondary": "a"}
    why = (
        tag("p", *(tag(kinds.get(kind, "span"), word.strip()) for word, kind in line if word))
        for line in lines(row.why)
    )
    many = f"{len(row.modules)} x " if len(row.modules) > 1 and row.name[0] == "[" else ""
    shown = tag(
        "summary" if row.inside else "div",
        tag("code", row.name, tag("small", f"{many}{row.why.cls}")),
        tag("span", *chips, like, class_="chips"),
        tag("span", _size(row.size), class_="size"),
        tag("i", class_="share", style=f"--part:{row.size / (whole or 1):.4f}"),
        tag("template", *why),
        class_="row",
        data_module=str(row.modules),
        data_by="\n".join(dict.fromkeys(mark.place for mark in row.marks)),
        tabindex=0,
    )
    if not row.inside:
        return shown
    units = (f"unit {colors.get(mark.axes, '')}" for mark in row.marks if mark.kind == "fsdp")
    inside = (_row(r, whole, colors) for r in row.inside)
    return tag("details", shown, tag("div", *inside, class_=f"kids {next(units, '')}"), open="")


def _plan(compiled: Compiled) -> Iterator[Html]:
    """The text of each file of the plan, its own first; a lowered plan has none."""
    files = compiled.files
    for file in reversed(files if files and not isinstance(files, LoweredFile) else ()):
        source = file.origin.source
        rows = (
            tag("li", line or " ", data_place=f"{source.name}:{number}")
            for number, line in enumerate(source.text.splitlines(), 1)
        )
        yield tag("h2", source.name)
        yield tag("ol", *rows)
