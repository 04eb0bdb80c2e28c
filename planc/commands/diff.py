"""`planc diff`: two lowered plans compared."""

import argparse
import json
import sys

from planc import compiler
from planc.answers.plan import compile_side, step_estimates
from planc.answers.target import report_wrong_order
from planc.commands import output, shared_arguments, terminal
from planc.compiler import Compiled, Files
from planc.diagnostics.diagnostic import Sink
from planc.diffing import compare, render
from planc.diffing.compare import Delta
from planc.emit import collectives
from planc.lowering.lowered_file import LoweredFile
from planc.lowering.step import Step


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("old", metavar="OLD", help="a plan, as for check, or a lowered JSON file")
    parser.add_argument("new", metavar="NEW", nargs="?", help="default: the same plan as OLD")
    shared_arguments.common(parser)
    for side in ("old", "new"):
        parser.add_argument(f"--{side}-model", metavar="MODEL")
        parser.add_argument(f"--{side}-world-size", metavar="N", type=shared_arguments.size)
        parser.add_argument(f"--{side}-set", metavar="NAME=VALUE", action="append", default=[])
    shared_arguments.training_step(parser, required=False)
    shared_arguments.sends(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--html", metavar="FILE", help="write both plans side by side as a page")


def run(options: argparse.Namespace) -> int:
    merged = Sink()
    plans = {"old": options.old, "new": options.new or options.old}
    names = dict.fromkeys(plans.values())
    if any(report_wrong_order(options.model, plan, merged) for plan in names):
        output.show(merged, "full", sys.stderr)
        return output.FAILED
    files = {plan: compiler.read(plan, merged) for plan in names}
    sides: dict[str, Compiled] = {}
    for side, plan in plans.items():
        sink = Sink()  # an error in one plan must not hide findings about the other
        sides[side] = _compile_side(files[plan], side, options, sink)
        merged.add(*sink)
    shared_arguments.whole_batch(options, merged)
    request = shared_arguments.request(options)
    asked = request.batch and not options.sends
    estimates = step_estimates(sides, request, merged) if asked else {}
    steps_of_sides = (
        (n, shared_arguments.step_of(options, compiled, merged)) for n, compiled in sides.items()
    )
    steps = {side: step for side, step in steps_of_sides if step} if options.sends else {}
    output.show(merged, "full", sys.stderr, quiet=True)
    old, new = (side.lowered for side in sides.values())
    if old is None or new is None or merged.has_errors:
        return output.FAILED
    change = compare.compare(old, new)
    if options.html:
        from planc.tools.show import changes

        page = changes.render(old, new, tuple(render.estimates(estimates)))
        if output.write(page, options.html) == output.FAILED:
            return output.FAILED
    else:
        _print(change, estimates, steps, options.format)
    return output.CLEAN if change.same else output.FINDINGS


def _compile_side(
    file: Files | None, side: str, options: argparse.Namespace, sink: Sink
) -> Compiled:
    values, code = vars(options), options.allow_code
    name = values[f"{side}_model"] or options.model
    size = values[f"{side}_world_size"] or options.world_size
    with output.waiting(f"reading {name}"):
        settings = [*options.set, *values[f"{side}_set"]]
        compiled, loaded = compile_side(file, name, sink, size=size, settings=settings, code=code)
    if isinstance(file, LoweredFile) and not loaded:
        note = f"{name} is unknown without torch: {file.name} was not held against it"
        print(note, file=sys.stderr)
    return compiled


def _print(
    change: Delta, estimates: dict[str, dict[str, float]], steps: dict[str, Step], form: str
) -> None:
    if form == "json":
        also: dict[str, object] = {"estimate": estimates} if estimates else {}
        if steps:
            also["sends"] = {
                side: collectives.document(step)["sends"] for side, step in steps.items()
            }
        print(json.dumps(render.document(change) | also, indent=2))
        return
    terminal.show(render.render(change))
    lines = (*render.estimates(estimates), *(collectives.changes(steps) if steps else ()))
    terminal.show("".join(f"{line}\n" for line in lines))
