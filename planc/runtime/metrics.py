"""The numbers of a run for a logger: tokens a second, MFU, memory, tokens of each expert.

Ranks count what they see, and each training step ends with one sum over all ranks, so a rank may
read the numbers alone. Nothing here runs unless `planc.apply(..., metrics=True)` asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from planc.model.module_table import routed_experts
from planc.ops.lowered import Lowered
from planc.runtime.standalone.expert_capacity import CAPACITY

GIB = 2**30
_SAMPLES, _TOKENS, _POSITIONS, _SQUARES, _COUNTS = range(5)
"""The index at which each kind of sums begins: rows, tokens without padding, positions, the squares
of rows' lengths; then for each module of experts its routed tokens, those of each expert, those of
none, and the number of all these that are dropped.
"""
_INPUTS = ("input_ids", "inputs_embeds")


class Expected(Protocol):
    """planc's estimate of a run."""

    def flops(self, positions: int, squares: int) -> float | None:
        """FLOPs of the passes over rows, by the sums of their lengths and of the squares of these;
        None where they cannot be counted.
        """

    def memory(self, rows: int, tokens: int, passes: int, optimizer: str) -> float | None:
        """Bytes that this rank holds at most in a step whose passes have so many rows on a data
        rank, and so many tokens in each; None where it is not known.
        """

    def peak(self, device: str) -> float | None:
        """FLOPs a second of a device by its name; None of one that no profile has."""


Experts = Mapping[str, tuple[nn.Module, int]]
"""Modules by name, each with the number of its experts."""


def experts_of(modules: Mapping[str, nn.Module], lowered: Lowered) -> Experts:
    """The modules whose tokens are counted by expert, of a model that is not parallel yet. Compiled
    blocks would have the count in their graphs.
    """
    if lowered.compilations:
        return {}
    counts = ((name, module, routed_experts(module)) for name, module in modules.items())
    return {name: (module, count) for name, module, count in counts if count}


