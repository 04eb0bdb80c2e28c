"""`planc fmt`: plans in the canonical layout."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace

from planc.commands import output, shared_arguments
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.syntax.formatter.files import FormattedFile, formatted_files
from planc.syntax.formatter.layout import format_plan


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
    parser.add_argument(
        "--explicit",
        metavar="MODEL",
        help="write the layouts that planc infers for MODEL into the plans",
    )
    shared_arguments.common(parser)


def _explicit(options: argparse.Namespace, sink: Sink) -> Iterator[FormattedFile]:
    """The plans with the layouts that are inferred for a model."""
    from planc.compiler import compile_plan
    from planc.emit.explicit import explicit

    for layout in formatted_files(options.files, sink):
        compiled = compile_plan(
            options.explicit,
            layout.name if layout.path else "-",
            sink,
            world_size=options.world_size,
            settings=options.set,
            allow_code=options.allow_code,
        )
        after = None
        if isinstance(compiled.files, tuple) and compiled.plan and compiled.facts:
            text = explicit(compiled.files, compiled.plan, compiled.facts)
            after = format_plan(Source(layout.name, text), sink)
        yield replace(layout, after=None if compiled.lowered is None else after)


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    changed = failed = False
    files = _explicit(options, sink) if options.explicit else formatted_files(options.files, sink)
    for layout in files:
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
    if failed or sink.has_errors:
        return output.FAILED
    return output.FINDINGS if changed and (options.check or options.diff) else output.CLEAN
