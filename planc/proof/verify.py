"""`planc verify`: proves on real processes that a plan trains the same model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from planc import compiler
from planc.compiler import Compiled, Files
from planc.diagnostics import render
from planc.diagnostics.diagnostic import Diagnostic, Sink, one_of
from planc.ir.nodes import Plan
from planc.ir.stand_in import Unrepresented
from planc.lowering.lowered_file import LoweredFile
from planc.model import cache
from planc.model.facts import Facts
from planc.model.load import load
from planc.model.randomness import random_numbers_kept
from planc.ops.document import digest
from planc.ops.lowered import Lowered
from planc.proof.real_size import report_real_size
from planc.proof.small_case import SmallCase, small_case
from planc.proof.small_mesh import not_reached, small_sizes, with_experts
from planc.proof.verify_report import report_difference, report_failure, report_unknown, table
from planc.runtime.known_verdict import KnownVerdict, Level
from planc.sections import Hook
from planc.simulate import certificate as store
from planc.simulate import verdict_store
from planc.simulate.launcher import LIMITS, SEEDS, Comparison, ForkServer, TrialFailure, fork_server
from planc.simulate.trial_part import left_out, rounds, separate_sections, trial_part
from planc.syntax import plan_files

PROCESSES = 4
TIMEOUT = 120.0
_CHOOSES = (
    "the errors are beyond rounding, and the model selects experts by rounded numbers: others for "
    "some tokens"
)

_REPORT_WRONG = Hook[Callable[[float, Plan | None, Sink], str]]("proof", "report_wrong")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """`verified`, `refuted` or `unknown`, and the certificate, None if the plan did not compile.

    Args:
        findings: those of the compiler and of the proof, as `planc.verify` returns them.
    """

    verdict: str
    certificate: store.Certificate | None = None
    findings: tuple[Diagnostic, ...] = ()

    def __str__(self) -> str:
        listed = [d for d in self.findings if d.severity != "info"]
        shown = [render(listed, "full")] if listed else []
        return "\n".join((*shown, table(self.certificate) if self.certificate else "")).rstrip()


@dataclass(slots=True, kw_only=True)
class _Case:
    """A plan to be proved, and the intermediate results."""

    facts: Facts
    lowered: Lowered
    compiled: Compiled
    processes: int
    check_codes: tuple[str, ...]
    small: SmallCase | None = None
    run: Lowered | None = None
    separate: dict[str, Lowered] = field(default_factory=dict)
    small_check_codes: tuple[str, ...] = ()
    precision: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return self.small.model.values if self.small else {}

    @property
    def plan(self) -> Plan:
        """The plan for the proxy model."""
        assert self.small is not None and self.small.compiled.plan is not None
        return self.small.compiled.plan


@random_numbers_kept()
def verify(
    model: str,
    plan: str,
    sink: Sink,
    *,
    world_size: int | None = None,
    processes: int = PROCESSES,
    settings: Iterable[str] = (),
    allow_code: bool = False,
    timeout: float = TIMEOUT,
    precision: bool = False,
) -> Proof:
    """Proves on real processes, with a proxy model of the family, that a plan trains the same.

    Args:
        model, plan: as for `planc.model.load.load` and `planc.syntax.plan_files.read`.
        sink: receives the findings: those of the compiler, and PL520 (the numbers differ), PL521 (a
            rank failed), PL522 (timeout), PL523 (unknown).
        world_size: the number of ranks of the run to prove; by default `processes`.
        processes: the number of processes on this machine; at most as many as ranks.
        timeout: seconds for all processes, including their start.
        precision: whether the plan's own mixed precision runs; the result is not stored.
    """
    if cache.missing():
        sink.error("PL760", f"nothing can be run: {cache.not_installed()}", help=cache.INSTALL)
        return Proof(verdict="unknown")
    world_size = world_size or processes
    with fork_server() as server:  # imports torch during the compilation
        files = compiler.read(plan, sink)
        if isinstance(files, LoweredFile):
            message = "a lowered plan is for one model and cannot be applied to a proxy model"
            report_unknown(sink, message, "pass the .plan file")
            return Proof(verdict="unknown")
        facts = load(model, sink, allow_code=allow_code)
        case = _compile(files, facts, sink, world_size, tuple(settings))
        if case is None:
            return Proof(verdict="unknown")
        if case.lowered.code and not allow_code:
            message = f"{case.lowered.code[0]} is custom code"
            report_unknown(sink, message, "review it, then pass --allow-code")
            return Proof(verdict="unknown")
        if backend := case.lowered.backend:
            report_unknown(sink, backend.UNPROVED, "compare a few training steps with torch's FSDP")
            unproved = _certificate(case, "unknown", backend.UNPROVED)
            return Proof(verdict="unknown", certificate=unproved)
        if precision and not rounds(case.lowered):
            report_unknown(sink, "it has no mixed precision", "leave out --precision")
            return Proof(verdict="unknown")
        case.processes = min(processes, world_size)
        lacking = _add_proxy_model(case, precision=precision)
        if lacking:
            report_unknown(sink, lacking.reason, origins=lacking.origins)
            unproved = _certificate(case, "unknown", lacking.reason)
            return Proof(verdict="unknown", certificate=unproved)
        return _run(case, server, sink, timeout)


def _compile(
    files: Files | None, facts: Facts | None, sink: Sink, world: int, given: tuple[str, ...]
) -> _Case | None:
    """The plan compiled for the original model, or None after findings.

    Errors of the checks do not stop the proof, which tests whether they are right.
    """
    checks = Sink()
    done = compiler.compile(files, facts, sink, world_size=world, settings=given, checks=checks)
    if done.facts is None or done.lowered is None:
        return None
    return _Case(
        facts=done.facts,
        lowered=done.lowered,
        compiled=done,
        processes=world,
        check_codes=_codes(checks),
    )


def _codes(checks: Sink) -> tuple[str, ...]:
    return tuple(sorted({d.code for d in checks if d.severity == "error"}))


def _add_proxy_model(case: _Case, *, precision: bool) -> Unrepresented | None:
    """Adds the plan for the proxy model to the case; returns the reason if there is none."""
    assert case.compiled.plan is not None
    axes, checks = small_sizes(case.compiled.plan.mesh.axes, case.processes), Sink()
    axes = with_experts(axes, case.compiled.plan.mesh)
    small = small_case(case.compiled, axes, checks=checks)
    if isinstance(small, Unrepresented):
        return small
    assert small.compiled.lowered is not None
    case.run = trial_part(small.compiled.lowered, precision=precision)
    case.small = small
    for name in separate_sections(small.compiled.lowered, precision=precision):
        case.separate[name] = trial_part(small.compiled.lowered, section=name)
    case.precision = precision
    case.small_check_codes = _codes(checks)
    return None


def _run(case: _Case, server: ForkServer, sink: Sink, timeout: float) -> Proof:
    assert case.run is not None
    comparison = server.compare(
        case.config, case.run, timeout=timeout, code=case.facts.code, precision=case.precision
    )
    for name, part in case.separate.items():
        if isinstance(comparison, Comparison) and comparison.same:
            with fork_server() as another:
                other = another.compare(case.config, part, timeout=timeout, code=case.facts.code)
            comparison = (
                other if isinstance(other, TrialFailure) else comparison.with_section(name, other)
            )
    findings = Sink()
    verdict, reason, places = _judge(case, comparison, findings)
    chooses = isinstance(comparison, Comparison) and comparison.chooses
    doubt = _CHOOSES if chooses and verdict == "refuted" else _doubt(case, verdict)
    if doubt:
        verdict, reason = "unknown", doubt
        report_unknown(sink, doubt)
    else:
        sink.add(*findings)
    compared = None if isinstance(comparison, TrialFailure) else comparison
    certificate = _certificate(case, verdict, reason, compared, places)
    kept = store.keepable(case.facts, case.lowered) and not case.precision
    if verdict != "unknown" and kept:
        identity = store.identity(case.facts)
        key = store.key_of(certificate["lowered"], identity, case.lowered.packages)
        store.keep(certificate, key)
        _remember(case, certificate, findings)
    return Proof(verdict=verdict, certificate=certificate)


def _judge(
    case: _Case, compared: Comparison | TrialFailure, findings: Sink
) -> tuple[str, str | None, tuple[str, ...]]:
    """The verdict on a run, its reason, and the places of the plan that a refutation names."""
    if isinstance(compared, TrialFailure):
        return *report_failure(compared, case.plan, findings), ()
    if compared.same:
        if not case.precision and report_real_size(case.compiled, findings).verdict == "refuted":
            return "refuted", next(d.message for d in findings), ()
        return "verified", None, ()
    if wrong := [name for name in case.separate if not compared.within_limit(name)]:
        report = _REPORT_WRONG.find(wrong[0])
        assert report is not None, f"{wrong[0]} does not report its simulation"
        return "refuted", report(compared.errors[wrong[0]], case.compiled.plan, findings), ()
    assert case.run is not None
    return "refuted", *report_difference(compared, case.plan, case.run, findings)


def _remember(case: _Case, certificate: store.Certificate, findings: Sink) -> None:
    """Stores the verdict for `planc.apply`, which finds it for all dtypes of the weights; the first
    error is the reason for `refuted`.
    """
    verified = certificate["verdict"] == "verified"
    count = certificate["processes"]
    text = f"verified on {count} process{'es' if count != 1 else ''}"
    if not verified:
        text = next((d.short for d in findings), store.summary(certificate).lower())
    level: Level = "verified" if verified else "refuted"
    known = KnownVerdict(level=level, text=text)
    text = plan_files.digest(case.compiled.files)
    verdict_store.remember(case.lowered, case.facts, known, by="processes", plan=text)


def _doubt(case: _Case, verdict: str) -> str | None:
    """Why the proxy model's verdict may not hold for the original: only one fails a check."""
    full, reduced = set(case.check_codes), set(case.small_check_codes)
    real, small = full - reduced, reduced - full
    if verdict == "verified" and real:
        codes = one_of(sorted(real), last="and")
        return f"planc check finds {codes} at the real sizes, and not at the small ones"
    if verdict == "refuted" and small:
        codes = one_of(sorted(small), last="and")
        return f"planc check finds {codes} in the proxy model, and not in the real one"
    return None


