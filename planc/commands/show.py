"""`planc show`: a plan as a page or a picture."""

import argparse
import sys

from planc.commands import output, shared_arguments
from planc.compiler import Compiled
from planc.diagnostics.diagnostic import Sink
from planc.ops.phrases import size
from planc.simulate.verdict_store import recall
from planc.tools.estimate import profiles, timeline
from planc.tools.estimate.answer import Answer, answer_for
from planc.tools.show.module_tree import tree
from planc.tools.show.page import Known, render
from planc.tools.show.picture import picture


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.target(parser)
    shared_arguments.training_step(parser, required=False)
    parser.add_argument("--svg", action="store_true", help="write the mesh and the modules as SVG")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="to write; or `-`")


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    shared_arguments.whole_batch(options, sink)
    hardware = profiles.hardware(options.hardware, sink)
    compiled = Compiled() if sink.has_errors else output.compile_options(options, sink)
    findings, asked = tuple(sink), sink if options.batch else Sink()
    answer = None
    if not options.svg:
        answer = answer_for(compiled, shared_arguments.request(options), asked)
    output.show(sink, "full", sys.stderr, quiet=True)
    if sink.has_errors or not (compiled.lowered and compiled.facts and hardware):
        return output.exit_code(sink)
    if options.svg:
        drawn = picture(compiled.lowered, tree(compiled), hardware.ranks_per_node)
        return output.write(drawn, options.output)
    verdict = recall(compiled.lowered, compiled.facts)
    timed = answer is not None and answer.counted
    sent = timed and shared_arguments.step_of(options, compiled, asked)
    known = Known(
        numbers=(
            *(_numbers(answer) if answer else ()),
            ("proof", verdict.level, verdict.text.removeprefix(verdict.level)),
        ),
        findings=findings,
        memory=timeline.moments(answer) if answer else {},
        step=timeline.passes(answer) if answer and timed else {},
        sent=timeline.bytes_sent(sent) if timed and sent else {},
        per_node=hardware.ranks_per_node,
    )
    return output.write(render(compiled, known), options.output)


def _numbers(answer: Answer) -> tuple[tuple[str, str, str], ...]:
    if not answer.counted:
        return ()
    peak, time, fits = answer.estimate.fullest.peak, answer.estimate.time, answer.estimate.fits
    room = f"{'fits' if fits else 'does not fit'} in {size(int(answer.estimate.usable))}"
    pace = f"{time.tokens_per_second:,.0f} tokens/s a rank, MFU {time.mfu:.0%}"
    return ("at most", size(int(peak)), room), ("a step", f"{time.seconds:.3g} s", pace)