class Meter:
    """Counts what the steps of a run do.

    Args:
        mesh: of all ranks.
        experts: as of `experts_of`, now as the plan has made them.
    """

    def __init__(self, lowered: Lowered, mesh: DeviceMesh, experts: Experts) -> None:
        self.device, self.world = mesh.device_type, lowered.world_size
        place = zip(lowered.axes, mesh.get_coordinate() or (), strict=True)
        self.reads = not any(at for axis, at in place if axis.name not in lowered.data)
        """Whether this rank is the first of those that read the same rows."""
        self.expected: Expected | None = None
        self.optimizer = ""
        self.counting = True  # not in a pass that makes up for a batch which this rank lacks
        self.at: dict[str, tuple[int, int]] = {}
        self.limited: set[str] = set()
        end = _COUNTS
        for name, (module, count) in experts.items():
            self.at[name] = (end, count)
            end += count + 3
            takes = [*signature(type(module).forward).parameters][2]  # after self, hidden states
            hook = partial(self._count_routed, *self.at[name], takes)
            module.register_forward_pre_hook(hook, with_kwargs=True)
            if limit := module.__dict__.get(CAPACITY):
                limit.counted = partial(self._count_dropped, end - 1)
                self.limited.add(name)
        self.own = torch.zeros(end, dtype=torch.int64, device=self.device)
        self.total, self.before = self.own.clone(), [0] * end
        self.balanced = [0] * end
        self.steps = 0
        self.since = 0.0
        self.shapes: set[tuple[int, int, int]] = set()

    def _count_routed(
        self, at: int, count: int, name: str, _module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        """Counts the tokens of a pass, by what the router chose."""
        if not self._counts():
            return
        chosen = kwargs[name] if name in kwargs else args[1]
        local = chosen.to_local() if isinstance(chosen, DTensor) else chosen
        flat = local.detach().flatten().clamp(max=count)  # beyond the experts stands for none
        self.own[at] += len(flat) // max(1, local.shape[-1])
        self.own[at + 1 : at + count + 2].scatter_add_(0, flat, torch.ones_like(flat))

    def _count_dropped(self, at: int, tokens: Tensor) -> None:
        """Counts the choices of a pass that are dropped."""
        if self._counts():
            self.own[at] += tokens

    def _counts(self) -> bool:
        """Whether a pass counts: not evaluation, nor what a checkpoint runs again."""
        again = torch._C._current_autograd_node() is not None
        return self.counting and not again and torch.is_grad_enabled()

    def steps_with(self, optimizer: Optimizer) -> None:
        """Notes what steps the parameters."""
        moves = any(group.get("momentum") for group in optimizer.param_groups)
        name = type(optimizer).__name__.lower()
        self.optimizer = "momentum" if name == "sgd" and moves else name

    # steps ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A training step begins."""
        self.counting = True
        if not self.since:
            self._again()

    def count(self, batches: Sequence[Mapping[str, Any]], passes: int) -> None:
        """Counts batches of a rank, as they were read, of a step with so many passes."""
        shapes = [_shape(batch) for batch in batches]
        self.shapes |= {(*shape, passes) for shape in shapes}
        if not self.reads:
            return
        for batch, (rows, length) in zip(batches, shapes, strict=True):
            sums = (rows, 0, rows * length, rows * length * length)
            self.own[:_COUNTS] += torch.tensor(sums, device=self.device)
            self.own[_TOKENS] += _count_unpadded(batch, rows * length)

    def settle(self, steps: int = 1) -> None:
        """Adds what all ranks have counted in some steps; every rank calls it, after these."""
        if self.world > 1:
            distributed.all_reduce(self.own)
        self.total += self.own
        self.own.zero_()
        self.steps += steps

    def _again(self) -> None:
        self.since, self.steps = time.perf_counter(), 0
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    # numbers --------------------------------------------------------------------------------------

    def read(self, *, per_expert: bool = False) -> dict[str, float]:
        """The numbers of the steps since the last time, with those `per_expert` where asked; empty
        without any.
        """
        total: list[int] = self.total.tolist()  # which waits for the device
        seconds = time.perf_counter() - self.since
        new = [now - before for now, before in zip(total, self.before, strict=True)]
        numbers = dict(self._numbers(total, new, seconds)) if self.steps else {}
        for name, loads in self._tokens(new).items() if numbers and per_expert else ():
            numbers |= {f"experts/tokens/{name}/{at}": float(load) for at, load in enumerate(loads)}
        self.before = total
        self._again()
        return numbers

    def _numbers(
        self, total: Sequence[int], new: Sequence[int], seconds: float
    ) -> Iterator[tuple[str, float]]:
        yield "seconds_per_step", seconds / self.steps
        yield "samples_per_second", new[_SAMPLES] / seconds
        if new[_POSITIONS]:
            rate = new[_TOKENS] / seconds
            yield "tokens_per_second", rate
            yield "tokens_per_second_per_device", rate / self.world
            yield "tokens_seen", float(total[_TOKENS])
        yield from self._flops(new, seconds)
        yield from self._memory()
        yield from self._imbalance(new)
        yield from self._shares(new)

    def _flops(self, new: Sequence[int], seconds: float) -> Iterator[tuple[str, float]]:
        flops = self.expected and self.expected.flops(new[_POSITIONS], new[_SQUARES])
        if not flops:
            return
        rate = flops / seconds / self.world
        yield "tflops_per_device", rate / 1e12
        name = torch.cuda.get_device_name() if self.device == "cuda" else self.device
        if self.expected and (peak := self.expected.peak(name)):
            yield "mfu", rate / peak

    def _memory(self) -> Iterator[tuple[str, float]]:
        if self.device == "cuda":
            yield "memory/allocated_gib", torch.cuda.max_memory_allocated() / GIB
            yield "memory/reserved_gib", torch.cuda.max_memory_reserved() / GIB
        if self.expected and len(self.shapes) == 1:
            [shape] = self.shapes
            if size := self.expected.memory(*shape, self.optimizer):
                yield "memory/estimated_gib", size / GIB

    def _imbalance(self, new: Sequence[int]) -> Iterator[tuple[str, float]]:
        loads = self._loads(new).items()
        imbalances = {
            n: max(counts) * len(counts) / sum(counts) for n, counts in loads if any(counts)
        }
        if imbalances:
            yield "experts/imbalance", max(imbalances.values())
        yield from ((f"experts/imbalance/{name}", value) for name, value in imbalances.items())

    def _shares(self, new: Sequence[int]) -> Iterator[tuple[str, float]]:
        """Yields the fraction of routed tokens that experts with a capacity dropped: the maximum,
        then each module.
        """
        shares = {
            name: new[at + count + 2] / sum(new[at + 1 : at + 1 + count])
            for name, (at, count) in self.at.items()
            if name in self.limited and any(new[at + 1 : at + 1 + count])
        }
        if shares:
            yield "experts/dropped", max(shares.values())
        yield from ((f"experts/dropped/{name}", share) for name, share in shares.items())

    def new_loads(self) -> dict[str, list[int]]:
        """The counts of each expert since the last call, by module; equal on all ranks, and in
        proportion to its tokens.
        """
        total: list[int] = self.total.tolist()
        new = [now - before for now, before in zip(total, self.balanced, strict=True)]
        self.balanced = total
        return self._loads(new)

    def tokens_per_expert(self) -> dict[str, list[int]]:
        """The tokens that each expert got since the start, by module.

        Ranks that have the same tokens have counted them all: as often as a module was given more
        tokens than there are.
        """
        return self._tokens(self.total.tolist())

    def _tokens(self, counts: Sequence[int]) -> dict[str, list[int]]:
        """The tokens of each module's experts in some counts, each once."""
        tokens_by_name = {}
        for name, loads in self._loads(counts).items():
            times = max(1, round(counts[self.at[name][0]] / max(1, counts[_POSITIONS])))
            tokens_by_name[name] = [tokens // times for tokens in loads]
        return tokens_by_name

    def _loads(self, counts: Sequence[int]) -> dict[str, list[int]]:
        """The part of each module's experts in some counts."""
        return {n: [*counts[at + 1 : at + 1 + count]] for n, (at, count) in self.at.items()}


def _shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    """The rows of a batch and the tokens of each; 0 where it has no tokens."""
    given = (batch.get(name) for name in _INPUTS)
    tokens = next((value for value in given if isinstance(value, Tensor) and value.dim() > 1), None)
    if tokens is not None:
        return tokens.shape[0], tokens.shape[1]
    first = next(
        (value for value in batch.values() if isinstance(value, Tensor) and value.dim()), None
    )
    return (0 if first is None else len(first)), 0


def _count_unpadded(batch: Mapping[str, Any], positions: int) -> int | Tensor:
    """The tokens of a batch that are no padding, where its mask says which are."""
    mask = batch.get("attention_mask")
    if positions and isinstance(mask, Tensor) and mask.dim() == 2:
        return (mask != 0).sum().to(torch.int64)
    return positions
