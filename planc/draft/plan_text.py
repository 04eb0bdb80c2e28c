"""Renders a draft as the text of a plan."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from textwrap import wrap

from planc.diagnostic import Sink
from planc.draft import axes
from planc.model.roles import TOWER
from planc.plan.mesh_axes import CONTEXT, EXPERTS, SHARD
from planc.plan.settings import PARAM_DTYPE, RECOMPUTE, REDUCE_DTYPE, SEQUENCE
from planc.source import Source
from planc.syntax import ast
from planc.syntax.plan_files import DRAFT, written_family


@dataclass(slots=True, kw_only=True)
class Draft:
    """The content of a plan before it is rendered.

    Args:
        blocks: the block lists, the main one first.
        units: for each list, the classes of blocks that can be FSDP units; no entry means all.
        called: the lists whose blocks are called as modules; others cannot be wrapped.
        checkpoint: whether activation checkpointing is offered.
        plain, sequence: the rules without and with sequence parallelism, by block list (`""` is
            outside of them), then by module; no `sequence` means no such option.
        may_tie, tied: whether the configuration ties embedding and head, or any may.
        embedding, head, tail: modules for units: the token embedding, the head, the norms before
            it.
        comment, notes: paragraphs at the top, and comments by module.
        sizes: of the axes `pp`, `cp` and `ep`, where they are above one.
        experts: the modules whose experts the ranks of `ep` divide.
    """

    name: str
    family: str
    comment: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    units: dict[str, list[str]] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    checkpoint: bool = True
    plain: dict[str, dict[str, str]] = field(default_factory=dict)
    sequence: dict[str, dict[str, str]] | None = None
    may_tie: bool = False
    tied: bool = False
    embedding: str | None = None
    head: str | None = None
    tail: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    experts: list[str] = field(default_factory=list)

    def divide(self, sizes: dict[str, int]) -> None:
        """Adds axes of these sizes; the ranks of `ep` hold whole experts."""
        self.experts = [*axes.experts(self.plain)] if EXPERTS in sizes else []
        self.sizes = {name: size for name, size in sizes.items() if name != EXPERTS or self.experts}
        if self.experts:
            self.plain = axes.undivided(self.plain)
            self.sequence = self.sequence and axes.undivided(self.sequence)


def render(draft: Draft) -> str:
    """The text of the plan."""
    lines = [f"plan {draft.name} for {written_family(draft.family)}", ""]
    for paragraph in draft.comment:
        lines += [f"# {line}" for line in wrap(paragraph, 98)]
        lines.append("#")
    if draft.comment:
        lines[-1] = ""
    tensor, units, names = list(_tensor(draft)), list(_fsdp(draft)), block_names(draft.blocks)
    wrapped = [i for i, path in enumerate(draft.blocks) if path in draft.called]
    again = [f"        ${names[i]} : full" for i in wrapped] if draft.checkpoint else []
    for i, path in enumerate(draft.blocks):
        if any(f"${names[i]} " in line for line in (*tensor, *units, *again)):
            lines.append(f"let {names[i]} = {path}.*")
    lines += ["", "mesh {", *axes.mesh(draft.sizes, tensor=bool(tensor)), "}", ""]
    lines += axes.sections(draft.sizes, next(iter(draft.blocks), ""), draft.experts)
    if tensor:
        lines += ["tensor on tp {", *(f"    {line}" for line in tensor), "}", ""]
    if again:
        lines += [f"when {RECOMPUTE.word} {{", "    checkpoint {", *again, "    }", "}", ""]
    lines += units
    return "\n".join(lines) + "\n"


def block_names(blocks: Iterable[str]) -> list[str]:
    """The name of each block list in the plan: `block`, or `tower` for the lists of a tower."""
    names: list[str] = []
    for path in blocks:
        kind = "tower" if TOWER.search(path) else "block"
        many = sum(name.startswith(kind) for name in names)
        names.append(f"{kind}{many + 1}" if many else kind)
    return names


def _tensor(draft: Draft) -> Iterable[str]:
    """The tensor rules: those of both variants first, then those that differ."""
    for name, path in zip(block_names(draft.blocks), draft.blocks, strict=True):
        inner = list(_both_variants(draft, path))
        if inner:
            yield from [f"${name} {{", *(f"    {line}" for line in inner), "}"]
    yield from _both_variants(draft, "")


def _both_variants(draft: Draft, path: str) -> Iterable[str]:
    plain, notes = draft.plain.get(path, {}), draft.notes
    if draft.sequence is None:
        yield from _rules(plain, notes)
        return
    sequence = draft.sequence.get(path, {})
    both = {n: s for n, s in plain.items() if sequence.get(n) == s}
    one = {n: s for n, s in plain.items() if n not in both}
    two = {n: s for n, s in sequence.items() if n not in both}
    yield from _rules(both, notes)
    if two:
        yield from [f"when {SEQUENCE.word} {{", *(f"    {r}" for r in _rules(two, {}))]
        yield from ["} else {", *(f"    {r}" for r in _rules(one, {}))] if one else []
        yield "}"
    elif one:
        yield from [f"when not {SEQUENCE.word} {{", *(f"    {r}" for r in _rules(one, {})), "}"]


def _rules(rules: dict[str, str], notes: dict[str, str]) -> Iterable[str]:
    """Rules grouped by style, with similar names joined by braces."""
    by_style: dict[tuple[str, str], list[str]] = {}
    for key, style in rules.items():
        for one in style.split(" & "):
            by_style.setdefault((one, notes.get(key, "")), []).append(key)
    noted: set[str] = set()
    for (style, note), names in by_style.items():
        if note and note not in noted:
            noted.add(note)
            yield from (f"# {line}" for line in wrap(note, 98))
        yield from (f"{target} : {style}" for target in braced(names))


def braced(names: list[str]) -> list[str]:
    """Names that differ in one place as one selector: `mlp.{gate,up}_proj`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        holder, _, last = name.rpartition(".")
        groups.setdefault(holder, []).append(last)
    found = []
    for holder, lasts in groups.items():
        start = f"{holder}." if holder else ""
        found += [f"{start}{joined}" for joined in _joined(lasts)]
    return found


