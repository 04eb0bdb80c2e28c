"""`planc fmt`: plans in the canonical layout."""

import argparse
import sys

from planc.commands import output
from planc.diagnostic import Sink
from planc.syntax.formatter.files import formatted_files


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", metavar="PLAN", nargs="+", help="a file, a folder, or `-` for standard input"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; list files that would change"
    )
    parser.add_argument(
        "--diff", action="store_true", help="write nothing; show a diff of the changes"
    )


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    changed = failed = False
    for layout in formatted_files(options.files, sink):
        failed |= layout.after is None
        changed |= layout.changes
        if options.diff:
            sys.stdout.write(layout.diff())
        elif options.check:
            print(f"{layout.name} is not in the canonical layout\n" * layout.changes, end="")
        elif layout.path is None:
            sys.stdout.write(layout.after or "")
        elif layout.changes and layout.write(sink):
            print(f"formatted {layout.name}")
    output.show(sink, "full", sys.stderr, quiet=True)
    if failed or sink.failed:
        return output.FAILED
    return output.FINDINGS if changed and (options.check or options.diff) else output.CLEAN
