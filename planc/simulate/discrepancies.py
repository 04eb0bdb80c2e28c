"""Compares the ranks of a simulation with a single process, module by module."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from planc.compat.names import missing_name
from planc.diagnostics.diagnostic import PlanError, first_line
from planc.model.facts import below, generic, is_inside
from planc.ops import styles as ir
from planc.ops.lowered import Lowered
from planc.simulate import observed_layouts
from planc.simulate.batches import Batches
from planc.simulate.numerics import FLOOR, relative
from planc.simulate.outcome import (
    LIMIT,
    LOSS_ALONE,
    PARAMETER_LIMIT,
    Discrepancy,
    Outcome,
)
from planc.simulate.program import RankResult, Reference
from planc.simulate.prove import Errors, compare
from planc.simulate.thread_ranks import RankFailure
from planc.simulate.trace import Seen, Trace, raising_line
from planc.simulate.trial_part import separate_limit


@dataclass(slots=True, kw_only=True)
class Runs:
    """The single process and the ranks, pass by pass of the first step."""

    lowered: Lowered
    batches: Batches
    reference: Reference
    results: list[RankResult]
    implicit: list[observed_layouts.Implicit] = field(default_factory=list)

    @property
    def limit(self) -> float:
        """The largest error of outputs and gradients that counts as equal."""
        return separate_limit(self.lowered) or LIMIT

    def views(self) -> Iterator[View]:
        """Yields what the ranks of equal rows computed in a pass, beside the right one."""
        names = [batch.name for batch in self.batches.steps[0]]
        for number, name in enumerate(names):
            for right in self.reference.passes:
                ranks = [r for r in self.results if r.data_rank == right.data_rank]
                ranks = [r for r in ranks if len(r.traces) > number]
                for part in dict.fromkeys(r.part_rank for r in ranks):
                    mine = [r for r in ranks if r.part_rank == part]
                    trace = self._without_towers(mine[0].of_trace(number, right.traces[number]))
                    yield View(name, trace, [r.traces[number] for r in mine])

    def _without_towers(self, right: Trace) -> Trace:
        """The trace of the single process, without towers that each rank runs on images of its
        own.
        """
        divided = self.lowered.divided_encoders
        if not divided:
            return right
        calls = {n: c for n, c in right.calls.items() if not is_inside(n, divided)}
        return Trace(calls=calls, finished=[n for n in right.finished if n in calls])


@dataclass(slots=True)
class View:
    """One pass over a data rank's rows: of the single process (`right`), and of the ranks."""

    name: str
    right: Trace
    mine: list[Trace]

    @property
    def finished_modules(self) -> list[str]:
        """The modules that have ended on every rank, in order."""
        finished = [set(trace.finished) for trace in self.mine]
        return [n for n in self.mine[0].finished if all(n in names for names in finished)]

    def outputs(self, name: str) -> tuple[list[Seen], torch.Tensor] | None:
        """The ranks' outputs of a module and the right one; None if one of them is missing."""
        right = self.right.calls.get(name)
        mine = [t.calls[name].output for t in self.mine if name in t.calls]
        seen = [output for output in mine if output is not None]
        if right is None or right.output is None or len(seen) < len(self.mine):
            return None
        return seen, right.output.tensor


def compare_runs(runs: Runs) -> Outcome:
    errors = [compare(result, runs.reference) for result in runs.results]
    logits, loss = max(e.logits for e in errors), max(e.loss for e in errors)
    gradients = list(_gradients(runs, errors))
    unknown = next((draw for draw in runs.reference.different_draws if draw.wrong is None), None)
    if unknown is not None:
        reason = f"{unknown.problem}{unknown.line and f' ({unknown.line})'}"
        return Outcome(verdict="unknown", reason=reason)
    discrepancies = [*_sizes(runs), *_draws(runs)]
    limit = runs.limit
    if max(logits, loss) > limit:
        whole = Discrepancy(kind="output", subject=_head(runs), error=max(logits, loss))
        wrong = first_wrong_output(runs, limit) or whole
        alone = not wrong.subject and not wrong.detail and _loss_alone(runs, limit)
        discrepancies.append(replace(wrong, detail=LOSS_ALONE) if alone else wrong)
    discrepancies += [p for p in gradients if p.error > limit or p.kind == "missing"]
    norm = max(e.norm for e in errors)
    if not discrepancies:
        discrepancies += _later(errors, norm, limit)
    return Outcome(
        verdict="refuted" if discrepancies else "proved",
        discrepancies=(*discrepancies, *_means(runs), *_unstated_layouts(runs)),
        logits=logits,
        loss=loss,
        gradient=max((p.error for p in gradients), default=0.0),
        norm=norm,
        parameters=max((v for e in errors for v in e.parameters.values()), default=0.0),
        modules=_modules(runs, gradients),
        recomputed=runs.reference.recomputed,
        passes=tuple(p.name for p in runs.batches.steps[0] if p.name),
    )


