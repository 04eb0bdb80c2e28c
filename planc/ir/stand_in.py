"""The decisions of the real plan on a proxy model, whose layers stand for real ones.

A plan is elaborated for the real model on the real mesh. Here each of its sets of modules becomes
the set of small modules that stand for them, so that the proxy model is run under the rules that
the real model will run under. What no small module stands for cannot be proved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from planc.diagnostics.source import Span
from planc.ir import nodes as ir
from planc.ir.shared_parameters import with_copies
from planc.model.facts import Facts, Modules
from planc.model.indices import Indices
from planc.model.layer_kinds import (
    Kind,
    block_lists,
    blocks_added_to,
    entry_kinds,
    length,
    signature,
)
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.styles import style_text
from planc.proxy.depth import edges

Rules = frozenset[tuple[Span, tuple[Any, ...]]]
"""The lines of a plan that act on a layer, with the path inside the layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrepresented:
    """Why no proxy model decides a plan, and the lines that act on what nothing stands for."""

    reason: str
    origins: tuple[Span, ...] = ()


def variants(plan: ir.Plan, facts: Facts, *, ends: bool = False) -> dict[int, list[str]]:
    """Labels of the rules on each block, by the length of its list, as an argument of `shrink`.

    Lists in which the kind of a block alone decides which rules act on it are left out.

    Args:
        ends: whether the first and the last block are apart from those between them.
    """
    labels: dict[int, list[str]] = {}
    for at in block_lists(facts.model):
        kinds, rules = _classes(at, plan, facts, ends)
        numbers = _numbers(kinds, rules)
        if any(numbers):
            row = labels.get(len(numbers), [""] * len(numbers))
            labels[len(numbers)] = [f"{old} {new}" for old, new in zip(row, numbers, strict=True)]
    return labels


def kinds_of(at: Modules, plan: ir.Plan, facts: Facts) -> list[tuple[Any, ...]]:
    """The kind of each block of a list, with the rules on it, of which its stage is one."""
    kinds = [*entry_kinds(at, facts, facts).values()]
    rules = variants(plan, facts).get(len(kinds), [""] * len(kinds))
    return [*zip(kinds, rules, strict=True)]


def stand_in(
    plan: ir.Plan,
    facts: Facts,
    small: Facts,
    *,
    kept: Mapping[int, Sequence[tuple[int, ...]]],
    sizes: Mapping[str, int],
) -> ir.Plan | Unrepresented:
    """A plan, with the numbers of a proxy model, on that model's modules and a small mesh's sizes;
    `kept` are the real layers that the small ones stand for (`Shrunk.kept`).
    """
    state = StandInModel(plan, facts, small, kept)
    small_plan = plan.map_modules(state.walk)
    small_plan = replace(
        small_plan,
        mesh=plan.mesh.with_sizes(sizes),
        load=plan.load and replace(plan.load, fp32=tuple(state.all(plan.load.fp32, plan.load))),
        tensor=tuple(rule.for_model(small) for rule in small_plan.tensor),
        pipeline=_pipeline(plan, state),
        context=tuple(
            _among(rule.for_model(small), plan.mesh, sizes) for rule in small_plan.context
        ),
        attention=tuple(
            op.among(sizes[op.axis], plan.mesh.size(op.axis)) for op in small_plan.attention
        ),
    )
    acting = {node.origin for node, _ in small_plan.acting}
    for node, modules in plan.acting:
        if node.origin not in acting:
            state.lacks(f"the proxy model has nothing that stands for `{modules}`", node.origin)
    return state.problems[0] if state.problems else small_plan


def _among(rule: ir.ContextRule, mesh: ir.Mesh, sizes: Mapping[str, int]) -> ir.ContextRule:
    """The rule on an axis of a small mesh."""
    op = rule.op and rule.op.among(sizes[rule.axis], mesh.size(rule.axis))
    return replace(rule, op=op)


def _inferred_text(node: Any) -> str:
    """The layouts that planc inferred for a rule, or its choice for a budget; empty if the line
    states it.
    """
    if isinstance(node, Checkpoint):
        return " ".join(map(str, node.save))
    inferred = isinstance(node, ir.TensorRule) and node.inferred
    return style_text(node.style) if inferred else ""


_FIRST, _LAST = Span.from_place("first"), Span.from_place("last")
_ENDS = frozenset[tuple[Span, tuple[Any, ...]]]({(_FIRST, ()), (_LAST, ())})