def _joined(words: list[str]) -> list[str]:
    if len(words) < 2:
        return words
    tails: dict[str, list[str]] = {}
    for word in words:
        match = re.fullmatch(r"([A-Za-z0-9_]+?)(_[A-Za-z]+|\d*)", word)
        head, tail = (match[1], match[2]) if match else (word, "")
        tails.setdefault(tail, []).append(head)
    if any(len(heads) < 2 for heads in tails.values()):
        tails = {"": words}
    return [
        f"{{{','.join(heads)}}}{tail}" if len(heads) > 1 else f"{heads[0]}{tail}"
        for tail, heads in tails.items()
    ]


def _fsdp(draft: Draft) -> Iterable[str]:
    shards = f"{SHARD}_{CONTEXT}" if CONTEXT in draft.sizes else SHARD
    yield f"fsdp on {shards}, replicate on dp_replicate {{"
    yield f"    precision(param = {PARAM_DTYPE.word}, reduce = {REDUCE_DTYPE.word})"
    for name, path in zip(block_names(draft.blocks), draft.blocks, strict=True):
        classes = draft.units.get(path)
        if path in draft.called and classes is None:
            yield f"    ${name} : unit(reshard = except_last)"
        elif path in draft.called:
            yield from (f"    {path}.*<{cls}> : unit" for cls in classes or ())
    for name in draft.experts:
        yield f"    {name} : unit(on = ep_shard, shard_dim = auto, reshard = except_last)"
    ends = [name for name in (*draft.tail, draft.head) if name]
    apart = [f"{draft.embedding} : unit"] if draft.embedding else []
    if ends:
        last = f"group({', '.join(ends)})" if len(ends) > 1 else ends[0]
        apart.append(f"{last} : unit(reshard = never)")
    together = [name for name in (draft.embedding, *ends) if name]
    if draft.may_tie and draft.embedding and draft.head:
        yield "    when config.tie_word_embeddings {"
        yield f"        group({', '.join(together)}) : unit(reshard = never)"
        yield "    } else {"
        yield from (f"        {line}" for line in apart)
        yield "    }"
    elif draft.tied and len(together) > 1:
        yield f"    group({', '.join(together)}) : unit(reshard = never)"
    else:
        yield from (f"    {line}" for line in apart)
    yield "    root : unit(reshard = never)"
    yield "}"


def parsed_text(text: str) -> ast.File:
    """The text of a draft, parsed."""
    from planc.syntax.parse import parse  # which imports lark

    return parse(Source(DRAFT, text), Sink())
