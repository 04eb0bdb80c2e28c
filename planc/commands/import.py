"""`planc import`: a plan from the configuration of another library."""

import argparse
import sys

from planc.commands import output, shared_arguments
from planc.diagnostic import Sink


def arguments(parser: argparse.ArgumentParser) -> None:
    from planc.importing.peer import NAMES

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
    from planc.importing.importer import imported

    sink = Sink()
    result = imported(options.file, sink, peer=options.peer, model=options.model)
    output.show(sink, "full", sys.stderr, quiet=True)
    if result is None:
        return output.exit_code(sink)
    kinds = [kind for _, kind, _ in result.fate]
    taken = kinds.count("plan")
    print(
        f"{len(kinds)} keys of {options.file} ({result.peer.title}): {taken} in the plan, "
        f"{kinds.count('same')} as without them, {kinds.count('left')} not for a plan, "
        f"{kinds.count('lost') + kinds.count('unknown')} to decide by hand",
        file=sys.stderr,
    )
    return output.write(result.text, options.output)
