"""`planc lsp`: a language server for editors."""

import argparse
from importlib.util import find_spec

from planc.commands import output


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stdio", action="store_true", help="which editors pass; there is no other way"
    )


def run(options: argparse.Namespace) -> int:
    if find_spec("pygls") is None:
        help = "pip install 'planc[lsp]', into the environment of this planc"
        needs = "an editor's server needs pygls, which is not installed"
        return output.show_error("PL742", needs, help)
    from planc.tools.editor.server import serve

    serve()
    return output.CLEAN