def _loss_alone(runs: Runs, limit: float) -> bool:
    """Whether the loss of the first pass is wrong, and its logits are right; later passes follow a
    step by wrong gradients.
    """
    logits, losses = [0.0], [0.0]
    for result in runs.results:
        right = runs.reference.passes[result.data_rank]
        losses += map(relative, result.losses[:1], right.losses[:1])
        logits += map(relative, result.logits[:1], result.local_logits(right.logits)[:1])
    return len(logits) > 1 and max(logits) <= limit < max(losses)


def _head(runs: Runs) -> str:
    """The module whose loss is computed in chunks, which hides its logits; empty for none."""
    heads = runs.lowered.loss_heads
    return next((name for modules in heads for name in modules.names()), "")


def _draws(runs: Runs) -> Iterator[Discrepancy]:
    """Yields random numbers that differ from those of the plain model, each place once."""
    for draw in dict.fromkeys(runs.reference.different_draws):
        yield Discrepancy(
            kind="draws",
            subject=draw.module,
            error=float(draw.wrong or 0),
            detail=draw.problem,
            line=draw.line,
        )


def _gradients(runs: Runs, errors: list[Errors]) -> Iterator[Discrepancy]:
    """The error of each gradient, the largest over the ranks."""
    reference = runs.reference.gradients
    floor = FLOOR * max((float(g.abs().max()) for g in reference.values()), default=0.0)
    traces = runs.results[0].traces
    calls = traces[0].calls if traces else {}
    group = [r for r in runs.results if r.data_rank == 0]
    for name, wanted in reference.items():
        call = calls.get(name.rpartition(".")[0])
        line = call.line if call else ""
        mine = [r.gradients[name] for r in group if name in r.gradients]
        if len(mine) < len(group):
            yield Discrepancy(kind="missing", subject=name, error=1.0, line=line)
            continue
        error = max(e.gradients[name] for e in errors)
        kind, detail = "gradient", ""
        if error > LIMIT and all(g.shape == wanted.shape for g in mine):
            total = torch.stack(mine).sum(0)
            summed = len(mine) > 1 and relative(total, wanted, floor) < LIMIT
            kind = "partial" if summed else kind
            detail = "" if summed else _ratio(mine[0], wanted, floor)
        yield Discrepancy(kind=kind, subject=name, error=min(error, 1e9), line=line, detail=detail)
    for name in dict.fromkeys(n for r in runs.results for n in r.gradients if n not in reference):
        detail = "the single process does not train it"
        yield Discrepancy(kind="gradient", subject=name, error=1.0, detail=detail)


def _ratio(mine: torch.Tensor, wanted: torch.Tensor, floor: float) -> str:
    """By which factor a gradient is off, if it is off by a factor alone."""
    ratio = float((mine * wanted).sum() / (wanted * wanted).sum().clamp_min(1e-30))
    if abs(ratio - 1) < LIMIT or relative(mine, wanted * ratio, floor) > LIMIT:
        return ""
    return f"it is {ratio:.4g} times the right one"


def _later(errors: list[Errors], norm: float, limit: float) -> Iterator[Discrepancy]:
    """Yields what differs after the gradients: their norm, or parameters after two steps."""
    if norm > limit:
        yield Discrepancy(kind="norm", subject="", error=norm)
        return
    worst = {n: max(e.parameters[n] for e in errors) for n in errors[0].parameters}
    name = max(worst, key=worst.__getitem__, default="")
    if name and worst[name] > PARAMETER_LIMIT:
        yield Discrepancy(kind="parameter", subject=name, error=min(worst[name], 1e9))


