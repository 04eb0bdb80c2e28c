"""`planc explain`: what a diagnostic code means."""

import argparse
import os
import sys

from planc.codes import CODES
from planc.commands import output
from planc.report import explain
from planc.report.color import wants_color


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", metavar="CODE", help="a diagnostic code, such as PL101")


def run(options: argparse.Namespace) -> int:
    text = explain.explain(options.code.upper())
    if text is None:
        print(f"there is no code {options.code}; known are {', '.join(CODES)}", file=sys.stderr)
        return output.FAILED
    print(explain.terminal(text, wants_color(sys.stdout, os.environ)), end="")
    return output.CLEAN
