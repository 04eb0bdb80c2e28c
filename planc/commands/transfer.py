"""`planc transfer`: the table by which weights of a training plan reach a serving engine."""

import argparse
import json
import sys

from planc.answers.transfer import split_settings, transfer_of
from planc.commands import output, shared_arguments, terminal
from planc.diagnostics.diagnostic import Sink
from planc.ir.patches import BUCKET


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.model(parser)
    shared_arguments.plan(parser, nargs=None)
    help = "a plan with a serve section, or another training plan"
    parser.add_argument("serve", metavar="SERVE_PLAN", help=help)
    shared_arguments.common(parser, sized=True)
    parser.add_argument(
        "--serve-world-size",
        metavar="N",
        type=shared_arguments.size,
        help="the number of ranks of SERVE_PLAN, if it is a training plan",
    )
    parser.add_argument(
        "--bucket",
        metavar="SIZE",
        type=shared_arguments.memory_size,
        default=BUCKET,
        help="what a rank sends or receives at once (default 256MiB)",
    )
    parser.add_argument("--hardware", metavar="NAME", default="h100-8x", help="a profile of links")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    options.set, settings = split_settings(options.set)
    compiled = output.compile_options(options, sink)
    transfer = transfer_of(
        compiled,
        options.serve,
        sink,
        settings=settings,
        size=options.serve_world_size,
        bucket=int(options.bucket),
        hardware=options.hardware,
    )
    output.show(sink, "full", sys.stderr, quiet=True)
    if transfer and options.format == "json":
        print(json.dumps(transfer.document, indent=1))
    elif transfer:
        terminal.show(f"{transfer}\n")
    return output.exit_code(sink)
