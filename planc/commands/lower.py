"""`planc lower`: the torch calls that a plan means."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planc.commands import output, shared_arguments, terminal
from planc.diagnostics.diagnostic import Sink
from planc.files.project import ProjectError, Target, project
from planc.ops.lowered import Lowered

if TYPE_CHECKING:
    from planc.compiler import Compiled


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments.model(parser, nargs="?", otherwise="with --save or --check, all targets")
    shared_arguments.plan(parser)
    shared_arguments.common(parser)
    parser.add_argument(
        "--format",
        choices=("text", "json", "python", "tp-plan", "transformers", "transformers-class"),
        default="text",
    )
    shared_arguments.output(parser)
    shared_arguments.sends(parser)
    parser.add_argument(
        "--order",
        action="store_true",
        help="run a rank alone, and list the collectives that it calls in a step, in order",
    )
    shared_arguments.batch(parser, required=False)
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument(
        "--save", action="store_true", help="write the lowered plans of the project's targets"
    )
    kept.add_argument(
        "--check", action="store_true", help="compare the targets with what --save wrote"
    )


def run(options: argparse.Namespace) -> int:
    sink = Sink()
    if options.save or options.check:
        return _of_targets(options)
    if options.model is None:
        return output.show_error("PL023", "no model is named", "write planc lower MODEL")
    compiled = output.compile_options(options, sink)
    output.show(sink, "full", sys.stderr, quiet=True)
    if compiled.lowered is None:
        return output.exit_code(sink)
    step = _of_a_step(options, compiled, sink)
    if sink.has_errors:
        output.show(sink, "full", sys.stderr, quiet=True)
        return output.exit_code(sink)
    if options.format in ("tp-plan", "transformers", "transformers-class"):
        return _for_transformers(options, compiled.lowered)
    text = _text(options.format, compiled, *step)
    if options.format == "text" and options.output in (None, "-"):
        terminal.show(text, titled=True)
        return output.CLEAN
    return output.write(text, options.output)


def _for_transformers(options: argparse.Namespace, lowered: Lowered) -> int:
    """Writes what transformers' `tp_plan` or `DistributedConfig` can say of a lowered plan."""
    from planc.emit import distributed_config, tp_plan

    render = {
        "tp-plan": tp_plan.render,
        "transformers": distributed_config.render,
        "transformers-class": distributed_config.render_class,
    }[options.format]
    sink = Sink()
    written = render(lowered, sink)
    output.show(sink, "full", sys.stderr, quiet=True)
    if written is None:
        return output.exit_code(sink)
    lost = options.format != "tp-plan" and any(d.code == "PL767" for d in sink)
    return output.write(written, options.output) or (output.FINDINGS if lost else output.CLEAN)


def _of_a_step(
    options: argparse.Namespace, compiled: Compiled, sink: Sink
) -> tuple[list[str], dict[str, Any]]:
    """The traffic and the collective order of a step, if the options ask for them, as lines and as
    data.
    """
    shown: list[str] = []
    plain: dict[str, Any] = {}
    if not (options.sends or options.order):
        return shown, plain
    shared_arguments.whole_batch(options, sink)
    step = shared_arguments.step_of(options, compiled, sink)
    if step is None:
        return shown, plain
    if options.sends:
        from planc.emit import collectives

        shown += collectives.lines(step)
        plain |= collectives.document(step)
    if options.order:
        from planc.answers.plan import step_order
        from planc.tools.order import show

        with output.waiting(f"running a rank of {options.model}"):
            order = step_order(compiled, step, sink)
        if order is None:
            return shown, plain
        shown += show.lines(order, sized=options.batch is not None)
        plain |= show.document(order)
    return shown, plain


def _text(form: str, compiled: Compiled, shown: list[str], plain: dict[str, Any]) -> str:
    """The lowered plan; as text with what is said of a step after it, as JSON that in its place."""
    assert compiled.lowered is not None
    if form == "json":
        from planc.ops.document import dumps

        return json.dumps(plain, indent=2) + "\n" if plain else dumps(compiled.lowered)
    if form == "python":
        from planc.emit.python import script

        return script.render(compiled.lowered, digest=compiled.digest)
    from planc.emit import text as plain_text

    text = plain_text.render(compiled.lowered, digest=compiled.digest)
    return text + "".join(f"{line}\n" for line in shown)


def _of_targets(options: argparse.Namespace) -> int:
    """Writes or compares the lowered plan of each of the project's targets."""
    try:
        settings = project()
    except ProjectError as error:
        return output.show_error("PL021", str(error))
    has_options = (options.model, options.world_size, options.output) != (None, None, None)
    has_options = has_options or bool(options.set) or options.format != "text"
    names = [target.file_name for target in settings.targets]
    if twice := next((name for name in names if names.count(name) > 1), None):
        return output.show_error("PL021", f"two targets would both have the file {twice}")
    if settings.lowered is None or not settings.targets or has_options:
        why = "--save and --check take no model and no other options" if has_options else None
        return output.show_error(
            "PL023",
            why or "no pyproject.toml names `lowered` and [[tool.planc.targets]]",
            "it takes the targets of the project, and the folder `lowered` for their plans",
        )
    act = _save if options.save else _compare
    return max(
        act(target, settings.lowered / target.file_name, options) for target in settings.targets
    )


def _lower_target(target: Target, options: argparse.Namespace) -> tuple[Lowered | None, int]:
    """The lowered plan of a target, and the exit code of its findings."""
    sink = Sink()
    with output.waiting(f"lowering {target.text}"):
        compiled = output.compiled_target(target, sink, options.allow_code)
    output.show(sink, "full", sys.stderr, quiet=True)
    return compiled.lowered, output.exit_code(sink)


def _save(target: Target, path: Path, options: argparse.Namespace) -> int:
    from planc.ops.document import dumps

    lowered, code = _lower_target(target, options)
    if lowered is None:
        return code
    with contextlib.suppress(OSError):  # writing says so
        path.parent.mkdir(parents=True, exist_ok=True)
    code = output.write(dumps(lowered), str(path))
    print(f"wrote {path}\n" * (code == output.CLEAN), end="")
    return code


def _compare(target: Target, path: Path, options: argparse.Namespace) -> int:
    from planc.diffing import compare, render
    from planc.lowering import lowered_file

    sink = Sink()
    before = lowered_file.read(str(path), sink) if path.exists() else None
    new, code = _lower_target(target, options)
    if before is None:
        if not sink.has_errors:
            sink.error("PL006", f"there is no {path}", help="`planc lower --save` writes it")
        output.show(sink, "full", sys.stderr)
        return output.FAILED
    if new is None:
        return code
    change = compare.compare(before.lowered, new)
    terminal.show(f"# {target.text}\n{render.render(change)}")
    return output.CLEAN if change.same else output.FINDINGS
