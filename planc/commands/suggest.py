"""`planc suggest`: the fastest plan that fits."""

import argparse
import json
import shlex
import sys
from pathlib import Path

from planc.commands import output, shared_arguments
from planc.diagnostics.diagnostic import Sink
from planc.model.load import load
from planc.tools.suggest.suggest import Asked, run_best, suggest
from planc.tools.suggest.suggestion_text import document, run_text, text


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.model(parser)
    shared_arguments.plan(parser)
    shared_arguments.common(parser, sized=True)
    shared_arguments.training_step(parser, required=True)
    parser.set_defaults(micro_batches=None)  # searched
    parser.add_argument(
        "--require",
        metavar="CONDITION",
        action="append",
        default=[],
        help="what must hold of axes and options, such as 'tp <= 8'; can be repeated",
    )
    parser.add_argument(
        "--compare",
        metavar="SETTINGS",
        action="append",
        default=[],
        help="settings of a mesh, such as 'tp=2 pp=8': what makes it slower; can be repeated",
    )
    parser.add_argument(
        "--device-memory",
        metavar="SIZE",
        type=shared_arguments.memory_size,
        help="in place of the hardware's",
    )
    parser.add_argument(
        "--budget",
        choices=("auto",),
        help="also choose which calls of blocks the first plans keep in the memory that is free",
    )
    parser.add_argument(
        "--no-run",
        action="store_true",
        help="do not run a rank of the first plans to count what it holds",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    shared_arguments.output(parser, what="the plan ")


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    asked = Asked(
        plan=options.plan,
        world_size=options.world_size,
        request=shared_arguments.request(options, options.device_memory),
        folder=str(Path(options.output or "-").parent),
        micro_batches=options.micro_batches,
        settings=options.set,
        requires=options.require,
        compare=options.compare,
        run=not options.no_run,
        budgets=options.budget is not None,
    )
    with output.waiting(f"searching plans for {options.model}") as progress:
        facts = load(options.model, sink, allow_code=options.allow_code)
        suggestion = suggest(facts, asked, sink, progress) if facts else None
    output.show(sink, "full", sys.stderr, quiet=True)
    if suggestion is None:
        return output.exit_code(sink)
    # a plan on standard output is not mixed with the table
    stream = sys.stderr if options.output in (None, "-") else sys.stdout
    if options.format == "text":  # before a rank is run, which takes as long as the search
        print("\n".join(text(suggestion)), file=stream, flush=True)
    with output.waiting("running a rank"):
        checked = run_best(suggestion, sink)
    if checked is None:
        output.show(sink, "full", sys.stderr, quiet=True)
        return output.exit_code(sink)
    if options.format == "json":
        print(json.dumps(document(checked), indent=2))
        return output.write(checked.plan, options.output) if options.output else output.CLEAN
    command = _command(options, checked.found.best[0].micro_batches)
    lines = *run_text(suggestion, checked), f"its estimate in full: {command}"
    print("", *lines, sep="\n", file=stream)
    return output.write(checked.plan, options.output)


def _command(options: argparse.Namespace, micro_batches: int) -> str:
    """The request that estimates the suggested plan."""
    model, plan = shlex.quote(options.model), shlex.quote(options.output or "-")
    more = [f" --set-hardware {shlex.quote(change)}" for change in options.set_hardware]
    more += [f" --kernels {shlex.quote(options.layer_kernels)}"] if options.layer_kernels else []
    return (
        f"planc estimate {model} {plan} --world-size {options.world_size} --batch {options.batch} "
        f"--seq {options.seq} --micro-batches {micro_batches} "
        f"--hardware {shlex.quote(options.hardware)}{''.join(more)}"
    )
