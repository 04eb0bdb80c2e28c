"""The fewest changes of a plan of transformers with which the proxy model is proved."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from planc.model.facts import generic
from planc.simulate.outcome import LIMIT
from planc.tools.audit.apply import Rules, StepErrors
from planc.tools.audit.styles import GRADIENT_SUM, STYLES


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """The changes of a plan; the plan with them is proved.

    Args:
        removed: the names without a rule.
        changed, added: styles by name.
    """

    removed: tuple[str, ...] = ()
    changed: Mapping[str, str] = field(default_factory=dict)
    added: Mapping[str, str] = field(default_factory=dict)

    @property
    def first(self) -> str:
        """The name of the first rule that changes."""
        return next(iter((*self.changed, *self.removed, *self.added)), "")


def find_repair(
    run: Callable[[Rules], StepErrors], rules: Rules, errors: StepErrors
) -> Repair | None:
    """The changes of a refuted plan, or None if no subset of its rules is proved.

    Args:
        run: runs a plan on the proxy model.
        rules: the plan, by generic name.
        errors: its result.
    """
    for candidate in _single_changes(rules, errors):
        if run(candidate).verdict == "proved":
            return _difference(rules, candidate)
    # the groups of rules that are proved together, and the most of each other group
    kept: dict[str, str] = {}
    for group in _groups(rules):
        whole = {**kept, **group}
        result = run(whole)
        if result.verdict == "proved":
            kept = whole
            continue
        others = (*_single_changes(whole, result, group), *_without_one(kept, group))
        kept = next((c for c in others if run(c).verdict == "proved"), kept)
    ordered = {name: kept[name] for name in (*rules, *kept) if name in kept}
    return _difference(rules, ordered) if kept else None


def _single_changes(
    rules: Rules, errors: StepErrors, among: Rules | None = None
) -> Iterator[dict[str, str]]:
    """Yields plans that sum the gradients that are off, or have another style for one rule."""
    holders = list(dict.fromkeys(generic(n).rpartition(".")[0] for n in errors.gradients))
    free = [name for name in holders if name and name not in rules]
    if free and errors.logits < LIMIT:
        yield {**rules, **dict.fromkeys(free, GRADIENT_SUM)}
    suspects = {generic(name) for name in errors.gradients} | set(holders)
    names = [name for name in (among or rules) if among or name in suspects]
    for name in names:
        meaning = STYLES.get(str(rules[name]))
        for style in meaning.others if meaning else ():
            yield {**rules, name: style}


def _groups(rules: Rules) -> Iterator[dict[str, str]]:
    """Yields the rules of each module: of its children, or of its own parameters and itself."""
    groups: dict[str, dict[str, str]] = {}
    for name, style in rules.items():
        holder = name.rpartition(".")[0]
        if any(other.startswith(f"{name}.") for other in rules):
            holder = name
        groups.setdefault(holder or name, {})[name] = style
    yield from groups.values()


def _without_one(kept: Rules, group: Rules) -> Iterator[dict[str, str]]:
    for name in group:
        if len(group) > 1:
            yield {**kept, **{n: s for n, s in group.items() if n != name}}


def _difference(before: Rules, after: Rules) -> Repair:
    return Repair(
        removed=tuple(name for name in before if name not in after),
        changed={n: s for n, s in after.items() if n in before and before[n] != s},
        added={n: s for n, s in after.items() if n not in before},
    )
