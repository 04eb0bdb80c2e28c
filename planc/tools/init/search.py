"""Finds, for each part of a model, the best split of its weights that layout flow proves.

The search starts with the best recipe of every part, runs the proxy model, and steps back where
the run refutes it: a part with wrong outputs gets its next recipe. Layouts are inferred; where that
is impossible, the splits are added one after the other, each by its best recipe that goes with
those before it. Every step uses up a candidate, so the search terminates.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from planc import compiler
from planc.compiler import Compiled
from planc.diagnostics.codes import WITHOUT_LAYOUTS
from planc.diagnostics.diagnostic import Severity, Sink
from planc.elaborate.settings import AUTO
from planc.infer.infer_layouts import NO_TOKENS, has_sequence_shards
from planc.model.facts import Facts, Module, generic
from planc.ops.base import AxisRole
from planc.proof.flow_findings import what_is_wrong
from planc.proof.judge import judge
from planc.proof.small_case import SmallCase, SmallModel
from planc.proof.small_mesh import RANKS
from planc.simulate.outcome import Discrepancy, Outcome
from planc.tools.init.from_transformers import given_choices
from planc.tools.init.plan_text import DECODER, Draft, parsed_text, render
from planc.tools.init.recipes import SplitChoice, SplitRecipe, split_choices
from planc.tools.init.roles import Roles, RunRecord

_NO_PARTS = 'no list of blocks: an nn.ModuleList, or an nn.ModuleDict with keys "0", "1", ...'
_MOST = 60
"""The most runs of the proxy model; models have far fewer parts."""


@dataclass(slots=True)
class Search:
    """The state of the search: of the proxy model its facts, builder (None if it cannot run), roles
    and run; the plan that is filled in; the rules of transformers, where these are `given`; and why
    no hidden states can be sequence shards.
    """

    facts: Facts
    small: SmallModel | None
    roles: Roles
    ran: RunRecord | None
    draft: Draft
    given: Mapping[str, str] | None = None
    parts: dict[str, list[SplitChoice]] = field(default_factory=dict)
    outside: list[SplitChoice] = field(default_factory=list)
    inside: dict[str, dict[str, Module]] = field(default_factory=dict)
    unreached: list[str] = field(default_factory=list)
    no_sequence: str = ""
    runs: int = 0

    def __post_init__(self) -> None:
        for blocks in self.roles.blocks:
            inside = self.inside[blocks.path] = _holders(self.facts, blocks.path)
            path = blocks.path
            given = None if self.given is None else given_choices(self.given, path, inside)
            self.parts[path] = split_choices(blocks, self.facts, inside) if given is None else given
            inner = f"{blocks.path}."
            if self.ran is not None and not any(n.startswith(inner) for n in self.ran.order):
                self.unreached.append(blocks.path)
                self._leave_unsplit(blocks.path)
        if self.given is not None:
            self.outside = given_choices(self.given, "", dict(named_below("", self.facts.root)))
            return
        for name, style in self._ends():
            split = SplitRecipe(rules={name: style})
            recipes = [split, SplitRecipe(rules={})]
            self.outside.append(SplitChoice(name=name, members=(name,), recipes=recipes))

    def _ends(self) -> Iterator[tuple[str, str]]:
        # the base plan's role stands for all embeddings with the same tensor
        same = () if self.draft.base == DECODER else self.roles.same
        for table in filter(None, (self.roles.embedding, *same)):
            yield table, "rowwise"
        for head in self.roles.heads:
            if self.ran is None or head in self.ran.order:  # what never runs cannot be proved
                yield head, "colwise" if head == self.roles.heads[-1] else "colwise(-> replicate)"

    @property
    def all(self) -> list[SplitChoice]:
        return [*(c for choices in self.parts.values() for c in choices), *self.outside]

    def settle(self) -> Outcome:
        """Settles the recipes; returns the outcome of the last run."""
        self.draft.checkpoint = False  # splits are settled without checkpointing
        outcome = self._settle()
        if outcome.recomputed:  # reversible layers: a resharded unit would lack parameters
            self.draft.called = set()
            return outcome
        self.draft.checkpoint = True
        again = self._try()
        if again.verdict == outcome.verdict:
            return again
        self.draft.checkpoint = False
        return outcome

    def _settle(self) -> Outcome:
        outcome = self._try()
        while outcome.verdict != "proved" and self.runs < _MOST:
            if outcome.verdict == "nothing" or not self._step_back(outcome):
                break
            outcome = self._try()
        return outcome

    def with_sequence(self) -> None:
        """Tries sequence parallelism with the settled splits; the draft offers it if proved."""
        if self.draft.sequence == "true":
            return
        for word in (AUTO, "true"):  # everywhere, else in part
            done, sink = self._compile(word)
            rules = done.plan.tensor if done.plan and done.lowered else ()
            if any(has_sequence_shards(rule.style) for rule in rules):
                outcome = self._judge(done)
                if outcome.verdict == "proved":
                    self.draft.sequence = AUTO
                else:
                    first = next(map(_wrong, outcome.discrepancies), outcome.reason)
                    self.no_sequence = f"with it, {first}"
                return
        if self.ran is not None and self.ran.flow.tokens is None:
            self.no_sequence = NO_TOKENS
        else:
            self.no_sequence = self._clash(sink) or "no hidden states are sequence shards"

    def cautious(self) -> None:
        """Splits only embeddings and heads: for a model that cannot be run."""
        for path in self.parts:
            self._leave_unsplit(path)
        self._fill()

    def _leave_unsplit(self, path: str) -> None:
        for choice in self.parts[path]:
            choice.at = len(choice.recipes) - 1

    # Running -------------------------------------------------------------------------------------

    def _try(self) -> Outcome:
        """The outcome with the recipes as they are; with others where no layouts go with them."""
        done, sink = self._compile(self.draft.sequence)
        if self._clash(sink):
            self._unclash()
            done, sink = self._compile(self.draft.sequence)
        if not any(self.draft.rules.values()):
            why = f"no way to shard its parts was right: {left_whole(self.all)}"
            return Outcome(verdict="nothing", reason=why if self.parts else _NO_PARTS)
        if done.lowered is None:
            self.runs += 1
            return Outcome(verdict="refuted", discrepancies=tuple(_compile_errors(done, sink)))
        return self._judge(done)

    def _judge(self, done: Compiled) -> Outcome:
        self.runs += 1
        assert self.small is not None and done.lowered is not None
        if not done.lowered.split_axes(AxisRole.TENSOR):
            return Outcome(verdict="nothing", reason="none of its parameters can be sharded")
        return judge(SmallCase(model=self.small, compiled=done), quick=True)

    def _compile(self, sequence: str) -> tuple[Compiled, Sink]:
        self._fill()
        sink, settings = Sink(), [f"tp={RANKS}", "dp_shard=1"]
        files = parsed_text(render(replace(self.draft, sequence=sequence)))
        done = compiler.compile(files, self.facts, sink, world_size=RANKS, settings=settings)
        return done, sink

    def _clash(self, sink: Sink) -> str:
        """Why no layouts go with the splits; empty where some do."""
        finding = next((d for d in sink if d.code in WITHOUT_LAYOUTS), None)
        return "" if finding is None else next(iter(finding.facts), finding.message)

    def _unclash(self) -> None:
        """Adds the splits one after the other, each by its best recipe that layouts go with."""
        if self.draft.sequence == "false" and not self._clash(self._compile("true")[1]):
            self.draft.sequence = "true"  # whole hidden states alone clash
            return
        groups = [[c] for choices in self.parts.values() for c in choices]
        groups += [self.outside] if self.draft.tied else [[c] for c in self.outside]
        best = [[choice.at for choice in group] for group in groups]
        for choice in self.all:
            choice.at = len(choice.recipes) - 1
        for group, first in zip(groups, best, strict=True):
            for choice, at in zip(group, first, strict=True):
                choice.at = at
            while why := self._clash(self._compile(self.draft.sequence)[1]):
                for choice in group:
                    choice.refute(why)
                if not self._next(group):
                    break

    def _next(self, group: Iterable[SplitChoice]) -> bool:
        """Takes the next recipe of some choices; False if there is none."""
        left = [choice for choice in group if not choice.last]
        for choice in left:
            choice.at += 1
        return bool(left)

    def _fill(self) -> None:
        self.draft.rules = {}
        self.draft.notes = {}
        for path, choices in self.parts.items():
            rules: dict[str, str] = {}
            for choice in choices:
                rules |= choice.recipe.rules
                self.draft.notes |= choice.notes
            self.draft.rules[path] = self._order(path, rules)
        self.draft.rules[""] = {n: s for c in self.outside for n, s in c.recipe.rules.items()}

    def _order(self, path: str, rules: dict[str, str]) -> dict[str, str]:
        order = [n for n in self.inside[path] if n and "." not in n]
        return dict(sorted(rules.items(), key=lambda r: order.index(r[0].partition(".")[0])))

    # Taking back ---------------------------------------------------------------------------------

    def _step_back(self, outcome: Outcome) -> bool:
        """Takes the next recipe where an outcome is wrong; False if there is none."""
        # where no choice is named, take any that is left
        blamed = [c for c in self._suspects(outcome) if not c.last]
        choice = next((c for c in (*blamed, *self.all) if not c.last), None)
        if choice is None:
            return False
        if choice in blamed[:1]:
            choice.refute(_wrong(outcome.discrepancies[0]))
        # tied modules are split together
        tied = choice in self.outside and self.draft.tied
        return self._next(self.outside if tied else [choice])

    def _locate(self, name: str) -> tuple[str | None, str]:
        """The block list that contains a module, and the module's name in the block."""
        for path in self.parts:
            if name.startswith(f"{path}."):
                return path, name[len(path) + 1 :].partition(".")[2]
        return None, name

    def _suspects(self, outcome: Outcome) -> list[SplitChoice]:
        """The choices whose modules an outcome names, the first one first."""
        suspects: list[SplitChoice] = []
        wrong = outcome.discrepancies
        subjects = [p.subject for p in wrong if p.kind not in ("boundary", "unstated")]
        subjects += [p.before for p in wrong if p.before]
        boundaries = [p.subject for p in wrong if p.kind == "boundary"]
        ends = {"$embedding": self.draft.embedding, "$head": self.draft.head}
        for subject in (*boundaries[:1], *subjects):
            path, inner = self._locate(ends.get(subject) or subject)
            inner = re.sub(r"^\$(blocks?|tower)\d*\.", "", inner)
            choices = self.parts.get(path, []) if path else [*self.all]
            named = [choice for choice in choices if _concerns(choice, inner)]
            # a module beside those of a part, such as a convolution of keys, takes what they give
            named = named or [c for c in choices if path and c.top and c.top == inner.split(".")[0]]
            suspects += [choice for choice in named if choice not in suspects]
        return suspects


