"""Layout flow, as `planc check` asks for it: shrink, lower, simulate, remember, report.

The plan is compiled once more, for a small model of the same family on its tensor axes alone, and
what `planc.runtime.flow` finds there is reported at the lines of the plan. A verdict is kept by
the digest of the small lowered plan, its configuration and the library versions, so a warm check
imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from planc.diagnostic import Label, PlanError, Severity, Sink
from planc.driver import Compiled, compile_plan
from planc.ir.plan import Plan, TensorRule
from planc.lowering.document import digest
from planc.lowering.ops import Parallelize
from planc.model import cache
from planc.model.facts import Facts, Modules
from planc.model.load import of_values
from planc.model.shrink import shrink
from planc.proof import smaller

PRESUMED = frozenset({"PL151", "PL160", "PL161", "PL162", "PL163", "PL205"})
"""Warnings that structure alone can only presume; where the numbers are right, they were wrong."""

_FORMAT = 2
_RANKS = 2
"""Ranks of a simulated axis: what is wrong over 2 is wrong over 8, and heads divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What layout flow says of a plan.

    Args:
        verdict: `proved`, `refuted`, `unknown`, or `nothing` where no axis is tensor parallel.
        reason: why it is unknown.
        parts: where the plan's model parts from the plain one, as `planc.runtime.flow.Part` has it.
        logits, loss, gradient: the largest relative errors.
    """

    verdict: str
    reason: str = ""
    parts: tuple[dict[str, Any], ...] = ()
    logits: float = 0.0
    loss: float = 0.0
    gradient: float = 0.0

    @property
    def text(self) -> str:
        """What the summary of a check says."""
        match self.verdict:
            case "proved":
                worst = max(self.logits, self.loss, self.gradient)
                return f"layout flow (proved, largest error {worst:.0e})"
            case "unknown":
                return "layout flow (unknown)"
            case "refuted":
                return "layout flow (refuted)"
            case _:
                return "layout flow (no tensor parallelism)"


def flow(
    compiled: Compiled, plan: str, settings: Iterable[str], sink: Sink, *, strict: bool = False
) -> Verdict:
    """The verdict of layout flow on a compiled plan.

    Args:
        compiled: without errors.
        plan: as the user named it; it is read again.
        settings: as the user gave them.
        sink: receives PL501 to PL503 (refuted) and PL504 (unknown), and loses what was presumed
            where the plan is proved.
        strict: whether unknown is an error.
    """
    facts, ir = compiled.facts, compiled.plan
    if facts is None or ir is None or compiled.lowered is None:
        return Verdict(verdict="nothing")
    axes = {op.axis for op in compiled.lowered.ops if isinstance(op, Parallelize)}
    if not axes:
        return Verdict(verdict="nothing")
    small = _small(facts, ir, plan, list(settings), axes)
    verdict = small if isinstance(small, Verdict) else _judged(*small)
    if verdict.verdict == "proved":
        sink.diagnostics[:] = [d for d in sink if d.code not in PRESUMED]
    _report(verdict, None if isinstance(small, Verdict) else small[1].plan, sink, strict)
    return verdict


def _small(
    facts: Facts, ir: Plan, plan: str, settings: list[str], axes: set[str]
) -> Verdict | tuple[dict[str, Any], Compiled]:
    """The plan compiled for a small model, or why that can't be."""
    if "model_type" not in facts.config:
        return Verdict(verdict="unknown", reason="the model has no configuration to shrink")
    if plan == "-":
        return Verdict(verdict="unknown", reason="a plan from standard input is read only once")
    quiet = Sink()
    try:
        values = shrink(facts.config, ranks=dict.fromkeys((*axes, "tp"), _RANKS))
    except Exception as error:
        return Verdict(verdict="unknown", reason=f"the model cannot be shrunk: {error}")
    values = json.loads(json.dumps(values, default=str))
    values.setdefault("architectures", [facts.name])
    known = of_values(values, "the small model", quiet)
    if known is None:
        return Verdict(verdict="unknown", reason=_first(quiet, "the model cannot be shrunk"))
    sizes = {a.name: _RANKS if a.name in axes else 1 for a in ir.mesh.axes}
    own = smaller.settings(settings, sizes)
    compiled = compile_plan(known, plan, quiet, world_size=_RANKS ** len(axes), settings=own)
    if compiled.lowered is None:
        return Verdict(verdict="unknown", reason=_first(quiet, "the plan does not fit it"))
    return values, compiled


def _first(sink: Sink, otherwise: str) -> str:
    errors = [d.message for d in sink if d.severity is Severity.ERROR]
    return f"{otherwise}: {errors[0]}" if errors else otherwise


