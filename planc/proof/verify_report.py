"""Renders a proof for people and for programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from planc.diagnostic import Sink
from planc.report.json_document import document as findings
from planc.trial.certificate import Certificate, number, summary

if TYPE_CHECKING:
    from planc.proof.verify import Proof

_KINDS = {
    "logits": "logits",
    "loss": "loss",
    "gradients": "gradients",
    "norm": "norm of the gradients",
    "parameters": "parameters after two AdamW steps",
}


def table(certificate: Certificate) -> str:
    """The comparison: what was compared, on what, and the errors. Lines end with a newline."""
    lines = [_what(certificate), ""]
    errors = certificate["errors"]
    if errors is not None:
        lines.append(f"{'':<34}{'error':>14}{'limit':>8}")
        for kind, words in _KINDS.items():
            if (limit := certificate["limits"].get(kind)) is None:
                continue
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


def document(proof: Proof, sink: Sink) -> str:
    """The certificate (null if the plan did not compile) and the findings, as JSON."""
    out: dict[str, Any] = {"verdict": proof.verdict, "certificate": proof.certificate}
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
    made = f"{layers} layers of width {width} on {mesh}" if layers and width else f"on {mesh}"
    return f"{text}\nsmall model: {made}, seeds {', '.join(map(str, certificate['seeds']))}"
