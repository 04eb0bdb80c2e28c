"""Layout flow: checks in one process that a plan trains the same model.

A proxy model is trained with all ranks as threads of this process, by the same program that
`planc verify` runs on processes. Nothing is inferred: a missing reduction, a gradient that stays
partial, a wrong divisor or a mix of local tensors and DTensors shows in the numbers, or as the
exception of the real code.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from planc.diagnostics.diagnostic import first_line
from planc.model.sources.huggingface import quiet
from planc.ops import styles as ir
from planc.ops.base import AxisRole
from planc.ops.document import digest
from planc.ops.lora import Adapt
from planc.ops.lowered import Lowered
from planc.proxy.refused_inputs import refuses_inputs
from planc.proxy.user_model import ModelBuilder
from planc.runtime.calls import import_error
from planc.runtime.executor import add_adapters, apply_for_reference, apply_lowered
from planc.simulate import program
from planc.simulate.batches import batches
from planc.simulate.coupled_rows import coupling_module
from planc.simulate.discrepancies import Runs, compare_runs, failed_run, uneven_use
from planc.simulate.numerics import NEARLY, InFloat64, for_trial
from planc.simulate.observed_layouts import redistributions
from planc.simulate.outcome import RIGHT, Discrepancy, Outcome
from planc.simulate.random_numbers import RankRandom
from planc.simulate.thread_ranks import RankFailure, busy, run_ranks
from planc.simulate.time_limit import time_limit
from planc.simulate.trace import Trace
from planc.simulate.trial_part import separate_ops, trial_part


@quiet()
def simulate(
    builder: ModelBuilder,
    lowered: Lowered,
    *,
    quick: bool = False,
    draws: bool = False,
    section: str = "",
) -> Outcome:
    """Trains a proxy model with and without the plan, and compares; `quick` is one pass with the
    tensor axes alone, `draws` keeps the dropout of adapters, `section` the operations of a
    section with a separate simulation. Where only the last pass is wrong, all is tried again with a
    length that the tensor axes divide; where all numbers are nearly right, in float64, which tells
    a fault from the rounding of a model that amplifies it.
    """
    if reason := busy():
        return Outcome(verdict="unknown", reason=reason)
    lowered = trial_part(lowered, tensor=quick, draws=draws, section=section)
    for requirement in (r for op in lowered.ops for r in op.requirements):
        if error := import_error(requirement):
            return Outcome(verdict="unknown", reason=requirement.finding(error))
    first, at_last = _outcome(builder, lowered, quick=quick, uneven=True)
    if _nearly(first) and not quick:
        wide: Any = InFloat64(builder)
        exact, _ = _outcome(wide, lowered, quick=quick, uneven=True)
        if exact.verdict == "proved":
            return exact
    if not at_last:
        return first
    other, _ = _outcome(builder, lowered, quick=quick, uneven=False)
    if other.verdict != "proved":
        return other
    uneven = replace(first.discrepancies[0], kind="lengths")
    return replace(other, discrepancies=(*other.discrepancies, uneven))


def _nearly(outcome: Outcome) -> bool:
    """Whether numbers alone are wrong, and all by little."""
    kinds = ("output", "gradient", "norm", "parameter")
    return outcome.verdict == "refuted" and all(
        d.kind in kinds and 0 < d.error < NEARLY for d in outcome.discrepancies
    )


def _outcome(
    builder: ModelBuilder, lowered: Lowered, *, quick: bool, uneven: bool
) -> tuple[Outcome, bool]:
    """The outcome of one simulation, and whether it refutes the plan by the last pass alone."""
    prepared = _prepare(builder, lowered, quick=quick, uneven=uneven)
    if isinstance(prepared, Outcome):
        return prepared, False
    runs, models = prepared
    failure = _run(models, runs)
    if failure is None and runs.reference.draws:
        plain = apply_for_reference(for_trial(builder.build(0), lowered), lowered)
        runs.reference = program.train_single(plain, runs.batches, lowered, runs.results)
    outcome = failed_run(failure, runs) if failure else compare_runs(runs)
    if outcome.verdict == "refuted" and failure is None:
        coupled = tuple(_coupled_microbatches(builder, lowered, runs))
        outcome = replace(outcome, discrepancies=(*outcome.discrepancies, *coupled))
    later = outcome.verdict == "refuted" and all(result.norms for result in runs.results)
    wrong = [d.kind for d in outcome.discrepancies if d.kind not in RIGHT]
    at_last = later and (failure is not None or {*wrong} <= {"norm", "parameter"})
    return outcome, uneven and at_last and bool(outcome.discrepancies)


def _coupled_microbatches(
    builder: ModelBuilder, lowered: Lowered, runs: Runs
) -> Iterator[Discrepancy]:
    """The module whose output for a row depends on the other rows of a pass, which a pipeline
    computes in microbatches; none if the model takes no fewer rows.

    Raises:
        Exception: the model raises one that says nothing of its inputs.
    """
    pipeline, data = runs.lowered.pipeline, runs.batches
    if pipeline is None or pipeline.microbatches == 1 or separate_ops(lowered):
        return
    plain = apply_for_reference(for_trial(builder.build(0), lowered), lowered)
    parts = data.ranks * pipeline.microbatches
    try:
        module = coupling_module(plain, data.steps[0][0], data.extra(0), parts)
    except Exception as error:
        if not refuses_inputs(error):
            raise
        return
    if module is not None:
        yield Discrepancy(kind="microbatch", subject=module)


def _prepare(
    builder: ModelBuilder, lowered: Lowered, *, quick: bool, uneven: bool
) -> tuple[Runs, list[nn.Module]] | Outcome:
    """The results of the single process, and a model for each rank; or why nothing can be run."""
    try:
        data = batches(builder, lowered, 0, quick=quick, uneven=uneven)
        single = apply_for_reference(for_trial(builder.build(0), lowered), lowered)
        reference = program.train_single(single, data, lowered)
        if reference.draws and lowered.split_axes(AxisRole.SEQUENCE):
            raise program.SingleError(program.DRAWS_PARTS)
        # adapters are initialized here too, one model after the other, from the same seed
        models = [
            add_adapters(for_trial(builder.build(0), lowered), lowered)
            for _ in range(lowered.world_size)
        ]
        lowered = lowered.without(Adapt)
    except program.SingleError as error:
        return Outcome(verdict="unknown", reason=f"the proxy model does not train: {error}")
    except Exception as error:
        reason = f"the proxy model does not run: {first_line(error)}"
        return Outcome(verdict="unknown", reason=reason)
    if reference.draws and lowered.pipeline is not None:
        reason = "the random numbers of a pipeline's microbatches are not compared"
        return Outcome(verdict="unknown", reason=reason)
    if reference.uneven and lowered.fsdp_units:
        return uneven_use(reference)
    results = [program.RankResult() for _ in models]
    runs = Runs(lowered=lowered, batches=data, reference=reference, results=results)
    return runs, models


def _run(models: list[nn.Module], runs: Runs) -> RankFailure | None:
    """Trains the models, each as one rank."""
    name, styled = digest(runs.lowered), set(_styled_modules(runs.lowered))

    def rank(number: int) -> None:
        model, result = models[number], runs.results[number]
        program.seed_rank(number)
        with RankRandom() if runs.reference.draws else nullcontext():
            plan, draws = runs.lowered, runs.reference.draws
            steered = () if draws else runs.reference.steered
            run = apply_lowered(model, plan, digest=name, device_type="cpu", allow_code=True)
            program.train_rank(
                model, run, runs.batches, result, traced=True, draws=draws, steered=steered
            )

    def current() -> Trace | None:
        return runs.results[0].traces[-1] if runs.results[0].traces else None

    with redistributions(current, styled, runs.implicit):
        return run_ranks(len(models), rank, time_limit())


def _styled_modules(lowered: Lowered) -> Iterator[str]:
    """Yields the modules whose computation a style distributes."""
    for op in lowered.styles:
        if not isinstance(op.style, ir.Input | ir.Output):
            yield from op.modules.names()
