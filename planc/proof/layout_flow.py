"""Layout flow for `planc check`: shrink, stand in, simulate, cache, report.

The plan, as it was decided for the real model, is applied to a proxy model of the family on a
few ranks, and the discrepancies found by `planc.simulate.simulate` are reported at the lines of the
plan. The outcome is cached by the digest of the small lowered plan, the configuration, the library
versions and planc's own sources, so a warm check does not import torch.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self

from planc.checks.parameters import split_apart
from planc.compiler import Compiled, Draft
from planc.diagnostics.codes import PRESUMED
from planc.diagnostics.diagnostic import Severity, Sink
from planc.diagnostics.source import Span
from planc.ir.nodes import Plan
from planc.ir.stand_in import Unrepresented
from planc.model import cache
from planc.model.facts import Facts, below
from planc.model.randomness import random_numbers_kept
from planc.ops.base import AxisRole
from planc.ops.lowered import Lowered
from planc.proof.called_modules import called_modules, report_leaks
from planc.proof.flow_findings import (
    refutation_findings,
    report_limits,
    report_uncalled,
    report_unstated,
)
from planc.proof.judge import attribute_to_context, judge
from planc.proof.layer_verdicts import NOT_SPLIT, LayerVerdict, layer_verdicts
from planc.proof.random_numbers import dropout_case, report_random_numbers
from planc.proof.real_size import report_real_size
from planc.proof.remedy import blamed_first, remedy
from planc.proof.small_case import SmallCase, small_case, without_optimizer_classes
from planc.proof.small_mesh import (
    for_schedule_file,
    pairs,
    passes_on,
    simulated_sizes,
    with_experts,
)
from planc.sections import Hook
from planc.simulate.outcome import Outcome
from planc.simulate.time_limit import time_limit
from planc.simulate.trial_part import MEAN, left_out, separate_sections

_NOTHING = Unrepresented(reason="nothing is simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionVerdict:
    """The verdict on one section, such as `tensor on tp`, and why it is unknown or left out.

    Args:
        verdict: `proved`, `refuted`, `unknown`, or `left out` of the simulation.
        by: `simulation`, or `structure` if rules decide it without a run.
        data: whether it distributes parameters over the data axes (`fsdp`, `replicate`).
    """

    name: str
    verdict: str
    by: str
    reason: str = ""
    data: bool = False

    def document(self) -> dict[str, Any]:
        """The section as JSON."""
        fields = {"name": self.name, "verdict": self.verdict, "by": self.by}
        return {**fields, "reason": self.reason or None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict of layout flow on a plan, each kind of layer and each section.

    Args:
        gathered: whether every FSDP unit is a module that is called, and so is all-gathered.
        released_early: whether the model's code recomputes, in the backward pass, parts of an FSDP
            unit other than the root, which may have been resharded before; the root is not.
        wrong_apart: whether the plan is wrong with random numbers, or with a section that has a
            separate simulation, and right without.
    """

    outcome: Outcome
    layers: tuple[LayerVerdict, ...] = ()
    sections: tuple[SectionVerdict, ...] = ()
    gathered: bool = True
    released_early: bool = False
    wrong_apart: bool = False

    def _correct_verdict(self, section: SectionVerdict) -> SectionVerdict:
        """The verdict on a section, corrected by the verdict on the plan as a whole.

        FSDP units that are never called refute their section. An unknown kind of layer, or units
        that may be resharded too early, make a section unknown that the simulation alone proves.
        """
        if section.data and not self.gathered:
            return replace(section, verdict="refuted", by="simulation")
        by_run = self._unknown_reason if section.by == "simulation" else ""
        reason = self._released_reason if section.data else by_run
        if section.verdict == "proved" and self.verdict == "unknown" and reason:
            return replace(section, verdict="unknown", reason=reason)
        return section

    def with_runs(self, sections: Iterable[SectionVerdict]) -> Self:
        """The verdict with those of runs apart from the first, which was right."""
        all_sections = tuple(sections)
        wrong = self.wrong_apart or any(section.verdict == "refuted" for section in all_sections)
        return replace(self, sections=(*self.sections, *all_sections), wrong_apart=wrong)

    @property
    def unknown_layers(self) -> tuple[LayerVerdict, ...]:
        return tuple(k for k in self.layers if k.verdict == "unknown")

    @property
    def verdict(self) -> str:
        """`proved`, `refuted`, `unknown`, or `nothing` if no axis is tensor parallel."""
        if not self.gathered or self.wrong_apart:
            return "refuted"
        right = self.outcome.verdict == "proved"
        open_ends = self.unknown_layers or self.released_early
        return "unknown" if right and open_ends else self.outcome.verdict

    @property
    def reason(self) -> str:
        """Why the verdict is unknown."""
        cause = self._unknown_reason or self._released_reason
        return self.outcome.reason or (cause if self.verdict == "unknown" else "")

    @property
    def _unknown_reason(self) -> str:
        return "; ".join(f"{k.text}: {k.reason}" for k in self.unknown_layers)

    @property
    def _released_reason(self) -> str:
        if not self.released_early:
            return ""
        return (
            f"the model's own code runs `{self.outcome.recomputed}` again in the backward pass, "
            "when FSDP may have resharded its parameters"
        )

    @property
    def _mean_reasons(self) -> str:
        return "".join(f"; {s.reason}" for s in self.sections if s.name == MEAN)

    @property
    def text(self) -> str:
        """The verdict for the summary of a check."""
        count = len([k for k in self.layers if k.modules != "root"])
        many = f"{count} kinds of layer, " if count > 1 else ""
        match self.verdict:
            case "proved":
                detail = f"proved{cache.provenance()}, {many}largest error {self.outcome.worst:.0e}"
                if apart := [k.text for k in self.layers if k.reason == NOT_SPLIT]:
                    detail += f"; not reached and not split: {', '.join(apart)}"
                return f"layout flow ({detail}{self._mean_reasons})"
            case "nothing":
                return f"layout flow (no tensor parallelism{self._mean_reasons})"
            case other:
                parts = [(w, [k for k in self.layers if k.verdict == w]) for w in _WORDS]
                counts = ", ".join(f"{len(layers)} {word}" for word, layers in parts if layers)
                where = cache.provenance() if other == "refuted" else ""
                sections = f"; of its sections {counts}" if counts else ""
                return f"layout flow ({other}{where}{sections})"

    def document(self) -> dict[str, Any]:
        """The verdict as JSON data, without the modules of the proxy model."""
        outcome, made_with = self.outcome, cache.made_with()
        measured = self.verdict in ("proved", "refuted") and bool(outcome.modules)
        errors = {k: getattr(outcome, k) if measured else None for k in _ERRORS}
        return {
            "verdict": self.verdict,
            "reason": self.reason or None,
            "errors": errors,
            "sections": [self._correct_verdict(section).document() for section in self.sections],
            "layers": [{**asdict(k), "reason": k.reason or None} for k in self.layers],
            **({"made_with": dict(made_with)} if measured and made_with else {}),
        }