def _means(runs: Runs) -> Iterator[Discrepancy]:
    """A loss that is no mean over tokens: over the rows of each data rank it is another one; and
    buffers that each data rank computes from its rows, unless a module mixes the rows with them.
    """
    (name, error), module = runs.reference.of_whole_batches(), runs.reference.coupling
    if error > LIMIT:
        kind, subject = ("mean", name) if module is None else ("rows", module)
        yield Discrepancy(kind=kind, subject=subject, error=error, detail=name)
    for buffer in runs.reference.row_buffers:
        if module is None or not below(generic(buffer), generic(module)):
            yield Discrepancy(kind="buffer", subject=buffer)


def uneven_use(reference: Reference) -> Outcome:
    """The outcome of parameters that some data ranks use and others do not: torch reduces what each
    rank has in one buffer, so that nothing can be compared.
    """
    discrepancies = [
        Discrepancy(kind="uneven", subject=u.name, detail=u.where) for u in reference.uneven
    ]
    traces = (trace for result in reference.passes for trace in result.traces)
    errors: dict[str, float | None] = dict.fromkeys(n for trace in traces for n in trace.calls)
    errors |= {u.name.rpartition(".")[0]: 1.0 for u in reference.uneven}
    return Outcome(
        verdict="refuted", discrepancies=tuple(discrepancies), modules=tuple(errors.items())
    )


def first_wrong_output(runs: Runs, limit: float = LIMIT) -> Discrepancy | None:
    """The first module to end whose output is off by more than a limit."""
    return next(
        (discrepancy for view in runs.views() if (discrepancy := _wrong_in(view, limit))), None
    )


def _wrong_in(view: View, limit: float) -> Discrepancy | None:
    last = None
    for name in view.finished_modules:
        both = view.outputs(name)
        if both is None:
            continue
        mine, right = both
        layouts = observed_layouts.observed_layouts(mine, right, limit)
        error = _error(mine, right)
        if error is not None and error > limit and (mine[0].placements or not layouts):
            part = f"`{last}` before it gives a part of a sum that nothing adds up"
            return Discrepancy(
                kind="output",
                subject=name,
                error=error,
                line=view.mine[0].calls[name].line,
                detail="; ".join(filter(None, [_batch(view.name), part if last else ""])),
                before=last or "",
            )
        if layouts != (ir.Partial(),) or mine[0].placements:
            last = None
        elif last is None or not below(last, name):  # an enclosing module returns the same tensor
            last = name
    return None


def _batch(name: str) -> str:
    return f"in a batch with {name}" if name else ""


def _error(mine: list[Seen], right: torch.Tensor) -> float | None:
    """The relative error of a module's output; None if it cannot be compared."""
    if any(seen.tensor.shape != right.shape for seen in mine):
        return None
    return max(relative(seen.tensor, right) for seen in mine)


def _modules(runs: Runs, gradients: list[Discrepancy]) -> tuple[tuple[str, float | None], ...]:
    """The error of each module that the plain model ran: its output and its own gradients."""
    calls = runs.reference.passes[0].traces[0].calls
    # in a pipeline the loss and the gradients are compared, and they depend on every output
    errors_by_module: dict[str, float | None] = dict.fromkeys(
        calls, 0.0 if runs.lowered.pipeline else None
    )
    divided = runs.lowered.divided_encoders
    errors_by_module |= {n: 0.0 for n in calls if is_inside(n, divided)}  # by the features
    lost: set[str] = set()
    for view in runs.views():
        for name, right in view.right.calls.items():
            both = view.outputs(name)
            if both is None and (right.output is not None or name not in view.mine[0].calls):
                lost.add(name)
                continue
            error = (_error(*both) or 0.0) if both else 0.0
            if error > LIMIT and both and not both[0][0].placements:
                # a shard or a partial value can have the same shape
                error = 0.0 if observed_layouts.observed_layouts(*both, LIMIT) else error
            errors_by_module[name] = max(errors_by_module.get(name) or 0.0, error)
    errors_by_module |= dict.fromkeys(lost)
    for part in gradients:
        holder = part.subject.rpartition(".")[0]
        errors_by_module[holder] = max(errors_by_module.get(holder) or 0.0, part.error)
    return tuple(errors_by_module.items())


