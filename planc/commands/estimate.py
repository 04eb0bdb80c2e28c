"""`planc estimate`: memory and time of a training step."""

import argparse
import json
import sys

from planc.commands import output, shared_arguments, terminal
from planc.diagnostics.diagnostic import Sink
from planc.tools.estimate.advice import advise
from planc.tools.estimate.answer import answer_for, document, judge_fit, text


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.target(parser)
    shared_arguments.training_step(parser, required=True)
    parser.add_argument(
        "--imbalance",
        metavar="FACTOR",
        type=shared_arguments.factor,
        default=1.0,
        help="how many times the mean of tokens the experts of the fullest rank get, such as 2.0",
    )
    parser.add_argument("--explain", action="store_true", help="say how each number comes about")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    compiled = output.compiled(options, sink)
    found = answer_for(compiled, shared_arguments.request(options), sink)
    if found:
        judge_fit(found, sink)
        advise(found, sink)
    output.show(sink, "full", sys.stderr, quiet=True)
    if found and options.format == "json":
        print(json.dumps(document(found), indent=2))
    elif found:
        terminal.show("".join(f"{line}\n" for line in text(found, explain=options.explain)))
    unknown = found is not None and found.fits is None
    return output.exit_code(sink) or (output.FAILED if unknown else output.CLEAN)
