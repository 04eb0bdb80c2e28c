"""`planc launch`: the file that starts a plan on a cluster."""

import argparse
import shlex
import sys
from collections.abc import Iterator

from planc.cluster import job
from planc.cluster.targets import TARGETS
from planc.commands import output, shared_arguments
from planc.compiler import Compiled
from planc.diagnostic import Sink


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.target(parser, required=True)
    parser.add_argument("--to", choices=tuple(TARGETS), required=True, help="what the file is for")
    parser.add_argument(
        "--gpus-per-node",
        metavar="[NAME:]N",
        type=_gpus,
        default=("", 8),
        help="the GPUs of a node, such as 8 or H100:8 (default 8)",
    )
    shared_arguments.weights(parser)
    shared_arguments.output(parser)
    parser.set_defaults(script=[])  # the words after `--`
    parser.usage = f"{parser.prog} MODEL PLAN --to TARGET [options] -- train.py ..."


def _gpus(text: str) -> tuple[str, int]:
    name, _, count = text.rpartition(":")
    return name, shared_arguments.size(count)


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    name, gpus = options.gpus_per_node
    if not options.script:
        sink.error("PL642", "no script to start", help="write it last, after `--`: -- train.py")
    if options.to == "skypilot" and not name:
        help = f"write --gpus-per-node H100:{gpus}"
        sink.error("PL642", "SkyPilot takes the name of a GPU, and none was given", help=help)
    compiled = Compiled() if sink.failed else output.compiled(options, sink)
    text = ""
    if compiled.lowered is not None:
        nodes, per_node = job.nodes_of(compiled.lowered, gpus, sink)
        said = list(_said(options, compiled.lowered.world_size))
        text = TARGETS[options.to](
            job.ClusterJob(
                lowered=compiled.lowered,
                digest=compiled.digest,
                nodes=nodes,
                per_node=per_node,
                gpu=name,
                preflight=("planc", "preflight", *said, *_compared(options, compiled.digest)),
                script=job.command_of(options.script),
                written=shlex.join(["planc", "launch", *said, *_asked(options)]),
            )
        )
    output.show(sink, "full", sys.stderr, quiet=True)
    return (
        output.write(text, options.output) if text and not sink.failed else output.exit_code(sink)
    )


def _said(options: argparse.Namespace, ranks: int) -> Iterator[str]:
    """The plan, as the command line names it."""
    yield from (options.model, options.plan, "--world-size", str(ranks))
    for setting in options.set:
        yield from ("--set", setting)
    if options.allow_code:
        yield "--allow-code"


def _asked(options: argparse.Namespace) -> Iterator[str]:
    """The rest of the command line."""
    gpus = ":".join(str(part) for part in options.gpus_per_node if part)
    yield from ("--to", options.to, "--gpus-per-node", gpus)
    if options.weights:
        yield from ("--weights", options.weights)
    yield from ("--", *options.script)


def _compared(options: argparse.Namespace, digest: str) -> Iterator[str]:
    """What preflight compares besides."""
    yield from ("--digest", digest[:12])
    if options.script[0].endswith(".py"):
        yield from ("--file", options.script[0])
    if options.weights:
        yield from ("--weights", options.weights)
