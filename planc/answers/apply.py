"""`planc.apply`: a model parallelized over the ranks of this run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from planc.answers.plan import require_lowered
from planc.answers.target import Overrides, chosen_plan, compile_for, module_facts
from planc.compiler import Compiled
from planc.diagnostics.diagnostic import Diagnostic, PlanError, Sink
from planc.model import cache
from planc.ops.document import digest
from planc.ops.lowered import Lowered
from planc.syntax import ast, plan_files

if TYPE_CHECKING:
    from torch import nn

    from planc.ir.nodes import Plan
    from planc.model.facts import Facts
    from planc.runtime.known_verdict import KnownVerdict, Required
    from planc.runtime.run import Run
    from planc.tools.estimate.expected import ExpectedNumbers

_log = logging.getLogger("planc")


def apply(
    model: nn.Module,
    plan: str | os.PathLike[str] | Lowered | None = None,
    *,
    overrides: Overrides = (),
    world_size: int | None = None,
    device_type: str | None = None,
    allow_code: bool = False,
    require: Required | None = None,
    prove: bool = False,
    compare: int = 2,
    watchdog: float | None = None,
    metrics: bool = False,
) -> Run:
    """Parallelizes a model over the ranks of this run, in place, according to a plan.

    Rank 0 logs the warnings of the checks, and the verdict of `planc check` or `planc verify` on
    this machine. The verdict is stored by the digest of the lowered plan and by the functions that
    the model runs. Nothing is simulated unless asked.

    Args:
        model: a module with parameters on meta, CPU or CUDA that is not parallel yet.
        plan: a path, the name of a plan, a lowered JSON file, or a lowered plan; by default the
            plan of the model's family: one of the project's own folders, else a shipped one, else a
            draft as `init` writes it, which rank 0 writes and proves while the others wait.
        overrides: `name=value` for mesh axes and options: a text, several, or a mapping.
        world_size: the number of ranks; by default that of the process group, else that of
            torchrun's environment, else 1.
        device_type: `cpu` or `cuda`; by default the device of the model.
        allow_code: whether custom styles of the plan (`style NAME = python "..."`) may be imported.
        require: `proved` or `verified`, the least that must be known of the plan; by default it
            must not be known to be refuted, and `nothing` applies even such a plan.
        prove: whether rank 0 proves a plan of which nothing is known, as `planc check` does, in a
            process of its own, where the script has code of its own in a copy of this one; the
            other ranks wait for it, at most nine minutes.
        compare: the number of first forward passes in which ranks compare their inputs, those of
            the tensor axes and those of the innermost data axis; 0 compares neither these nor the
            weights that the ranks have built.
        watchdog: seconds. Where no collective of this rank has moved for so long, a thread writes
            what it waits for into the folder `planc-hang`, or that which the environment variable
            PLANC_HANG_DIR names, for `planc hang`; the run goes on. By default the number in the
            variable PLANC_WATCHDOG, which files of `planc launch` set, else no such thread.
        metrics: whether training steps count what `run.metrics()` says: one sum over all ranks at
            the end of each, and one for each mixture's module in a pass.

    Returns:
        The handle of the run: `.model`, `.mesh`, `.data_rank`, `.data_size`, `.describe()`,
        `.summary()`.

    Raises:
        PlanError: the plan has errors, it is refuted or less is known of it than required, the
            ranks disagree, or torch refused an operation or is not installed. In the first forward
            passes: the ranks have different inputs (PL483), or different weights (PL484).
        TypeError: the model is no module.
        ValueError: there is no such requirement, a plan that is lowered already is to be proved, or
            a watchdog has no time or nothing to read.
    """
    watchdog = _can_be_asked(model, require, prove, plan, watchdog)
    from planc.runtime.executor import apply_lowered
    from planc.runtime.meshes import device_of, no_group_after_an_error
    from planc.runtime.preconditions import announce, require_not_parallel
    from planc.runtime.safeguards.guards import require_unwrapped
    from planc.runtime.uncaught import print_errors_once
    from planc.simulate.verdict_store import recall

    with print_errors_once(), no_group_after_an_error():
        try:
            require_not_parallel(model)
            require_unwrapped(model)
            facts = module_facts(model)
            if not isinstance(plan, Lowered):
                size = world_size or _of_the_run("WORLD_SIZE", 1)
                draft = partial(_draft_of_rank_0, device=device_of(model, device_type))
                compiled, sink = compile_for(facts, plan, size, overrides, allow_code, draft=draft)
                lowered = _lower(compiled, sink, chosen=plan is None)
                prove = prove or plan_files.is_draft(compiled.files)
            else:
                compiled, lowered = None, plan
            known = recall(lowered, facts, plan_files.digest(compiled and compiled.files))
            if prove and compiled is not None and known.level == "unproved":
                known = _proved_by_rank_0(compiled, known, allow_code)
        except Exception as error:
            announce(error, device_of(model, device_type))
            raise
        _warn(lowered.findings, known)
        run = apply_lowered(
            model,
            lowered,
            digest=digest(lowered),
            device_type=device_type,
            allow_code=allow_code,
            known=known,
            require=require,
            compare=compare,
            metrics=metrics,
        )
        return _complete_run(run, compiled, watchdog)


def _can_be_asked(
    model: object, require: Required | None, prove: bool, plan: object, watchdog: float | None
) -> float | None:
    """Checks what is asked; returns the time of the watchdog."""
    cache.require_torch("planc.apply")
    from planc.runtime.known_verdict import known_requirement
    from planc.runtime.launchers import require_known_to_torch

    if not hasattr(model, "named_modules"):
        raise TypeError(f"apply takes an nn.Module, not {type(model).__name__}")
    known_requirement(require)
    if prove and isinstance(plan, Lowered):
        raise ValueError("prove takes the plan by its path or name, not a lowered one")
    require_known_to_torch()
    watchdog = _seconds_of(watchdog)
    if watchdog is not None:
        from planc.runtime.safeguards.watchdog import require_usable

        require_usable(watchdog)
    return watchdog


def _seconds_of(watchdog: float | None) -> float | None:
    """The time of a watchdog, given or set in the environment, where 0 is none."""
    text = os.environ.get("PLANC_WATCHDOG") if watchdog is None else None
    if not text:
        return watchdog
    try:
        return float(text) or None
    except ValueError:
        raise ValueError(f"PLANC_WATCHDOG is a number of seconds, not {text!r}") from None


def _complete_run(run: Run, compiled: Compiled | None, watchdog: float | None) -> Run:
    """The run, watched, with what its summary says of the plan's text and of the overrides."""
    from planc.answers.transfer import planner_of
    from planc.runtime.sends_weights import PLANNERS

    if watchdog is not None:
        from planc.runtime.safeguards.watchdog import Watchdog

        Watchdog(run.lowered, run.digest, watchdog).start()
    if compiled is None or compiled.applied is None:
        return run
    PLANNERS[run.model] = planner_of(compiled)
    if run.steps.meter:
        run.steps.meter.expected = _expected_numbers(run, *compiled.applied)
    text = plan_files.digest(compiled.files) or None
    return replace(run, sets=compiled.settings, plan_digest=text)


