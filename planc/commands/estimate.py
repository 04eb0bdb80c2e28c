"""`planc estimate`: memory and time of a training step."""

import argparse
import json
import sys

from planc.answers.step import judge_step
from planc.commands import output, shared_arguments, terminal
from planc.diagnostics.diagnostic import Sink
from planc.tools.estimate.answer import document, text


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.target(parser)
    shared_arguments.training_step(parser, required=True)
    parser.add_argument(
        "--expert-imbalance",
        "--imbalance",
        dest="imbalance",
        metavar="FACTOR",
        type=shared_arguments.factor,
        default=1.0,
        help="how many times the mean of tokens the experts of the fullest rank get, such as 2.0",
    )
    parser.add_argument("--explain", action="store_true", help="say how each number comes about")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    compiled = output.compile_options(options, sink)
    answer = judge_step(compiled, shared_arguments.request(options), sink)
    output.show(sink, "full", sys.stderr, quiet=True)
    if answer and options.format == "json":
        print(json.dumps(document(answer), indent=2))
    elif answer:
        terminal.show("".join(f"{line}\n" for line in text(answer, explain=options.explain)))
    unknown = answer is not None and answer.fits is None
    return output.exit_code(sink) or (output.FAILED if unknown else output.CLEAN)
