"""Renders a draft as the text of a plan: weight splits, over a base plan where that fits."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from textwrap import wrap

from planc.diagnostics.diagnostic import Sink
from planc.elaborate.settings import AUTO, PARAM_DTYPE, RECOMPUTE, REDUCE_DTYPE, SEQUENCE
from planc.ir.mesh_axes import CONTEXT, SHARD
from planc.model.roles import TOWER
from planc.syntax import ast
from planc.syntax.plan_files import DRAFT, read_text, written_family

DECODER, BLOCKS = "decoder.plan", "blocks.plan"
_PRECISION = f"precision(param = {PARAM_DTYPE.word}, reduce = {REDUCE_DTYPE.word})"


@dataclass(slots=True, kw_only=True)
class Draft:
    """The content of a plan before it is rendered.

    Args:
        base: the plan that it extends; empty where none fits the model's roles.
        blocks: the block lists, the main one first.
        units: for each list, the classes of blocks that can be FSDP units; no entry means all.
        called: the lists whose blocks are called as modules; others cannot be wrapped.
        checkpoint: whether activation checkpointing is offered.
        rules: styles by block list (`""` is outside of them), then by module.
        sequence: the setting: `false`, `true`, or `auto`, which `--set` can change.
        may_tie, tied: whether the configuration ties embedding and head, or any may.
        embedding, head, tail: modules for units: the token embedding, the head, the norms before
            it.
        comment, notes: paragraphs at the top, and comments by module.
        sizes: of the axes `pp`, `cp` and `ep`, where they are above one.
        experts: the modules whose experts the ranks of `ep` can divide.
        own_attention: whether attention is gathered, as it is computed by the model's own code.
    """

    name: str
    family: str
    base: str = ""
    comment: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    units: dict[str, list[str]] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    checkpoint: bool = True
    rules: dict[str, dict[str, str]] = field(default_factory=dict)
    sequence: str = "false"
    may_tie: bool = False
    tied: bool = False
    embedding: str | None = None
    head: str | None = None
    tail: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    experts: frozenset[str] = frozenset()
    own_attention: bool = False

    @property
    def names(self) -> dict[str, str]:
        """The name of each block list in the plan: `$blocks` for the only list that a base plan has
        rules for, else `$block` or `$tower`, with a number where there are several.
        """
        kinds = {p: "tower" if TOWER.search(p) else "block" for p in self.blocks}
        names: dict[str, str] = {}
        for path, kind in kinds.items():
            alone = self.base and kind == "block" and [*kinds.values()].count(kind) == 1
            count = sum(kinds[other] == kind for other in names) + 1
            names[path] = "$blocks" if alone else f"${kind}{count if count > 1 else ''}"
        return names

    @property
    def fits(self) -> bool:
        """Whether units and checkpoints of the blocks are those of the base plan."""
        main = [p for p in self.blocks if not TOWER.search(p)]
        wrapped = all(p in self.called and p not in self.units for p in main)
        return bool(self.base) and self.checkpoint and wrapped

    @property
    def own_blocks(self) -> list[str]:
        """The lists whose units and checkpoints the plan states itself."""
        return [p for p in self.blocks if not self.fits or TOWER.search(p)]


def render(draft: Draft) -> str:
    """The text of the plan."""
    lines = [f"plan {draft.name} for {written_family(draft.family)}", ""]
    for paragraph in draft.comment:
        lines += [f"# {line}" for line in wrap(paragraph, 98)]
        lines.append("#")
    if draft.comment:
        lines[-1] = ""
    if draft.base:
        lines += [f'extend "{draft.base}"', ""]
    body = [*_mesh(draft), *_tensor(draft), *_checkpoint(draft), *_fsdp(draft)]
    if draft.own_attention:
        body += ["", "context on cp {", "    attention = gather", "}"]
    for path, name in draft.names.items():
        if name != "$blocks" and any(re.search(rf"\{name}\b", line) for line in body):
            lines.append(f"let {name[1:]} = {path}.*")
    if draft.base and _splits(draft) and draft.sequence != AUTO:
        lines += ["", f"override option {SEQUENCE.word} = {draft.sequence}"]
    return "\n".join([*lines, "", *body])


def _mesh(draft: Draft) -> Iterator[str]:
    sizes = [f"    override {name} = {size}" for name, size in draft.sizes.items()]
    whole = [
        "    dp_replicate = 1",
        f"    {SHARD} = auto",
        *(["    tp = 1"] if _splits(draft) else []),
    ]
    if sizes or not draft.base:
        yield from ("mesh {", *(sizes if draft.base else whole), "}", "")


def _splits(draft: Draft) -> bool:
    return any(draft.rules.values())


def _tensor(draft: Draft) -> Iterator[str]:
    """The tensor section, which says how weights are split."""
    if not _splits(draft):
        return
    roles = {draft.embedding: "$embedding", draft.head: "$head"} if draft.base == DECODER else {}
    ends = {roles.get(n, n): style for n, style in draft.rules.get("", {}).items()}
    of_base = {"$embedding": "rowwise", "$head": "colwise"} if draft.base == DECODER else {}
    replaced = not of_base.items() <= ends.items()
    yield f"{'override ' * replaced}tensor on tp {{"
    if replaced or not draft.base:
        stated = not draft.base and draft.sequence != AUTO
        yield f"    {SEQUENCE.word} = {draft.sequence if stated else SEQUENCE.word}"
    for path, name in draft.names.items():
        rules = draft.rules.get(path, {})
        divided = {n: s for n, s in rules.items() if f"{path}.*.{n}" in draft.experts}
        inner = [*_rules({n: s for n, s in rules.items() if n not in divided}, draft.notes)]
        if divided and draft.base:
            inner += ["when ep == 1 or etp > 1 {", *_rules(divided, draft.notes), "}"]
        if inner:
            yield from (f"{name} {{", *inner, "}")
    left = {n: style for n, style in ends.items() if replaced or n not in of_base}
    yield from _rules(left, {})
    yield from ("}", "")


def _rules(rules: dict[str, str], notes: dict[str, str]) -> Iterable[str]:
    """Rules grouped by style, with similar names joined by braces."""
    by_style: dict[tuple[str, str], list[str]] = {}
    for key, style in rules.items():
        by_style.setdefault((style, notes.get(key, "")), []).append(key)
    noted: set[str] = set()
    for (style, note), names in by_style.items():
        if note and note not in noted:
            noted.add(note)
            yield from (f"# {line}" for line in wrap(note, 90))
        yield from (f"{target} : {style}" for target in brace_names(names))


def brace_names(names: list[str]) -> list[str]:
    """Joins names that differ in one word into one selector, such as `mlp.{gate,up}_proj`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        holder, _, last = name.rpartition(".")
        groups.setdefault(holder, []).append(last)
    braced = []
    for holder, lasts in groups.items():
        start = f"{holder}." if holder else ""
        braced += [f"{start}{joined}" for joined in _join_words(lasts)]
    return braced