_WORDS = ("proved", "refuted", "unknown")
_ERRORS = ("logits", "loss", "gradient", "norm", "parameters")


def flow(
    compiled: Compiled,
    sink: Sink,
    *,
    strict: bool = False,
    allow_code: bool = False,
    draft: Draft | None = None,
) -> Verdict:
    """The verdict of layout flow on a compiled plan without errors; reports PL501 to PL508. If it
    is proved, presumed findings are overruled.

    Args:
        compiled: the plan for its model.
        strict: makes unknown (PL504) an error.
        allow_code: whether Python code that the plan or the model names may be run.
        draft: drafts a plan if no file is for the family. If given, the lines at fault are searched
            for in a refuted plan.
    """
    without = compiled if allow_code else without_optimizer_classes(compiled)
    verdict = _flow(without, sink, strict, allow_code, draft)
    if without is not compiled:
        why = "it is code, imported only with --allow-code: AdamW steps instead"
        apart = SectionVerdict(
            name="optimizer class", verdict="left out", by="structure", reason=why
        )
        verdict = replace(verdict, sections=(*verdict.sections, apart))
    if verdict.verdict not in ("proved", "nothing") or compiled.lowered is None:
        return verdict
    verdict = verdict.with_runs(_separate_verdicts(compiled, sink, strict))
    if verdict.verdict != "proved":
        return verdict
    return verdict.with_runs(_real_size(without, verdict.outcome.input_kinds, sink))


