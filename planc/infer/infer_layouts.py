"""Layouts that follow from how a plan splits weights: IR -> IR, for tensor sections with the
setting `sequence`.

Inference runs on the data flow of a proxy model, whose blocks stand for the real ones: those of a
list that have the same kind and the same rules, the first and the last one apart. What is inferred
is structural (places and dims); the one number, `mla_kv`'s, is computed from the real modules. The
proof does not know which rule was inferred.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planc.diagnostics.diagnostic import Label, Sink, one_of
from planc.diagnostics.source import NOWHERE, Span
from planc.infer.flow_types import Clash, FoundRule, Layouts, Tried
from planc.infer.kept_layouts import Known, layouts_of
from planc.ir.nodes import Inferred, Plan, SequenceSetting, TensorRule
from planc.ir.random_numbers import split_axes
from planc.ir.stand_in import StandInModel, Unrepresented, variants
from planc.model.dataflow import DataFlow, Operation
from planc.model.facts import Facts, Modules, generic, parse_path
from planc.ops.contract import contract
from planc.ops.styles import (
    SPLITS,
    Attributes,
    Colwise,
    Experts,
    Input,
    MlaKv,
    Replicate,
    Rowwise,
    Shard,
    Style,
)
from planc.proxy.flow import FlowSource, flow_of, flow_source

Recorded = tuple[FlowSource, StandInModel, tuple[TensorRule, ...], DataFlow]
"""A proxy model, how it stands for the real one, the rules on it, and its data flow."""
NO_TOKENS = "planc knows a sequence by its token ids, and this model takes none"
"""The reason why no hidden states of an audio model are sequence shards."""
_DEPTHS = (2, 6, 10, 16)
"""The least numbers of layers of the proxy models that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutClash:
    """Stated layouts that do not go together: the reason, with the line of the model's code, and
    the lines of the rules that gave the tensors.
    """

    text: str
    origins: tuple[Span, ...]


def infer_layouts(plan: Plan, facts: Facts, sink: Sink) -> Plan:
    """Infers the layouts that tensor sections leave open; reports PL151 and PL524 to PL528.

    Before:
        model.layers.*.self_attn.o_proj   : rowwise
        model.layers.*.self_attn.q_proj   : colwise
        (model.layers.*.input_layernorm has no rule)

    After, with sequence parallelism:
        model.layers.*.self_attn.o_proj   : rowwise(-> shard(1))
        model.layers.*.self_attn          : input(shard(1) -> replicate)
        model.layers.*.input_layernorm    : sequence

    It also records the lines of code that generate random numbers in the plan.
    """
    for setting in plan.sequence:
        if plan.mesh.size(setting.axis) > 1 and "tensor" not in plan.broken:
            plan = _Section(plan, facts, setting, sink).infer()
    if "tensor" not in plan.broken:
        plan = _complete_layouts(plan, facts, sink)
    for section, rules in () if "tensor" in plan.broken else _stated_sections(plan, facts, sink):
        recorded = section.record(rules)
        plan = section.check_observations(plan, recorded)
        if not isinstance(recorded, Unrepresented | str):
            _, _, small, flow = recorded
            if isinstance(layouts := section.complete(flow, small), Layouts):
                section.cut(flow, small, layouts)
    return plan


def _complete_layouts(plan: Plan, facts: Facts, sink: Sink) -> Plan:
    """Completes the layouts of sections without `sequence` whose rules are only splits and lack
    layouts. Hidden states between blocks stay replicated, if the splits allow it.
    """
    for section, rules in [*_stated_sections(plan, facts, Sink())]:
        axis = section.setting.axis
        if all(rule.open for rule in plan.tensor if rule.axis == axis) and any(
            section.errors(rules)
        ):
            setting = replace(section.setting, wanted=False)
            completed, findings = replace(plan, sequence=(*plan.sequence, setting)), Sink()
            inferred = _Section(completed, facts, setting, findings).infer()
            if not findings.errors:
                plan = inferred
                sink.add(*findings)
    return plan


