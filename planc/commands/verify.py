"""`planc verify`: a plan proved on real processes."""

import argparse
import sys

from planc.commands import output, shared_arguments, terminal
from planc.diagnostics.diagnostic import Sink
from planc.proof.verify import verify
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
    if output.out_of_place(options.model, options.plan, sink):
        output.show(sink, "full", sys.stdout)
        return output.FAILED
    with output.waiting(f"training a small model on {options.processes} processes"):
        found = verify(
            options.model,
            options.plan,
            sink,
            world_size=options.world_size,
            processes=options.processes,
            settings=options.set,
            allow_code=options.allow_code,
            timeout=options.timeout,
            precision=options.precision,
        )
    if options.format == "json":
        print(document(found.verdict, found.certificate, sink), end="")
    else:
        output.show(sink, "full", sys.stdout, quiet=True)
        if found.certificate:
            terminal.show(table(found.certificate))
    if options.certificate and found.certificate:
        written = output.write(certificate.dumps(found.certificate), options.certificate)
        if written != output.CLEAN:
            return written
    return {"verified": output.CLEAN, "refuted": output.FINDINGS}.get(found.verdict, output.FAILED)
