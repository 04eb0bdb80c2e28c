"""The tensor rules in which two plans of one model differ, as changes of one of them."""

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from os.path import commonprefix

from planc.diagnostics.diagnostic import Label
from planc.diagnostics.source import Span
from planc.elaborate.sections.tensor import aspect
from planc.ir.nodes import Plan, TensorRule
from planc.model.facts import Modules, generic
from planc.model.indices import Indices
from planc.ops.base import AxisRole
from planc.ops.phrases import block, together
from planc.ops.styles import Style, style_name, style_text
from planc.syntax import plan_files

At = tuple[str, str]
"""The torch name of a module, and what of it a rule decides: one for each."""
Rules = Mapping[At, TensorRule]
Key = tuple[tuple[str, ...], str]
"""The same for the modules of all layers: a `Modules.key`, and what a rule decides."""
Reach = Mapping[Key, Mapping[Span, Modules]]
"""The modules of each rule, by its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleChange:
    """A rule of a plan in the place of another one, on some modules.

    Args:
        old: the rule of the refuted plan; None where it has none.
        new: that of the right one; None where that has none.
        places: the modules, of the proxy model, and what of them is decided.
        near: where a rule is missing, the one that the right plan has next to it, or for modules
            with the most similar names; the same rule for other layers, if there is one.
        reach: the modules of the real model: with `*` for all layers, else with their indices.
        layers: for the same rule for other layers, those that it is for, and those that lack it.
        condition: what is to be inverted, instead of a change of each rule that it decides.
    """

    old: TensorRule | None
    new: TensorRule | None
    places: tuple[At, ...]
    near: TensorRule | None = None
    reach: tuple[str, ...] = ()
    layers: tuple[str, str] | None = None
    condition: Span | None = None

    @property
    def paths(self) -> list[str]:
        """The modules, with `*` or sets of indices, and braces for names."""
        return together(self.reach or {generic(name): 0 for name, _ in self.places})

    @property
    def style(self) -> str:
        """The new style as its plan writes it, with the expressions of its arguments; with its
        layouts where they are inferred there, as a plan that states them needs it.
        """
        assert self.new is not None
        if self.new.inferred is not None:
            return style_text(self.new.style)
        return " ".join(self.new.written.text.split())

    @property
    def label(self) -> Iterator[Label]:
        """The line at fault, or the line next to which another is missing."""
        if self.condition is not None:
            yield Label(span=self.condition, text="at fault: right the other way around")
        elif self.old is not None:
            detail = f"right with `{self.style}`" if self.new else "right without it"
            yield Label(span=self.old.origin, text=f"at fault: {detail}")
        elif self.near is not None and self.layers is not None:
            yield Label(span=self.near.origin, text=f"at fault: for `{self.layers[0]}` alone")
        elif self.near is not None:
            yield Label(span=self.near.origin, text="a rule is missing beside this one")

    @property
    def text(self) -> str:
        """The change as an instruction."""
        if self.condition is not None:
            return f"invert the condition `{' '.join(self.condition.text.split())}`"
        where = " and ".join(f"`{at}`" for at in self.paths)
        if self.new is None:
            return f"remove the rule for {where}"
        if self.layers is not None:
            return f"let the rules for `{self.layers[0]}` alone reach `{self.layers[1]}` too"
        place = f", as {self.new.origin.place} has it"
        if self.new.inferred is not None:
            place = f", as follows from {self.new.origin.place}"
        if self.new.origin.source.name == plan_files.DRAFT:
            place = ", as `planc init` drafts it"
        if self.old is None:
            rules = " and ".join(f"`{at} : {self.style}`" for at in self.paths)
            return f"add {rules}{place}"
        return f"give {where} the style `{self.style}`{place}"


def tensor_rules(plan: Plan, axis: str) -> Rules:
    """The tensor rules of a plan for one axis."""
    return {
        (name, aspect(style_name(rule.style))): rule
        for rule in plan.tensor
        if rule.axis == axis
        for name in rule.modules.names()
    }


def differences(mine: Rules, right: Rules, plan: Plan, right_plan: Plan) -> list[RuleChange]:
    """The differences of two plans, a change for each pair of rules.

    Args:
        mine, right: the rules of both plans on the proxy model.
        plan, right_plan: both on the real one.
    """
    pairs: dict[tuple[Span | None, Span | None, Style | None, Span | None], list[At]] = {}
    lines = {(_key(name), what, rule.style): rule.origin for (name, what), rule in mine.items()}
    for at in dict.fromkeys((*mine, *right)):
        old, new = mine.get(at), right.get(at)
        if not (old and new and old.style == new.style):
            inferred = new.style if new and new.inferred else None
            alike = lines.get((_key(at[0]), at[1], new.style)) if new and not old else None
            origins = (old.origin if old else None, new.origin if new else None)
            key = (*origins, inferred, alike)
            pairs.setdefault(key, []).append(at)
    changes = []
    reach, right_reach = _reach(plan), _reach(right_plan)
    for places in pairs.values():
        name, _ = at = places[0]
        new = right.get(at)
        near = min(mine, key=partial(_farness, name, new, right), default=at)
        change = RuleChange(old=mine.get(at), new=new, places=tuple(places), near=mine.get(near))
        changes.append(_in_the_model(change, mine, reach, right_reach))
    return changes


def _farness(name: str, new: TensorRule | None, right: Rules, other: At) -> tuple[bool, float, int]:
    """The distance of a rule from a missing one: rules of the same block first, then by the lines
    between both in the right plan, then by what the names share.
    """
    block, at = name.rpartition(".")[0], other[0].rpartition(".")[0]
    return not block or block != at, _lines(right.get(other), new), -shared(other[0], name)


def _lines(old: TensorRule | None, new: TensorRule | None) -> float:
    """The number of lines between two rules of a plan; infinite for rules of different files."""
    spans = [rule.origin for rule in (old, new) if rule is not None]
    if len(spans) < 2 or spans[0].source.name != spans[1].source.name:
        return math.inf
    return abs(spans[0].line - spans[1].line)


def _reach(plan: Plan) -> Reach:
    """The modules of the model that each tensor rule is for, those of all layers together."""
    tensor = {axis.name for axis in plan.mesh.of_role(AxisRole.TENSOR)}
    reaches: dict[Key, dict[Span, Modules]] = {}
    for rule in plan.tensor:
        if rule.axis in tensor:
            spans = reaches.setdefault((rule.modules.key, aspect(style_name(rule.style))), {})
            spans[rule.origin] = rule.modules.join(spans.get(rule.origin, rule.modules))
    return reaches


def _in_the_model(change: RuleChange, rules: Rules, mine: Reach, right: Reach) -> RuleChange:
    """A change with the modules of the real model that it is for.

    Args:
        rules: of the refuted plan, on the proxy model.
        mine, right: of both plans, on the real model.
    """
    keys = dict.fromkeys((_key(name), what) for name, what in change.places)
    same = next((r for at, r in rules.items() if _is_of(r, at, change, keys)), None)
    reach: list[str] = []
    layers: tuple[str, str] | None = None
    for key in keys:
        olds, news = mine.get(key, {}), right.get(key, {})
        module_rules = [*olds.values(), *news.values()]
        whole = reduce(or_, (m.entries for m in module_rules), Indices(0))
        here = _entries(change.old, olds, whole) & _entries(change.new, news, whole)
        if here in (Indices(0), whole):
            reach.append(".".join("*" if word == "[]" else word for word in key[0]))
            continue
        lacking = module_rules[0].with_entries(here)
        reach.append(str(lacking))
        if same is not None and same.origin in olds:
            layers = block(olds[same.origin]), block(lacking)
    return replace(change, reach=tuple(reach), layers=layers, near=same if layers else change.near)


def _is_of(rule: TensorRule, at: At, change: RuleChange, keys: Container[Key]) -> bool:
    """Whether a rule has the style that a change adds, on the same modules of other layers."""
    missing = change.new if change.old is None else None
    return missing is not None and (_key(at[0]), at[1]) in keys and rule.style == missing.style


def _key(name: str) -> tuple[str, ...]:
    """A torch name as `Modules.key` has it."""
    return tuple("[]" if part.isdecimal() else part for part in name.split("."))


def _entries(rule: TensorRule | None, reach: Mapping[Span, Modules], whole: Indices) -> Indices:
    """The layers that a rule is for; without one, those that no rule is for."""
    if rule is None:
        return whole - reduce(or_, (m.entries for m in reach.values()), Indices(0))
    return reach[rule.origin].entries if rule.origin in reach else Indices(0)


def shared(first: str, second: str) -> int:
    """The length of the common prefix of two names."""
    return len(commonprefix([first, second]))  # noqa: RUF071
