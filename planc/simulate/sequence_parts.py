"""Ranks that have parts of sequences, beside a single process that has whole ones."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planc.model.patches import AFTER_TEXT
from planc.ops.base import AxisRole
from planc.runtime.gradients import mean_over
from planc.runtime.run import Run
from planc.simulate.trace import ModuleCall, Seen, Trace


def context_axes(run: Run) -> tuple[str, ...]:
    """The axes that the plan splits sequences over."""
    return run.lowered.split_axes(AxisRole.SEQUENCE)


class RankPart:
    """Selects a rank's part of the tensors of a single process."""

    behind = False
    """Whether whole rows are cut inside of the model: modules before that have whole ones."""
    __slots__ = ()

    def local_part(self, value: Tensor) -> Tensor:
        """The rank's part of an output."""
        raise NotImplementedError

    def _part_of(self, right: Seen, mine: Seen | None) -> Seen:
        """The rank's part of what a module got or gave; `mine` is what it did on the rank."""
        raise NotImplementedError

    def of_trace(self, trace: Trace, local_trace: Trace) -> Trace:
        """The calls of the single process, with the rank's part of each tensor.

        Args:
            trace: of the single process.
            local_trace: of the rank.
        """
        calls = {}
        for name, call in trace.calls.items():
            mine = local_trace.calls.get(name, call) if self.behind else ModuleCall(line="")
            inputs = {k: self._part_of(v, mine.inputs.get(k)) for k, v in call.inputs.items()}
            output = call.output and self._part_of(call.output, mine.output)
            calls[name] = ModuleCall(line=call.line, inputs=inputs, output=output)
        return Trace(calls=calls, finished=trace.finished)


@dataclass(frozen=True, slots=True)
class BatchPart(RankPart):
    """The part of a batch that a rank has: indices `[rows, tokens]` in sequences of a length.

    `behind`: whole rows are cut inside of the model, so that modules before that have whole ones.
    """

    tokens: Tensor
    length: int
    behind: bool = False

    def local_part(self, value: Tensor) -> Tensor:
        """The rank's part of a tensor of the single process, `[rows, length, ...]`,
        `[1, length, ...]`, `[rows * length, ...]`, `[length]` or, of positions in several dims,
        `[dims, rows, length]`; another one has no tokens, and stays whole.
        """
        rows = len(self.tokens)
        if value.shape == (self.length,) and (self.tokens == self.tokens[0]).all():
            return value[self.tokens[0]]
        if value.dim() == 3 and value.shape[2] == self.length and value.shape[1] in (1, rows):
            return torch.stack([self.local_part(row) for row in value])
        if value.dim() > 1 and value.shape[1] == self.length and len(value) in (1, rows):
            tokens = self.tokens[: len(value)]
            return value[torch.arange(len(tokens))[:, None], tokens]
        if value.dim() > 1 and len(value) == rows * self.length:
            return self.local_part(value.unflatten(0, (rows, -1))).flatten(0, 1)
        return value

    def _part_of(self, right: Seen, mine: Seen | None) -> Seen:
        """The rank's part of a tensor, or all of it where the rank has as much."""
        if mine is not None and mine.tensor.shape == right.tensor.shape:
            return right
        return Seen(self.local_part(right.tensor))


@dataclass(frozen=True, slots=True)
class ImagePart(RankPart):
    """The patches that a rank has of images, which the model gets and gives whole.

    Args:
        rank, size: which part of how many.
        first: whether text stands before the patches where both attend jointly.
    """

    rank: int
    size: int
    first: bool
    behind: bool = True

    def local_part(self, value: Tensor) -> Tensor:
        """Outputs of the model are whole."""
        return value

    def _part_of(self, right: Seen, mine: Seen | None) -> Seen:
        """The rank's part of a tensor: text, and its run of the patches."""
        if mine is None or mine.tensor.dim() != right.tensor.dim():
            return right
        pairs = zip(right.tensor.shape, mine.tensor.shape, strict=True)
        unlike = [dim for dim, (every, own) in enumerate(pairs) if every != own]
        if len(unlike) != 1:
            return right
        dim, kept = unlike[0], mine.tensor.shape[unlike[0]]
        own = (right.tensor.shape[dim] - kept) // (self.size - 1)
        text, patches = kept - own, right.tensor.shape[dim] - (kept - own)
        at = (text if self.first else 0) + self.rank * own
        whole = (0 if self.first else patches, text)
        parts = [right.tensor.narrow(dim, *some) for some in (whole, (at, own))]
        return Seen(torch.cat(parts if self.first else parts[::-1], dim))


def part_rank(run: Run) -> int:
    """The index of this rank's part of its sequences."""
    return sum(run.submesh(axis).get_local_rank() for axis in context_axes(run))


def parts_of(run: Run, inputs: Mapping[str, Any]) -> Iterator[RankPart]:
    """Yields the part of a batch that this rank has; nothing where it has all of it."""
    for op in run.lowered.contexts:
        if op.patches:
            size, first = run.lowered.axis_size(op.axis), op.patches == AFTER_TEXT
            yield ImagePart(rank=part_rank(run), size=size, first=first)
            return
    ids = inputs.get("input_ids")
    if context_axes(run) and isinstance(ids, Tensor):
        index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        mine = run.batch({**inputs, "labels": index})["labels"]
        behind = any(op.of_rows for op in run.lowered.contexts)
        yield BatchPart(mine.cpu(), ids.shape[1], behind)


def mean_of_parts(run: Run, loss: Tensor) -> Tensor:
    """The mean of the losses of all parts, each over a part of the labels' number."""
    for axis in context_axes(run):
        loss = mean_over(loss, run.submesh(axis))
    return loss
