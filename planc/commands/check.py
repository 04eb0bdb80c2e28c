"""`planc check`: what is wrong with plans for models."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from planc.answers.plan import draft_plan, judge
from planc.answers.target import split_models
from planc.commands import output, shared_arguments
from planc.compiler import Compiled
from planc.diagnostics import FORMATS
from planc.diagnostics.codes import CODES
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.json_document import document, findings
from planc.files.project import Project, ProjectError, Target, project
from planc.proof.checked import LEVELS, known_certificate, summary
from planc.simulate.time_limit import SECONDS


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.model(
        parser, nargs="?", otherwise="the targets in pyproject.toml; may be several"
    )
    shared_arguments.plan(parser, nargs="*", otherwise="that of the model's family, else a draft")
    shared_arguments.common(parser)
    parser.add_argument(
        "--device-memory",
        metavar="SIZE",
        type=shared_arguments.memory_size,
        help="make it an error if a rank needs more, such as 80GiB; activations count with --batch "
        "and --seq",
    )
    shared_arguments.training_step(parser, required=False)
    parser.set_defaults(**dict.fromkeys(_ESTIMATE))
    parser.add_argument("--format", choices=FORMATS, default="full")
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors")
    parser.add_argument(
        "--level",
        choices=LEVELS,
        default="flow",
        help="structure skips the simulated run of a proxy model (flow); order also runs each rank "
        "of a small mesh alone, and looks whether the collectives of all fit together",
    )
    parser.add_argument(
        "--time-limit",
        metavar="SECONDS",
        type=shared_arguments.seconds,
        default=SECONDS,
        help="of processor time for each simulated run of a proxy model (default 300)",
    )
    parser.add_argument("--fix", action="store_true", help="correct misspelled names in the plans")
    parser.add_argument("--watch", action="store_true", help="check again when a plan changes")


_ESTIMATE = ("device_memory", "hardware", "stack", "optimizer", "attention")
"""The arguments that ask for an estimate."""


@dataclass(slots=True, kw_only=True)
class _Checked:
    """A target and what was found.

    Args:
        compiled: how far the compiler came.
        sink: the findings that stand, with the severities of the project.
        also: the fields of the JSON document beside the findings.
        lines: what follows the findings in the full format.
    """

    target: Target
    compiled: Compiled
    sink: Sink
    also: dict[str, Any]
    lines: tuple[str, ...]


def run(options: argparse.Namespace) -> int:
    if options.watch:
        from planc.commands import watch

        return watch.repeat(lambda: _run(options), lambda: _target_names(options))
    return _run(options)[0]


def _target_names(options: argparse.Namespace) -> Iterator[str]:
    """The models and plans that are judged, whether or not they are there."""
    try:
        targets = [*_targets(options, project())]
    except ProjectError:
        return
    for target in targets:
        yield from filter(None, (target.model, target.plan))


def _run(options: argparse.Namespace) -> tuple[int, list[Compiled]]:
    """The exit code, and what was compiled."""
    sink = Sink()
    try:
        settings = project()
        if unknown := sorted(settings.severity.keys() - CODES.keys()):
            file = settings.folder / "pyproject.toml"
            raise ProjectError(f"{file}: [tool.planc] names {unknown[0]!r}, which is not a code")
    except ProjectError as error:
        sink.error("PL021", str(error))
        settings = Project()
    targets = list(_targets(options, settings)) if not sink.has_errors else []
    if not targets and not sink.has_errors:
        sink.error(
            "PL023",
            "no model is named, and no pyproject.toml has [[tool.planc.targets]]",
            help="name a MODEL, or list targets as docs/ci.md shows",
        )
    if not targets:
        output.show(sink, options.format, sys.stdout)
        return output.exit_code(sink), []
    checked = []
    for number, target in enumerate(targets, 1):
        of = f"{number}/{len(targets)} " if len(targets) > 1 else ""
        with output.waiting(f"checking {of}{target.text}"):
            checked.append(_check_target(target, options, settings.severity))
        if options.format in ("full", "concise"):
            _print(checked[-1], options.format, alone=len(targets) == 1)
    if options.format not in ("full", "concise"):
        _document(checked, options.format)
    if options.fix:
        from planc.commands import edits

        edits.correct([finding for check_of_target in checked for finding in check_of_target.sink])
    codes = [
        output.exit_code(check_of_target.sink, strict=options.strict) for check_of_target in checked
    ]
    if len(targets) > 1 and options.format == "full":
        clean = codes.count(output.CLEAN)
        print(f"\n{clean} of {len(codes)} targets are clean")
    return max(codes), [check_of_target.compiled for check_of_target in checked]


def _targets(options: argparse.Namespace, settings: Project) -> Iterator[Target]:
    """The models and plans of the command line, else the project's targets."""
    if options.model is None:
        given = {"world_size": options.world_size, "elastic": 0} if options.world_size else {}
        targets = (replace(t, set=(*t.set, *options.set), **given) for t in settings.targets)
        yield from dict.fromkeys(targets)  # those of several world sizes become one
        return
    models, plans = split_models([options.model, *options.plan])
    for model, plan in product(models, plans or (None,)):
        yield Target(model=model, plan=plan, world_size=options.world_size, set=tuple(options.set))