def _judged(values: dict[str, Any], compiled: Compiled) -> Verdict:
    """The verdict on a small lowered plan, from the cache or by simulation."""
    assert compiled.lowered is not None and compiled.facts is not None
    config = json.dumps(values, sort_keys=True)
    key = cache.named(f"flow {_FORMAT}", digest(compiled.lowered), config)
    kept = cache.recall(key)
    if isinstance(kept, dict):
        try:
            return Verdict(**{**kept, "parts": tuple(kept["parts"])})
        except (KeyError, TypeError):
            pass  # of another time; judged anew
    from planc.model.real import Maker
    from planc.runtime.flow import simulate

    try:
        maker = Maker(values)
    except PlanError as error:
        return Verdict(verdict="unknown", reason=f"the small model cannot be built: {error}")
    outcome = simulate(lambda: maker.build(0), maker.sample(), compiled.lowered)
    verdict = Verdict(**{**asdict(outcome), "parts": tuple(asdict(p) for p in outcome.parts)})
    if verdict.verdict != "unknown":  # what is unknown here and now may be known elsewhere
        cache.keep(key, asdict(verdict))
    return verdict


# Reporting ---------------------------------------------------------------------------------------


def _report(verdict: Verdict, small: Plan | None, sink: Sink, strict: bool) -> None:
    if verdict.verdict == "unknown":
        sink.report(
            Severity.ERROR if strict else Severity.WARNING,
            "PL504",
            f"layout flow cannot say whether this plan is right: {verdict.reason}",
            help="`planc verify` runs it on real processes",
        )
        return
    if verdict.verdict != "refuted" or small is None:
        return
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for part in verdict.parts:
        alike.setdefault((part["kind"], _generic(part["subject"])), []).append(part)
    outputs = [group for (kind, _), group in alike.items() if kind in ("output", "crash")]
    for group in outputs[:1] or list(alike.values())[:8]:
        _one(group, small, sink)


def _generic(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _one(group: list[dict[str, Any]], small: Plan, sink: Sink) -> None:
    part = group[0]
    kind, subject = part["kind"], _generic(part["subject"])
    module = subject if kind in ("output", "crash") else subject.rpartition(".")[0]
    rules = list(_rules(module, small))
    labels = [Label(span=r.origin, text=f"decides `{r.modules.path[-1]}`") for r in rules]
    if kind == "crash":
        marked = {r.origin for r in rules}
        before = [r for r in _rules(_generic(part["before"]), small) if r.origin not in marked]
        labels += [Label(span=r.origin, text="ended just before") for r in before]
    facts = ["seen on a shrunken model, with all ranks of the axis simulated (2)"]
    match kind:
        case "crash":
            code, message = "PL503", f"the model dies at `{subject}` under this plan"
            facts.insert(0, part["detail"])
        case "output":
            code = "PL501"
            message = f"`{subject or 'the model'}` computes something else under this plan"
            facts.insert(0, f"the first output that differs, by {part['error']:.1e}")
        case "partial":
            code = "PL502"
            message = f"the gradient of `{subject}` is a part of a sum, and nothing adds it up"
            facts.insert(0, f"each rank's differs by up to {max(p['error'] for p in group):.1e}")
        case _:
            code, message = "PL502", f"the gradient of `{subject}` is wrong under this plan"
            facts.insert(0, f"relative error {max(p['error'] for p in group):.1e}")
    sink.error(code, message, *labels, facts=facts, help=_help(kind, module))


def _help(kind: str, module: str) -> str | None:
    if kind == "partial":
        last = module.rpartition(".")[2]
        return f"give it a style that sums: `{last} : sequence(dim = ..., local = true)`"
    return None


def _rules(module: str, small: Plan) -> Iterable[TensorRule]:
    """The rules on a module, else those right around it, else those of its block."""
    parts = module.split(".") if module else []
    for length in range(len(parts), 0, -1):
        around = parts[:length]
        on = [r for r in small.tensor if _names(r.modules, around)]
        if on:
            return on
        beside = [
            r
            for r in small.tensor
            if len(r.modules.path) == length + 1 and _names(r.modules, around, inside=True)
        ]
        if beside:
            return list({r.origin: r for r in beside}.values())
    return []


def _names(modules: Modules, parts: list[str], *, inside: bool = False) -> bool:
    path = modules.path[: len(parts)] if inside else modules.path
    return len(path) == len(parts) and all(
        s == p if isinstance(s, str) else p == "*" for s, p in zip(path, parts, strict=True)
    )