def layout_errors(plan: Plan, facts: Facts) -> Iterator[LayoutClash | TensorRule]:
    """Yields the rules that must follow from those of sections that state all layouts, and are not
    stated, and where stated layouts do not go with what flows; nothing where the flow is not known.
    """
    for section, rules in _stated_sections(plan, facts, Sink()):
        yield from section.errors(rules)


def _stated_sections(
    plan: Plan, facts: Facts, sink: Sink
) -> Iterator[tuple["_Section", tuple[TensorRule, ...]]]:
    """Yields the sections that state all layouts, each with its rules."""
    inferred_axes = {setting.axis for setting in plan.sequence}
    for axis in (each for each in split_axes(plan) if each not in inferred_axes):
        rules = tuple(replace(r, open=False) for r in plan.tensor if r.axis == axis)
        parts = any(has_sequence_shards(rule.style) for rule in rules)
        setting = SequenceSetting(axis=axis, wanted=parts, origin=rules[0].origin)
        yield _Section(plan, facts, setting, sink), rules


def has_sequence_shards(style: Style) -> bool:
    """Whether inputs or outputs of a style are sequence shards."""
    style_contract = contract(style)
    flows = () if style_contract.sums else (*style_contract.takes, *style_contract.gives)
    return any(Shard(1) in flow.forward for flow in flows)


