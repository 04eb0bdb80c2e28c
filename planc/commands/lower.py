"""`planc lower`: the torch calls that a plan means."""

from __future__ import annotations

import argparse
import sys

from planc.commands import output, shared_arguments
from planc.diagnostic import Sink


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.target(parser)
    parser.add_argument("--format", choices=("text", "json", "python"), default="text")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write to FILE instead of standard output"
    )


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    compiled = output.compiled(options, sink)
    output.show(sink, "full", sys.stderr, quiet=True)
    if compiled.lowered is None:
        return output.exit_code(sink)
    if options.format == "python" and compiled.lowered.pipeline is not None:
        sink.error(
            "PL568",
            "a pipeline cannot be written as Python yet: its schedule is run by planc",
            compiled.lowered.pipeline.origin,
            help="`planc.apply` runs it; or set the axis of its stages to 1",
        )
        output.show(sink, "full", sys.stderr, quiet=True)
        return output.exit_code(sink)
    if options.format == "json":
        from planc.ops.document import dumps

        text = dumps(compiled.lowered)
    elif options.format == "python":
        from planc.emit.python import script

        text = script.render(compiled.lowered, digest=compiled.digest)
    else:
        from planc.emit import text as plain

        text = plain.render(compiled.lowered, digest=compiled.digest)
    return output.write(text, options.output)
