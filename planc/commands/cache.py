"""`planc cache`: what is known of models and plans, in a file for planc without torch."""

from __future__ import annotations

import argparse
import sys

from planc.commands import output
from planc.diagnostic import Sink
from planc.model import cache
from planc.proof import pack
from planc.resources import cache_folder

_FILE = "planc-pack.json"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("pack", "unpack", "show"),
        help="write what checks on this machine have cached, read it where torch is not installed, "
        "or say what a file or this machine has",
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help=f"the pack (default {_FILE})")


def run(options: argparse.Namespace) -> int:
    sink, file = Sink(), options.file or _FILE
    if options.action == "pack":
        code = _pack(file, sink)
    elif options.action == "unpack":
        code = _unpack(file, sink)
    else:
        code = _show(options.file, sink)
    output.show(sink, "full", sys.stderr, quiet=True)
    return code or output.exit_code(sink)


def _pack(file: str, sink: Sink) -> int:
    if cache.missing():
        message = f"what is packed must be known at first hand: {cache.not_installed()}"
        sink.error("PL760", message, help=cache.INSTALL)
        return output.CLEAN
    made = pack.gathered()
    if not made.document["entries"]:
        message = f"nothing in {cache_folder()} was found with the installed versions"
        sink.error("PL761", message, help="run `planc check`, whose facts and verdicts are packed")
        return output.CLEAN
    code = output.write(pack.dumps(made), file)
    if code == output.CLEAN and file != "-":
        print(f"packed {file}: {made}")
    return code


def _unpack(file: str, sink: Sink) -> int:
    found = pack.read(file, sink)
    if found is None:
        return output.CLEAN
    try:
        pack.install(found)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        sink.error("PL020", f"cannot write {cache_folder()}: {why}")
        return output.CLEAN
    print(f"unpacked {file}: {found}")
    if not cache.missing():
        print("torch and transformers are installed here, so planc reads no pack", file=sys.stderr)
    return output.CLEAN


def _show(file: str | None, sink: Sink) -> int:
    found = pack.gathered() if file is None else pack.read(file, sink)
    if found:
        print(f"{file or cache.home()}: {found}")
    return output.CLEAN
