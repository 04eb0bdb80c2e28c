"""The kinds of layer of a model, and the verdict of layout flow on each.

Blocks of one list are of the same kind if they have the same structure and the same entries in the
configuration's per-layer lists (such as `layer_types`). The proxy model has one layer of each kind;
its result holds for all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from planc.compiler import Compiled
from planc.ir.nodes import Plan
from planc.model.facts import Facts, Module, Modules, below
from planc.model.indices import Indices
from planc.model.layer_kinds import block_lists, layer_columns, signature
from planc.simulate.outcome import LIMIT, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerVerdict:
    """The verdict (`proved`, `refuted` or `unknown`, why) on the blocks of one kind.

    Args:
        modules: a selector, `model.layers[0:32]`; `root` is everything outside of block lists.
        label: the kind in the configuration, such as `sliding_attention`; may be empty.
        error: the largest relative error, None if none was measured.
    """

    modules: str
    label: str
    verdict: str
    reason: str = ""
    error: float | None = None

    @property
    def text(self) -> str:
        return f"{self.modules} ({self.label})" if self.label else self.modules


NOT_SPLIT = "it is not split, and the run of the proxy model does not reach it"

_Key = tuple[Any, ...]


class _Group(NamedTuple):
    modules: Modules
    label: str


def layer_verdicts(facts: Facts, small: Compiled, outcome: Outcome) -> tuple[LayerVerdict, ...]:
    """The verdict on each kind of layer of a model, from a run of the proxy model."""
    if outcome.verdict not in ("proved", "refuted") or small.facts is None or small.plan is None:
        return ()
    groups = {key: group.modules for key, group in _groups(small.facts, facts)}
    seen = {key: list(modules.names()) for key, modules in groups.items()}
    ran = {name for name, _ in outcome.modules}
    verdicts: list[LayerVerdict] = []
    for key, group in _groups(facts, facts):
        names = seen.get(key, [])
        if names and not any(_is_in(r, name) for r in ran for name in names):
            verdicts.append(_not_run(group, groups[key], small.plan, outcome.missing_inputs))
        else:
            verdicts.append(_judge(str(group.modules), group.label, names, outcome))
    blocks = [name for names in seen.values() for name in names]
    rest = [n for n, _ in outcome.modules if not any(_is_in(n, b) or _is_in(b, n) for b in blocks)]
    if rest:
        verdicts.append(_judge("root", "", rest, outcome))
    return (*verdicts, *_not_used(small, blocks, ran, outcome.missing_inputs))


def _not_used(
    small: Compiled, blocks: list[str], ran: set[str], missing_inputs: str
) -> Iterator[LayerVerdict]:
    """Modules outside of block lists with a rule that the run neither calls nor trains."""
    assert small.plan is not None
    for rule in small.plan.tensor:
        names = [n for n in rule.modules.names() if not any(_is_in(n, b) for b in blocks)]
        if (
            rule.modules.module.count
            and names
            and not any(_is_in(r, n) for n in names for r in ran)
        ):
            name, reason = str(rule.modules), _unreached_reason(missing_inputs)
            yield LayerVerdict(modules=name, label="", verdict="unknown", reason=reason)


def _not_run(group: _Group, modules: Modules, plan: Plan, missing_inputs: str) -> LayerVerdict:
    split = any(rule.modules.is_within(modules) for rule in plan.tensor)
    return LayerVerdict(
        modules=str(group.modules),
        label=group.label,
        verdict="unknown" if split else "proved",
        reason=_unreached_reason(missing_inputs) if split else NOT_SPLIT,
    )


def _unreached_reason(missing_inputs: str) -> str:
    reason = "the run of the proxy model does not reach it"
    return f"{reason}: {missing_inputs}" if missing_inputs else reason


def _judge(modules: str, label: str, names: list[str], outcome: Outcome) -> LayerVerdict:
    errors = [e for n, e in outcome.modules if any(_is_in(n, name) for name in names)]
    first = outcome.first
    worst = max((e for e in errors if e is not None), default=None)
    wrong = any(_is_in(first.subject, name) for name in names) if first else (worst or 0.0) > LIMIT
    reason = ""
    if not errors:
        reason = "the proxy model has no such layer"
    elif first is not None and not wrong:
        reason = f"the model is wrong at {first.subject or 'its end'}, so this cannot be compared"
    elif None in errors and not wrong:
        reason = "the run did not reach it"
    if reason:
        return LayerVerdict(modules=modules, label=label, verdict="unknown", reason=reason)
    verdict = "refuted" if wrong else "proved"
    return LayerVerdict(modules=modules, label=label, verdict=verdict, error=worst)


def _is_in(name: str, holder: str) -> bool:
    return name == holder or below(name, holder)


def _groups(facts: Facts, named: Facts) -> Iterator[tuple[_Key, _Group]]:
    """Yields the blocks grouped by kind, in order.

    Args:
        facts: the facts with the blocks.
        named: the facts whose configuration decides which lists are per layer: those of the
            original model, because in a small one any list can be as long as the layers.
    """
    for at in block_lists(facts.model):
        # of equal entries one tells no layers apart, and a size is another one in a proxy model
        real = dict(layer_columns(at, named, named))
        columns = [
            (name, column)
            for name, column in layer_columns(at, facts, named)
            if len(set(map(str, real.get(name, column)))) > 1
        ]
        merged: dict[_Key, tuple[Module, Indices]] = {}
        for child in at.module.children:
            child_signature = signature(child.module)
            for index in child.indices or ():
                values = tuple(str(column[index]) for _, column in columns if index < len(column))
                module, others = merged.get(
                    (at.path, values, child_signature), (child.module, Indices(0))
                )
                merged[at.path, values, child_signature] = (
                    module,
                    others | Indices.from_numbers([index]),
                )
        for key, (module, indices) in merged.items():
            both = zip(key[1], columns, strict=True)
            labels = [value for value, (_, c) in both if len(set(map(str, c))) > 1]
            yield key, _Group(Modules((*at.path, indices), module), ", ".join(labels))
