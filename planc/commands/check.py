"""`planc check`: what is wrong with a plan for a model."""

from __future__ import annotations

import argparse
import sys

from planc.commands import output, shared_arguments
from planc.compiler import Compiled
from planc.diagnostic import Sink
from planc.report import FORMATS
from planc.report.json_document import findings
from planc.trial import certificate
from planc.trial.certificate import Certificate


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.target(parser)
    parser.add_argument(
        "--device-memory",
        metavar="SIZE",
        type=shared_arguments.memory_size,
        help="make it an error if a rank needs more, such as 80GiB; activations count with --batch "
        "and --seq",
    )
    shared_arguments.training_step(parser, required=False)
    parser.add_argument("--format", choices=FORMATS, default="full")
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors")
    parser.add_argument(
        "--level",
        choices=("structure", "flow"),
        default="flow",
        help="structure skips the simulated run of a small model (flow)",
    )


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    compiled = output.compiled(options, sink)
    checked, verdict = "structure", None
    if options.level == "flow" and compiled.lowered:
        from planc.proof.layout_flow import flow
        from planc.proof.record import record

        verdict = flow(compiled, sink, strict=options.strict, allow_code=options.allow_code)
        record(compiled, verdict, sink)
        checked += f", {verdict.text}"
    if options.device_memory and compiled.applied and compiled.lowered:
        from planc.estimate.answer import answer, judge_fit

        found = answer(
            *compiled.applied, shared_arguments.request(options, options.device_memory), sink
        )
        if found:
            judge_fit(found, compiled.applied[1], sink)
        checked += ", memory" if options.batch and options.seq else ", memory without activations"
    proof = _proof(compiled, sink)
    also = {
        "flow": verdict.document() if verdict else None,
        "certificate": proof,
        "overruled": findings(sink.overruled),
    }
    output.show(sink, options.format, sys.stdout, also=also)
    if options.format == "full" and compiled.lowered and compiled.plan:
        mesh = " | ".join(f"{a.name} {a.size}" for a in compiled.plan.mesh.axes)
        print(f"{compiled.plan.name} for {compiled.lowered.model} on {mesh}: lowers to ", end="")
        print(f"{compiled.digest[:12]}")
        print(f"checked: {checked}; ", end="")
        print(certificate.summary(proof) if proof else "not checked: real processes")
    return output.exit_code(sink, strict=options.strict)


def _proof(compiled: Compiled, sink: Sink) -> Certificate | None:
    """The result of `planc verify` for this plan, if it was run; a refuted plan is an error."""
    if compiled.facts is None or compiled.lowered is None or compiled.facts.code:
        return None  # a certificate holds for the class of the library, and code can change
    found = certificate.known(compiled.digest, certificate.identity(compiled.facts))
    if found and found["verdict"] == "refuted":
        sink.error("PL520", found["reason"], help="`planc verify` found this; run it again")
    return found
