"""What is to blame for a refuted plan: the fewest rules that, as a right plan has them, prove it.

Where numbers go wrong is often not where the plan is: a module that is split and should not be
makes another one raise. So the tensor rules are compared with those of a plan that is right, that
of the family or a draft, and the small model is run again with one difference mended at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import commonprefix

from planc.compiler import Compiled, Draft, compile
from planc.diagnostic import Diagnostic, Label, Sink
from planc.model.facts import Modules
from planc.model.indices import Indices
from planc.ops.base import AxisRole
from planc.ops.phrases import together
from planc.ops.styles import style_name
from planc.plan.ir import Plan, TensorRule
from planc.plan.sections.tensor import aspect
from planc.proof.flow_findings import generic
from planc.proof.judge import judge
from planc.proof.small_case import SmallCase, small_plan, with_plan
from planc.source import Span
from planc.syntax import ast, plan_files
from planc.trial.outcome import Outcome

At = tuple[str, str]
"""The torch name of a module, and what of it a rule decides: one for each."""
Rules = Mapping[At, TensorRule]

SEQUENCE = "sequence_parallel"
"""The option of shipped plans and of drafts that decides about sequence parallelism."""
_MOST = 12
"""The most differences that are tried one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A rule of a plan in the place of another one, on some modules.

    Args:
        old: the rule of the refuted plan; None where it has none.
        new: that of the right one; None where that has none.
        places: the modules, of the small model, and what of them is decided.
        near: where a rule is missing, the one for the modules with the most similar names.
    """

    old: TensorRule | None
    new: TensorRule | None
    places: tuple[At, ...]
    near: TensorRule | None = None

    @property
    def paths(self) -> list[str]:
        """The modules, with `*` for indices and braces for names."""
        return together({generic(name): 0 for name, _ in self.places})

    @property
    def style(self) -> str:
        """The new style as its plan writes it, with the expressions of its arguments."""
        assert self.new is not None
        return " ".join(self.new.origin.text.partition(":")[2].split())

    @property
    def label(self) -> Iterator[Label]:
        """The line to blame, or the one beside which another is missing."""
        if self.old is not None:
            told = f"right with `{self.style}`" if self.new else "right without it"
            yield Label(span=self.old.origin, text=f"to blame: {told}")
        elif self.near is not None:
            yield Label(span=self.near.origin, text="a rule is missing beside this one")

    @property
    def text(self) -> str:
        """What to do."""
        where = " and ".join(f"`{at}`" for at in self.paths)
        if self.new is None:
            return f"remove the rule for {where}"
        place = f", as {self.new.origin.place} has it"
        if self.new.origin.source.name == plan_files.DRAFT:
            place = ", as `planc init` drafts it"
        if self.old is None:
            rules = " and ".join(f"`{at} : {self.style}`" for at in self.paths)
            return f"add {rules}{place}"
        return f"give {where} the style `{self.style}`{place}"


def remedy(
    compiled: Compiled, small: SmallCase, outcome: Outcome, draft: Draft
) -> tuple[Change, ...]:
    """The fewest changes of tensor rules found that prove a refuted small case; none if not found.

    Args:
        compiled: the plan for the real model.
        small: what was refuted.
        outcome: of it.
        draft: what drafts a plan where no file is for the family.
    """
    plan = small.compiled.plan
    assert plan is not None
    axes = plan.mesh.of_role(AxisRole.TENSOR)
    if len(axes) != 1 or axes[0].size == 1 or _elsewhere(outcome):
        return ()
    axis = axes[0].name
    mine = _rules(plan, axis)
    rights = [_rules(*right) for right in _right_plans(compiled, small, draft)]
    found = [(_differences(mine, right), right) for right in rights]
    changes, right = min(found, key=lambda one: len(one[0]), default=([], {}))
    changes.sort(key=partial(_distance, outcome))
    return tuple(_fewest(changes, partial(_proves, small, plan, axis, right)))


def blamed_first(found: Sequence[Diagnostic], changes: Sequence[Change]) -> Iterator[Diagnostic]:
    """The first error at the lines to blame, with what to do; the others, facts of it."""
    if not (found and changes):
        yield from found
        return
    first, *others = found
    blamed = [label for change in changes for label in change.label]
    help = f"{', and '.join(change.text for change in changes)}: then the small model is proved"
    help += f"; or {first.help}" if first.help else ""
    also = (f"from the same cause: {other.message}" for other in others)
    facts = (*first.facts, *also)
    yield replace(first, labels=tuple(blamed) or first.labels, facts=facts, help=help)


def _elsewhere(outcome: Outcome) -> bool:
    """Whether another section than the tensor one is to blame."""
    return any(d.kind in ("context", "draws") for d in outcome.discrepancies[:1])


def _distance(outcome: Outcome, change: Change) -> int:
    """How far a change is from what was wrong first, by what their names share."""
    seen = outcome.discrepancies[0].subject if outcome.discrepancies else ""
    return -max(_shared(seen, name) for name, _ in change.places)


def _right_plans(compiled: Compiled, small: SmallCase, draft: Draft) -> Iterator[tuple[Plan, str]]:
    """The plans of the family, or its draft, on the small model, and their tensor axis: with and
    without sequence parallelism, which needs other rules.
    """
    facts, plan, quiet = small.compiled.facts, small.compiled.plan, Sink()
    assert facts is not None and plan is not None and compiled.facts and compiled.plan
    files = plan_files.read_for(compiled.facts.family, quiet, partial(draft, compiled.facts))
    if not files:
        return
    tensor = compiled.plan.mesh.of_role(AxisRole.TENSOR)[0]
    ranks = plan.mesh.size(tensor.name)
    for settings in _settings(files):
        right = compile(
            files,
            compiled.facts,
            Sink(),
            world_size=tensor.size,
            settings=(f"tp={tensor.size}", *settings),
        )
        if right.plan is None or right.lowered is None:
            continue
        sizes = {a.name: ranks if a.role is AxisRole.TENSOR else 1 for a in right.plan.mesh.axes}
        made = small_plan(right, small.model, facts, sizes)
        if isinstance(made, Plan):
            yield made, made.mesh.of_role(AxisRole.TENSOR)[0].name


def _settings(files: Iterable[ast.File]) -> tuple[tuple[str, ...], ...]:
    options = {s.name for f in files for s in f.statements if isinstance(s, ast.Option)}
    return ((f"{SEQUENCE}=true",), (f"{SEQUENCE}=false",)) if SEQUENCE in options else ((),)


def _rules(plan: Plan, axis: str) -> Rules:
    return {
        (name, aspect(style_name(rule.style))): rule
        for rule in plan.tensor
        if rule.axis == axis
        for name in rule.modules.names()
    }


def _differences(mine: Rules, right: Rules) -> list[Change]:
    """What differs, a change for each pair of rules."""
    pairs: dict[tuple[Span | None, Span | None], list[At]] = {}
    for at in dict.fromkeys((*mine, *right)):
        old, new = mine.get(at), right.get(at)
        if not (old and new and old.style == new.style):
            key = (old.origin if old else None, new.origin if new else None)
            pairs.setdefault(key, []).append(at)
    changes = []
    for places in pairs.values():
        name, _ = at = places[0]
        near = max(mine, key=lambda other: _shared(other[0], name), default=at)
        rules = {"old": mine.get(at), "new": right.get(at), "near": mine.get(near)}
        changes.append(Change(places=tuple(places), **rules))
    return changes


def _shared(one: str, two: str) -> int:
    return len(commonprefix([one, two]))  # noqa: RUF071


def _fewest(changes: list[Change], proves: Callable[[Sequence[Change]], bool]) -> list[Change]:
    """One change that is enough, else as few of all as can be."""
    if not changes or len(changes) > _MOST:
        return []
    for change in changes:
        if proves([change]):
            return [change]
    if len(changes) == 1 or not proves(changes):
        return []
    needed = changes
    for change in changes:
        rest = [other for other in needed if other is not change]
        if proves(rest):
            needed = rest
    return needed


def _proves(
    small: SmallCase, plan: Plan, axis: str, right: Rules, changes: Sequence[Change]
) -> bool:
    """Whether the small model is right with some changes."""
    new = {at: right.get(at) for change in changes for at in change.places}
    mine = {at: rule for at, rule in _rules(plan, axis).items() if at not in new}
    mine |= {at: rule for at, rule in new.items() if rule is not None}
    other = [rule for rule in plan.tensor if rule.axis != axis]
    tensor = [
        replace(rule, axis=axis, modules=_one(rule.modules, name))
        for (name, _), rule in mine.items()
    ]
    plan = replace(plan, tensor=(*other, *tensor))
    case = with_plan(small, plan)
    return isinstance(case, SmallCase) and judge(case).verdict == "proved"


def _one(modules: Modules, name: str) -> Modules:
    """One module of a set."""
    words = zip(modules.path, name.split("."), strict=True)
    path = (Indices.of([int(w)]) if isinstance(s, Indices) else w for s, w in words)
    return Modules(tuple(path), modules.module)
