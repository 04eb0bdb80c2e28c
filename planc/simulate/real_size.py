"""Runs one rank of a plan at the real sizes of a model, on fake tensors: shapes without values.

A proxy model has other sizes than the real model, and a number that divides the former may not
divide the latter. The rank is a thread, as in a simulation, on torch's fake process group, whose
collectives return at once. Imports torch.
"""

import math
from collections.abc import Sequence

from torch import nn

from planc.compat.fakes import FakeTensorMode, unset_fake_temporarily
from planc.diagnostics.diagnostic import PlanError, first_line
from planc.model.sources.huggingface import one_sequence_a_row, quiet, uncounted_images
from planc.ops.document import digest
from planc.ops.lowered import Lowered
from planc.proxy.diffusers_model import DiffusersBuilder
from planc.proxy.fakes import fake_inputs
from planc.proxy.input_search import BatchShape
from planc.proxy.sample_inputs import Inputs
from planc.proxy.transformers_model import TransformersBuilder
from planc.proxy.user_model import UserModelBuilder
from planc.runtime.collectives import named_modules
from planc.runtime.executor import apply_lowered
from planc.simulate.fake_ranks import isolate_rank, with_memory
from planc.simulate.outcome import Discrepancy, Outcome
from planc.simulate.thread_ranks import busy, run_alone, without_logs
from planc.simulate.time_limit import time_limit
from planc.simulate.trace import Trace, raising_line

ROWS = 2
LENGTHS = (2, 32)
"""Tokens of a row on each rank that splits it. A plan is refuted if it fails with both: a part of a
short row may be shorter than a convolution or a block of attention."""


Builder = TransformersBuilder | DiffusersBuilder | UserModelBuilder


@quiet()
@without_logs()
def run_at_real_size(
    builder: Builder, lowered: Lowered, input_kinds: Sequence[str] = ()
) -> Outcome:
    """The outcome of one forward and backward pass: `refuted`, with a `crash`, if the rank raises
    and a single process does not; `unknown` if neither runs on fake tensors.

    Args:
        builder: builds the model.
        lowered: the plan.
        input_kinds: the kinds of inputs besides text that the proxy model got; empty if unknown.
    """
    if reason := busy():
        return Outcome(verdict="unknown", reason=reason)
    crash: Discrepancy | None = None
    for length in LENGTHS:
        try:
            inputs = _inputs(builder, lowered, length, input_kinds)
            exception, late = _run(builder, lowered, inputs)
            if late:
                return Outcome(verdict="unknown", reason=late)
            if exception is None:
                return Outcome(verdict="proved")
            _run_single(builder, inputs)
        except Exception as error:
            if crash is not None:  # the model has no rows of this length
                break
            reason = f"one process does not run on tensors without values: {first_line(error)}"
            return Outcome(verdict="unknown", reason=reason)
        crash = exception
    assert crash is not None
    return Outcome(verdict="refuted", discrepancies=(crash,))


def _inputs(builder: Builder, lowered: Lowered, length: int, input_kinds: Sequence[str]) -> Inputs:
    """Inputs of a rank.

    Raises:
        Exception: the model does not accept rows of this length.
    """
    split = math.prod(a.size for a in lowered.axes if a.name not in lowered.data)
    multiples = [op.token_multiple for op in lowered.ops]
    if isinstance(builder, DiffusersBuilder):
        multiples.append(builder.token_multiple)
    shape = BatchShape(rows=ROWS, length=math.lcm(length * split, *multiples))
    if isinstance(builder, TransformersBuilder):
        with one_sequence_a_row(), uncounted_images(), _fake_tensors():
            builder.choose_on_fakes(lambda: _single(builder), input_kinds)
    return builder.sample(shape)


def _single(builder: Builder) -> nn.Module:
    """The model of a single process, inside a `FakeTensorMode`."""
    with unset_fake_temporarily():
        model = builder.build_on_meta()
    with_memory(model, "cpu")
    return model


def _run_single(builder: Builder, inputs: Inputs) -> None:
    """Runs a single process on the inputs.

    Raises:
        Exception: it does not run on fake tensors.
    """
    with one_sequence_a_row(), uncounted_images(), _fake_tensors():
        _single(builder)(**fake_inputs(inputs)).loss.backward()


def _run(builder: Builder, lowered: Lowered, inputs: Inputs) -> tuple[Discrepancy | None, str]:
    """The crash of the first rank, None if it runs; and why it was given up, if it was."""
    trace, name = Trace(tensors=False), digest(lowered)

    def rank(_: int) -> None:
        model = builder.build_on_meta()
        run = apply_lowered(model, lowered, digest=name, device_type="cpu", allow_code=True)
        with _fake_tensors(), isolate_rank(run, None), trace.watch(named_modules(model)):
            with_memory(model, "cpu")
            model(**run.batch(fake_inputs(inputs))).loss.backward()

    failure = run_alone(lowered.world_size, rank, time_limit())
    if failure is None:
        return None, ""
    error = failure.error
    if error is None:
        return None, failure.message
    cause = error.__cause__ if isinstance(error, PlanError) and error.__cause__ else error
    assert isinstance(cause, Exception)
    crash = Discrepancy(
        kind="crash",
        subject=trace.running[-1] if trace.running else "",
        detail=first_line(cause),
        line=raising_line(error),
        before=trace.leaf,
    )
    return crash, ""


def _fake_tensors() -> FakeTensorMode:
    """Tensors that are made inside are fake; real ones, such as sizes of images, keep values."""
    return FakeTensorMode(allow_non_fake_inputs=True)