def left_whole(choices: Iterable[SplitChoice]) -> str:
    """The parts that are split in no way, each with what was wrong with the first."""
    names_by_reason: dict[str, list[str]] = {}
    for choice in choices:
        if not choice.recipe.rules:
            names_by_reason.setdefault(choice.why, []).append(choice.name)
    return "; ".join(
        f"{', '.join(names)} ({why})" if why else ", ".join(names)
        for why, names in names_by_reason.items()
    )


def _wrong(first: Discrepancy) -> str:
    """Describes the first discrepancy, with the line of the model's code."""
    where = f"`{generic(first.subject)}`"
    what = first.detail if first.kind in ("refused", "draws") else what_is_wrong(first.kind, where)
    detail = f", {first.detail}" if first.kind == "crash" and first.detail else ""
    return f"{what}{detail}" + (f" ({first.line})" if first.line else "")


def _compile_errors(done: Compiled, sink: Sink) -> Iterator[Discrepancy]:
    """Errors of the compiler as discrepancies, each of the modules of a rule that it labels."""
    rules = done.plan.tensor if done.plan else ()
    for finding in (d for d in sink if d.severity is Severity.ERROR):
        spans = [label.span for label in finding.labels]
        named = [r.modules.first_name for r in rules if any(r.origin.has(s) for s in spans)]
        for subject in named or [""]:
            yield Discrepancy(kind="refused", subject=subject, detail=finding.message)


def _concerns(choice: SplitChoice, inner: str) -> bool:
    """Whether a name is a module of the choice, inside one or directly around one."""
    names = {inner, generic(inner)} - {""}
    return any(
        name in (m, generic(m)) or f"{name}.".startswith(f"{m}.") or f"{m}.".startswith(f"{name}.")
        for m in choice.members
        for name in names
    )


def _holders(facts: Facts, path: str) -> dict[str, Module]:
    holders: dict[str, Module] = {}
    for child in facts.module_at(path).module.children:
        for name, module in named_below("", child.module):
            holders.setdefault(name, module)
    return holders


def named_below(name: str, module: Module) -> Iterator[tuple[str, Module]]:
    """Yields a module and all below it by their names; entries of a list are `*`."""
    yield name, module
    for child in module.children:
        last = child.name if child.indices is None else "*"
        yield from named_below(f"{name}.{last}" if name else last, child.module)
