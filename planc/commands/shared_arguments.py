"""Arguments that several commands take."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planc.compiler import Compiled
    from planc.diagnostics.diagnostic import Sink
    from planc.lowering.step import Step
    from planc.tools.estimate.answer import Request


def size(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, not {text!r}")
    return value


def sizes(text: str) -> tuple[int, ...]:
    """Numbers of ranks, the largest first."""
    return tuple(sorted({size(part) for part in text.split(",")}, reverse=True))


def image_size(text: str) -> tuple[int, int]:
    """Height and width in pixels: `448x448`."""
    sides = [int(part) for part in text.split("x") if part.isdecimal()]
    if len(sides) != 2 or text.count("x") != 1 or min(sides) < 1:
        raise argparse.ArgumentTypeError(f"must be HEIGHTxWIDTH, such as 448x448, not {text!r}")
    return sides[0], sides[1]


def seconds(text: str) -> float:
    value = _number(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, not {text!r}")
    return value


def _number(text: str) -> float:
    """The number that a text is; 0 for any other text."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def timeout(parser: argparse.ArgumentParser, default: float) -> None:
    help = f"total time limit (default {default:g})"
    parser.add_argument("--timeout", metavar="SECONDS", type=seconds, default=default, help=help)


def memory_size(text: str) -> float:
    units = {"gib": 2.0**30, "gb": 1e9, "mib": 2.0**20, "mb": 1e6}
    number = text.lower().rstrip("bgim ")
    unit = text.lower()[len(number) :].strip()
    value = _number(number) * units.get(unit, 0.0)
    if not 0 < value < 1e18:
        raise argparse.ArgumentTypeError(f"must be a size such as 80GiB, not {text!r}")
    return value


def factor(text: str) -> float:
    value = _number(text)
    if not 1 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, not {text!r}")
    return value


def model(
    parser: argparse.ArgumentParser, *, nargs: str | None = None, otherwise: str = ""
) -> None:
    """`otherwise` says what is taken without one."""
    help = "a folder with config.json, a .json file, a cached hub name, or package.module:name"
    also = f"; by default {otherwise}" if otherwise else ""
    parser.add_argument("model", metavar="MODEL", nargs=nargs, help=help + also)


def plan(
    parser: argparse.ArgumentParser,
    *,
    nargs: str | None = "?",
    otherwise: str = "that of the family",
) -> None:
    help = "a .plan file, `-`, a plan's name, REV:path in git, or a lowered JSON file"
    also = f"; by default {otherwise}" if nargs else ""
    parser.add_argument("plan", metavar="PLAN", nargs=nargs, help=help + also)


def target(
    parser: argparse.ArgumentParser, *, required: bool = False, several: bool = False
) -> None:
    """A model, its plan, and how it is run."""
    model(parser)
    plan(parser, nargs=None if required else "?")
    common(parser, several=several)


def common(parser: argparse.ArgumentParser, *, sized: bool = False, several: bool = False) -> None:
    """`sized` makes the number of ranks a must; with `several` it is a tuple."""
    help = "the number of ranks"
    parser.add_argument(
        "--world-size",
        metavar="N[,N...]" if several else "N",
        type=sizes if several else size,
        required=sized,
        help=help + (", or those that the run changes between" if several else ""),
    )
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="set a mesh axis or an option; can be repeated",
    )
    trust(parser)


def trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-code",
        action="store_true",
        help="allow running Python code that MODEL or PLAN names",
    )


def output(parser: argparse.ArgumentParser, *, what: str = "") -> None:
    help = f"write {what}to FILE instead of standard output"
    parser.add_argument("-o", "--output", metavar="FILE", help=help)


def weights(parser: argparse.ArgumentParser) -> None:
    help = "the folder of safetensors, or the checkpoint, that every rank reads"
    parser.add_argument("--weights", metavar="DIR", help=help)


def batch(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--batch", metavar="B", type=size, required=required, help="rows of a step, all ranks"
    )
    parser.add_argument("--seq", metavar="S", type=size, required=required, help="tokens of a row")
    parser.add_argument(
        "--micro-batches",
        metavar="M",
        type=size,
        default=1,
        help="passes that a step accumulates gradients over (default 1)",
    )


def profiles(
    parser: argparse.ArgumentParser, *, hardware: str = "a profile, or a .toml file"
) -> None:
    """`hardware` says what its profile is for."""
    parser.add_argument("--hardware", metavar="NAME", default="h100-8x", help=hardware)
    stack = "a profile, or a .toml file"
    parser.add_argument("--stack", metavar="NAME", default="torch", help=stack)


def training_step(parser: argparse.ArgumentParser, *, required: bool, kernels: bool = True) -> None:
    """`kernels` says whether those of layers can be chosen, which a rank that runs has."""
    batch(parser, required=required)
    profiles(parser)
    parser.add_argument(
        "--set-hardware",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="a field of the hardware's profile, such as network_latency_us=10; can be repeated",
    )
    if kernels:
        help = "of layers: eager, compiled, fused, or a .toml file; by default those of the plan"
        parser.add_argument(
            "--kernels", metavar="NAME", dest="layer_kernels", default="", help=help
        )
    parser.add_argument(
        "--optimizer", choices=("adamw", "adam", "sgd", "momentum"), default="adamw"
    )
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")


def sends(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sends",
        action="store_true",
        help="list the collectives of a step (with bytes by --batch and --seq)",
    )


def whole_batch(options: argparse.Namespace, sink: Sink) -> None:
    """Reports PL750 where a batch has no length, or a length no batch."""
    if (options.batch is None) != (options.seq is None):
        sink.error("PL750", "a step has a batch and a length", help="name --batch and --seq")


def step_of(options: argparse.Namespace, compiled: Compiled, sink: Sink) -> Step | None:
    """The step with the batch that is asked for; None after PL702, one that cannot be split."""
    from planc.answers.plan import step_of

    return step_of(compiled, sink, options.batch, options.seq, options.micro_batches)


def request(options: argparse.Namespace, device_memory: float | None = None) -> Request:
    """The step to estimate, from the arguments of `training_step`."""
    from planc.answers.step import step_request
    from planc.tools.estimate.answer import Request

    given = {name: value for name, value in vars(options).items() if value is not None}
    names = ("hardware", "stack", "layer_kernels", "optimizer", "attention")
    choices = {name: given[name] for name in names if name in given}
    choices["hardware_changes"] = tuple(given.get("set_hardware", ()))
    if "batch" not in given or "seq" not in given:
        return Request(batch=None, device_memory=device_memory, **choices)
    batch: tuple[int, int, int] = options.batch, options.seq, given.get("micro_batches", 1)
    imbalance = given.get("imbalance", 1.0)
    return step_request(batch, imbalance=imbalance, device_memory=device_memory, **choices)