@random_numbers_kept()
def _flow(
    compiled: Compiled, sink: Sink, strict: bool, allow_code: bool, draft: Draft | None
) -> Verdict:
    """The verdict on all but separate simulations; the arguments are those of `flow`."""
    facts, ir, lowered = compiled.facts, compiled.plan, compiled.lowered
    if facts is None or ir is None or lowered is None:
        return Verdict(outcome=Outcome(verdict="nothing"))
    report_leaks(facts, lowered, sink)
    axes = {*lowered.split_axes(AxisRole.TENSOR)}
    parts = {*lowered.split_axes(AxisRole.SEQUENCE)}
    divided = lowered.split_axes(AxisRole.EXPERT, AxisRole.STAGE)
    if lowered.code and not allow_code:
        reason = f"{lowered.code[0]} is custom code, imported only with --allow-code"
        outcome = Outcome(verdict="unknown", reason=reason)
        small: SmallCase | Unrepresented = Unrepresented(reason=reason)
    elif lowered.backend and not axes:
        return _unsplit(facts, ir, lowered, sink, strict)
    else:
        outcome, small = _judge_all(compiled, axes, parts)
    if not (axes | parts or divided) and outcome.verdict in ("nothing", "unknown"):
        return _unsplit(facts, ir, lowered, sink, strict)
    case = small.compiled if isinstance(small, SmallCase) else None
    layers = layer_verdicts(facts, case, outcome) if case else ()
    released_early = bool(outcome.recomputed) and _may_be_resharded(lowered, ir, outcome, small)
    verdict = Verdict(
        outcome=outcome,
        layers=layers,
        sections=tuple(_sections(lowered, ir, outcome, small)),
        released_early=released_early,
    )
    if verdict.verdict == "proved":
        sink.overrule(PRESUMED)
    if verdict.verdict == "unknown":
        lines = small.origins if isinstance(small, Unrepresented) else ()
        help = None if lines else advice(facts, verdict.reason)
        _unknown(verdict, sink, strict, help, lines)
    if isinstance(small, Unrepresented):
        return verdict
    verdict = replace(verdict, gathered=_report(outcome, small, compiled, draft, sink))
    if verdict.verdict != "proved" or not axes:
        return verdict
    return verdict.with_runs(_draws(compiled, axes, sink, strict))


def _judge_all(
    compiled: Compiled, split: set[str], parts: set[str]
) -> tuple[Outcome, SmallCase | Unrepresented]:
    """The outcome over all small meshes, and its case; `parts` are axes that split sequences."""
    assert compiled.plan is not None
    first: tuple[Outcome, SmallCase | Unrepresented] | None = None
    plan, mesh = compiled.plan, compiled.plan.mesh
    alone = [dict.fromkeys(mesh.names, 1)] if plan.loss_rules else []
    for mesh_sizes in [*simulated_sizes(mesh.axes, split, passes_on(plan), pairs(plan))] or alone:
        sizes = for_schedule_file(mesh_sizes, plan)
        small = small_case(compiled, with_experts(sizes, mesh))
        if isinstance(small, Unrepresented):
            return Outcome(verdict="unknown", reason=small.reason), small
        outcome = judge(small, quick=first is not None)
        if outcome.verdict == "refuted":
            outcome = attribute_to_context(outcome, compiled, sizes, parts)
        if first is None or outcome.verdict != "proved":
            first = outcome, small
        if outcome.verdict != "proved":
            break
    return first or (Outcome(verdict="nothing"), _NOTHING)


def _draws(
    compiled: Compiled, split: set[str], sink: Sink, strict: bool
) -> Iterator[SectionVerdict]:
    assert compiled.plan is not None and compiled.facts is not None
    mesh = compiled.plan.mesh
    sizes = next(simulated_sizes(mesh.axes, split))
    alone = {a: n if a in split else 1 for a, n in sizes.items()}
    case = dropout_case(compiled, with_experts(alone, mesh))
    if case is not None:
        assert case.compiled.plan is not None
        outcome = judge(case, quick=True, draws=True)
        facts, small = compiled.facts, case.compiled.plan
        wrong = report_random_numbers(outcome, small, facts, sink, strict=strict)
        verdict = outcome.verdict if wrong or outcome.verdict != "refuted" else "unknown"
        name, by = "random numbers", "simulation"
        yield SectionVerdict(name=name, verdict=verdict, by=by, reason=outcome.reason)


