"""`planc init`: a first plan for a model."""

import argparse
import sys

from planc.commands import output, shared_arguments
from planc.diagnostic import Sink
from planc.draft.axes import wanted
from planc.draft.init import draft
from planc.model.load import load


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
        sizes = wanted(options.set, sink)
        facts = None if sink.failed else load(options.model, sink, allow_code=options.allow_code)
        drafted = draft(facts, sink, sizes) if facts else None
    if sink.diagnostics:
        output.show(sink, "full", sys.stderr)
    if drafted is None:
        return output.FAILED
    return output.write(drafted.text, options.output)
