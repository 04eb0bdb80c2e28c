"""`planc explain`: what a diagnostic code means."""

import argparse
import os
import re
import shutil
import sys

from planc.commands import output
from planc.diagnostics import explain
from planc.diagnostics.color import wants_color


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", metavar="CODE", help="a diagnostic code, such as PL101")


def run(options: argparse.Namespace) -> int:
    pasted = re.fullmatch(r"(?:\w+\[)?(?:PL)?(\d{3})\]?:?", options.code, re.IGNORECASE)
    text = explain.explain(f"PL{pasted[1]}") if pasted else None
    if text is None:
        where = "a finding begins with its code, such as error[PL101]"
        print(f"there is no code {options.code}: {where}", file=sys.stderr)
        return output.FAILED
    width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 0
    print(explain.terminal(text, wants_color(sys.stdout, os.environ), width), end="")
    return output.CLEAN
