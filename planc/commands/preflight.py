"""`planc preflight`: the nodes of a job checked, under its launcher, before it trains."""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, TextIO

from planc.commands import output, shared_arguments, terminal
from planc.diagnostics.diagnostic import Sink, first_line, one_of
from planc.model.cache import require_torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from planc.compiler import Compiled
    from planc.diagnostics.diagnostic import Diagnostic
    from planc.tools.launch.judge import Needed
    from planc.tools.launch.preflight import Report, Wanted


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

    from planc.runtime.launchers import NEEDED
    from planc.tools.launch.peers import Peers, join
    from planc.tools.launch.preflight import Report, preflight

    if missing := [name for name in NEEDED if name not in os.environ]:
        text = f"{one_of(missing, last='and')} not set: preflight is a rank of the job it checks"
        return output.show_error("PL642", text, "start it as the script, under torchrun or srun")
    options.world_size = _size(options.world_size or (None,), os.environ["WORLD_SIZE"])
    report, began = Report(), time.monotonic()
    show = partial(_show, report, options.format, _for_the_report())

    def report_missing(findings: list[Diagnostic]) -> None:
        report.sink.add(*findings)
        report.seconds = ranks.seconds
        show()

    try:
        ranks: Peers = join(options.timeout, report_missing)
    except RuntimeError as error:
        report.seconds = time.monotonic() - began
        return _without_first(first_line(error), report, show)
    try:
        compiled = partial(output.compile_options, options)
        preflight(ranks, compiled, _wanted_checks(options), report)
    except DistError:  # the watch says why
        ranks.wait()
    return ranks.end(output.exit_code(report.sink), show)


def _without_first(error: str, report: Report, show: Callable[[], None]) -> int:
    """Says that rank 0 never came: rank 1 in the place of its report, the others beside it."""
    rank, at = os.environ["RANK"], f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    text = f"rank 0 does not answer rank {rank} at {at}: {error}"
    help = "look at rank 0, and at the network between the nodes"
    if rank != "1":
        return output.show_error("PL644", text, help)
    report.sink.error("PL644", text, help=help)
    show()
    return output.exit_code(report.sink)


def _show(report: Report, format: str, stream: TextIO) -> None:
    with redirect_stdout(stream):
        if format == "json":
            output.show(report.sink, "json", stream, also=report.document)
        else:
            output.show(report.sink, "full", stream, quiet=True)
            terminal.show("".join(f"{line}\n" for line in report.lines()))
    stream.flush()


def _for_the_report() -> TextIO:
    """Standard output; what a model and libraries write there goes to standard error instead."""
    stream = sys.stdout
    try:
        if stream.fileno() == 1:
            stream = os.fdopen(os.dup(1), "w", encoding=stream.encoding, errors=stream.errors)
            os.dup2(2, 1)
    except OSError:  # no file of the system
        pass
    return stream


def _wanted_checks(options: argparse.Namespace) -> Wanted:
    from planc.tools.launch.preflight import Wanted

    return Wanted(
        files=(*options.file, *filter(None, [options.weights])),
        compare="files" if options.whole else "samples",
        save=options.save,
        digest=options.digest,
        needed=_needed_bytes,
        allow_code=options.allow_code,
    )


def _size(given: tuple[int | None, ...], there: str) -> int | None:
    """The world size of this job, if it is one of those given, else the first."""
    return next((n for n in given if str(n) == there), given[0])


def _needed_bytes(compiled: Compiled) -> Needed:
    """The estimated bytes of memory, and on disk of parameters and optimizer state; none for a
    lowered file.
    """
    from planc.tools.estimate.answer import Request, answer_for
    from planc.tools.launch.judge import Needed

    answer = answer_for(compiled, Request(batch=None), Sink()) if compiled.applied else None
    if answer is None:
        return Needed()
    largest = answer.estimate.fullest.largest
    saved = [i.size for i in largest.items if i.name in ("parameters", "optimizer state")]
    return Needed(memory=int(largest.size), disk=int(sum(saved)))
