"""A proxy model, loaded and distributed by transformers' own code with ranks as threads, and a
step of it compared with one process.

Its checkpoint is loaded by `from_pretrained(distributed_config=...)`: faults of loading show too.
"""

import copy
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from planc.compat.transformers_distributed import (
    DistributedConfig,
    loading_on_threads,
    with_plan,
)
from planc.diagnostics.diagnostic import first_line
from planc.model.sources.huggingface import quiet
from planc.proof.small_mesh import RANKS
from planc.simulate.numerics import errors_by_name, full_copy, full_gradients, relative
from planc.simulate.outcome import LIMIT
from planc.simulate.thread_ranks import RankFailure, busy, run_ranks

SECONDS = 120.0
"""The limit of one run, in seconds of processor time."""

Rules = Mapping[str, Any]
"""A plan of transformers: styles by generic name, relative to the full model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepErrors:
    """The result of one plan on the proxy model.

    Args:
        verdict: `proved`, `wrong`, `crash`, or `unknown` if one process does not run.
        reason: the error of a crash, or why nothing is known.
        logits, loss: their errors.
        gradients: errors by parameter, of those above the limit.
    """

    verdict: str
    reason: str = ""
    logits: float = 0.0
    loss: float = 0.0
    gradients: Mapping[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[str, float]:
        """The tensor that is most wrong, and its error."""
        if not self.logits < LIMIT:
            return "the logits", self.logits
        name = max(self.gradients, key=self.gradients.__getitem__, default="the loss")
        return name, self.gradients.get(name, self.loss)


@dataclass(slots=True, kw_only=True)
class _Step:
    """The tensors of one training step; those of a rank are full ones."""

    logits: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


_SIZES: Mapping[str, Mapping[str, int]] = {
    "tp_plan": {"tp_size": RANKS},
    "ep_plan": {"fsdp_size": RANKS, "ep_size": RANKS},
    "fsdp_plan": {"fsdp_size": RANKS},
    "pp_plan": {"pp_size": RANKS},
}
"""The sizes of the `DistributedConfig` for each plan."""


class AuditedModel:
    """Runs a proxy model with and without the plans of transformers.

    Args:
        builder: builds it, and its inputs.
    """

    def __init__(self, builder: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="planc-audit-")
        self._references: dict[bool, _Step] = {}
        with quiet(), loading_on_threads():
            self.model = builder.build(0)
            self._inputs = builder.sample()
            self.model.save_pretrained(self._folder.name)

    def plan(self, kind: str) -> dict[str, Any]:
        """The model's plan of a kind, such as `tp_plan`."""
        return dict(getattr(self.model, f"_{kind}", None) or {})

    def run(self, kind: str, rules: Rules) -> StepErrors:
        """Compares a step of two ranks under the rules with one process."""
        if reason := busy():
            return StepErrors(verdict="unknown", reason=reason)
        split, trained = kind in ("ep_plan", "fsdp_plan"), kind != "pp_plan"
        try:
            with quiet(), loading_on_threads():
                reference = self._reference(split=split)
        except Exception as error:
            reason = f"the proxy model does not run in one process: {first_line(error)}"
            return StepErrors(verdict="unknown", reason=reason)
        steps = [_Step() for _ in range(RANKS)]

        def rank(number: int) -> None:
            cls = with_plan(type(self.model), kind, rules)
            model = self._load(cls, distributed_config=DistributedConfig(**_SIZES[kind]))
            rows = _rows(self._inputs, number) if split else self._inputs
            _train(model, rows, steps[number], backward=trained)

        with quiet(), loading_on_threads():
            failure = run_ranks(RANKS, rank, SECONDS)
        if failure is not None:
            return StepErrors(verdict="crash", reason=_reason(failure))
        return _compare(reference, steps, split=split, gradients=trained)

    def _load(self, cls: Any, **more: Any) -> Any:
        model = cls.from_pretrained(
            self._folder.name,
            config=copy.deepcopy(self.model.config),
            attn_implementation="eager",
            dtype=torch.float32,
            **more,
        )
        return model.train()

    def _reference(self, *, split: bool) -> "_Step":
        """The step of one process: on the batch of all ranks, or the mean over the ranks' rows."""
        if split not in self._references:
            model = self._load(type(self.model))
            losses, logits = list[torch.Tensor](), list[torch.Tensor]()
            rows = [_rows(self._inputs, rank) for rank in range(RANKS)]
            for inputs in rows if split else [self._inputs]:
                output = model(**inputs, use_cache=False)
                (output.loss / (RANKS if split else 1)).backward()
                losses.append(output.loss.detach())
                logits.append(output.logits.detach())
            self._references[split] = _Step(
                logits=torch.cat(logits), loss=torch.stack(losses), gradients=full_gradients(model)
            )
        return self._references[split]


def _rows(inputs: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The rows of a data rank."""

    def shard(value: Any) -> Any:
        rows = isinstance(value, torch.Tensor) and value.dim()
        return value.chunk(RANKS)[number] if rows else value

    return {name: shard(value) for name, value in inputs.items()}


def _train(model: Any, inputs: Mapping[str, Any], step: _Step, *, backward: bool) -> None:
    """One forward pass, and a backward pass where asked for; the step has its full tensors."""
    with torch.set_grad_enabled(backward):
        output = model(**inputs, use_cache=False)
    step.logits = full_copy(output.logits)
    if backward:
        output.loss.backward()
        step.loss = full_copy(output.loss)
        step.gradients = full_gradients(model)


def _compare(reference: _Step, steps: list[_Step], *, split: bool, gradients: bool) -> StepErrors:
    """The errors of the rank that is most wrong."""
    logits = loss = 0.0
    off: dict[str, float] = {}
    for number, step in enumerate(steps):
        right = reference.logits
        if right is not None and step.logits is not None:
            right = right.chunk(RANKS)[number] if split else right
            logits = max(logits, relative(step.logits, right))
        if not gradients or reference.loss is None or step.loss is None:
            continue
        reference_loss = reference.loss[number if split else 0]
        loss = max(loss, relative(step.loss, reference_loss))
        errors = errors_by_name(step.gradients, reference.gradients)
        for name, error in errors.items():
            if not error < LIMIT:
                off[name] = max(error, off.get(name, 0.0))
    numbers = [logits, loss, *off.values()]
    wrong = not all(isfinite(n) and n < LIMIT for n in numbers)
    return StepErrors(
        verdict="wrong" if wrong else "proved",
        logits=logits,
        loss=loss,
        gradients=off,
    )


def _reason(failure: RankFailure) -> str:
    """The error of a rank, and the line of code that raised it."""
    if failure.error is None:
        return failure.message
    last = traceback.extract_tb(failure.error.__traceback__)[-1]
    text = f"{type(failure.error).__name__}: {first_line(failure.error)}"
    return f"{text} ({Path(last.filename).name}:{last.lineno})"
