"""`planc init`: a first plan for a model."""

import argparse
import sys

from planc.commands import output, shared_arguments
from planc.diagnostic import Sink
from planc.draft.init import drafted


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.model(parser)
    shared_arguments.trust(parser)
    parser.add_argument(
        "--set",
        metavar="AXIS=SIZE",
        action="append",
        default=[],
        help="an axis of the plan: pp, cp or ep",
    )
    shared_arguments.output(parser)


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    with output.waiting(f"drafting and proving a plan for {options.model}"):
        made = drafted(options.model, options.set, sink, allow_code=options.allow_code)
    if sink.diagnostics:
        output.show(sink, "full", sys.stderr)
    if made is None:
        return output.FAILED
    return output.write(made.text, options.output)
