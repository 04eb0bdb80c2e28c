"""`planc hang`: which ranks of a run that hangs wait where, and for whom."""

import argparse
import json
import sys
from pathlib import Path

from planc.commands import output, shared_arguments, terminal
from planc.diagnostics.diagnostic import Sink


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dumps",
        metavar="DUMPS",
        help="the folder that `planc.apply(..., watchdog=300)` wrote, or one with torch's files",
    )
    shared_arguments.target(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    from planc.tools.order import dumps, hang
    from planc.tools.order.findings import known_order

    sink = Sink()
    try:
        dump_by_rank = dumps.read(Path(options.dumps))
    except dumps.DumpError as error:
        return output.show_error(
            "PL617", str(error), "name the folder that the message of a run names"
        )
    abouts = [dump.about for dump in dump_by_rank.values() if dump.about]
    if options.world_size is None and abouts:
        options.world_size = abouts[0]["world_size"]
    compiled = output.compile_options(options, sink)
    if compiled.lowered is not None and not sink.has_errors:
        other = next((a for a in abouts if a["digest"] != compiled.digest), None)
        if other is not None:
            sink.error(
                "PL618",
                f"rank {other['rank']} ran the plan {other['plan']} ({other['digest'][:12]}), and "
                f"this is {compiled.lowered.plan} ({compiled.digest[:12]})",
                help="name the model, the plan and the settings of the run",
            )
    output.show(sink, "full", sys.stderr, quiet=True)
    if compiled.lowered is None or sink.has_errors:
        return output.exit_code(sink)
    with output.waiting("running each pipeline rank"):
        order = known_order(compiled, sink)
    output.show(sink, "full", sys.stderr, quiet=True)
    explained = hang.explain(dump_by_rank, compiled.lowered, order)
    if options.format == "json":
        print(json.dumps(hang.document(explained), indent=2))
    else:
        terminal.show("".join(f"{line}\n" for line in hang.lines(explained)))
    return output.FINDINGS if explained.waits or explained.absent else output.CLEAN