def _certificate(
    case: _Case,
    verdict: str,
    reason: str | None,
    compared: Comparison | None = None,
    places: tuple[str, ...] = (),
) -> store.Certificate:
    first, parts = compared.first if compared else None, ("what", "name", "error")
    without = [*left_out(case.lowered, precision=case.precision)]
    if compared and compared.exact:
        without.append(("float32", "the model amplifies its rounding; compared in float64"))
    files = case.compiled.files
    return {
        "format_version": store.FORMAT_VERSION,
        "verdict": verdict,
        "reason": reason,
        "plan": case.lowered.plan,
        "plan_digest": plan_files.digest(files if isinstance(files, tuple) else ()),
        "lowered": digest(case.lowered),
        "model": case.facts.name,
        "family": case.facts.family,
        "world_size": case.lowered.world_size,
        "mesh": _mesh(case.lowered),
        "processes": case.processes,
        "small": None if case.run is None else _small(case, case.run),
        "seeds": list(SEEDS),
        "limits": dict(compared.limits if compared else LIMITS),
        "errors": compared.errors if compared else None,
        "worst": compared.worst if compared else None,
        "first": first and {**{n: first[n] for n in parts}, "places": list(places)},
        "checks": list(case.check_codes),
        "not_reached": list(not_reached(case.lowered, next(iter(case.separate.values()), case.run)))
        if case.run
        else [],
        "left_out": [": ".join(pair) for pair in without],
        "versions": store.versions(case.facts.config),
        "device": compared.device if compared else None,
        "seconds": round(compared.seconds if compared else 0.0, 3),
    }


def _small(case: _Case, run: Lowered) -> dict[str, Any]:
    return {"config": case.config, "mesh": _mesh(run), "lowered": digest(run)}


def _mesh(lowered: Lowered) -> list[dict[str, Any]]:
    return [{"name": a.name, "size": a.size} for a in lowered.axes]