_VERDICT_NAMES = Hook[Callable[[Plan], Iterator[str]]]("proof", "verdict_names")
_REPORT = Hook[Callable[[Outcome, Plan, Sink, bool], None]]("proof", "report")


@random_numbers_kept()
def _separate_verdicts(compiled: Compiled, sink: Sink, strict: bool) -> Iterator[SectionVerdict]:
    """The verdict on each section with a separate simulation, which is on the first small mesh."""
    lowered, plan = compiled.lowered, compiled.plan
    assert lowered is not None
    sections = separate_sections(lowered)
    if plan is None or not sections:
        return
    split = {*lowered.split_axes(AxisRole.TENSOR)}
    sizes = next(simulated_sizes(plan.mesh.axes, split), None)
    if sizes is None:
        return
    case = small_case(compiled, with_experts(for_schedule_file(sizes, plan), plan.mesh))
    for name in sections:
        if isinstance(case, Unrepresented):
            outcome = Outcome(verdict="unknown", reason=case.reason)
        else:
            outcome = judge(case, section=name)
        report = _REPORT.find(name)
        assert report is not None, f"{name} does not report its simulation"
        report(outcome, plan, sink, strict)
        yield SectionVerdict(
            name=name, verdict=outcome.verdict, by="simulation", reason=outcome.reason
        )


def _real_size(
    compiled: Compiled, input_kinds: tuple[str, ...], sink: Sink
) -> Iterator[SectionVerdict]:
    """The verdict on the real sizes, unless it is that they are right, as all others presume.

    Args:
        input_kinds: the kinds of inputs besides text that the proxy model got.
    """
    outcome = report_real_size(compiled, sink, input_kinds)
    if outcome.verdict in ("refuted", "unknown"):
        verdict = "left out" if outcome.verdict == "unknown" else "refuted"
        name, by = "real sizes", "simulation"
        yield SectionVerdict(name=name, verdict=verdict, by=by, reason=outcome.reason)


def _report(
    outcome: Outcome, case: SmallCase, real: Compiled, draft: Draft | None, sink: Sink
) -> bool:
    """Reports what a simulation found; returns whether every FSDP unit is called."""
    small, plan = case.compiled.plan, real.plan
    assert small is not None and plan is not None
    called = {name for name, _ in outcome.modules}
    if not outcome.of_kind("uneven") and report_uncalled(called, small, sink):
        return False  # the cause of whatever else was found
    if outcome.verdict == "refuted":
        ties = split_apart(*real.applied) if real.applied else ()
        findings = refutation_findings(outcome, small, tuple(ties), sink)
        changes = remedy(real, case, outcome, draft) if draft else ()
        if changes:  # what is presumed is wrong, or has the same cause: with these all is proved
            sink.overrule(PRESUMED)
        sink.add(*blamed_first(findings, changes))
    else:
        report_unstated(outcome, small, sink)
    report_limits(outcome, plan.mesh, sink)
    return True


def _unsplit(facts: Facts, ir: Plan, lowered: Lowered, sink: Sink, strict: bool) -> Verdict:
    """The verdict on a plan without tensor parallelism: whether its FSDP units are called."""
    if backend := lowered.backend:
        unseen = Outcome(verdict="unknown", reason=backend.UNPROVED)
        verdict = Verdict(outcome=unseen, sections=tuple(_sections(lowered, ir, unseen, _NOTHING)))
        _unknown(verdict, sink, strict, "compare a few training steps with torch's FSDP")
        return verdict
    nothing = Outcome(verdict="nothing")
    sections = tuple(_sections(lowered, ir, nothing, _NOTHING))
    if ir.fsdp is None or all(unit.root for unit in ir.fsdp.units):
        return Verdict(outcome=nothing, sections=sections)
    ran, reason = called_modules(facts)
    if ran is None:
        why = f"whether its units are called: {reason}"
        unknown = (replace(s, verdict="unknown", reason=why) if s.data else s for s in sections)
        sections = tuple(unknown)
    gathered = ran is None or not report_uncalled(ran, ir, sink)
    return Verdict(outcome=nothing, sections=sections, gathered=gathered)


