"""`planc launch`: the file that starts a plan on a cluster."""

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from planc.commands import output, shared_arguments
from planc.compiler import Compiled
from planc.diagnostics.diagnostic import PlanError, Sink
from planc.runtime.known_verdict import accept
from planc.simulate.verdict_store import recall
from planc.syntax import plan_files
from planc.tools.launch import job
from planc.tools.launch.targets import TARGETS


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.target(parser, required=True, several=True)
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
    if not re.fullmatch(r"[\w.-]*", name):
        raise argparse.ArgumentTypeError(f"must name a GPU by one word, not {name!r}")
    return name, shared_arguments.size(count)


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    if not "".join(options.script[:1]):
        sink.error("PL642", "no script to start", help="write it last, after `--`: -- train.py")
    if options.plan == "-":
        text = "each rank reads the plan, and standard input is not there"
        sink.error("PL642", text, help="write the plan to a file that the nodes have")
    if options.to == "skypilot" and not options.gpus_per_node[0]:
        help = f"write --gpus-per-node H100:{options.gpus_per_node[1]}"
        sink.error("PL642", "SkyPilot takes the name of a GPU, and none was given", help=help)
    if options.to in ("skypilot", "kubeflow") and len(options.world_size or ()) > 1:
        sink.error(
            "PL642",
            f"a file for {options.to} has one number of nodes, and several world sizes were given",
            help="write one, or a file for torchrun, slurm or ray",
        )
    cluster_job = None if sink.has_errors else _job(options, sink)
    output.show(sink, "full", sys.stderr, quiet=True)
    if cluster_job is None or sink.has_errors:
        return output.exit_code(sink)
    if options.output and _is_another(Path(options.output)):
        text = f"cannot write {options.output}: a file that planc launch did not write is there"
        return output.show_error("PL020", text, "name another, or remove it")
    return output.write(TARGETS[options.to](cluster_job), options.output)


def _is_another(file: Path) -> bool:
    """Whether a file is there that is not a job, such as the script that the job starts."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    except OSError:  # to write it says why
        return False
    return bool(text) and "# planc launch " not in text


def _job(options: argparse.Namespace, sink: Sink) -> job.ClusterJob | None:
    """The job of the largest world size, which continues with the others."""
    name, gpus = options.gpus_per_node
    asked = [{**vars(options), "world_size": n} for n in options.world_size or (None,)]
    compiled_plans = [
        output.compile_options(argparse.Namespace(**compiled), sink) for compiled in asked
    ]
    plans = [compiled.lowered for compiled in compiled_plans if compiled.lowered is not None]
    if len(plans) < len(compiled_plans):
        return None
    most = plans[0].world_size
    nodes, per = zip(*(job.nodes_of(plan, gpus, sink, most=most) for plan in plans), strict=True)
    if options.to != "ray" and not sink.has_errors:
        job.require_range(nodes, per[0], sink)
    known = [_stored_verdict(compiled, sink) for compiled in compiled_plans]
    digests = [compiled.digest for compiled in compiled_plans]
    said = [*_plan_arguments(options, [plan.world_size for plan in plans])]
    return job.ClusterJob(
        lowered=plans[0],
        digest=digests[0],
        nodes=nodes[0],
        per_node=per[0],
        fewer=dict(zip(nodes[1:], digests[1:], strict=True)),
        proof={plan.world_size: text for plan, text in zip(plans, known, strict=True) if text},
        gpu=name,
        preflight=("planc", "preflight", *said, *_comparison_arguments(options, digests)),
        script=job.command_of(options.script),
        written=shlex.join(["planc", "launch", *said, *_job_arguments(options)]),
    )


def _stored_verdict(compiled: Compiled, sink: Sink) -> str:
    """The stored verdict on a plan as text; empty for a lowered file. Reports PL480 for a refuted
    plan, which `planc.apply` would refuse on the nodes.
    """
    if compiled.lowered is None or compiled.facts is None:
        return ""
    known = recall(compiled.lowered, compiled.facts, plan_files.digest(compiled.files))
    try:
        accept(known, None)
    except PlanError as error:
        sink.add(*error.diagnostics)
    return known.text


def _plan_arguments(options: argparse.Namespace, ranks: Sequence[int]) -> Iterator[str]:
    """The plan, as the command line names it."""
    yield from (options.model, options.plan, "--world-size", ",".join(map(str, ranks)))
    for setting in options.set:
        yield from ("--set", setting)
    if options.allow_code:
        yield "--allow-code"


def _job_arguments(options: argparse.Namespace) -> Iterator[str]:
    """The rest of the command line."""
    gpus = ":".join(str(part) for part in options.gpus_per_node if part)
    yield from ("--to", options.to, "--gpus-per-node", gpus)
    if options.weights:
        yield from ("--weights", options.weights)
    yield from ("--", *options.script)


def _comparison_arguments(options: argparse.Namespace, digests: Sequence[str]) -> Iterator[str]:
    """Yields the arguments of preflight for further comparisons: digests, the script, the
    weights.
    """
    yield from ("--digest", ",".join(digest[:12] for digest in digests))
    if script := job.python_file(options.script):
        yield from ("--file", script)
    if options.weights:
        yield from ("--weights", options.weights)
