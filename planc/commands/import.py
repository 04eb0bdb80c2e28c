"""`planc import`: a plan from the configuration of another library."""

import argparse
import sys

from planc.commands import output, shared_arguments
from planc.diagnostics.diagnostic import Sink


def arguments(parser: argparse.ArgumentParser) -> None:
    from planc.tools.importers.peer import NAMES

    parser.add_argument(
        "file", metavar="FILE", help="YAML, TOML, JSON, a script of arguments, or FILE.py:FUNCTION"
    )
    parser.add_argument(
        "--from", dest="peer", choices=NAMES, help="whose file it is (default: recognized)"
    )
    parser.add_argument(
        "--model", help="the model that the plan is for (default: the one that FILE names)"
    )
    shared_arguments.output(parser)


def run(options: argparse.Namespace) -> int:
    from planc.tools.importers.importer import import_plan

    sink = Sink()
    result = import_plan(options.file, sink, peer=options.peer, model=options.model)
    output.show(sink, "full", sys.stderr, quiet=True)
    if result is None:
        return output.exit_code(sink)
    open_, cost = result.count("lost", "unknown"), result.count("cost")
    left_out = f", {cost} left out that change no number" * bool(cost)
    print(
        f"{len(result.fate)} keys of {options.file} ({result.peer.title}): "
        f"{result.count('plan')} in the plan, {result.count('same')} as without them, "
        f"{result.count('left')} not for a plan, {open_} to decide by hand{left_out}",
        file=sys.stderr,
    )
    written = output.write(result.text, options.output)
    return written or (output.FINDINGS if list(sink) else output.CLEAN)