def _check_target(
    target: Target, options: argparse.Namespace, severity: Mapping[str, str]
) -> _Checked:
    sink, level, code = Sink(), options.level, options.allow_code
    draft = draft_plan if level != "structure" else None
    compiled = output.compiled_target(target, sink, code, draft)
    verdict, order = judge(compiled, sink, level, code, options.time_limit, strict=options.strict)
    also = f", {order.text}" if order else ""
    also += _check_estimate(target, compiled, options, sink)
    proof = known_certificate(compiled, sink)
    return _Checked(
        target=target,
        compiled=compiled,
        sink=sink.adjust(severity),
        also={
            "flow": verdict.document() if verdict else None,
            **({"order": order.document()} if order else {}),
            "certificate": proof,
            "overruled": findings(sink.overruled_findings),
        },
        lines=summary(compiled, proof, verdict, also),
    )


def _check_estimate(
    target: Target, compiled: Compiled, options: argparse.Namespace, sink: Sink
) -> str:
    """Judges the step that is asked for, and says what of it was checked."""
    if compiled.lowered is None:
        return ""
    shared_arguments.whole_batch(options, sink)
    if target.elastic and options.batch and options.seq:
        from planc.answers.step import fullest_step

        size, passes = options.batch, options.micro_batches or 1
        size, passes = fullest_step(compiled.lowered, target.elastic, size, passes)
        options = argparse.Namespace(**{**vars(options), "batch": size, "micro_batches": passes})
    if all(vars(options)[name] is None for name in _ESTIMATE):
        if options.batch and options.seq:
            shared_arguments.step_of(options, compiled, sink)
        return ""
    from planc.answers.step import judge_step
    from planc.tools.estimate.memory import GIB

    request = shared_arguments.request(options, options.device_memory)
    answer = judge_step(compiled, request, sink, advice=bool(options.hardware))
    if answer is None:
        return ""
    what = "memory" if request.batch else "memory without activations"
    peak, room = answer.estimate.fullest.peak / GIB, answer.estimate.usable / GIB
    return f", {what} ({peak:.1f} GiB of {room:.1f} usable)"


def _print(checked: _Checked, format: str, *, alone: bool) -> None:
    if not alone:
        print(
            f"\n# planc check {checked.target.text}"
            if format == "full"
            else f"# {checked.target.text}"
        )
    output.show(checked.sink, format, sys.stdout)
    if format == "full":
        from planc.commands import terminal

        terminal.show("".join(f"{line}\n" for line in checked.lines))


def _document(checked: list[_Checked], format: str) -> None:
    """Findings for programs; one JSON document for several targets."""
    if format == "json" and len(checked) > 1:
        runs = [{"target": o.target.text, **document(o.sink), **o.also} for o in checked]
        print(json.dumps({"format_version": 1, "targets": runs}, indent=2))
        return
    also = checked[0].also if len(checked) == 1 else None
    output.show(
        [d for check_of_target in checked for d in check_of_target.sink],
        format,
        sys.stdout,
        also=also,
    )