def _classes(
    at: Modules, plan: ir.Plan, facts: Facts, ends: bool
) -> tuple[list[Kind], list[Rules]]:
    """The kind of each block of a list and the rules on it; `ends` as of `variants`."""
    kinds = list(entry_kinds(at, facts, facts).values())
    n = len(at.path)
    bits: dict[tuple[Span, tuple[Any, ...]], int] = {}
    for node, modules in plan.acting:
        picked = modules.path[n] if modules.path[:n] == at.path and modules.path[n:] else ""
        if isinstance(picked, Indices):
            key = (node.origin, (*modules.path[n + 1 :], _inferred_text(node)))
            bits[key] = bits.get(key, 0) | picked.bits
    alike: list[tuple[Indices, Rules]] = [(Indices.all(len(kinds)), frozenset())]
    for key, on in bits.items():
        parts = (
            ((a & Indices(on), rule_keys | {key}), (a - Indices(on), rule_keys))
            for a, rule_keys in alike
        )
        alike = [part for pair in parts for part in pair if part[0]]
    of = {i: rule_keys for entries, rule_keys in alike for i in entries}
    rules = [of[i] for i in range(len(kinds))]
    if plan.pipeline is not None and plan.pipeline.op.blocks.path == at.path:
        op, origin = plan.pipeline.op, plan.pipeline.origin
        rules = [rule_keys | {(origin, (op.stage_of(i),))} for i, rule_keys in enumerate(rules)]
    for i, end in ((0, _FIRST), (-1, _LAST)) if ends and rules else ():
        rules[i] = rules[i] | {(end, ())}
    return kinds, rules


def _pipeline(plan: ir.Plan, state: StandInModel) -> ir.PipelineRule | None:
    """The stages of the small blocks: those of the blocks that they stand for."""
    if plan.pipeline is None:
        return None
    rule, op = plan.pipeline, plan.pipeline.op
    blocks = list(state.all((op.blocks,), rule))
    layers = state.blocks_of(op.blocks)
    bounds = [sum(layer < first for layer in layers) for first in op.bounds]
    if not blocks or any(start >= stop for start, stop in pairwise(bounds)):
        state.lacks(f"the proxy model has too few blocks for {op.stages} stages", rule.origin)
        return None
    small_op = replace(
        op,
        blocks=blocks[0],
        bounds=tuple(bounds),
        inputs=tuple(state.all(op.inputs, rule)),
        outputs=tuple(state.all(op.outputs, rule)),
        added=blocks_added_to(blocks[0], state.small) if op.added else 0,
    )
    return replace(rule, op=with_copies(small_op, state.small))


def _numbers(kinds: list[Kind], rules: list[Rules]) -> list[int]:
    known: dict[Kind, list[Rules]] = {}
    for kind, rule_set in zip(kinds, rules, strict=True):
        if rule_set not in known.setdefault(kind, []):
            known[kind].append(rule_set)
    return [known[kind].index(rule_set) for kind, rule_set in zip(kinds, rules, strict=True)]


