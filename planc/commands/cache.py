"""`planc cache`: what is known of models and plans, in a file for planc without torch."""

from __future__ import annotations

import argparse
import sys

from planc.commands import output
from planc.diagnostics.diagnostic import Sink, io_reason
from planc.files.resources import cache_folder
from planc.model import cache
from planc.proof import pack

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
        return _pack(file)
    if options.action == "unpack":
        _unpack(file, sink)
    elif contents := pack.collect_pack() if options.file is None else pack.read(options.file, sink):
        print(f"{options.file or cache.home()}: {contents}")
    output.show(sink, "full", sys.stderr, quiet=True)
    return output.exit_code(sink)


def _pack(file: str) -> int:
    if cache.missing():
        message = f"what is packed must be known at first hand: {cache.not_installed()}"
        return output.show_error("PL760", message, cache.INSTALL)
    collected = pack.collect_pack()
    if not collected.document["entries"]:
        message = f"nothing in {cache_folder()} was found with the installed versions"
        help = "run `planc check`, whose facts and verdicts are packed"
        return output.show_error("PL761", message, help)
    code = output.write(pack.dumps(collected), file)
    if code == output.CLEAN and file != "-":
        print(f"packed {file}: {collected}")
    return code


def _unpack(file: str, sink: Sink) -> None:
    contents = pack.read(file, sink)
    if contents is None:
        return
    try:
        pack.install(contents)
    except OSError as error:
        sink.error("PL020", f"cannot write {cache_folder()}: {io_reason(error)}")
        return
    print(f"unpacked {file}: {contents}")
    if not cache.missing():
        print("torch and transformers are installed here, so planc reads no pack", file=sys.stderr)
