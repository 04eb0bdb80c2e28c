"""Finds, for each part of a model, the best recipe that layout flow proves.

The search starts with the best recipe of every part, runs the small model, and steps back where
the run refutes it: a gradient that is not all-reduced gets a rule that reduces it; a part with
wrong outputs gets its next recipe. Every step uses up a candidate, so the search terminates.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from planc import compiler
from planc.diagnostic import Severity, Sink
from planc.draft.plan_text import Draft, render
from planc.draft.recipes import SplitChoice, SplitRecipe, split_choices
from planc.draft.roles import Roles, RunRecord
from planc.model.facts import Facts, Module, generic
from planc.ops.tensor_parallel import Parallelize
from planc.plan.settings import SEQUENCE
from planc.proof.judge import judge
from planc.proof.small_case import SmallCase, SmallModel
from planc.proof.small_mesh import RANKS
from planc.source import Source
from planc.syntax import ast
from planc.syntax.parse import parse
from planc.trial.outcome import Discrepancy, Outcome

WHOLE = "output(shard(1) -> replicate)"
_NO_PARTS = 'no list of blocks: an nn.ModuleList, or an nn.ModuleDict with keys "0", "1", ...'
_MOST = 60
"""The most runs of the small model; models have far fewer parts."""


@dataclass(slots=True)
class Search:
    """The state of the search: of the small model its facts, builder (None if it cannot run), roles
    and run; and the plan that is filled in.
    """

    facts: Facts
    small: SmallModel | None
    roles: Roles
    ran: RunRecord | None
    draft: Draft
    parts: dict[str, list[SplitChoice]] = field(default_factory=dict)
    outside: list[SplitChoice] = field(default_factory=list)
    summed: dict[str, dict[str, str]] = field(default_factory=dict)
    inside: dict[str, dict[str, Module]] = field(default_factory=dict)
    unreached: list[str] = field(default_factory=list)
    runs: int = 0

    def __post_init__(self) -> None:
        for blocks in self.roles.blocks:
            inside = self.inside[blocks.path] = _holders(self.facts, blocks.path)
            self.parts[blocks.path] = split_choices(blocks, self.facts.config, inside)
            inner = f"{blocks.path}."
            if self.ran is not None and not any(n.startswith(inner) for n in self.ran.order):
                self.unreached.append(blocks.path)
                self._leave_unsplit(blocks.path)
            self.summed[blocks.path] = {}
        for name, styles in self._ends():
            plain, sequence = ({name: style} for style in styles)
            split = SplitRecipe(name="split", plain=plain, sequence=sequence)
            recipes = [split, SplitRecipe(name="whole", plain={})]
            choice = SplitChoice(name=name, members=(name,), top=name, recipes=recipes)
            self.outside.append(choice)

    def _ends(self) -> Iterator[tuple[str, tuple[str, str]]]:
        for table in filter(None, (self.roles.embedding, *self.roles.same)):
            yield table, ("rowwise", "rowwise(-> shard(1), local = false)")
        for head in self.roles.heads:
            if self.ran is not None and head not in self.ran.order:
                continue  # a module that never runs cannot be proved
            yield head, ("colwise(-> replicate)", "colwise(shard(1) -> replicate)")

    @property
    def all(self) -> list[SplitChoice]:
        return [*(c for some in self.parts.values() for c in some), *self.outside]

    def plain(self) -> Outcome:
        """Settles the recipes without sequence parallelism; returns the outcome of the last run."""
        self.draft.checkpoint = False  # splits are settled without checkpointing
        outcome = self._settle()
        if outcome.recomputed:  # reversible layers: a resharded unit would lack parameters
            self.draft.called = set()
            return outcome
        self.draft.checkpoint = True
        again = self._try(sequence=False)
        if again.verdict == outcome.verdict:
            return again
        self.draft.checkpoint = False
        return outcome

    def _settle(self) -> Outcome:
        outcome = self._try(sequence=False)
        while outcome.verdict != "proved" and self.runs < _MOST:
            if outcome.verdict == "nothing" or not self._step_back(outcome):
                break
            outcome = self._try(sequence=False)
        return outcome

    def with_sequence(self) -> Outcome | None:
        """Tries sequence parallelism with the settled recipes; the draft offers it if proved."""
        rules = self._sequence_rules()
        if rules is None:
            return None
        self.draft.sequence = rules
        outcome = self._try(sequence=True)
        for _ in range(3):
            if outcome.verdict != "refuted" or not self._summed(outcome, rules):
                break
            outcome = self._try(sequence=True)
        if outcome.verdict != "proved":
            self.draft.sequence = None
        return outcome

    def cautious(self) -> None:
        """Splits only embeddings and heads: for a model that cannot be run."""
        for path in self.parts:
            self._leave_unsplit(path)
        self._fill()

    def _leave_unsplit(self, path: str) -> None:
        for choice in self.parts[path]:
            choice.at = len(choice.recipes) - 1

    # Running -------------------------------------------------------------------------------------

    def _try(self, *, sequence: bool) -> Outcome:
        self.runs += 1
        self._fill()
        if not any(self.draft.plain.values()):
            why = "no way to shard its parts was right" if self.parts else _NO_PARTS
            return Outcome(verdict="nothing", reason=why)
        settings = [f"tp={RANKS}", "dp_shard=1"]
        if self.draft.sequence is not None:
            settings.append(f"{SEQUENCE.word}={str(sequence).lower()}")
        sink = Sink()
        file = parse(Source("draft.plan", render(self.draft)), sink)
        compiled = compiler.compile((file,), self.facts, sink, world_size=RANKS, settings=settings)
        if compiled.lowered is None:
            return Outcome(verdict="refuted", discrepancies=tuple(_refused(file, sink)))
        if not any(isinstance(op, Parallelize) for op in compiled.lowered.ops):
            return Outcome(verdict="nothing", reason="none of its parameters can be sharded")
        assert self.small is not None
        return judge(SmallCase(model=self.small, compiled=compiled), quick=True)

    def _fill(self) -> None:
        self.draft.plain = {}
        self.draft.notes = {}
        for path, some in self.parts.items():
            rules = self.draft.plain.setdefault(path, {})
            for choice in some:
                rules |= choice.recipe.plain
                if choice.recipe.note:
                    self.draft.notes |= dict.fromkeys(choice.recipe.plain, choice.recipe.note)
            rules |= {n: s for n, s in self.summed[path].items() if n not in rules}
            self.draft.plain[path] = self._ordered(path, rules)
        self.draft.plain[""] = {n: s for c in self.outside for n, s in c.recipe.plain.items()}

    def _ordered(self, path: str, rules: dict[str, str]) -> dict[str, str]:
        order = [n for n in self.inside[path] if n and "." not in n]
        return dict(sorted(rules.items(), key=lambda r: order.index(r[0].partition(".")[0])))

    # Taking back ---------------------------------------------------------------------------------

    def _step_back(self, outcome: Outcome) -> bool:
        """Adds a reduction or takes the next recipe where an outcome is wrong; False if none."""
        if outcome.verdict == "refuted" and self._summed(outcome, None):
            return True
        # where no choice is named, take any that is left
        choice = next((c for c in (*self._blamed(outcome), *self.all) if not c.last), None)
        if choice is None:
            return False
        # tied modules are split together
        for one in self.outside if choice in self.outside and self.draft.tied else [choice]:
            one.at = min(one.at + 1, len(one.recipes) - 1)
        return True

    def _summed(self, outcome: Outcome, rules: dict[str, dict[str, str]] | None) -> bool:
        """Adds rules that reduce partial gradients, or `mla_kv` for MLA's latent projection."""
        outputs = {"output", "crash", "refused", "size"} & {p.kind for p in outcome.discrepancies}
        added = False
        for part in outcome.discrepancies if not outputs else ():
            module = part.subject.rpartition(".")[0]
            path, inner = self._inside(module)
            if path is None:
                continue
            there = self.summed[path] if rules is None else rules[path]
            taken = inner in there or inner in self.draft.plain.get(path, {})
            if part.kind == "gradient" and "kv_a_proj" in inner and not taken:
                there[inner] = "mla_kv(rope = config.qk_rope_head_dim)"
                added = True
            elif part.kind == "partial" and not taken and self._leaf(module):
                there[inner] = "replicate(gradient = sum)"
                added = True
        return added

    def _leaf(self, name: str) -> bool:
        try:
            return not self.facts.at(name).module.children
        except KeyError:
            return False

    def _inside(self, name: str) -> tuple[str | None, str]:
        """The block list that contains a module, and the module's name in the block."""
        for path in self.parts:
            if name.startswith(f"{path}."):
                return path, generic(name[len(path) + 1 :].partition(".")[2])
        return None, name

    def _blamed(self, outcome: Outcome) -> list[SplitChoice]:
        """The choices whose modules an outcome names, the first one first."""
        found: list[SplitChoice] = []
        wrong = outcome.discrepancies
        subjects = [p.subject for p in wrong if p.kind not in ("boundary", "unstated")]
        subjects += [p.before for p in wrong if p.before]
        boundaries = [p.subject for p in wrong if p.kind == "boundary"]
        for subject in (*boundaries[:1], *subjects):
            path, inner = self._inside(subject)
            inner = re.sub(r"^\$(block|tower)\d*\.", "", inner)
            some = self.parts.get(path, []) if path else [*self.all]
            named = [choice for choice in some if _concerns(choice, inner)]
            # a module beside those of a part, such as a convolution of keys, takes what they give
            named = named or [c for c in some if path and c.top and c.top == inner.split(".")[0]]
            found += [choice for choice in named if choice not in found]
        return found

    # Sequence parallelism ------------------------------------------------------------------------

    def _sequence_rules(self) -> dict[str, dict[str, str]] | None:
        """The rules with norms and residuals sharded over the sequence; None if there are none."""
        if self.ran is None or len(self.parts) != 1 or not self.roles.embedding:
            return None
        if any(c.recipe.name == "whole" for c in self.outside):
            return None
        [(path, some)] = self.parts.items()
        [blocks] = self.roles.blocks
        rules = {norm: "sequence" for norm in blocks.norms if "." not in norm}
        children = (
            name
            for name, module in self.inside[path].items()
            if name and "." not in name and module.kind != "norm" and module.count
        )
        for top in dict.fromkeys((*(c.top for c in some), *children)):
            top_rules = self._of_top(path, top, [c for c in some if c.top == top])
            if top_rules is None:
                return None
            rules |= top_rules
        rules |= {n: s for n, s in self.summed[path].items() if n not in rules}
        ends = {n: s for c in self.outside for n, s in (c.recipe.sequence or {}).items()}
        rules = self._ordered(path, rules)
        ends |= dict.fromkeys(self.roles.norms, "sequence")
        if not self.roles.heads:  # the caller of an encoder takes its whole output
            inner = tuple(f"{p}." for p in self.parts)
            after = [n for n in self.ran.order if n in self.roles.norms or n.startswith(inner)]
            ends |= {n: f"sequence & {WHOLE}" for n in after[-1:] if n in self.roles.norms}
        for table in self.roles.tables:  # same layout as the token embeddings they are added to
            if self.ran.dims.get(table, 0) >= 2:
                dim = self.ran.dims[table] - 2
                ends[table] = f"output(replicate -> shard({dim}), local = false)"
        return {path: rules, "": ends}

    def _of_top(self, path: str, top: str, choices: list[SplitChoice]) -> dict[str, str] | None:
        """The rules for one child of a block: its recipe's, or the sequence gathered around it."""
        assert self.ran is not None
        if not top or (len(choices) == 1 and choices[0].recipe.sequence is not None):
            rules: dict[str, str] = {}
            for choice in choices:
                if choice.recipe.sequence is None:
                    return None
                rules |= choice.recipe.sequence
            return rules
        names = [n for n in self.ran.order if self._inside(n) == (path, top)]
        takes = next((self.ran.hidden[n] for n in names if n in self.ran.hidden), None)
        gives = next((self.ran.output_counts[n] for n in names if n in self.ran.output_counts), 0)
        if takes is None:
            return None
        many = ", null" * max(0, gives - 1)
        around = f"input({takes}, local = true)"
        around += f" & output(replicate -> shard(1){many}, local = false)"
        inner = {n: s for c in choices for n, s in c.recipe.plain.items()}
        return {**inner, top: " & ".join(filter(None, [inner.get(top), around]))}


