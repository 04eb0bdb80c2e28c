"""The commands and their exit codes; no logic."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from planc.cli_parser import parser

# Each command imports what it needs, so that `planc --help` and `planc fmt` start quickly.
if TYPE_CHECKING:
    from planc.compiler import Compiled
    from planc.diagnostic import Diagnostic, Sink
    from planc.estimate.answer import Request
    from planc.trial.certificate import Certificate

CLEAN, FINDINGS, FAILED = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `planc`. Returns the exit code: 0 clean, 1 findings, 2 could not run."""
    gc.set_threshold(50_000, 20, 20)  # what is imported and parsed stays until the end
    try:
        options = parser().parse_args(arguments)
        code = _COMMANDS[options.command](options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `planc lower ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLEAN
    except Exception as error:
        if os.environ.get("PLANC_TRACEBACK"):
            raise
        from planc.diagnostic import Sink

        sink = Sink()
        sink.error(
            "PL900",
            f"planc itself failed: {type(error).__name__}: {error}",
            help="this is a bug in planc; run again with PLANC_TRACEBACK=1 and report it",
        )
        _show(sink, "full", sys.stderr)
        return FAILED


def _check(options: argparse.Namespace) -> int:
    from planc.diagnostic import Sink
    from planc.report.json_document import findings
    from planc.trial import certificate

    sink = Sink()
    compiled = _compile(options, sink)
    checked, verdict = "structure", None
    if options.level == "flow" and compiled.lowered:
        from planc.proof.layout_flow import flow
        from planc.proof.record import record

        verdict = flow(compiled, sink, strict=options.strict, allow_code=options.allow_code)
        record(compiled, verdict, sink)
        checked += f", {verdict.text}"
    if options.device_memory and compiled.applied and compiled.lowered:
        from planc.estimate.answer import answer, judge_fit

        found = answer(*compiled.applied, _request(options, options.device_memory), sink)
        if found:
            judge_fit(found, compiled.applied[1], sink)
        checked += ", memory" if options.batch and options.seq else ", memory without activations"
    proof = _proof(compiled, sink)
    also = {
        "flow": verdict.document() if verdict else None,
        "certificate": proof,
        "overruled": findings(sink.overruled),
    }
    _show(sink, options.format, sys.stdout, also=also)
    if options.format == "full" and compiled.lowered and compiled.plan:
        mesh = " | ".join(f"{a.name} {a.size}" for a in compiled.plan.mesh.axes)
        print(f"{compiled.plan.name} for {compiled.lowered.model} on {mesh}: lowers to ", end="")
        print(f"{compiled.digest[:12]}")
        print(f"checked: {checked}; ", end="")
        print(certificate.summary(proof) if proof else "not checked: real processes")
    return _code(sink, strict=options.strict)


def _proof(compiled: Compiled, sink: Sink) -> Certificate | None:
    """The result of `planc verify` for this plan, if it was run; a refuted plan is an error."""
    from planc.trial import certificate

    if compiled.facts is None or compiled.lowered is None or compiled.facts.code:
        return None  # a certificate holds for the class of the library, and code can change
    found = certificate.known(compiled.digest, certificate.identity(compiled.facts))
    if found and found["verdict"] == "refuted":
        sink.error("PL520", found["reason"], help="`planc verify` found this; run it again")
    return found


def _lower(options: argparse.Namespace) -> int:
    from planc.diagnostic import Sink

    sink = Sink()
    compiled = _compile(options, sink)
    _show(sink, "full", sys.stderr, quiet=True)
    if compiled.lowered is None:
        return _code(sink)
    if options.format == "json":
        from planc.ops.document import dumps

        text = dumps(compiled.lowered)
    elif options.format == "python":
        from planc.emit.python import script

        text = script.render(compiled.lowered, digest=compiled.digest)
    else:
        from planc.emit import text as plain

        text = plain.render(compiled.lowered, digest=compiled.digest)
    return _write(text, options.output)


def _estimate(options: argparse.Namespace) -> int:
    from planc.diagnostic import Sink
    from planc.estimate.answer import answer, judge_fit
    from planc.estimate.render import document, text

    sink = Sink()
    compiled = _compile(options, sink)
    found = None
    if compiled.lowered and compiled.applied:
        found = answer(*compiled.applied, _request(options), sink)
        if found:
            judge_fit(found, compiled.applied[1], sink)
    elif compiled.lowered:
        sink.error(
            "PL705", "a lowered plan does not say how its modules are split", help="name the plan"
        )
    _show(sink, "full", sys.stderr, quiet=True)
    if found and options.format == "json":
        print(json.dumps(document(found), indent=2))
    elif found:
        print("\n".join(text(found, explain=options.explain)))
    return _code(sink)


def _request(options: argparse.Namespace, device_memory: float | None = None) -> Request:
    from planc.estimate.answer import Request
    from planc.estimate.from_plan import Batch

    batch = None
    if options.batch and options.seq:
        batch = Batch(
            global_batch=options.batch, sequence=options.seq, micro_batches=options.micro_batches
        )
    return Request(
        batch=batch,
        hardware=options.hardware,
        stack=options.stack,
        optimizer=options.optimizer,
        attention=options.attention,
        device_memory=device_memory,
    )


def _diff(options: argparse.Namespace) -> int:
    from planc import compiler
    from planc.diagnostic import Sink
    from planc.diffing import compare, render
    from planc.model.load import load

    sides = []
    merged, own = Sink(), vars(options)
    plans = {"old": options.old, "new": options.new or options.old}
    files = {plan: compiler.read(plan, merged) for plan in dict.fromkeys(plans.values())}
    for side, plan in plans.items():
        sink = Sink()  # an error in one plan must not hide findings about the other
        compiled = compiler.compile(
            files[plan],
            load(own[f"{side}_model"] or options.model, sink, allow_code=options.allow_code),
            sink,
            world_size=own[f"{side}_world_size"] or options.world_size,
            settings=[*options.set, *own[f"{side}_set"]],
        )
        sides.append(compiled.lowered)
        for diagnostic in sink:
            merged.add(diagnostic)
    _show(merged, "full", sys.stderr, quiet=True)
    old, new = sides
    if old is None or new is None:
        return FAILED
    change = compare.compare(old, new)
    if options.format == "json":
        print(json.dumps(render.document(change), indent=2))
    else:
        print(render.render(change), end="")
    return CLEAN if change.same else FINDINGS


def _verify(options: argparse.Namespace) -> int:
    from planc.diagnostic import Sink
    from planc.proof.verify import verify
    from planc.proof.verify_report import document, table
    from planc.trial import certificate

    sink = Sink()
    found = verify(
        options.model,
        options.plan,
        sink,
        world_size=options.world_size,
        processes=options.processes,
        settings=options.set,
        allow_code=options.allow_code,
        timeout=options.timeout,
        precision=options.precision,
    )
    if options.format == "json":
        print(document(found, sink), end="")
    else:
        _show(sink, "full", sys.stdout, quiet=True)
        if found.certificate:
            print(table(found.certificate), end="")
    if options.certificate and found.certificate:
        written = _write(certificate.dumps(found.certificate), options.certificate)
        if written != CLEAN:
            return written
    return {"verified": CLEAN, "refuted": FINDINGS}.get(found.verdict, FAILED)


def _init(options: argparse.Namespace) -> int:
    from planc.diagnostic import Sink
    from planc.draft.init import draft
    from planc.model.load import load

    sink = Sink()
    facts = load(options.model, sink, allow_code=options.allow_code)
    drafted = draft(facts, sink) if facts else None
    if sink.diagnostics:
        _show(sink, "full", sys.stderr)
    if drafted is None:
        return FAILED
    return _write(drafted.text, options.output)


def _why(options: argparse.Namespace) -> int:
    from planc.diagnostic import Sink
    from planc.provenance import render
    from planc.provenance.query import why
    from planc.report.color import paint, wants_color

    sink = Sink()
    compiled = _compile(options, sink)
    answer = why(options.name, compiled, sink)
    _show(sink, "full", sys.stderr, quiet=True)
    if answer is None or compiled.lowered is None:
        return _code(sink)
    if options.format == "json":
        print(json.dumps(render.document(answer, compiled.lowered), indent=2))
    else:
        color = wants_color(sys.stdout, os.environ)
        print("".join(f"{paint(line, color)}\n" for line in render.lines(answer)), end="")
    return CLEAN


def _fmt(options: argparse.Namespace) -> int:
    from planc.diagnostic import Sink
    from planc.syntax.formatter.files import formatted_files

    sink = Sink()
    changed = failed = False
    for layout in formatted_files(options.files, sink):
        failed |= layout.after is None
        changed |= layout.changes
        if options.diff:
            sys.stdout.write(layout.diff())
        elif options.check:
            print(f"{layout.name} is not in the canonical layout\n" * layout.changes, end="")
        elif layout.path is None:
            sys.stdout.write(layout.after or "")
        elif layout.changes and layout.write(sink):
            print(f"formatted {layout.name}")
    _show(sink, "full", sys.stderr, quiet=True)
    if failed or sink.failed:
        return FAILED
    return FINDINGS if changed and (options.check or options.diff) else CLEAN


def _explain(options: argparse.Namespace) -> int:
    from planc.codes import CODES
    from planc.report import explain
    from planc.report.color import wants_color

    text = explain.explain(options.code.upper())
    if text is None:
        print(f"there is no code {options.code}; known are {', '.join(CODES)}", file=sys.stderr)
        return FAILED
    print(explain.terminal(text, wants_color(sys.stdout, os.environ)), end="")
    return CLEAN


def _compile(options: argparse.Namespace, sink: Sink) -> Compiled:
    from planc.compiler import compile_plan

    return compile_plan(
        options.model,
        options.plan,
        sink,
        world_size=options.world_size,
        settings=options.set,
        allow_code=options.allow_code,
    )


def _show(
    sink: Iterable[Diagnostic],
    format: str,
    stream: object,
    *,
    quiet: bool = False,
    also: Mapping[str, Any] | None = None,
) -> None:
    """Prints the findings; `quiet` leaves out infos and an empty summary.

    `also` has further fields of a JSON document.
    """
    found = [d for d in sink if not (quiet and d.severity == "info")]
    if quiet and not found:
        return
    from planc.report import render, wants_color

    color = wants_color(stream, os.environ)
    text = render(found, format, color=color, width=_width(), also=also)
    print(text, end="" if text.endswith("\n") or not text else "\n", file=stream)  # type: ignore[call-overload]


def _width() -> int:
    import shutil

    return max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))


def _code(sink: Sink, *, strict: bool = False) -> int:
    """The exit code for the findings.

    Args:
        sink: the findings.
        strict: whether warnings without errors give 1.
    """
    from planc.codes import exit_code

    warned = strict and any(d.severity == "warning" for d in sink)
    found = exit_code(d.code for d in sink if d.severity == "error")
    return FINDINGS if warned and found == CLEAN else found


def _write(text: str, output: str | None) -> int:
    """Writes to standard output, or atomically to a file."""
    if output is None or output == "-":
        sys.stdout.write(text)
        return CLEAN
    from pathlib import Path

    from planc import atomic_write
    from planc.diagnostic import Sink

    try:
        atomic_write.write(Path(output), text)
    except OSError as error:
        sink = Sink()
        sink.error("PL020", f"cannot write {output}: {(error.strerror or str(error)).lower()}")
        _show(sink, "full", sys.stderr)
        return FAILED
    return CLEAN


_COMMANDS = {
    "init": _init,
    "check": _check,
    "lower": _lower,
    "estimate": _estimate,
    "diff": _diff,
    "why": _why,
    "verify": _verify,
    "fmt": _fmt,
    "explain": _explain,
}


if __name__ == "__main__":
    sys.exit(main())
