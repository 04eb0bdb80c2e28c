"""`planc lsp`: a language server for editors."""

import argparse
import sys
from importlib.util import find_spec

from planc.commands import output
from planc.diagnostic import Sink


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stdio", action="store_true", help="which editors pass; there is no other way"
    )


def run(options: argparse.Namespace) -> int:
    if find_spec("pygls") is None:
        sink = Sink()
        help = "pip install 'planc[lsp]', into the environment of this planc"
        sink.error("PL742", "an editor's server needs pygls, which is not installed", help=help)
        output.show(sink, "full", sys.stderr)
        return output.exit_code(sink)
    from planc.editor.server import serve

    serve()
    return output.CLEAN
