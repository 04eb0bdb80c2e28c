"""`planc calibrate`: a hardware profile, fitted to a user's own measurements or measured here."""

import argparse
import sys
from pathlib import Path

from planc.commands import output, shared_arguments
from planc.diagnostics.diagnostic import Sink
from planc.files import atomic_write
from planc.tools.estimate.answer import Request
from planc.tools.estimate.profiles import FOLDER, Hardware
from planc.tools.suggest.measurements import fit, read, report, toml


def arguments(parser: argparse.ArgumentParser) -> None:
    measured = parser.add_mutually_exclusive_group(required=True)
    measured.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="CSV: model, plan, world_size, batch, seq, seconds; set, micro_batches, gib, compute",
    )
    measured.add_argument(
        "--cpu",
        action="store_true",
        help="measure this machine's CPU, and gloo between two processes",
    )
    shared_arguments.profiles(parser, hardware="the profile to begin with")
    parser.add_argument(
        "-o", "--output", metavar="FILE.toml", required=True, help="where the profile is written"
    )
    shared_arguments.trust(parser)


def run(options: argparse.Namespace) -> int:
    sink, path = Sink(), Path(options.output)
    if path.resolve().parent == FOLDER.resolve() or path.suffix != ".toml":
        sink.error(
            "PL719",
            f"{path} cannot be the fitted profile",
            help="name a .toml file outside of planc, which ships its own",
        )
    profiled = None if sink.errors else _profile(options, sink)
    if profiled:
        profile, lines = profiled
        try:
            atomic_write.write(path, toml(profile))
        except OSError as error:
            sink.error(
                "PL719", f"{path} cannot be written: {error.strerror}", help="name another file"
            )
        else:
            print("\n".join(lines))
    output.show(sink, "full", sys.stderr, quiet=True)
    return output.exit_code(sink)


def _profile(options: argparse.Namespace, sink: Sink) -> tuple[Hardware, list[str]] | None:
    """The profile and what is said of it; None after errors."""
    name = Path(options.output).stem
    if options.cpu:
        from planc.tools.suggest import measured_cpu

        profile = measured_cpu.profile(name)
        return profile, [
            f"  {n} = {getattr(profile, n):.4g}  {how}" for n, how in profile.sources.items()
        ]
    request = Request(batch=None, hardware=options.hardware, stack=options.stack)
    rows = read(Path(options.file), request, sink, allow_code=options.allow_code)
    if not rows or sink.errors:
        return None
    profile = fit(rows, name)
    return profile, [*report(rows, profile)]
