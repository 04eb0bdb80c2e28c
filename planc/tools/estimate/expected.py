"""The estimate of a run: its FLOPs, its memory, the peak of its device."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from planc.diagnostics.diagnostic import Sink
from planc.ir.nodes import Plan
from planc.lowering.step import Step
from planc.model.facts import Facts
from planc.ops.lowered import Lowered
from planc.tools.estimate import profiles
from planc.tools.estimate.answer import Answer, Request, answer
from planc.tools.estimate.from_plan import OPTIMIZERS, Batch

_TOKENS = 128
"""At least as many have the rows whose FLOPs are counted, which those of all others follow from."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpectedNumbers:
    """
    Args:
        plan, facts: as checked and lowered, with adapters applied.
        lowered: the plan of the run.
        place: of this rank in the pipeline.
        attention: transformers' `attn_implementation`.
    """

    plan: Plan
    facts: Facts
    lowered: Lowered
    place: int
    attention: str = "sdpa"
    known: dict[tuple[Batch, str], Answer | None] = field(default_factory=dict)

    def flops(self, positions: int, squares: int) -> float | None:
        """FLOPs of the passes over rows: a multiple of their lengths and, for attention, of the
        squares of these.

        Args:
            positions, squares: the sums of both.
        """
        if self._terms is None:
            return None
        linear, quadratic = self._terms
        return linear * positions + quadratic * squares

    @cached_property
    def _terms(self) -> tuple[float, float] | None:
        rows, tokens = Step(lowered=self.lowered).divisors
        tokens *= -(-_TOKENS // tokens)
        found = [self._answer(Batch(global_batch=rows, sequence=n)) for n in (tokens, 2 * tokens)]
        short, long = (one and one.counted and one.work.model_flops / rows for one in found)
        if not short or not long:
            return None
        quadratic = (long - 2 * short) / (2 * tokens**2)
        return short / tokens - quadratic * tokens, quadratic

    def memory(self, rows: int, tokens: int, passes: int, optimizer: str) -> float | None:
        """Bytes that this rank holds at most in a step; None where the estimate is not complete.

        Args:
            rows, tokens: of a pass of a data rank.
            passes: that a step accumulates.
            optimizer: the name of its class in torch, in small letters.
        """
        if optimizer not in OPTIMIZERS:
            return None
        every = rows * passes * Step(lowered=self.lowered).ranks
        batch = Batch(global_batch=every, sequence=tokens, micro_batches=passes)
        found = self._answer(batch, optimizer)
        return found.estimate.ranks[self.place].peak if found and found.complete else None

    def peak(self, device: str) -> float | None:
        """FLOPs a second of the data sheet; None of a device that no profile has."""
        for name in profiles.shipped_profiles():
            one = profiles.hardware(name, Sink())
            if one and device and device in one.devices.split(", "):
                return one.peak_tflops * 1e12
        return None

    def _answer(self, batch: Batch, optimizer: str = "adamw") -> Answer | None:
        """An estimate, which leaves the random numbers of the script as they are."""
        import torch

        if (batch, optimizer) not in self.known:
            request = Request(batch=batch, optimizer=optimizer, attention=self.attention)
            with torch.random.fork_rng(devices=[]):
                self.known[batch, optimizer] = answer(self.plan, self.facts, request, Sink())
        return self.known[batch, optimizer]
