"""`planc why`: the lines that decide a module or a parameter."""

import argparse
import json
import sys

from planc.commands import output, shared_arguments, terminal
from planc.diagnostics.diagnostic import Sink
from planc.provenance.answer import document, text
from planc.provenance.query import why


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.target(parser, required=True)
    parser.add_argument(
        "name", metavar="NAME", help="fully qualified name, such as model.layers.0.mlp"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    compiled = output.compile_options(options, sink)
    answer = why(options.name, compiled, sink)
    output.show(sink, "full", sys.stderr, quiet=True)
    if answer is None or compiled.lowered is None:
        return output.exit_code(sink)
    if options.format == "json":
        print(json.dumps(document(answer, compiled.lowered), indent=2))
    else:
        terminal.show(text(answer), titled=True)
    return output.CLEAN
