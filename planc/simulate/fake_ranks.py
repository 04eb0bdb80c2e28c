"""Values for a rank on torch's fake process group instead of those that other ranks would send.

A fake group's collectives return at once and write nothing. Sizes and shapes are right where they
follow from the rank's own; where they don't, or where a step reads values, which fake tensors do
not have, this says what they are: equal shares of the tokens for all experts, one document a row,
and a loss that divides by a number of tokens. This module imports torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn

from planc.compat.fakes import FakeTensor, FakeTensorMode, unset_fake_temporarily
from planc.compat.trees import tree_leaves
from planc.model.sources.huggingface import (
    merged_windows,
    one_sequence_a_row,
    uncounted_images,
)
from planc.runtime import training_step
from planc.runtime.run import Run
from planc.runtime.standalone import context as of_context
from planc.runtime.standalone import context_tokens, expert_parallel, pipeline_step
from planc.runtime.standalone.collectives import Sizes, all_gather
from planc.runtime.standalone.context import CONTEXT
from planc.runtime.standalone.context_ring import RingMask
from planc.runtime.standalone.divided_images import Column, DividedImages
from planc.runtime.standalone.expert_parallel import LocalExperts, Share
from planc.runtime.standalone.pipeline import stages_of
from planc.runtime.standalone.pipeline_messages import HEADER, Message
from planc.runtime.standalone.pipeline_schedule import RunningStage
from planc.runtime.standalone.towers import SharedTower


class FakeFloats(FakeTensorMode):  # type: ignore[misc]
    """Fake tensors, except for what is computed from nothing but integers of code and batch: by
    these the code of a model finds its images. Memory for tensors on meta is fake too.
    """

    def dispatch(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        given = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
            if func in _INDEXING:
                args = (args[0], _places(args[1]), *args[2:])
            return super().dispatch(func, types, args, given)
        if not tensors:
            result = super().dispatch(func, types, args, given)
            if not isinstance(result, FakeTensor) or result.is_floating_point():
                return result
        return func(*args, **given)


_INDEXING = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
)


def _places(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices of a tensor, with the places of those masks that have values."""
    places: list[Tensor | None] = []
    for index in indices:
        mask = index is not None and index.dtype == torch.bool
        if index is None or not mask or isinstance(index, FakeTensor):
            places.append(index)
        else:
            places += index.nonzero().unbind(1)
    return places


@contextmanager
def isolate_rank(run: Run, form: Sequence[Any] | None, *, values: bool = False) -> Iterator[None]:
    """Lets a rank take its steps without the others.

    Args:
        run: of the rank.
        form: of what the stages before it send, as `sent_by` gives it on one of them.
        values: whether the rank's own tensors have values, as on a device.
    """
    others = (
        (context_tokens, "document_numbers", lambda _: _OneDocument()),
        (expert_parallel, "shares", _equal_shares),
        (SharedTower, "needs_collectives", lambda _: False),
        (RunningStage, "receive_description", partialmethod(_receive_form, form)),
        (Message, "parts", _receive_parts),
        (distributed.ProcessGroup, "send", _send),
    )
    context = run.model.__dict__.get(CONTEXT)
    seen = partial(_causal, halves=getattr(context, "balance", "none") != "none")
    without_values = (
        (training_step, "_require_as_many", _as_many),
        (RingMask, "tile_visibility", property(seen)),
        (of_context, "batch_documents", lambda *_, **__: None),  # no row has a second one
        (DividedImages, "_sizes", _as_own),
        (pipeline_step, "rows_of_images", _equal_images),
    )
    with ExitStack() as stack:
        for place, name, substitute in others if values else (*others, *without_values):
            stack.enter_context(mock.patch.object(place, name, substitute))
        if not values:
            run.steps.counts = run.steps.settled = True
            stack.enter_context(one_sequence_a_row())
            stack.enter_context(uncounted_images())
            stack.enter_context(merged_windows())
        if context is not None and not values:
            plain = context.batch
            stack.enter_context(mock.patch.object(context, "batch", partial(_part, plain)))
        yield


def sent_by(run: Run) -> list[Any]:
    """The arguments of the `Message` that this rank's stages have sent; none without stages."""
    stages = stages_of(run.model)
    sent = (part.section.sent for part in stages.runner.parts) if stages else ()
    return next(([message.forms, message.values] for message in sent if message), [])


