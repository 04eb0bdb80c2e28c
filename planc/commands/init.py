"""`planc init`: a first plan for a model."""

import argparse
import sys

from planc.commands import output, shared_arguments
from planc.diagnostics.diagnostic import Sink
from planc.tools.init.init import draft_text


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
    parser.add_argument(
        "--from",
        dest="source",
        choices=["transformers"],
        help="take the splits of transformers' own plan, and prove them",
    )
    shared_arguments.output(parser)


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    with output.waiting(f"drafting and proving a plan for {options.model}"):
        drafted = draft_text(
            options.model,
            options.set,
            sink,
            allow_code=options.allow_code,
            of_transformers=options.source is not None,
        )
    if sink.diagnostics:
        output.show(sink, "full", sys.stderr)
    if drafted is None:
        return output.FAILED
    return output.write(drafted.text, options.output)
