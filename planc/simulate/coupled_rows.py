"""Finds what data ranks compute otherwise than one process, since each has rows of its own.

All is seen in one process: parameters that the rows of some ranks use and those of others do not,
modules whose output for a row depends on the other rows of the batch, and buffers that a forward
pass computes from its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from planc.ops.lowered import Lowered
from planc.proxy.refused_inputs import refuses_inputs
from planc.runtime.collectives import named_modules
from planc.simulate.batches import TrialPass
from planc.simulate.numerics import parameters_by_name, relative
from planc.simulate.outcome import LIMIT
from planc.simulate.trace import Trace


@dataclass(frozen=True, slots=True)
class UnevenUse:
    """A parameter that gets a gradient on one data rank, and none on another or in another pass."""

    name: str
    where: str


@dataclass(slots=True)
class UsedParameters:
    """The parameters that get a gradient, by step, pass and data rank; and whether the model's code
    has looked at numbers, by which it may choose what runs.
    """

    every: dict[tuple[int, int, int], frozenset[str]] = field(default_factory=dict)
    looked: bool = False

    @contextmanager
    def record(self, model: nn.Module, step: int, number: int, rank: int) -> Iterator[None]:
        """Notes what one backward pass gives a gradient."""
        used = set[str]()
        with ExitStack() as hooks:
            for name, parameter in parameters_by_name(model):
                if parameter.requires_grad:
                    note = _noting(used, name)
                    hook = parameter.register_post_accumulate_grad_hook(note)
                    hooks.callback(hook.remove)
            yield
        self.every[step, number, rank] = frozenset(used)

    def of_rows(
        self, model: nn.Module, one: TrialPass, forward: Callable[[Mapping[str, Any]], Tensor]
    ) -> None:
        """Notes what each row of a pass alone gives a gradient: rows of one repeated token use the
        fewest experts. A model that takes no single rows is not asked.

        Raises:
            Exception: the model raises one that says nothing of its inputs.
        """
        rows = len(next(iter(one.inputs.values())))
        for row in range(rows):
            try:
                with self.record(model, -1, row, 0):
                    forward(one.of_rank(row, rows)).backward()
            except Exception as error:
                if not refuses_inputs(error):
                    raise
                self.every.pop((-1, row, 0), None)
                return

    def uneven(self, lowered: Lowered) -> tuple[UnevenUse, ...]:
        """The parameters that ranks of one pass do not all use; or passes, where code looks. All
        ranks run a tower that the plan shares.
        """
        found: dict[str, str] = {}
        for (key, used), (other, theirs) in combinations(self.every.items(), 2):
            if key[:2] == other[:2]:
                one, two = f"data rank {key[2]}", f"data rank {other[2]}"
            elif self.looked:
                one, two = "the rows of one pass", "those of another"
            else:
                continue
            for name in sorted(used ^ theirs):
                first, second = (one, two) if name in used else (two, one)
                found.setdefault(name, f"{first} gives it a gradient, and {second} none")
        return tuple(
            UnevenUse(name, where)
            for name, where in found.items()
            if not any(op.runs_everywhere(name) for op in lowered.ops)
        )


def _noting(used: set[str], name: str) -> Any:
    return lambda _parameter: used.add(name)


def coupling_module(
    model: nn.Module, one: TrialPass, extra: Mapping[str, Any], ranks: int
) -> str | None:
    """The first module, or the model (``), whose output for the rows of a data rank is another one
    in the whole batch; None where the loss alone depends on which rows are together.
    """
    before = torch.random.get_rng_state()
    whole = _outputs(model, {**one.inputs, **extra})
    parts = [_outputs(model, {**one.of_rank(rank, ranks), **extra}) for rank in range(ranks)]
    torch.random.set_rng_state(before)
    rows = len(next(iter(one.inputs.values())))
    mixing = (name for name in whole if _are_mixed(name, whole, parts, rows))
    return next(mixing, None) if _are_mixed("", whole, parts, rows) else None


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def restore_buffers(model: nn.Module, before: Mapping[str, Tensor]) -> list[str]:
    """Gives buffers that have changed their earlier values, and returns their names."""
    changed = [name for name, now in model.named_buffers() if _differ(now, before.get(name))]
    for name in changed:
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = before[name].clone()
    return changed


def row_buffers(
    model: nn.Module, one: TrialPass, extra: Mapping[str, Any], ranks: int
) -> tuple[str, ...]:
    """The buffers that a forward pass computes from its rows: they differ between data ranks."""
    before, values = copy_buffers(model), list[dict[str, Tensor]]()
    for rank in range(ranks):
        with torch.no_grad():
            model(**{**one.of_rank(rank, ranks), **extra})
        values.append(copy_buffers(model))
        restore_buffers(model, before)
    first, *others = values
    return tuple(n for n in first if any(_differ(first[n], other.get(n)) for other in others))


def _differ(buffer: Tensor, other: Tensor | None) -> bool:
    """Whether two values of a buffer differ by more than rounding; masks may contain infinity."""
    if other is None or torch.equal(buffer, other):
        return False
    return relative(buffer, other) > LIMIT


def _are_mixed(
    name: str, whole: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]], rows: int
) -> bool:
    """Whether rows have other outputs together; not of experts, which sort all tokens."""
    mine = [part[name] for part in parts if name in part]
    right = whole.get(name)
    if right is None or len(mine) < len(parts) or right.shape[:1] != (rows,):
        return False
    if {m.shape[1:] for m in mine} != {right.shape[1:]}:
        return False
    together = torch.cat(mine)
    return len(together) == rows and relative(together, right) > LIMIT


def _outputs(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The output of each module, in the order of ending."""
    trace = Trace()
    with torch.no_grad(), trace.watch(named_modules(model)):
        model(**inputs)
    calls = ((name, trace.calls[name].output) for name in trace.finished)
    return {name: seen.tensor for name, seen in calls if seen is not None}