def _may_be_resharded(
    lowered: Lowered, ir: Plan, outcome: Outcome, small: SmallCase | Unrepresented
) -> bool:
    """Whether the module that runs again is in an FSDP unit other than the root, or the plan uses
    a backend; a simulation with FSDP has shown what comes of it.
    """
    if lowered.backend:
        return True
    axes = (*ir.fsdp.shard, *ir.fsdp.replicate) if ir.fsdp is not None else ()
    if isinstance(small, SmallCase) and _is_simulated(small, axes):
        return False
    units = (m for op in lowered.fsdp_units for m in op.members)
    return any(below(outcome.recomputed, unit) for at in units for unit in at.names() if unit)


def advice(facts: Facts, reason: str | None) -> str:
    """The help of a finding that nothing is proved, for a reason."""
    if (facts.user_model is not None or facts.code) and "does not run" in (reason or ""):
        return "say what its forward takes: `inputs=` of `planc.check`, or a method `planc_inputs`"
    if "time limit" in (reason or ""):
        longer = 4 * time_limit()
        return (
            f"`--time-limit {longer:g}`, or `time_limit={longer:g}` of `planc.check`, allows more"
        )
    return cache.UNPACK if cache.missing() else "`planc verify` runs it on real processes"


def _unknown(
    verdict: Verdict, sink: Sink, strict: bool, help: str | None, lines: tuple[Span, ...] = ()
) -> None:
    sink.report(
        Severity.ERROR if strict else Severity.WARNING,
        "PL504",
        f"layout flow cannot decide whether this plan is right: {verdict.reason}",
        *lines,
        help=help,
    )


def _of_model_axes(
    lowered: Lowered, outcome: Outcome, small: SmallCase | Unrepresented
) -> Iterator[SectionVerdict]:
    words = {
        AxisRole.SEQUENCE: "context",
        AxisRole.STAGE: "pipeline",
        AxisRole.EXPERT: "expert",
    }
    for word, axis in ((w, axis) for role, w in words.items() for axis in lowered.split_axes(role)):
        verdict, reason = outcome.verdict, outcome.reason
        if not (isinstance(small, SmallCase) and _is_simulated(small, (axis,))):
            verdict, reason = "unknown", reason or f"no {axis} was simulated"
        yield SectionVerdict(
            name=f"{word} on {axis}", verdict=verdict, by="simulation", reason=reason
        )


def _sections(
    lowered: Lowered, ir: Plan, outcome: Outcome, small: SmallCase | Unrepresented
) -> Iterator[SectionVerdict]:
    """Yields the verdict on each section; one on an axis of one rank, real or small, is a no-op."""
    run = outcome.verdict if outcome.verdict != "nothing" else "proved"
    by = "simulation" if outcome.verdict != "nothing" else "structure"
    section_verdict = partial(SectionVerdict, verdict=run, by=by, reason=outcome.reason)
    for axis in lowered.split_axes(AxisRole.TENSOR):
        yield section_verdict(name=f"tensor on {axis}")
    if lowered.checkpoint_ops:
        section = section_verdict(name="checkpoint")
        if run == "refuted":
            wrong = "the plan is wrong, so this cannot be compared"
            section = replace(section, verdict="unknown", reason=wrong)
        yield section
    yield from _of_model_axes(lowered, outcome, small)
    for names in _VERDICT_NAMES.find_all(ir.sections):
        yield from (section_verdict(name=name) for name in names(ir))
    if ir.fsdp is not None and lowered.fsdp_units:
        kind = "fsdp" if ir.fsdp.shard else "replicate"
        axes = ir.fsdp.shard or ir.fsdp.replicate
        name = f"{kind} on {' * '.join(axes)}"
        if isinstance(small, SmallCase) and _is_simulated(small, axes):
            yield section_verdict(name=name, data=True)
        else:
            yield SectionVerdict(name=name, verdict="proved", by="structure", data=True)
    if ir.fsdp is not None and (backend := lowered.backend):
        name, by = f"fsdp on {' * '.join(ir.fsdp.shard)}", "structure"
        yield SectionVerdict(
            name=name, verdict="unknown", by=by, reason=backend.UNPROVED, data=True
        )
    for name, reason in left_out(lowered):
        yield SectionVerdict(name=name, verdict="left out", by="structure", reason=reason)


def _is_simulated(small: SmallCase, axes: tuple[str, ...]) -> bool:
    assert small.compiled.lowered is not None
    return any(small.compiled.lowered.axis_size(axis) > 1 for axis in axes)
