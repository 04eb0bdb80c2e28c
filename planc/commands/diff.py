"""`planc diff`: two lowered plans compared."""

import argparse
import json
import sys
from dataclasses import replace

from planc import compiler
from planc.commands import output, shared_arguments, terminal
from planc.compiler import Files
from planc.diagnostics.codes import NO_TORCH
from planc.diagnostics.diagnostic import Sink
from planc.diffing import compare, render
from planc.diffing.compare import Delta
from planc.emit import sends
from planc.lowering.lowered_file import LoweredFile
from planc.lowering.step import Step
from planc.model.load import load


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
    sides = []
    merged = Sink()
    plans = {"old": options.old, "new": options.new or options.old}
    if any(
        output.out_of_place(options.model, plan, merged) for plan in dict.fromkeys(plans.values())
    ):
        output.show(merged, "full", sys.stderr)
        return output.FAILED
    files = {plan: compiler.read(plan, merged) for plan in dict.fromkeys(plans.values())}
    for side, plan in plans.items():
        sink = Sink()  # an error in one plan must not hide findings about the other
        sides.append(_compiled(files[plan], side, options, sink))
        merged.add(*sink)
    shared_arguments.whole_batch(options, merged)
    asked = options.batch and options.seq and not options.sends
    estimates = _estimates(sides, options, merged) if asked else {}
    steps = _steps(sides, options, merged) if options.sends else {}
    output.show(merged, "full", sys.stderr, quiet=True)
    old, new = (side.lowered for side in sides)
    if old is None or new is None or merged.failed:
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


def _compiled(
    file: Files | None, side: str, options: argparse.Namespace, sink: Sink
) -> compiler.Compiled:
    """One side, compiled for its model; where torch is missing, and with it all that is known of
    the model, a lowered plan is taken as it is.
    """
    own, found = vars(options), Sink()
    name = own[f"{side}_model"] or options.model
    with output.waiting(f"reading {name}"):
        facts = load(name, found, allow_code=options.allow_code)
    unknown = found.failed and all(d.code in NO_TORCH for d in found if d.severity == "error")
    alone = file if unknown and isinstance(file, LoweredFile) else None
    if alone is None:
        sink.add(*found)
    compiled = compiler.compile(
        file,
        facts,
        sink,
        world_size=own[f"{side}_world_size"] or options.world_size,
        settings=[*options.set, *own[f"{side}_set"]],
    )
    if alone is None:
        return compiled
    note = f"{name} is unknown without torch: {alone.name} was not held against it"
    print(note, file=sys.stderr)
    return replace(compiled, lowered=alone.lowered)


def _print(
    change: Delta, estimates: dict[str, dict[str, float]], steps: dict[str, Step], form: str
) -> None:
    if form == "json":
        also: dict[str, object] = {"estimate": estimates} if estimates else {}
        if steps:
            also["sends"] = {side: sends.document(step)["sends"] for side, step in steps.items()}
        print(json.dumps(render.document(change) | also, indent=2))
        return
    terminal.show(render.render(change))
    lines = (*render.estimates(estimates), *(sends.changes(steps) if steps else ()))
    terminal.show("".join(f"{line}\n" for line in lines))


def _steps(
    sides: list[compiler.Compiled], options: argparse.Namespace, sink: Sink
) -> dict[str, Step]:
    """The bytes that a step sends, before and after; empty where a batch cannot be split."""
    found: dict[str, Step] = {}
    for side, compiled in zip(("old", "new"), sides, strict=True):
        step = shared_arguments.step_of(options, compiled, sink)
        found |= {side: step} if step else {}
    return found if len(found) == len(sides) else {}


def _estimates(
    sides: list[compiler.Compiled], options: argparse.Namespace, sink: Sink
) -> dict[str, dict[str, float]]:
    """The most that a rank holds, the rows of its passes, seconds of a step, and bytes that a rank
    sends in it, on both sides; empty where one has no estimate.
    """
    from planc.tools.estimate.answer import answer_for
    from planc.tools.estimate.timeline import bytes_sent

    found: dict[str, dict[str, float]] = {"memory": {}, "rows": {}, "time": {}, "sent": {}}
    for side, compiled in zip(("old", "new"), sides, strict=True):
        asked = shared_arguments.request(options)
        made = answer_for(compiled, asked, sink)
        if made is None:
            return {}
        step = shared_arguments.step_of(options, compiled, sink)
        found["memory"][side] = made.estimate.fullest.peak
        found["rows"][side] = made.passes[1]
        found["time"][side] = made.estimate.time.seconds
        found["sent"][side] = sum(bytes_sent(step).values()) if step else 0.0
    return found
