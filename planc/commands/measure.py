"""`planc measure`: what one rank of a plan holds, counted by running it."""

import argparse
import json
import sys

from planc.commands import output, shared_arguments, terminal
from planc.diagnostic import Sink
from planc.estimate.answer import answer_for
from planc.estimate.measured import measure, plain, text
from planc.measure.count import NotCountedError


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.target(parser)
    shared_arguments.training_step(parser, required=True)
    parser.add_argument("--exact", action="store_true", help="run all layers, not a few")
    parser.add_argument(
        "--stage",
        metavar="PLACE",
        type=int,
        action="append",
        default=[],
        help="a place in the pipeline; by default all; can be repeated",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    compiled = output.compiled(options, sink)
    found = answer_for(compiled, shared_arguments.request(options), sink)
    made = None
    if found and not sink.failed:
        try:
            with output.waiting(f"running a rank of {options.model}"):
                made = measure(compiled, found, exact=options.exact, places=tuple(options.stage))
        except NotCountedError as error:
            error.report(sink)
    output.show(sink, "full", sys.stderr, quiet=True)
    if made and options.format == "json":
        print(json.dumps(plain(made), indent=2))
    elif made:
        terminal.show("".join(f"{line}\n" for line in text(made)))
    if made and not made.counted.fits:
        return output.FINDINGS
    return output.exit_code(sink)