def _expected_numbers(run: Run, plan: Plan, facts: Facts) -> ExpectedNumbers:
    """The estimated numbers of this rank."""
    from planc.tools.estimate.expected import ExpectedNumbers

    axis = run.lowered.pipeline.axis if run.lowered.pipeline else None
    config = getattr(run.model, "config", None)
    eager = getattr(config, "_attn_implementation", None) == "eager"
    return ExpectedNumbers(
        plan=plan,
        facts=facts,
        lowered=run.lowered,
        place=run.mesh.get_local_rank(axis) if axis else 0,
        attention="eager" if eager else "sdpa",
    )


def _draft_of_rank_0(facts: Facts, *, device: str) -> tuple[ast.File, ...] | None:
    from planc.tools.init.on_rank_0 import parsed_for_run  # which imports the whole proof

    return parsed_for_run(facts, device)


def _proved_by_rank_0(compiled: Compiled, known: KnownVerdict, allow_code: bool) -> KnownVerdict:
    """On rank 0 the verdict of layout flow, which `apply` shares; elsewhere what is known."""
    from planc.proof.in_subprocess import prove_in_subprocess

    rank = _of_the_run("RANK", 0)
    _log.info("rank 0 proves the plan%s", "" if rank == 0 else f", and rank {rank} waits for it")
    return prove_in_subprocess(compiled, allow_code=allow_code) if rank == 0 else known


def _warn(findings: Iterable[Diagnostic], known: KnownVerdict) -> None:
    """Logs each warning on rank 0, but for those that a proof overrules."""
    from planc.diagnostics import render
    from planc.diagnostics.codes import PRESUMED

    if _of_the_run("RANK", 0) != 0:
        return
    overruled = PRESUMED if known.level in ("proved", "verified") else frozenset()
    for finding in findings:
        if finding.severity == "warning" and finding.code not in overruled:
            _log.warning("%s", render([finding], "concise").rstrip())


def _of_the_run(name: Literal["RANK", "WORLD_SIZE"], alone: int) -> int:
    """A number of the process group, else of torchrun's environment, else of a single process."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        of = {"RANK": distributed.get_rank, "WORLD_SIZE": distributed.get_world_size}
        return int(of[name]())
    return int(os.environ.get(name, alone))


def _lower(compiled: Compiled, sink: Sink, *, chosen: bool) -> Lowered:
    """The lowered plan; rank 0 logs which one was `chosen`. A draft is logged as it is written."""
    if compiled.plan is not None and not compiled.plan.mesh.axes:
        message = f"plan `{compiled.plan.name}` has no mesh: its ranks are those of an engine"
        help = "apply a training plan, and name this one in `run.transfer`"
        sink.error("PL308", message, compiled.plan.origin, help=help)
        raise PlanError(sink)
    lowered = require_lowered(compiled, sink)
    if chosen and not plan_files.is_draft(compiled.files) and _of_the_run("RANK", 0) == 0:
        _log.warning(chosen_plan(compiled))
    return lowered
