"""`planc estimate`: memory and time of a training step."""

import argparse
import json
import sys

from planc.commands import output, shared_arguments, terminal
from planc.diagnostic import Sink
from planc.estimate.advice import advise
from planc.estimate.answer import answer, judge_fit
from planc.estimate.render import document, text


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.target(parser)
    shared_arguments.training_step(parser, required=True)
    parser.add_argument("--explain", action="store_true", help="say how each number comes about")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    compiled = output.compiled(options, sink)
    found = None
    if compiled.lowered and compiled.applied:
        found = answer(*compiled.applied, shared_arguments.request(options), sink)
        if found:
            judge_fit(found, compiled.applied[1], sink)
            advise(found, sink)
    elif compiled.lowered:
        sink.error(
            "PL705", "a lowered plan does not say how its modules are split", help="name the plan"
        )
    output.show(sink, "full", sys.stderr, quiet=True)
    if found and options.format == "json":
        print(json.dumps(document(found), indent=2))
    elif found:
        terminal.show("".join(f"{line}\n" for line in text(found, explain=options.explain)))
    return output.exit_code(sink)