def _part(plain: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's part of a batch, whose values decide which tokens it has."""
    with unset_fake_temporarily():
        local_batch = plain({n: _with_values(v) for n, v in batch.items()})
    known = {name for name, value in batch.items() if not isinstance(value, FakeTensor)}
    return {
        name: torch.empty(value.shape, dtype=value.dtype)
        if isinstance(value, Tensor) and name not in known
        else value
        for name, value in local_batch.items()
    }


def _with_values(tensor: Tensor) -> Tensor:
    """A tensor of a batch with values, zeros if it is a fake one."""
    fake = isinstance(tensor, FakeTensor)
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if fake else tensor


class _OneDocument:
    """In the place of the documents' numbers: no row has a second one."""

    def __getitem__(self, _: Any) -> _OneDocument:
        return self

    def __gt__(self, _: Any) -> _OneDocument:
        return self

    def any(self) -> bool:
        return False


def _equal_shares(experts: LocalExperts, flats: list[Tensor]) -> list[Share]:
    """`shares` where every rank sends as many tokens to every other."""
    ranks, shares_by_chunk = experts.group.size(), list[Share]()
    sizes = torch.empty(ranks * experts.count, len(flats), dtype=torch.long, device=flats[0].device)
    distributed.all_to_all_single(torch.empty_like(sizes), sizes, group=experts.group)
    for flat in flats:
        each = [(len(flat) + rank) // ranks for rank in range(ranks)]
        tokens = torch.arange(len(flat), device=flat.device)
        shares_by_chunk.append((each, each, tokens * experts.count // max(1, len(flat))))
    return shares_by_chunk


def _causal(mask: RingMask, halves: bool) -> dict[tuple[int, int, int], list[bool]]:
    """The `tile_visibility` of a causal mask.

    Args:
        mask: of a rank.
        halves: whether a rank has a run of each half of a sequence.
    """
    ranks, cuts = mask.ring.size, len(mask.cuts)
    halves = halves and cuts > 1

    def place(rank: int, cut: int) -> int:
        """The index of a tile in the sequence."""
        if not halves:
            return rank * cuts + cut
        back, within = divmod(cut, cuts // 2)
        return (2 * ranks - 1 - rank if back else rank) * (cuts // 2) + within

    visibility = {}
    for owner, (at, queries), (to, keys) in itertools.product(
        range(ranks), enumerate(mask.cuts), enumerate(mask.cuts)
    ):
        query_tile, key_tile = place(mask.ring.rank, at), place(owner, to)
        visibility[owner, queries.start, keys.start] = [
            key_tile <= query_tile,
            key_tile < query_tile,
            key_tile == query_tile,
        ]
    return visibility


def _as_many(_: Any, __: Any, device_type: str) -> None:
    """Takes part in `_require_as_many`, whose result has no values."""
    both = torch.zeros(2, dtype=torch.long, device=device_type)
    distributed.all_reduce(both, distributed.ReduceOp.MAX)


def _receive_form(stage: RunningStage, form: Sequence[Any] | None, peer: int) -> Message:
    """The message of the stage before; by default one that another stage of this rank has sent."""
    header = torch.zeros(HEADER, dtype=torch.uint8, device=stage.device)
    distributed.recv(header, peer, group=stage.group)
    if form:
        return Message(*form)
    return next(filter(None, (part.section.sent for part in stage.beside.values())))


_PARTS = Message.parts


def _receive_parts(message: Message, packed: Tensor) -> list[Tensor]:
    """Random tensors instead of another stage's: garbage may be NaN, which breaks routers."""
    tensors = _PARTS(message, packed)
    return [part.normal_() if part.is_floating_point() else part for part in tensors]


def _as_own(images: DividedImages, columns: list[Column], *_: Any) -> list[list[Sizes]]:
    """The image sizes of all ranks, if each has the same images as this one."""
    sizes = [column.sizes for column in columns]
    most = max(map(len, sizes))
    mine = torch.zeros(len(columns), most, dtype=torch.int64)
    gathered = mine.new_empty((images.ranks, *mine.shape))
    all_gather(gathered.flatten(0, 1), mine, group=images.way.group)
    return [[each] * images.ranks for each in sizes]


def _equal_images(batch: Mapping[str, Any], count: int, _: Any) -> list[dict[str, Any]]:
    """The images of parts of a batch, where each row has as many."""
    pixels = batch.get("pixel_values")
    if pixels is None:
        return [{} for _ in range(count)]
    names = [name for name in ("pixel_values", "image_grid_thw") if name in batch]
    parts = zip(*(batch[name].chunk(count) for name in names), strict=True)
    return [dict(zip(names, part, strict=True)) for part in parts]


class _Holding:
    """The work of a message, which keeps its tensors as torch's own works do."""

    def __init__(self, work: Any, tensors: Any) -> None:
        self.work, self.tensors = work, tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


_SEND = distributed.ProcessGroup.send


def _send(group: Any, tensors: Any, *args: Any) -> _Holding:
    return _Holding(_SEND(group, tensors, *args), tensors)


def with_memory(model: nn.Module, device: str) -> None:
    """`to_empty`, which would make a parameter of its own for each module that has a tied one."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module._parameters, name))
    model.to_empty(device=device)
    for (first, name), *others in places.values():
        for parameters, other in others:
            parameters[other] = first[name]