@dataclass(slots=True)
class _Section:
    """The rules over one axis, and how small modules stand for real ones."""

    plan: Plan
    facts: Facts
    setting: SequenceSetting
    sink: Sink

    def infer(self) -> Plan:
        plan, setting = self.plan, self.setting
        section_rules = tuple(r for r in plan.tensor if r.axis == setting.axis)
        if not section_rules:
            return plan
        recorded = self.record(section_rules)
        if isinstance(recorded, Unrepresented | str):
            return self._unknown(recorded)
        source, state, small, flow = recorded
        plan = self.check_observations(plan, recorded)
        layouts = None if "tensor" in plan.broken else self._layouts(flow, small)
        if layouts is None:
            return replace(plan, broken=plan.broken | {"tensor"})
        self.cut(flow, small, layouts)
        memo, key = self.facts.memo, (*_rules_key(section_rules), setting.wanted, setting.origin)
        if key not in memo:
            carried = _Carried(flow, state, small, layouts, setting)
            if problem := carried.uneven or carried.unsized_linear(source.facts):
                return self._unknown(problem)
            sized = tuple(rule.for_model(self.facts) for rule in carried.rules())
            self.facts.remember(key, sized)
        rules = memo[key]
        others = tuple(r for r in plan.tensor if r.axis != setting.axis)
        if setting.wanted is not False and not layouts.everywhere:
            self._in_part(flow, layouts)
        return replace(plan, tensor=(*rules, *others))

    def check_observations(self, plan: Plan, recorded: Recorded | Unrepresented | str) -> Plan:
        """Adds the lines of code outside of nn.Dropout that generate random numbers to the plan.

        Reports PL528: a rule for an input that a module did not get.
        """
        if isinstance(recorded, Unrepresented | str):
            return plan
        source, _, small, flow = recorded
        before = self.sink.errors
        for rule in {r.origin: r for r in small if isinstance(r.style, Input)}.values():
            self._ungiven(rule, flow)
        broken = {"tensor"} if self.sink.errors > before else set[str]()
        if "draws" not in flow.memo:
            outside = (
                c for c in flow.calls if source.facts.module_at(c.name).module.kind != "dropout"
            )
            drawn = (e for c in outside for e in c.body if isinstance(e, Operation) and e.draws)
            flow.memo["draws"] = (*dict.fromkeys(str(flow.lines[e.line]) for e in drawn),)
        lines = dict.fromkeys((*plan.draws, *flow.memo["draws"]))
        return replace(plan, draws=tuple(lines), broken=plan.broken | broken)

    def _ungiven(self, rule: TensorRule, flow: DataFlow) -> None:
        """Reports the first input that a rule states and no call of its modules has."""
        names = {flow.alias.get(name, name) for name in rule.modules.names()}
        calls = [call for call in flow.calls if call.name in names]
        given = dict.fromkeys(key for call in calls for key, _ in call.arguments)
        assert isinstance(rule.style, Input)
        places = ((str(i), change) for i, change in enumerate(rule.style.positional))
        stated = {key: change for key, change in (*places, *rule.style.named) if change}
        lacking = next((key for key in stated if key not in given), None)
        if not calls or lacking is None:
            return
        keywords = [key for key in given if not key.isdecimal()]
        count, at = len(given) - len(keywords), lacking.isdecimal()
        came = [f"{count} by position"] * bool(count) + [f"`{k}` by keyword" for k in keywords]
        name = f"{(*keywords, 'NAME')[0]} = " if at else ""
        by = f"at position {int(lacking) + 1}" if at else f"by the keyword `{lacking}`"
        code = f"the model's own code: {flow.lines[calls[0].line]}"
        self.sink.error(
            "PL528",
            f"no tensor comes to `{generic(calls[0].name)}` {by}",
            rule.origin,
            facts=[f"tensors that come: {one_of(came, last='and') or 'none'}", code],
            help=f"name the input as the code passes it: `input({name}{stated[lacking]})`",
        )

    def errors(self, section_rules: tuple[TensorRule, ...]) -> Iterator[LayoutClash | TensorRule]:
        """Yields what complete rules lack, and where they clash: as of `layout_errors`."""
        recorded = self.record(section_rules)
        if isinstance(recorded, Unrepresented | str):
            return
        _, state, small, flow = recorded
        layouts = self.complete(flow, small)
        if isinstance(layouts, Clash):
            why = _why(layouts)
            blamed = _clash_lines(flow, why, small)
            lines = tuple(o for o in dict.fromkeys(r.origin for r in section_rules) if o in blamed)
            yield LayoutClash(text=_lines(flow, why)[0], origins=lines)
            return
        carried = _Carried(flow, state, small, layouts, self.setting)
        yield from (rule.for_model(self.facts) for rule in carried.rules() if rule.inferred)

    def complete(self, flow: DataFlow, small: tuple[TensorRule, ...]) -> Layouts | Clash:
        """Infers the layouts of the flow with complete rules."""
        return layouts_of(flow, _styles(small), sequence=bool(self.setting.wanted))

    def cut(self, flow: DataFlow, small: tuple[TensorRule, ...], layouts: Layouts) -> None:
        """Reports PL151: linears in plain `colwise` whose outputs the model's code cuts."""
        lines: dict[Span, dict[str, None]] = {}
        for module, line in layouts.cuts:
            for origin in _origins(flow, small)[module]:
                text = f"`{generic(module)}`: {flow.lines[line]}"
                lines.setdefault(origin, {})[text] = None
        for origin, codes in lines.items():
            self.sink.warning(
                "PL151",
                "the model's code cuts the output of this projection, and plain colwise gives each "
                f"{self.setting.axis} rank a slice of it",
                origin,
                facts=[*codes][:3],
                help="state its parts, `colwise(parts = 2)`, if the code cuts it into equal parts; "
                "else gather its output: `colwise(-> replicate)`",
            )

    def record(self, rules: tuple[TensorRule, ...]) -> Recorded | Unrepresented | str:
        """The shallowest proxy model whose blocks stand for all real ones, the rules on it, and its
        data flow, remembered with the facts: a search tries many plans with the same rules; or why
        there is none.
        """
        memo, key = self.facts.memo, _rules_key(rules)
        if key in memo:
            kept: Recorded = memo[key]
            return kept
        recorded = self._make_recording(rules)
        if not isinstance(recorded, Unrepresented | str):
            self.facts.remember(key, recorded)
        return recorded

    def _make_recording(self, rules: tuple[TensorRule, ...]) -> Recorded | Unrepresented | str:
        bare = _restrict_rules(self.plan, rules)
        apart = variants(bare, self.facts, ends=True)
        problem: Unrepresented | str = ""
        for layers in _DEPTHS:
            source = flow_source(self.facts, apart, layers)
            if isinstance(source, str):
                return source
            state = StandInModel(bare, self.facts, source.facts, source.kept, ends=True)
            small = bare.map_modules(state.walk).tensor
            if not state.problems:
                flow = flow_of(source, self.facts)
                return flow if isinstance(flow, str) else (source, state, small, flow)
            problem = problem or state.problems[0]
        return problem

    def _unknown(self, why: Unrepresented | str) -> Plan:
        reason, lines = (why, ()) if isinstance(why, str) else (why.reason, why.origins)
        self.sink.error(
            "PL524",
            f"the layouts over {self.setting.axis} cannot be inferred: {reason}",
            *(lines or (self.setting.origin,)),
            help="state them in the rules, and remove `sequence`",
        )
        return replace(self.plan, broken=self.plan.broken | {"tensor"})

    def _layouts(self, flow: DataFlow, small: tuple[TensorRule, ...]) -> Layouts | None:
        """The layouts for the setting's value; None after PL505, PL525 or PL526."""
        layouts = self._chosen(flow, small)
        if isinstance(layouts, Layouts):
            return layouts
        if not self._report_contradiction(flow, small):
            self._impossible(flow, layouts, small)
        return None

    def _chosen(self, flow: DataFlow, small: Sequence[TensorRule]) -> Layouts | tuple[Tried, ...]:
        """The layouts for the setting's value, or why there are none."""
        wanted, known = self.setting.wanted, _styles(small)
        parts = None if wanted is False else layouts_of(flow, known, sequence=True)
        if isinstance(parts, Layouts) and (parts.everywhere or (wanted and parts.parts)):
            return parts
        plain = None if wanted else layouts_of(flow, known, sequence=False)
        if isinstance(plain, Layouts):
            return plain if parts is None else replace(plain, why=_why(parts))
        if isinstance(parts, Layouts) and parts.parts and not wanted:
            return parts  # `auto`, and in parts alone it is possible at all
        return _why(parts if wanted else plain)

    def _report_contradiction(self, flow: DataFlow, small: tuple[TensorRule, ...]) -> bool:
        """Reports the stated layouts (PL505) without which there are layouts."""
        stated = dict.fromkeys(rule.origin for rule in small if not rule.open)
        for origin in stated:
            layouts = self._chosen(
                flow, [without_layouts(r) if r.origin == origin else r for r in small]
            )
            if not isinstance(layouts, Layouts):
                continue
            why = self._chosen(flow, small)
            reasons = "" if isinstance(why, Layouts) else _lines(flow, why[-1:])[0]
            self.sink.error(
                "PL505",
                "this line states layouts that do not go with what flows there",
                Label(span=origin, text="stated here"),
                Label(span=self.setting.origin, text="all other layouts are inferred here"),
                facts=[reasons] if reasons else [],
                help="state how the weights are split, and leave the layouts to inference",
            )
            return True
        return False

    def _in_part(self, flow: DataFlow, layouts: Layouts) -> None:
        """Reports how many sums of hidden states are sequence-parallel, and why others are not."""
        share = f"{layouts.parts} of {layouts.sums} sums of hidden states in the proxy model"
        whole = "hidden states are whole on each rank"
        reasons = dict.fromkeys(_lines(flow, layouts.why))
        self.sink.info(
            "PL527",
            f"sequence parallelism covers {share}" if layouts.parts else whole,
            self.setting.origin,
            facts=list(reasons)[:3],
        )

    def _impossible(
        self, flow: DataFlow, why: tuple[Tried, ...], small: tuple[TensorRule, ...]
    ) -> None:
        setting, facts = self.setting, _lines(flow, why[-3:])
        if setting.wanted:
            facts = facts or ([NO_TOKENS] if flow.tokens is None else [])
            message = "no hidden states can be sharded on the sequence"
            help = "write `sequence = auto`, or `sequence = false`"
            self.sink.error("PL526", message, setting.origin, facts=facts, help=help)
            return
        self.sink.error(
            "PL525",
            f"no layouts over {setting.axis} go with these splits",
            *(_clash_lines(flow, why[-1:], small) or (setting.origin,)),
            facts=facts,
            help="gather the output that the line needs whole (`colwise(-> replicate)`), or leave "
            "the weights whole",
        )


