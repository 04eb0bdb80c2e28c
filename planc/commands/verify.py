"""`planc verify`: a plan proved on real processes."""

import argparse
import sys

from planc.answers.plan import verify
from planc.commands import output, shared_arguments, terminal
from planc.diagnostics.diagnostic import PlanError, Sink
from planc.proof.verify import Proof
from planc.proof.verify_report import document, table
from planc.simulate import certificate


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.target(parser, required=True)
    parser.add_argument(
        "--processes",
        metavar="N",
        type=shared_arguments.size,
        default=4,
        help="number of processes on this machine (default 4)",
    )
    shared_arguments.timeout(parser, 120.0)
    parser.add_argument(
        "--precision",
        action="store_true",
        help="run the plan's own mixed precision, with a tolerance for rounding",
    )
    parser.add_argument("--certificate", metavar="FILE", help="write the result to FILE")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    with output.waiting(f"training a proxy model on {options.processes} processes"):
        try:
            proof = verify(
                options.model,
                options.plan,
                world_size=options.world_size,
                overrides=options.set,
                processes=options.processes,
                timeout=options.timeout,
                precision=options.precision,
                allow_code=options.allow_code,
            )
        except PlanError as error:
            proof = Proof(verdict="unknown", findings=error.diagnostics)
    sink.add(*proof.findings)
    if options.format == "json":
        print(document(proof.verdict, proof.certificate, sink), end="")
    else:
        output.show(sink, "full", sys.stdout, quiet=True)
        if proof.certificate:
            terminal.show(table(proof.certificate))
    if options.certificate and proof.certificate:
        written = output.write(certificate.dumps(proof.certificate), options.certificate)
        if written != output.CLEAN:
            return written
    return {"verified": output.CLEAN, "refuted": output.FINDINGS}.get(proof.verdict, output.FAILED)
