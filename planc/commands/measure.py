"""`planc measure`: what one rank of a plan holds, counted by running it."""

import argparse
import json
import shlex
import sys
from pathlib import Path

from planc.commands import output, shared_arguments, terminal
from planc.diagnostics.diagnostic import Sink
from planc.tools.estimate.memory import GIB
from planc.tools.suggest.measured import MeasuredRanks, measure, plain, text
from planc.tools.suggest.measurements import add


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.target(parser)
    shared_arguments.training_step(parser, required=True, kernels=False)
    parser.add_argument("--exact", action="store_true", help="run all layers, not a few")
    parser.add_argument(
        "--stage",
        metavar="PLACE",
        type=int,
        action="append",
        default=[],
        help="a place in the pipeline; by default all; can be repeated",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="",
        help="run on this machine's device, on memory of its own, and time it; by default on "
        "fake tensors",
    )
    parser.add_argument(
        "--layers",
        type=shared_arguments.size,
        metavar="N",
        help="a model with so many layers, for a device that is smaller than the rank",
    )
    _images(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE.csv",
        help="add a row to a file for `planc calibrate`, with the seconds of compute of --device",
    )


def _images(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--images",
        type=shared_arguments.size,
        metavar="N",
        default=0,
        help="images of each row; by default text alone",
    )
    parser.add_argument(
        "--image-size",
        type=shared_arguments.image_size,
        metavar="HEIGHTxWIDTH",
        default=(),
        help="pixels of an image, where the configuration does not state them",
    )


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    _require_row(options, sink)
    compiled = output.compile_options(options, sink)
    with output.waiting(f"running a rank of {options.model}"):
        measured = measure(
            compiled,
            shared_arguments.request(options),
            sink,
            layers=options.layers,
            device=options.device,
            exact=options.exact,
            places=tuple(options.stage),
            allow_code=options.allow_code,
            images=options.images,
            image_size=options.image_size,
        )
    if measured and options.output:
        if any(rank.missed for rank in measured.ranks):
            message = f"{options.output} takes no row: the device has too little memory"
            sink.error("PL630", message, help="measure a smaller step")
        else:
            add(Path(options.output), _row(options, measured), sink)
    output.show(sink, "full", sys.stderr, quiet=True)
    if measured and options.format == "json":
        print(json.dumps(plain(measured), indent=2))
    elif measured:
        terminal.show("".join(f"{line}\n" for line in text(measured)))
    if measured and not measured.fits and not sink.has_errors:
        return output.FINDINGS
    return output.exit_code(sink)


def _require_row(options: argparse.Namespace, sink: Sink) -> None:
    """Reports PL630 where a row could not say what was measured."""
    if not options.output:
        return
    usual = (options.optimizer, options.attention) == ("adamw", "sdpa")
    for said, wrong in (
        ("a row needs all pipeline ranks: leave --stage off", bool(options.stage)),
        ("a row is of all layers: leave --layers off", bool(options.layers)),
        ("`planc calibrate` takes steps of adamw and sdpa", not usual),
        ("a row names its plan, and standard input has no name", options.plan == "-"),
    ):
        if wrong:
            sink.error("PL630", f"{options.output} takes no row: {said}", help="leave -o off")


def _row(options: argparse.Namespace, measured: MeasuredRanks) -> dict[str, object]:
    return {
        "model": options.model,
        "plan": options.plan or "",
        "world_size": options.world_size or measured.answer.plan.mesh.world_size,
        "batch": options.batch,
        "seq": options.seq,
        "set": shlex.join(options.set),
        "micro_batches": options.micro_batches or 1,
        "gib": f"{measured.counted.fullest.peak / GIB:.4f}",
    } | ({"compute": f"{measured.seconds:.6g}"} if measured.seconds else {})
