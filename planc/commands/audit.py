"""`planc audit`: the parallel plans that transformers ships, proved or refuted."""

import argparse
import sys

from planc.commands import output
from planc.diagnostics import FORMATS
from planc.diagnostics.diagnostic import Sink


def arguments(parser: argparse.ArgumentParser) -> None:
    from planc.tools.audit.audit import KINDS

    parser.add_argument("library", choices=["transformers"], help="whose plans")
    parser.add_argument(
        "types", metavar="TYPE", nargs="*", help="model types (default: all with a plan)"
    )
    parser.add_argument(
        "--plan",
        dest="kinds",
        action="append",
        choices=KINDS,
        help="one of the plans of a type; can be repeated (default: all)",
    )
    parser.add_argument(
        "--patch", metavar="FILE", help="write a patch of a checkout of transformers"
    )
    parser.add_argument("--format", choices=FORMATS, default="full", help="of the findings")


def run(options: argparse.Namespace) -> int:
    from planc.model.sources.default_configs import types_with_plans
    from planc.tools.audit.audit import KINDS, audit

    sink, verdicts = Sink(), []
    types = options.types or types_with_plans()
    with output.waiting(f"auditing {len(types)} model types") as update:
        for verdict in audit(types, sink, options.kinds or KINDS):
            verdicts.append(verdict)
            update(len({v.type for v in verdicts}), len(types))
    also = {"audits": [verdict.document() for verdict in verdicts]}
    output.show(sink, options.format, sys.stdout, also=also)
    if options.format == "full":
        for verdict in verdicts:
            print(f"{verdict.type} {verdict.kind}: {verdict.verdict}")
    if options.patch:
        code = output.write("".join(v.patch for v in verdicts), options.patch)
        if code:
            return code
    return output.exit_code(sink)