def _origins(flow: DataFlow, rules: Iterable[TensorRule]) -> dict[str, list[Span]]:
    """The lines of the rules of each module, by the first name that the flow knows it by."""
    lines: dict[str, list[Span]] = {}
    for rule in rules:
        for name in rule.modules.names():
            lines.setdefault(flow.alias.get(name, name), []).append(rule.origin)
    return lines


def _clash_lines(
    flow: DataFlow, why: Iterable[Tried], rules: Iterable[TensorRule]
) -> tuple[Span, ...]:
    """The lines of the rules that gave the tensors of clashes."""
    lines = _origins(flow, rules)
    return tuple(dict.fromkeys(o for clash in why for n in clash.rules for o in lines.get(n, ())))


def _lines(flow: DataFlow, why: Iterable[Tried]) -> list[str]:
    places = ((clash.text, flow.lines[clash.line]) for clash in why)
    return [f"{text}  ({line})" if str(line) else text for text, line in places]


def _styles(rules: Iterable[TensorRule]) -> Known:
    """The splits and the complete styles of some rules, by the names of modules."""
    by_state: tuple[dict[str, list[Style]], dict[str, list[Style]]] = ({}, {})
    for rule in rules:
        for name in rule.modules.names():
            by_state[not rule.open].setdefault(name, []).append(rule.style)
    splits, stated = (tuple((n, tuple(s)) for n, s in styles.items()) for styles in by_state)
    return splits, stated