def _join_words(words: list[str]) -> list[str]:
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


def _checkpoint(draft: Draft) -> Iterator[str]:
    paths = [
        p for p in draft.blocks if p in draft.called and not (draft.fits and not TOWER.search(p))
    ]
    override = "override " if draft.base and not draft.fits else ""
    if paths and draft.checkpoint:
        rules = [f"{draft.names[path]} : full" for path in paths]
        if override:
            yield from ("override checkpoint {", f"when {RECOMPUTE.word} {{", *rules, "}", "}", "")
        else:
            yield from (f"when {RECOMPUTE.word} {{", "checkpoint {", *rules, "}", "}", "")
    elif override:
        yield from ("override checkpoint {", "$blocks : none", "}", "")


def _fsdp(draft: Draft) -> Iterator[str]:
    """Yields the fsdp section: the full one, or only units that the base plan lacks."""
    lines: list[str] = [] if draft.fits else [_PRECISION]
    for path, name in draft.names.items():
        classes = draft.units.get(path)
        if path not in draft.called or path not in draft.own_blocks:
            continue
        if classes is None:
            lines.append(f"{name} : unit(reshard = except_last)")
        else:
            lines += [f"{path}.*<{cls}> : unit" for cls in classes]
    if draft.base and not draft.fits and draft.experts:
        wide = "unit(on = ep_shard, shard_dim = auto, reshard = except_last)"
        lines += ["when ep > 1 {", f"$experts : {wide}", "}"]
    if not (draft.fits and draft.base == DECODER):
        lines += _ends(draft)
    if not draft.fits:
        lines.append("root : unit(reshard = never)")
    if lines:
        override = "override " if draft.base and not draft.fits else ""
        shards = f"{SHARD}_{CONTEXT}" if draft.base else SHARD
        yield from (f"{override}fsdp on {shards}, replicate on dp_replicate {{", *lines, "}")


def _ends(draft: Draft) -> Iterator[str]:
    """The units of the embedding, the last norm and the head."""
    ends = [name for name in (*draft.tail, draft.head) if name]
    apart = [f"{draft.embedding} : unit"] if draft.embedding else []
    if ends:
        last = f"group({', '.join(ends)})" if len(ends) > 1 else ends[0]
        apart.append(f"{last} : unit(reshard = never)")
    together = [name for name in (draft.embedding, *ends) if name]
    group = f"group({', '.join(together)}) : unit(reshard = never)"
    if draft.may_tie and draft.embedding and draft.head:
        yield from ("when config.tie_word_embeddings {", group, "} else {", *apart, "}")
    else:
        yield from [group] if draft.tied and len(together) > 1 else apart


def parsed_text(text: str) -> tuple[ast.File, ...]:
    """Parses the text of a draft, after the plans that it extends."""
    return read_text(DRAFT, text, Sink())