def _refused(file: ast.File, sink: Sink) -> Iterator[Discrepancy]:
    """Errors of the compiler as discrepancies; the subjects are the labeled rules' selectors."""
    rules = [node for node in ast.every(file) if isinstance(node, ast.Rule)]
    for found in sink:
        if found.severity is Severity.ERROR:
            spans = [label.span for label in found.labels]
            targets = (rule.target for span in spans for rule in rules if rule.origin.has(span))
            subject = next((target.origin.text for target in targets), "")
            yield Discrepancy(kind="refused", subject=subject, detail=found.message)


def _concerns(choice: SplitChoice, inner: str) -> bool:
    """Whether a name is a module of the choice, inside one or directly around one."""
    if not inner:
        return False
    return any(
        inner == generic(m)
        or inner == m
        or inner.startswith(f"{m}.")
        or m.startswith(f"{inner}.")
        or _braces(inner, m)
        for m in choice.members
    )


def _braces(selector: str, name: str) -> bool:
    """Whether a selector with braces, as shown in a finding, matches a module."""
    pattern = "".join(
        f"({part[1:-1].replace(',', '|')})" if part.startswith("{") else re.escape(part)
        for part in re.split(r"(\{[^}]*\})", selector)
        if part
    )
    return re.fullmatch(pattern.replace(r"\*", r"[^.]*"), name) is not None


def _holders(facts: Facts, path: str) -> dict[str, Module]:
    found: dict[str, Module] = {}
    for child in facts.at(path).module.children:
        for name, module in named_below("", child.module):
            found.setdefault(name, module)
    return found


def named_below(name: str, module: Module) -> Iterator[tuple[str, Module]]:
    """Yields a module and all below it by their names; entries of a list are `*`."""
    yield name, module
    for child in module.children:
        last = child.name if child.indices is None else "*"
        yield from named_below(f"{name}.{last}" if name else last, child.module)