def without_layouts(rule: TensorRule) -> TensorRule:
    """A rule without its layouts; one that states nothing else says that parameters are whole."""
    style: Style
    match rule.style:
        case Colwise():
            style = replace(rule.style, input=Replicate(), output=Shard(-1), local=True)
        case Rowwise():
            looked_up = rule.modules.module.kind == "embedding"
            source = Replicate() if looked_up else Shard(-1)
            style = replace(rule.style, input=source, output=Replicate(), local=True)
        case Experts():
            style = Experts(layouts=rule.style.layouts)
        case _:
            style = Attributes(names=())
    return replace(rule, style=style, open=True)


def _why(layouts: Layouts | Clash | None) -> tuple[Tried, ...]:
    if isinstance(layouts, Layouts):
        return layouts.why
    if isinstance(layouts, Clash):
        return (Tried("", str(layouts), layouts.line, layouts.rules),)
    return ()


def _rules_key(rules: Iterable[TensorRule]) -> tuple[Any, ...]:
    """A key by which rules are compared, with their lines."""
    return tuple((r.modules.path, r.axis, r.style, r.open, r.origin, r.written) for r in rules)


def _restrict_rules(plan: Plan, rules: tuple[TensorRule, ...]) -> Plan:
    """The plan with some of its tensor rules alone."""
    nothing = plan.map_modules(lambda *_: ())
    return replace(nothing, tensor=rules, load=None, pipeline=None)


