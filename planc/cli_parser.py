"""The command-line arguments of `planc`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import planc
from planc.report import FORMATS


def _size(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, not {text!r}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, not {text!r}")
    return value


def parser() -> argparse.ArgumentParser:
    """The argument parser; `command` in the parsed namespace is the command's name."""
    result = argparse.ArgumentParser(
        prog="planc", description="A compiler for parallel training plans."
    )
    result.add_argument("--version", action="version", version=f"planc {planc.__version__}")
    commands = result.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND"
    )
    for name, (help, fill) in _COMMANDS.items():
        fill(commands.add_parser(name, help=help))
    return result


def _bytes(text: str) -> float:
    units = {"gib": 2.0**30, "gb": 1e9, "mib": 2.0**20, "mb": 1e6}
    number = text.lower().rstrip("bgim ")
    unit = text.lower()[len(number) :].strip()
    try:
        value = float(number) * units[unit]
    except (KeyError, ValueError):
        value = 0.0
    if not 0 < value < 1e18:
        raise argparse.ArgumentTypeError(f"must be a size such as 80GiB, not {text!r}")
    return value


def _estimated(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--batch", metavar="B", type=_size, required=required, help="rows of a step, all ranks"
    )
    parser.add_argument("--seq", metavar="S", type=_size, required=required, help="tokens of a row")
    parser.add_argument(
        "--micro-batches",
        metavar="M",
        type=_size,
        default=1,
        help="passes that a step accumulates gradients over (default 1)",
    )
    parser.add_argument(
        "--hardware", metavar="NAME", default="h100-8x", help="a profile, or a .toml file"
    )
    parser.add_argument(
        "--stack", metavar="NAME", default="torch", help="a profile, or a .toml file"
    )
    parser.add_argument(
        "--optimizer", choices=("adamw", "adam", "sgd", "momentum"), default="adamw"
    )
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")


def _estimate(parser: argparse.ArgumentParser) -> None:
    _target(parser)
    _estimated(parser, required=True)
    parser.add_argument("--explain", action="store_true", help="say how each number comes about")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def _check(parser: argparse.ArgumentParser) -> None:
    _target(parser)
    parser.add_argument(
        "--device-memory",
        metavar="SIZE",
        type=_bytes,
        help="make it an error if a rank needs more, such as 80GiB; activations count with --batch "
        "and --seq",
    )
    _estimated(parser, required=False)
    parser.add_argument("--format", choices=FORMATS, default="full")
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors")
    parser.add_argument(
        "--level",
        choices=("structure", "flow"),
        default="flow",
        help="structure skips the simulated run of a small model (flow)",
    )


def _lower(parser: argparse.ArgumentParser) -> None:
    _target(parser)
    parser.add_argument("--format", choices=("text", "json", "python"), default="text")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write to FILE instead of standard output"
    )


def _why(parser: argparse.ArgumentParser) -> None:
    _target(parser)
    parser.add_argument(
        "name", metavar="NAME", help="fully qualified name, such as model.layers.0.mlp"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")


def _explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", metavar="CODE", help="a diagnostic code, such as PL101")


def _diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("old", metavar="OLD", help="a plan, as for check, or a lowered JSON file")
    parser.add_argument("new", metavar="NEW", nargs="?", help="default: the same plan as OLD")
    _common(parser)
    for side in ("old", "new"):
        parser.add_argument(f"--{side}-model", metavar="MODEL")
        parser.add_argument(f"--{side}-world-size", metavar="N", type=_size)
        parser.add_argument(f"--{side}-set", metavar="NAME=VALUE", action="append", default=[])
    parser.add_argument("--format", choices=("text", "json"), default="text")


def _fmt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", metavar="PLAN", nargs="+", help="a file, a folder, or `-` for standard input"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; list files that would change"
    )
    parser.add_argument(
        "--diff", action="store_true", help="write nothing; show a diff of the changes"
    )


def _verify(parser: argparse.ArgumentParser) -> None:
    _target(parser)
    parser.add_argument(
        "--processes",
        metavar="N",
        type=_size,
        default=4,
        help="number of processes on this machine (default 4)",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=120.0,
        help="total time limit (default 120)",
    )
    parser.add_argument(
        "--precision",
        action="store_true",
        help="run the plan's own mixed precision, with a tolerance for rounding",
    )
    parser.add_argument("--certificate", metavar="FILE", help="write the result to FILE")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def _init(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    _trust(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write to FILE instead of standard output"
    )


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder with config.json, a .json file, a cached hub name, or package.module:name",
    )


def _target(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    parser.add_argument(
        "plan",
        metavar="PLAN",
        help="a .plan file, `-`, a shipped plan's name, REV:path in git, or a lowered JSON file",
    )
    _common(parser)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world-size", metavar="N", type=_size, help="the number of ranks")
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="set a mesh axis or an option; can be repeated",
    )
    _trust(parser)


def _trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-code",
        action="store_true",
        help="allow running Python code that MODEL or PLAN names",
    )


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "init": ("write a first plan for a model, and prove it", _init),
    "check": ("report what is wrong with a plan for a model", _check),
    "lower": ("print the lowered plan: the torch calls that a plan means", _lower),
    "estimate": ("estimate memory and time of a training step", _estimate),
    "diff": ("compare two lowered plans", _diff),
    "why": ("show which lines decide a module or a parameter", _why),
    "verify": ("prove a plan on real processes, with a small model", _verify),
    "fmt": ("rewrite plans in the canonical layout, comments kept", _fmt),
    "explain": ("explain a diagnostic code", _explain),
}
