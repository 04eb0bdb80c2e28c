"""`planc preflight`: the nodes of a job checked, under its launcher, before it trains."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from planc.commands import output, shared_arguments, terminal
from planc.diagnostic import Sink, first_line, one_of
from planc.model.cache import require_torch

if TYPE_CHECKING:
    from planc.cluster.judge import Needed
    from planc.cluster.preflight import Wanted
    from planc.compiler import Compiled

_LOOK = "look at rank 0, and at the network between the nodes"


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.target(parser, required=True, several=True)
    shared_arguments.weights(parser)
    parser.add_argument(
        "--file", action="append", default=[], metavar="FILE", help="another file to compare"
    )
    parser.add_argument("--whole", action="store_true", help="compare all bytes of the weights")
    parser.add_argument("--save", metavar="DIR", default="", help="where the run saves to")
    parser.add_argument(
        "--digest",
        metavar="DIGEST[,DIGEST...]",
        default="",
        help="the plan that the job was written for, on each world size",
    )
    shared_arguments.timeout(parser, 60.0)
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    require_torch("planc preflight")
    from torch.distributed import DistError

    from planc.cluster.peers import Peers, joined
    from planc.cluster.preflight import Report, missed, preflight
    from planc.runtime.launchers import NEEDED

    def show(report: Report) -> None:
        if options.format == "json":
            output.show(report.sink, "json", sys.stdout, also=report.document)
        else:
            output.show(report.sink, "full", sys.stdout, quiet=True)
            terminal.show("".join(f"{line}\n" for line in report.lines()))
        sys.stdout.flush()

    if missing := [name for name in NEEDED if name not in os.environ]:
        text = f"{one_of(missing, last='and')} not set: preflight is a rank of the job it checks"
        return output.refused("PL642", text, "start it as the script, under torchrun or srun")
    options.world_size = _size(options.world_size or (None,), os.environ["WORLD_SIZE"])
    try:
        ranks: Peers = joined(options.timeout, lambda found: show(missed(found, ranks.seconds)))
    except RuntimeError as error:
        at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        text = f"rank 0 does not answer rank {os.environ['RANK']} at {at}: {first_line(error)}"
        return output.refused("PL644", text, _LOOK)
    try:
        report = preflight(ranks, lambda sink: output.compiled(options, sink), _wanted(options))
    except DistError as error:
        text = f"rank {ranks.rank} has lost the store of rank 0: {first_line(error)}"
        return output.refused("PL644", text, _LOOK)
    if ranks.rank == 0:
        show(report)
    return ranks.end(output.exit_code(report.sink))


def _wanted(options: argparse.Namespace) -> Wanted:
    from planc.cluster.preflight import Wanted

    return Wanted(
        files=(*options.file, *filter(None, [options.weights])),
        compare="files" if options.whole else "samples",
        save=options.save,
        digest=options.digest,
        needed=_needed,
        allow_code=options.allow_code,
    )


def _size(given: tuple[int | None, ...], there: str) -> int | None:
    """The world size of this job, if it is one of those given, else the first."""
    return next((n for n in given if str(n) == there), given[0])


def _needed(compiled: Compiled) -> Needed:
    """What the estimate says of parameters, gradients and optimizer state; nothing of a lowered
    file.
    """
    from planc.cluster.judge import Needed
    from planc.estimate.answer import Request, answer_for

    found = answer_for(compiled, Request(batch=None), Sink()) if compiled.applied else None
    if found is None:
        return Needed()
    largest = found.estimate.fullest.largest
    saved = [i.size for i in largest.items if i.name in ("parameters", "optimizer state")]
    return Needed(memory=int(largest.size), disk=int(sum(saved)))
