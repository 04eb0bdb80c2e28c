"""Renders a proof for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.json_document import document as findings
from planc.diagnostics.source import Span
from planc.ir.nodes import Plan
from planc.ops.base import AxisRole
from planc.ops.lowered import Lowered
from planc.proof.responsible_rules import rule_labels, unit_labels
from planc.proxy.stack_frames import of_torch_or_planc
from planc.sections import Hook
from planc.simulate.certificate import Certificate, number, summary
from planc.simulate.launcher import Comparison, TrialFailure

_KINDS = {
    "logits": "logits",
    "loss": "loss",
    "gradients": "gradients",
    "norm": "norm of the gradients",
    "parameters": "parameters after two steps",
}
_TITLE = Hook[str]("proof", "TITLE")


def table(certificate: Certificate) -> str:
    """The comparison: what was compared, on what, and the errors. Lines end with a newline."""
    lines = [_what(certificate), ""]
    errors = certificate["errors"]
    if errors is not None:
        lines.append(f"{'':<34}{'error':>14}{'limit':>8}")
        for kind, limit in certificate["limits"].items():
            words = _KINDS.get(kind) or _TITLE.find(kind) or kind
            at = (certificate["worst"] or {}).get(kind)
            location = f"  {at}" if at and errors[kind] > limit else ""
            lines.append(f"{words:<34}{number(errors[kind]):>14}{number(limit):>8}{location}")
        lines.append("")
    for title, what in (("left out", "left_out"), ("not reached", "not_reached")):
        lines += [f"{title}: {text}" for text in certificate[what]]
    if certificate["checks"]:
        lines.append(f"planc check also reports errors: {', '.join(certificate['checks'])}")
    if certificate["verdict"] == "unknown":
        lines.append(f"Unknown: {certificate['reason']}")
    else:
        lines.append(f"{summary(certificate)}. {certificate['seconds']:.1f} s")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def document(verdict: str, certificate: Certificate | None, sink: Sink) -> str:
    """The certificate (null if the plan did not compile) and the findings, as JSON."""
    out: dict[str, Any] = {"verdict": verdict, "certificate": certificate}
    return f"{json.dumps({**out, **findings(sink)}, indent=2)}\n"


def _what(certificate: Certificate) -> str:
    small = certificate["small"]
    plan, model = certificate["plan"], certificate["model"]
    text = f"{plan} for {model}, lowered {certificate['lowered'][:12]}"
    if small is None:
        return text
    config, mesh = small["config"], " | ".join(f"{a['name']} {a['size']}" for a in small["mesh"])
    layers = next(
        (config[n] for n in ("num_hidden_layers", "n_layer", "n_layers") if n in config), None
    )
    width = next((config[n] for n in ("hidden_size", "n_embd", "d_model") if n in config), None)
    proxy = f"{layers} layers of width {width} on {mesh}" if layers and width else f"on {mesh}"
    return f"{text}\nproxy model: {proxy}, seeds {', '.join(map(str, certificate['seeds']))}"


_WORDS = {
    "logits": "the logits",
    "loss": "the loss",
    "gradients": "a gradient",
    "norm": "the norm of the gradients",
    "parameters": "a parameter after two steps",
}


def report_unknown(
    sink: Sink, reason: str, help: str | None = None, origins: tuple[Span, ...] = ()
) -> None:
    """Reports PL523, at the lines that cannot be proved if there are any."""
    sink.error("PL523", f"this plan cannot be proved: {reason}", *origins, help=help)


def report_difference(
    comparison: Comparison, plan: Plan, lowered: Lowered, sink: Sink
) -> tuple[str, tuple[str, ...]]:
    """Reports PL520; returns its message and the responsible lines."""
    limits = comparison.limits
    beyond = [k for k, limit in limits.items() if not comparison.errors[k] <= limit]
    first = comparison.first
    difference = f"{_WORDS[beyond[0]]} is off by {number(comparison.errors[beyond[0]])}"
    name = ""
    if first is not None:
        name = first["name"] if first["what"] == "output" else first["name"].rpartition(".")[0]
        what = "the output of" if first["what"] == "output" else "the gradient of"
        difference = f"{what} {first['name']} is the first to differ, by {number(first['error'])}"
    message = f"the plan trains another model: {difference}"
    labels = [*rule_labels(name, plan), *unit_labels(name, plan)]
    facts = [
        f"{kind} {number(comparison.errors[kind])}  (limit {number(limits[kind])})"
        for kind in limits
    ]
    if comparison.errors["gradients"] > limits["gradients"]:
        facts.append(f"worst gradient: {comparison.worst['gradients']}")
    styled = lowered.split_axes(AxisRole.TENSOR)
    if styled and not any(r.modules.has(name) for r in plan.tensor):
        facts.append(f"no tensor rule covers {name or 'the model'}")
    sink.error("PL520", message, *labels, facts=facts)
    return message, tuple(dict.fromkeys(label.span.place for label in labels))


def report_failure(failure: TrialFailure, plan: Plan, sink: Sink) -> tuple[str, str]:
    """Reports PL521, PL522 or PL523; returns the verdict and the reason.

    A Python exception while the plan is applied or the parallel model runs refutes the plan,
    because the same model ran in a single process before. A rank ended by a signal leaves it
    unknown.
    """
    if failure.kind == "single":
        reason = f"the proxy model does not train in one process: {failure.message}"
        report_unknown(sink, reason, "planc can prove only models that return a loss for `labels`")
        return "unknown", reason
    detail = list(_frames(failure)) or failure.detail.splitlines()[-4:]
    if failure.kind == "time":
        hint = "ranks that wait for each other never return; --timeout sets a longer limit"
        sink.error("PL522", failure.message, facts=detail, help=hint)
        return "unknown", failure.message
    who = f"rank {failure.rank}" if failure.rank >= 0 else "a rank"
    doing = {"apply": " while the plan was applied", "parallel": " in the parallel model"}
    message = f"{who} failed{doing.get(failure.phase, '')}: {failure.message}"
    name = failure.module
    labels = [*rule_labels(name, plan), *unit_labels(name, plan)] if name else []
    sink.error("PL521", message, *labels, facts=detail)
    refuted = bool(failure.frames) and failure.phase in ("apply", "parallel", "compare")
    return ("refuted" if refuted else "unknown"), message


def _frames(failure: TrialFailure) -> Iterator[str]:
    """Yields the last frame in the model's code and the last of all."""
    outside = [f for f in failure.frames if not of_torch_or_planc(f[0])]
    for path, line, function, code in dict.fromkeys((*outside[-1:], *failure.frames[-1:])):
        yield f"{Path(path).name}:{line}, in {function}: {code}".rstrip(": ")
