"""`planc calibrate`: a hardware profile that is fitted to a user's own measurements."""

import argparse
import sys
from pathlib import Path

from planc import atomic_write
from planc.commands import output, shared_arguments
from planc.diagnostic import Sink
from planc.estimate.answer import Request
from planc.estimate.measurements import fitted, read, report, toml
from planc.estimate.profiles import FOLDER


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help="CSV: model, plan, world_size, batch, seq, seconds; set, micro_batches, gib",
    )
    parser.add_argument(
        "--hardware", metavar="NAME", default="h100-8x", help="the profile to begin with"
    )
    parser.add_argument(
        "--stack", metavar="NAME", default="torch", help="a profile, or a .toml file"
    )
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
    request = Request(batch=None, hardware=options.hardware, stack=options.stack)
    rows = read(Path(options.file), request, sink, allow_code=options.allow_code)
    if rows and not sink.errors:
        profile = fitted(rows, path.stem)
        try:
            atomic_write.write(path, toml(profile))
        except OSError as error:
            sink.error(
                "PL719", f"{path} cannot be written: {error.strerror}", help="name another file"
            )
        else:
            print("\n".join(report(rows, profile)))
    output.show(sink, "full", sys.stderr, quiet=True)
    return output.exit_code(sink)
