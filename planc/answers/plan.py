"""Answers questions about a plan: `planc.check`, `lower`, `diff`, `why`, `verify` and `init`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planc.answers import target
from planc.answers.target import Overrides, compile_for
from planc.compiler import Compiled, Files, compile
from planc.diagnostics.codes import NO_TORCH
from planc.diagnostics.diagnostic import PlanError, Sink, one_of
from planc.lowering.lowered_file import LoweredFile
from planc.model import cache
from planc.model.facts import Facts
from planc.model.load import load
from planc.ops.lowered import Lowered
from planc.simulate.time_limit import SECONDS, limit_simulations
from planc.syntax import ast

if TYPE_CHECKING:
    from torch import nn

    from planc.diffing.compare import Delta
    from planc.lowering.step import Step
    from planc.proof.checked import Findings
    from planc.proof.layout_flow import Verdict
    from planc.proof.verify import Proof
    from planc.provenance.answer import Reasons
    from planc.tools.estimate.answer import Request
    from planc.tools.init.init import InitResult
    from planc.tools.order.findings import OrderVerdict
    from planc.tools.order.record import Order


def check(
    model: str | os.PathLike[str] | nn.Module,
    plan: str | os.PathLike[str] | None = None,
    *,
    world_size: int | None = None,
    overrides: Overrides = (),
    allow_code: bool = False,
    level: str = "flow",
    inputs: Mapping[str, Any] | Callable[[int, int], Mapping[str, Any]] | None = None,
    loss: Callable[[Any, Mapping[str, Any]], Any] | None = None,
    time_limit: float = SECONDS,
) -> Findings:
    """Every finding about a plan for a model; empty without findings. `print` shows what
    `planc check` does.

    The verdict is kept, and `apply` finds it for the same code of the model.

    Args:
        model: a folder with `config.json`, a JSON file, a cached hub name, a shipped model's name,
            or a module (on any device, meta too). A module of one's own is proved as it is, on a
            copy, if it is small enough.
        plan: a path, the name of a plan, or `REV:path`; by default the plan of the model's family:
            one of the project's own folders, else a shipped one, else a draft as `init` writes it.
        world_size: the number of ranks.
        overrides: `name=value` for mesh axes and options: a text, several, or a mapping.
        allow_code: whether Python code that `model` or the plan names may be run.
        level: `flow`; `structure` to leave out the simulated run of a shrunken model; or `order`,
            which also runs each rank of a small mesh alone, and looks whether the collectives of
            all of them fit together.
        inputs: what the forward of a module takes, by argument: an example, or a function of a
            number of rows and a seed that makes one; tensors have rows on dim 0. The module is then
            proved as it is, whatever library it is from. A module may say it itself, by a method
            `planc_inputs(rows, seed)`.
        loss: of the module's output and the inputs, a mean over rows; by default the loss that it
            returns, else that of its output. A module may have a method `planc_loss(output,
            inputs)`.
        time_limit: seconds of processor time for each simulated run.

    Raises:
        ValueError: there is no such level, inputs or a loss are for the name of a model, or the
            time limit is not positive.
    """
    from planc.proof.checked import LEVELS, Findings, known_certificate, summary

    if not time_limit > 0:
        raise ValueError(f"time_limit is a positive number of seconds, not {time_limit!r}")
    if level not in LEVELS:
        raise ValueError(f"a level is {one_of(LEVELS)}, not {level!r}")
    if inputs is not None or loss is not None:
        if isinstance(model, str | os.PathLike):
            raise ValueError("inputs and a loss are for a module, and not for a name")
        model = replace(
            target.module_facts(model), user_model=model, inputs_and_loss=(inputs, loss)
        )
    draft = draft_plan if level != "structure" else None
    compiled, sink = compile_for(model, plan, world_size, overrides, allow_code, draft=draft)
    verdict, order = judge(compiled, sink, level, allow_code, time_limit)
    proof = known_certificate(compiled, sink)
    findings = Findings(sink)
    findings.lines = summary(compiled, proof, verdict, f", {order.text}" if order else "")
    return findings


def draft_plan(facts: Facts) -> tuple[ast.File, ...] | None:
    """A draft for a family without a plan; None where nothing can be proved, without torch."""
    from planc.tools.init.init import draft  # which imports the whole proof
    from planc.tools.init.plan_text import parsed_text

    return None if cache.missing() else parsed_text(draft(facts, Sink()).text)


def judge(
    compiled: Compiled, sink: Sink, level: str, code: bool, limit: float, *, strict: bool = False
) -> tuple[Verdict | None, OrderVerdict | None]:
    """The verdicts on a compiled plan of layout flow, which `apply` looks up, and of the order of
    collectives; None for what did not run.

    Args:
        code: whether Python code that the model or the plan names may be run.
        limit: seconds of processor time for each simulated run.
        strict: whether it is an error that nothing decides the plan (PL504).
    """
    from planc.proof.checked import note_untested_versions

    note_untested_versions(sink)
    verdict = None
    if level != "structure" and compiled.lowered is None:
        from planc.proof.split_remedy import explain_splits

        explain_splits(compiled, sink, draft_plan)
    elif level != "structure":
        from planc.proof.in_subprocess import record
        from planc.proof.layout_flow import flow

        with limit_simulations(limit):
            verdict = flow(compiled, sink, strict=strict, allow_code=code, draft=draft_plan)
        record(compiled, verdict, sink)
    if level != "order" or compiled.lowered is None:
        return verdict, None
    from planc.tools.order.findings import order

    return verdict, order(compiled, sink, allow_code=code)


def lower(
    model: str | os.PathLike[str] | nn.Module,
    plan: str | os.PathLike[str] | None = None,
    *,
    world_size: int | None = None,
    overrides: Overrides = (),
    allow_code: bool = False,
) -> Lowered:
    """The lowered plan: what `apply` runs; `.findings` is what the compiler and the structural
    checks say of it. Arguments as for `check`.

    Raises:
        PlanError: the plan has errors.
    """
    return require_lowered(*compile_for(model, plan, world_size, overrides, allow_code))


def require_lowered(compiled: Compiled, sink: Sink) -> Lowered:
    """The lowered plan with its findings; raises PlanError where there is none."""
    if compiled.lowered is None:
        raise PlanError(sink)
    return replace(compiled.lowered, findings=tuple(sink))


def diff(old: Lowered, new: Lowered) -> Delta:
    """The changes from one lowered plan to another; `.same` says whether anything does.

    Raises:
        TypeError: a side is no lowered plan, such as the name of a plan.
    """
    from planc.diffing.compare import compare

    for side in (old, new):
        if not isinstance(side, Lowered):
            kind = type(side).__name__
            raise TypeError(f"diff compares lowered plans, as `planc.lower` gives them, not {kind}")
    return compare(old, new)


def why(
    model: str | os.PathLike[str] | nn.Module,
    plan: str | os.PathLike[str] | None,
    name: str,
    *,
    world_size: int | None = None,
    overrides: Overrides = (),
    allow_code: bool = False,
) -> Reasons:
    """The lines of a plan that decide a module or a parameter, and what a rank holds of it.

    Args:
        name: its torch name, such as `model.layers.0.mlp.up_proj.weight`; the rest as for `check`.

    Raises:
        PlanError: the plan has errors, or the model has no such module.
    """
    from planc.provenance.query import why as find_reasons

    compiled, sink = compile_for(model, plan, world_size, overrides, allow_code)
    reasons = find_reasons(name, compiled, sink)
    if reasons is None:
        raise PlanError(sink)
    return replace(reasons, findings=tuple(sink))


def step_of(
    compiled: Compiled, sink: Sink, batch: int | None, seq: int | None, micro_batches: int | None
) -> Step | None:
    """A step of the lowered plan; None after PL702, a batch that cannot be split."""
    from planc.ir.parameter_owners import owned_modules
    from planc.lowering.backward import Backward
    from planc.lowering.pipeline_collectives import arguments_of
    from planc.lowering.step import Step, require_divisible

    if compiled.lowered is None:
        return None
    plan, facts = compiled.applied or (None, None)
    step = Step(
        lowered=compiled.lowered,
        config=facts.config if facts else {},
        backward=Backward(owned_modules(*compiled.applied) if compiled.applied else ()),
        arguments=arguments_of(compiled.lowered.pipeline, facts) if facts else None,
        batch=batch,
        sequence=seq,
        micro_batches=micro_batches or 1,
    )
    require_divisible(step, plan.mesh if plan else None, sink)
    return None if sink.has_errors else step


def step_order(compiled: Compiled, step: Step, sink: Sink) -> Order | None:
    """The calls of each pipeline rank in a step, in their order; None after
    PL727: one rank alone cannot run the step.
    """
    from planc.tools.measure.count import NotCountedError
    from planc.tools.order.record import of_places

    try:
        return of_places(compiled, step)
    except NotCountedError as error:
        error.report(sink)
        return None


def compile_side(
    files: Files | None,
    model: str,
    sink: Sink,
    *,
    size: int | None,
    settings: Sequence[str],
    code: bool,
) -> tuple[Compiled, bool]:
    """One side of a comparison, and whether its model was loaded: a lowered plan is taken as it is
    where torch is missing, and with it all that is known of the model.
    """
    loading = Sink()
    facts = load(model, loading, allow_code=code)
    unknown = loading.has_errors and all(
        d.code in NO_TORCH for d in loading if d.severity == "error"
    )
    alone = files.lowered if unknown and isinstance(files, LoweredFile) else None
    if alone is None:
        sink.add(*loading)
    result = compile(files, facts, sink, world_size=size, settings=settings)
    return (replace(result, lowered=alone), False) if alone else (result, True)


def step_estimates(
    sides: Mapping[str, Compiled], request: Request, sink: Sink
) -> dict[str, dict[str, float]]:
    """The most that a rank holds, the rows of its passes, seconds of a step, and bytes that a rank
    sends in it, for each side; empty where one has no estimate.
    """
    from planc.tools.estimate.answer import answer_for
    from planc.tools.estimate.timeline import bytes_sent

    numbers: dict[str, dict[str, float]] = {"memory": {}, "rows": {}, "time": {}, "sent": {}}
    batch = request.batch
    for side, compiled in sides.items():
        answer = answer_for(compiled, request, sink)
        if answer is None or batch is None:
            return {}
        step = step_of(compiled, sink, batch.global_batch, batch.sequence, batch.micro_batches)
        numbers["memory"][side] = answer.estimate.fullest.peak
        numbers["rows"][side] = answer.passes[1]
        numbers["time"][side] = answer.estimate.time.seconds
        numbers["sent"][side] = sum(bytes_sent(step).values()) if step else 0.0
    return numbers


def verify(
    model: str | os.PathLike[str],
    plan: str | os.PathLike[str],
    *,
    world_size: int | None = None,
    overrides: Overrides = (),
    processes: int = 4,
    timeout: float = 120.0,
    precision: bool = False,
    allow_code: bool = False,
) -> Proof:
    """Proves a plan on real processes of this machine, with a proxy model of the family.

    Args:
        model, plan: as for `check`, by name: the processes build the model themselves.
        world_size: the number of ranks of the real run; by default `processes`.
        processes: at most as many as ranks.
        timeout: seconds for all of it.
        precision: whether the plan's own mixed precision runs; the result is not stored.

    Returns:
        `.verdict` is `verified`, `refuted` or `unknown`, `.certificate` the document that
        `planc verify --certificate` writes, `.findings` what is wrong.

    Raises:
        PlanError: the plan has errors, so that nothing was run.
        TypeError: the model is a module.
        ValueError: the timeout is not positive.
    """
    from planc.proof.verify import verify as run_processes

    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"verify takes the name of a model, not {type(model).__name__}")
    if timeout <= 0:
        raise ValueError(f"timeout is a positive number of seconds, not {timeout!r}")
    sink, names = Sink(), (os.fspath(model), os.fspath(plan))
    if target.report_wrong_order(*names, sink):
        raise PlanError(sink)
    proof = run_processes(
        *names,
        sink,
        world_size=world_size,
        processes=processes,
        settings=target.settings_of(overrides),
        allow_code=allow_code,
        timeout=timeout,
        precision=precision,
    )
    if proof.certificate is None:
        raise PlanError(sink)
    return replace(proof, findings=tuple(sink))


def init(
    model: str | os.PathLike[str] | nn.Module,
    *,
    overrides: Overrides = (),
    allow_code: bool = False,
) -> InitResult:
    """Drafts a first plan for a model, and proves it as it is written.

    Args:
        model: as for `check`.
        overrides: sizes of the axes `pp`, `cp` and `ep`.
        allow_code: whether Python code that `model` names may be run.

    Returns:
        `.text` is the plan, `.findings` what could not be decided or proved.

    Raises:
        PlanError: the model or an axis is wrong.
    """
    from planc.tools.init.init import draft_text

    sink = Sink()
    facts, settings = target.model_of(model), target.settings_of(overrides)
    result = draft_text(facts, settings, sink, allow_code=allow_code)
    if result is None:
        raise PlanError(sink)
    return replace(result, findings=tuple(sink))