def _sizes(runs: Runs) -> Iterator[Discrepancy]:
    """Positions and ids that the model's code made as long as a local shard of the sequence."""
    for view in runs.views():
        for name, call in view.mine[0].calls.items():
            right = view.right.calls.get(name)
            for which, value, wanted in (
                observed_layouts.resized_inputs(call, right) if right else ()
            ):
                sizes = list(value.shape), list(wanted.shape)
                detail = f"{which} of {sizes[0]} where one process has {sizes[1]}"
                yield Discrepancy(kind="size", subject=name, detail=detail, line=call.line)
                return


def _unstated_layouts(runs: Runs) -> Iterator[Discrepancy]:
    """Yields layouts and redistributions that the plan does not state, whether right or wrong."""
    view = next(runs.views(), None)
    for name, which, layout, _ in observed_layouts.stated_inputs(runs.lowered) if view else ():
        assert view is not None
        right = view.right.calls.get(name)
        wanted = right.inputs.get(which) if right else None
        calls = [trace.calls.get(name) for trace in view.mine]
        mine = [call.inputs[which] for call in calls if call and which in call.inputs]
        if wanted is None or len(mine) < len(view.mine):
            continue
        observed = observed_layouts.observed_layouts(mine, wanted.tensor, LIMIT)
        if observed and not observed_layouts.agrees(layout, observed, wanted.tensor.dim()):
            both = (str(layout), str(observed[0]))
            line = next((call.line for call in calls if call), "")
            yield Discrepancy(kind="boundary", subject=name, layouts=both, line=line)
    for seen in runs.implicit:
        yield Discrepancy(
            kind="unstated",
            subject=seen.module,
            layouts=(seen.source, seen.target),
            op=seen.op,
            line=seen.line,
            before=seen.before,
        )


# What stops it ------------------------------------------------------------------------------------


def failed_run(failure: RankFailure, runs: Runs) -> Outcome:
    """The outcome of ranks that did not end: unknown if the simulation failed or the time was up,
    else refuted.

    Raises:
        PlanError: PL743, a library lacks a name, which says nothing about the plan.
    """
    error = failure.error
    if refusal := missing_name(error):
        raise refusal
    if error is None:
        if failure.late or all(r.phase == "done" for r in runs.results):
            return Outcome(verdict="unknown", reason=failure.message)
        subject, leaf = _next_module(runs), _leaf(runs)
        crash = Discrepancy(kind="crash", subject=subject, detail=failure.message, before=leaf)
        return Outcome(verdict="refuted", discrepancies=(crash, *_sizes(runs)))
    frames = traceback.extract_tb(error.__traceback__)
    inside = any(f.filename.endswith("multi_threaded_pg.py") for f in frames[-1:])
    if inside and isinstance(error, NotImplementedError | AssertionError):
        return Outcome(verdict="unknown", reason=f"the simulation failed: {first_line(error)}")
    part = first_wrong_output(runs)
    subject = part.subject if part else _next_module(runs)
    at = runs.results[failure.rank]
    first = at.traces and not at.norms  # the first step
    name = runs.batches.steps[0][len(at.traces) - 1].name if first else ""
    cause = error.__cause__ if isinstance(error, PlanError) and error.__cause__ else error
    assert isinstance(cause, Exception)
    crash = Discrepancy(
        kind="crash",
        subject=subject,
        detail="; ".join(filter(None, [first_line(cause), _batch(name)])),
        line=raising_line(error),
        before=_leaf(runs),
    )
    discrepancies = (crash, *([part] if part else []), *_sizes(runs), *_unstated_layouts(runs))
    return Outcome(verdict="refuted", discrepancies=discrepancies, modules=_modules(runs, []))


def _leaf(runs: Runs) -> str:
    """The leaf module that ended last."""
    traces = runs.results[0].traces
    return traces[-1].leaf if traces else ""


def _next_module(runs: Runs) -> str:
    """The module that was to end next in the pass that a rank did not end."""
    views = list(runs.views())
    if not views:
        return ""
    finished = views[-1].finished_modules
    after = (name for name in views[-1].right.finished if name not in finished)
    return next(after, finished[-1] if finished else "")