class _Carried:
    """Small layouts on the real modules that the small ones stand for."""

    def __init__(
        self,
        flow: DataFlow,
        state: StandInModel,
        small: tuple[TensorRule, ...],
        layouts: Layouts,
        setting: SequenceSetting,
    ) -> None:
        self.flow, self.state, self.small = flow, state, small
        self.layouts, self.setting = layouts, setting
        self.fixed = {n for rule in small if not rule.open for n in rule.modules.names()}
        self.stated = _origins(flow, small)

    @property
    def uneven(self) -> str | None:
        """The reason if small blocks of one kind, between others, have different rules; None if
        not.
        """
        for path, blocks in self.state.alike():
            if len({self._block_rules(f"{path}.{i}") for i in blocks}) > 1:
                return f"blocks of one kind of `{path}` get different layouts"
        return None

    def unsized_linear(self, small: Facts) -> str | None:
        """The style to state for a linear layer whose rotary features cannot be counted.

        None if the widths of the modules after each such layer tell their number.
        """
        for rule in self.layouts.rules:
            if isinstance(rule.style, MlaKv) and rule.module not in self.fixed:
                width = small.module_at(rule.module).module.parameters[0].shape[0]
                rest = (small.module_at(b).module.parameters[0].shape[-1] for b in rule.beside)
                if width - sum(rest) != rule.style.rope:
                    return f"state `mla_kv(rope = ...)` of `{generic(rule.module)}`"
        return None

    def _block_rules(self, block: str) -> frozenset[tuple[str, Style]]:
        return frozenset(
            (f.module.removeprefix(block), f.style)
            for f in self.layouts.rules
            if f.module == block or f.module.startswith(f"{block}.")
        )

    def rules(self) -> list[TensorRule]:
        """The plan's rules with their layouts, in order, then those that follow."""
        completed: dict[tuple[str, type], FoundRule] = {
            (f.module, type(f.style)): f
            for f in reversed(self.layouts.rules)
            if isinstance(f.style, SPLITS)
        }
        completed_rules: list[TensorRule] = []
        used: set[FoundRule] = set()
        for rule in self.small:
            for name in rule.modules.names():
                first = self.flow.alias.get(name, name)
                inferred = FoundRule(first, rule.style)
                if rule.open:
                    inferred = completed.get((first, type(rule.style)), inferred)
                used.add(inferred)
                self._add(completed_rules, inferred, rule.origin, self.state.real(name), rule)
        for inferred in self.layouts.rules:
            if inferred not in used:
                self._add(
                    completed_rules,
                    inferred,
                    self._origin(inferred),
                    self.state.real(inferred.module),
                )
        return completed_rules

    def _origin(self, rule: FoundRule) -> Span:
        """The line of the first split that a rule follows from, or of the setting."""
        lines = (self.stated[w][-1] for w in rule.weights if w in self.stated)
        return next(lines, self.setting.origin)

    def _add(
        self,
        rules: list[TensorRule],
        inferred: FoundRule,
        origin: Span,
        places: Iterable[Modules],
        stated: TensorRule | None = None,
    ) -> None:
        parent = inferred.module.rpartition(".")[0]
        inside = [
            b.removeprefix(f"{parent}.") for b in inferred.beside if b.startswith(f"{parent}.")
        ]
        why = Inferred(
            reason=inferred.reason,
            weights=tuple(dict.fromkeys(map(generic, inferred.weights))),
            code=str(self.flow.lines[inferred.line]),
            beside=tuple(parse_path(name) for name in inside),
        )
        for modules in places:
            rule = TensorRule(
                modules=modules,
                axis=self.setting.axis,
                style=inferred.style,
                written=stated.written if stated else NOWHERE,
                origin=origin,
                inferred=None if stated and inferred.style == stated.style else why,
            )
            for i, other in enumerate(rules):
                same = other.style == rule.style and other.origin == origin
                same = same and other.modules.module == modules.module
                both = other.modules.union(modules) if same else None
                if both is not None:
                    rules[i] = replace(other, modules=both)
                    break
            else:
                rules.append(rule)