@dataclass(slots=True)
class StandInModel:
    """Finds the small modules that stand for real ones, and the problem where none does; `ends` as
    of `variants`.
    """

    plan: ir.Plan
    facts: Facts
    small: Facts
    kept: Mapping[int, Sequence[tuple[int, ...]]]
    ends: bool = False
    problems: list[Unrepresented] = field(default_factory=list)
    _layers: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict)
    _standing: dict[tuple[Any, ...], list[list[int]]] = field(default_factory=dict)
    _even: dict[tuple[Any, ...], list[tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        small = {at.path: at for at in block_lists(self.small.model)}
        for at in block_lists(self.facts.model):
            if at.path in small:
                self._layers[at.path] = self._of_list(at, small[at.path])

    def lacks(self, reason: str, *origins: Span) -> None:
        self.problems.append(Unrepresented(reason=reason, origins=origins))

    def all(self, sets: Iterable[Modules], node: Any) -> Iterator[Modules]:
        """The small modules that stand for those of a node."""
        for modules in sets:
            yield from self.walk(modules, node.origin)

    def blocks_of(self, blocks: Modules) -> tuple[int, ...]:
        """The real block that each block of a small list stands for; empty where none does."""
        return self._layers.get(blocks.path, ())

    # Layers --------------------------------------------------------------------------------------

    def _of_list(self, at: Modules, small: Modules) -> tuple[int, ...]:
        """The real block that each block of a small list stands for; empty for none."""
        kinds, rules = _classes(at, self.plan, self.facts, self.ends)
        there = list(entry_kinds(small, self.small, self.facts).values())
        blocks = self._kept_blocks(kinds, rules, there) or self._by_kind(kinds, rules, there)
        if not blocks and self.ends:
            blocks = self._by_kind(kinds, [rule_set - _ENDS for rule_set in rules], there)
        if not blocks:
            text = f"which blocks of `{at}` the proxy model has is not known"
            self.lacks(text, *_differing(rules, rules))
            return ()
        classes = list(zip(kinds, rules, strict=True))
        for i, end in ((0, 0), (-1, len(kinds) - 1)):  # an end stands for an end of its class
            if classes[blocks[i]] == classes[end] and end not in blocks:
                blocks[i] = end
        if self.ends:
            self._with_ends(at, [(k, r - _ENDS) for k, r in classes], blocks)
        elif any(_numbers(kinds, rules)):
            self._neighbors(at, classes, blocks)
        return tuple(blocks)

    def _with_ends(self, at: Modules, classes: list[tuple[Kind, Rules]], blocks: list[int]) -> None:
        """The small blocks that stand for each real one: ends for ends, and those between for those
        between. An end that none stands for is as those between of its class, if all small ends
        are as those between of theirs.
        """
        last, small_classes = len(blocks) - 1, [classes[layer] for layer in blocks]
        inner = {i: c for i, c in enumerate(small_classes) if 0 < i < last}
        standing: list[list[int]] = []
        if len(small_classes) < len(classes) and len(small_classes) < 3 and len({*classes}) == 1:
            self._standing[at.path] = [[*range(len(small_classes))] for _ in classes]
            return
        for layer, real_class in enumerate(classes):
            end = {0: 0, len(classes) - 1: last}.get(layer, -1)
            known = end >= 0 and small_classes[end] == real_class
            standing.append([end] if known else [i for i, c in inner.items() if c == real_class])
        self._standing[at.path] = standing
        if standing[:1] != [[0]] or standing[-1] != [last]:
            self._even[at.path] = [
                (i, *(n for n, c in inner.items() if c == small_classes[i])) for i in (0, last)
            ]
        unseen = next((i for i, indices in enumerate(standing) if not indices), None)
        if unseen is None and any(len(indices) < 2 for indices in self._even.get(at.path, ())):
            unseen = 0
        if unseen is not None:
            text = f"no layer of the proxy model stands for `{at}[{unseen}]`"
            self.lacks(text, *(origin for origin, _ in classes[unseen][1]))

    def alike(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields small blocks that must have the same rules, since each stands for the same real
        ones: their list, and their indices.
        """
        for path, standing in self._standing.items():
            for indices in dict.fromkeys((*map(tuple, standing), *self._even.get(path, ()))):
                yield ".".join(map(str, path)), indices

    def real(self, name: str) -> tuple[Modules, ...]:
        """The real modules that a small module, by its torch name, stands for; those that several
        small ones stand for are the first one's.
        """
        at: tuple[Modules, ...] = (self.facts.model,)
        small = self.small.model
        for part in name.split(".") if name else ():
            entry = part.isdecimal() and any(c.indices for c in small.module.children)
            if entry:
                at = tuple(m for modules in at for m in self._stood_for(modules, small, int(part)))
            else:
                inner = (
                    (modules, c)
                    for modules in at
                    for c in modules.module.children
                    if c.name == part
                )
                at = tuple(Modules((*modules.path, part), c.module) for modules, c in inner)
            small = _step(small, Indices.from_numbers([int(part)]) if entry else part)
        return at

    def _stood_for(self, at: Modules, small: Modules, entry: int) -> Iterator[Modules]:
        """The entries of a real list that an entry of a small one stands for."""
        if at.path in self._layers:
            standing = self._standing.get(at.path, [])
            wanted = Indices.from_numbers(
                i for i, indices in enumerate(standing) if indices[:1] == [entry]
            )
        elif length(at) == length(small):
            wanted = Indices.from_numbers([entry])
        else:
            of = next(
                (structure for structure, all in _by_structure(small).items() if entry in all), None
            )
            first = of is not None and _by_structure(small)[of].first == entry
            wanted = _by_structure(at).get(of, Indices(0)) if first else Indices(0)
        yield from at.entries_in(wanted)

    def _kept_blocks(self, kinds: list[Kind], rules: list[Rules], there: list[Kind]) -> list[int]:
        """The blocks that were kept where the configuration was made small."""
        all_blocks = [tuple(range(len(kinds)))]
        kept = all_blocks if len(kinds) == len(there) else self.kept.get(len(kinds), ())
        matching = {k for k in kept if [kinds[i] for i in k] == there}
        same = len({tuple(rules[i] for i in k) for k in matching}) == 1
        return list(min(matching)) if same else []

    def _by_kind(self, kinds: list[Kind], rules: list[Rules], there: list[Kind]) -> list[int]:
        """A block of the same kind, if the same rules act on all blocks of a kind."""
        if len(set(rules)) == 1:
            return [min(i, len(kinds) - 1) for i in range(len(there))]
        if any(_numbers(kinds, rules)) or not set(there) <= set(kinds):
            return []
        return [kinds.index(kind) for kind in there]

    def _neighbors(self, at: Modules, classes: list[tuple[Kind, Rules]], blocks: list[int]) -> None:
        wanted: Any = edges(classes)  # type: ignore[arg-type]
        if edges([classes[i] for i in blocks]) == wanted:  # type: ignore[misc]
            return
        seen = {classes[i] for i in blocks}
        alone = next((i for i, block_class in enumerate(classes) if block_class not in seen), None)
        text = f"no layer of the proxy model stands for `{at}[{alone}]`"
        if alone is None:
            text = f"the blocks of `{at}` follow each other otherwise in the proxy model"
        all_rules = [rules for _, rules in classes]
        blamed = all_rules if alone is None else [all_rules[alone]]
        self.lacks(text, *_differing(blamed, all_rules))

    # Modules -------------------------------------------------------------------------------------

    def walk(self, modules: Modules, origin: Span) -> tuple[Modules, ...]:
        """The small modules that stand for those of a line."""
        at: tuple[Modules, ...] = (self.small.model,)
        real = self.facts.model
        for segment in modules.path:
            if not at:
                break
            if isinstance(segment, Indices):
                at = tuple(
                    m
                    for small_modules in at
                    for m in self._entries(small_modules, real, segment, origin)
                )
            else:
                at = tuple(
                    m for small_modules in at for m in self._child(small_modules, segment, origin)
                )
            real = _step(real, segment)
        return at

    def _child(self, at: Modules, name: str, origin: Span) -> Iterator[Modules]:
        children = [c.module for c in at.module.children if c.indices is None and c.name == name]
        if not children and at.module.parameter(name):
            children = [at.module]  # the last part of a path may be a parameter's name
        if not children:
            self.lacks(f"`{at}` of the proxy model has no `{name}`", origin)
        yield from (Modules((*at.path, name), module) for module in children)

    def _entries(
        self, at: Modules, real: Modules, wanted: Indices, origin: Span
    ) -> Iterator[Modules]:
        """The entries of a small list that stand for some of the real one's."""
        there, here = length(real), length(at)
        if real.path in self._layers:
            layers = self._layers[real.path]
            chosen = Indices.from_numbers(i for i, layer in enumerate(layers) if layer in wanted)
        elif there == here:
            chosen = wanted
        elif structures := [
            structures for structures, entries in _by_structure(real).items() if entries == wanted
        ]:
            chosen = _by_structure(at).get(structures[0], Indices(0))
        else:
            chosen = Indices(0)
            text = f"`{real}` has {there:,} entries, and the proxy model {here:,}"
            self.lacks(f"{text}: which of them stand for `{wanted}` is not known", origin)
        yield from at.entries_in(chosen)


def _by_structure(at: Modules) -> dict[Any, Indices]:
    """The structures of a list's entries, each with all entries that have it."""
    entries_by_structure: dict[Any, Indices] = {}
    for child in at.module.children:
        if child.indices is not None:
            structure = signature(child.module)
            entries_by_structure[structure] = (
                entries_by_structure.get(structure, Indices(0)) | child.indices
            )
    return entries_by_structure


def _step(at: Modules, segment: str | Indices) -> Modules:
    """A child of real modules; of the entries of a list, the first."""
    for child in at.module.children:
        if isinstance(segment, Indices) and child.indices and segment.first in child.indices:
            return Modules((*at.path, segment), child.module)
        if child.indices is None and child.name == segment:
            return Modules((*at.path, segment), child.module)
    return at


def _differing(blamed: Iterable[Rules], rule_sets: Iterable[Rules]) -> tuple[Span, ...]:
    rule_sets = list(rule_sets)
    common = frozenset[Any].intersection(*rule_sets)
    origins = {o for rules in blamed for o, _ in rules - common}
    origins = origins or {o for rules in rule_sets for o, _ in rules - common}
    return tuple(sorted(origins, key=lambda o: (o.source.name, o.start)))
