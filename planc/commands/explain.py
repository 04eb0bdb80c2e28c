"""`planc explain`: what a diagnostic code means."""

import argparse
import os
import shutil
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
        alike = [code for code in CODES if code[:3] == options.code.upper()[:3]] or CODES
        print(f"there is no code {options.code}; known are {', '.join(alike)}", file=sys.stderr)
        return output.FAILED
    width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 0
    print(explain.terminal(text, wants_color(sys.stdout, os.environ), width), end="")
    return output.CLEAN
