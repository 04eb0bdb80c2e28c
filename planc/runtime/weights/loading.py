"""Weights from files: checked as a whole first, then each rank reads what it holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from planc.diagnostic import Diagnostic, PlanError
from planc.model.checkpoint_conversion import recipes
from planc.runtime.lora import begin
from planc.runtime.preconditions import problem
from planc.runtime.quantization import pack, packed, source
from planc.runtime.sharded_tensors import (
    Order,
    adapter,
    aliases,
    held,
    local,
    offloaded,
    orders,
    plain,
    reshard,
    runs,
    take,
    units,
)
from planc.runtime.weights.buffers import recompute
from planc.runtime.weights.safetensors_index import Entry, listing, reading
from planc.runtime.weights.stored_tensors import Piece, Stored, fill, made, one

Weights = Literal["slices", "rank0"]
_STALE = (r"rotary_emb\.inv_freq$",)
"""What checkpoints of older libraries hold and models compute themselves."""


def load_files(model: nn.Module, folder: Path, *, weights: Weights, device: str) -> None:
    """Fills a model from a folder of safetensors. Every rank calls it.

    Everything that can be known beforehand is checked on every rank before a value is written.

    Args:
        model: with a plan applied; on meta it gets its memory here.
        folder: as `files.listing` has it; for `rank0` only rank 0 needs to see it.
        weights: `slices`, each rank reads its own; `rank0`, it reads all and sends it on.
        device: the type of device that a model on meta goes to.

    Raises:
        PlanError: PL496, all names and shapes that don't fit; PL497, files. On every rank.
    """
    findings: list[Diagnostic] = []
    entries: dict[str, Entry] = {}
    reader = weights == "slices" or distributed.get_rank() == 0
    reshard(model)
    matched: dict[str, Stored] = {}
    if reader:
        entries = listing(folder, findings)
        if not findings:
            matched = match(model, _stored(model, entries, findings), findings)
        if found := [name for name in matched if adapter(name)]:
            told = keys(f"{folder} holds adapters,", found).message
            findings.append(problem("PL496", told, help="load them with `run.load_adapters`"))
    values, unknown = recompute(model)
    findings += lost(unknown)
    together(findings)
    together(unlike(model, values))
    materialise(model, values, device)
    with torch.no_grad():
        slices = weights == "slices"
        failure = _slices(model, matched) if slices else _sent(model, matched, device)
    together([problem("PL497", f"reading failed midway: {failure}")] if failure else [])


def together(findings: list[Diagnostic]) -> None:
    """Raises on every rank what any rank found: its own, else those of the first that has some."""
    everyone: list[Any] = [findings]
    if distributed.get_world_size() > 1:
        everyone = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, findings)
    if findings:
        raise PlanError(findings)
    for found in everyone:
        if found:
            raise PlanError(found)


# Names and shapes --------------------------------------------------------------------------------


def _stored(
    model: nn.Module, entries: Mapping[str, Entry], findings: list[Diagnostic]
) -> dict[str, Stored]:
    """What a checkpoint holds under the model's names, whatever the files call it.

    Experts that are one tensor in the model may be many in the files.
    """
    known = set(held(model))
    if known.issuperset(entries):
        return {name: one(entry) for name, entry in entries.items()}
    out: dict[str, Stored] = {}
    for name, recipe in recipes(model, entries, known).items():
        whole = made(recipe, entries)
        if isinstance(whole, Stored):
            out[name] = whole
        else:
            findings.append(problem("PL496", f"{name} cannot be put together: {whole}"))
    return out


def match(
    model: nn.Module,
    entries: Mapping[str, Stored],
    findings: list[Diagnostic],
    *,
    without: Collection[str] = (),
) -> dict[str, Stored]:
    """What each tensor of a model is filled from, by the first of its names.

    Args:
        model: names are those that it had before anything was wrapped.
        entries: what the checkpoint holds; one without any adapter is of the model below them.
        findings: receives PL496, one each for what is missing, unexpected and wrongly shaped.
        without: names that need not be there.
    """
    renamed = {name: entries[own] for own, name in _renaming(model, entries).items()}
    tensors, four = held(model), packed(model)
    out: dict[str, Stored] = {}
    missing: list[str] = []
    wrong: list[str] = []
    tuned = any(map(adapter, renamed))
    for names in aliases(model):
        present = [name for name in names if name in renamed]
        if not present and adapter(names[0]) and not tuned:
            continue
        if not present:
            missing += [names[0]] if names[0] not in without else []
            continue
        out[names[0]] = renamed[present[0]]
        tensor = tensors[names[0]]
        shape = source(four[names[0]]).shape if names[0] in four else tuple(tensor.shape)
        wrong += [text for name in present if (text := _unlike(name, tensor, shape, renamed[name]))]
    ignored = [*_STALE, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    extra = [n for n in renamed if n not in tensors and not any(re.search(i, n) for i in ignored)]
    where = next(iter(entries.values())).folder if entries else "the folder"
    if missing:
        findings.append(keys(f"{where} lacks", missing))
    if extra:
        findings.append(keys(f"{where} holds what the model does not:", extra))
    if wrong:
        findings.append(problem("PL496", f"{where} holds other shapes: {'; '.join(wrong)}"))
    return out


def keys(what: str, names: Iterable[str]) -> Diagnostic:
    """PL496 over a list of names; those that differ by numbers alone are one, with their count."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    shown = (f"{p} ({len(g)} of them)" if len(g) > 1 else g[0] for p, g in groups.items())
    return problem(
        "PL496",
        f"{what} {', '.join(shown)}",
        help="nothing was loaded: build the model from the configuration beside the weights",
    )


def _unlike(name: str, tensor: Tensor, shape: tuple[int, ...], entry: Stored) -> str | None:
    if shape != entry.shape:
        return f"{name} is {list(entry.shape)}, the model's {list(shape)}"
    if tensor.is_floating_point() != entry.floating:
        return f"{name} is of {entry.dtype}, the model's of {tensor.dtype}"
    return None


def _renaming(model: nn.Module, entries: Iterable[str]) -> dict[str, str]:
    """The model's name of each name in the checkpoint, its own where the model has none.

    A checkpoint of a bare body names its parts without the name that the body has in a model with a
    head (`transformer.`), and the other way round.
    """
    known = set(held(model))
    base = f"{getattr(model, 'base_model_prefix', '') or ''}."
    found = list(entries)

    def by(way: Callable[[str], str]) -> dict[str, str]:
        return {name: way(name) if way(name) in known else name for name in found}

    ways = [by(str), by(lambda name: base + name), by(lambda name: name.removeprefix(base))]
    return max(ways, key=lambda way: sum(name in known for name in way.values()))


# Memory ------------------------------------------------------------------------------------------


def lost(names: Iterable[str]) -> list[Diagnostic]:
    """PL496 over tensors on meta that nothing can fill."""
    if not (own := list(names)):
        return []
    text = keys("no file holds, and no module computes again,", own).message
    how = "build the model on the CPU, or give the module a `reset_buffers` method that fills them"
    return [problem("PL496", text, help=how)]


def unlike(model: nn.Module, values: Mapping[int, Tensor]) -> list[Diagnostic]:
    """PL496 over buffers that not every rank computed alike; a collective."""
    mine: dict[str, str] = {}
    for name, buffer in model.named_buffers():
        if id(buffer) in values and buffer.numel():
            data = values[id(buffer)].cpu().flatten().view(torch.uint8).numpy()
            mine[plain(name)] = sha256(data.tobytes()).hexdigest()
    everyone: list[Any] = [mine]
    if distributed.get_world_size() > 1:
        everyone = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, mine)
    names = [n for n in mine if any(other.get(n) != mine[n] for other in everyone)]
    return [keys("the ranks did not compute alike", names)] if names else []


def materialise(model: nn.Module, values: Mapping[int, Tensor], device: str) -> None:
    """Gives what is on meta its memory: parameters without values, computed buffers with theirs.

    Parameters stay the same objects, so ties hold, and so do optimizers and FSDP units. Adapters,
    which no file of the model's holds, begin as they would have on the CPU.
    """
    done: dict[int, Tensor] = {}
    seen: set[int] = set()
    host = offloaded(model)
    unset = {name for name, tensor in held(model).items() if adapter(name) and tensor.is_meta}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta and id(parameter) not in seen:
                home = "cpu" if id(parameter) in host else device
                fresh = torch.empty_like(parameter.detach(), device=home)
                made = nn.Parameter(fresh, requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, made)
                seen.add(id(parameter))
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            if id(buffer) not in done:
                value = values.get(id(buffer))
                fresh = torch.empty_like(buffer, device=device) if value is None else value
                done[id(buffer)] = fresh.to(device)
            module._buffers[name] = done[id(buffer)]
    if seen and units(model):
        model._apply(lambda tensor: tensor)  # FSDP takes up the new memory of its shards
    if unset:
        begin(model, unset)


# Reading -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wish:
    """A tensor of the model and where its values are.

    Args:
        layer: of a 4-bit weight, which takes whole values and keeps its bytes.
    """

    tensor: Tensor
    stored: Stored | None
    order: Order | None = None
    layer: nn.Module | None = None

    @property
    def whole(self) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and the dtype of all the values."""
        if self.layer is not None:
            own = source(self.layer)
            return own.shape, own.dtype
        return tuple(self.tensor.shape), self.tensor.dtype

    @property
    def bytes(self) -> int:
        shape, dtype = self.whole
        return int(prod(shape) * dtype.itemsize)


def _wishes(model: nn.Module, matched: Mapping[str, Stored]) -> list[_Wish]:
    """Every distinct tensor but adapters, in an order that is the same on every rank."""
    tensors, own, four = held(model), orders(model), packed(model)
    return [
        _Wish(tensors[n[0]], matched.get(n[0]), own.get(n[0]), four.get(n[0]))
        for n in aliases(model)
        if not adapter(n[0])
    ]


def _slices(model: nn.Module, matched: Mapping[str, Stored]) -> str | None:
    """Every rank reads its own; gives what went wrong, or None."""
    files: dict[Path, list[tuple[Piece, _Wish]]] = {}
    wishes = _wishes(model, matched)
    for wish in (w for w in wishes if w.layer is None):
        assert wish.stored is not None
        for piece in wish.stored.pieces:
            files.setdefault(piece.entry.file, []).append((piece, wish))
    try:
        for file, wanted in files.items():
            with reading(file) as opened:
                for piece, wish in wanted:
                    fill(local(wish.tensor), opened, piece, runs(wish.tensor, wish.order))
        for wish in wishes:
            if wish.layer is not None:
                _quantised(wish)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _quantised(wish: _Wish) -> None:
    """One weight at a time is there in all its bits, and goes when it is packed."""
    assert wish.layer is not None and wish.stored is not None
    own = source(wish.layer)
    sizes = [sum(stop - start for start, stop in some) for some in own.ranges]
    weight = torch.empty(sizes, dtype=own.dtype)
    for piece in wish.stored.pieces:
        with reading(piece.entry.file) as opened:
            fill(weight, opened, piece, own.ranges)
    pack(wish.layer, weight)


def _sent(model: nn.Module, matched: Mapping[str, Stored], device: str) -> str | None:
    """Rank 0 reads each tensor whole and sends it; the others keep what they hold of it."""
    failure: str | None = None
    wishes = _wishes(model, matched)
    # one memory for all, for a backend may hold on to what it sent for a while
    room = torch.empty(max((w.bytes for w in wishes), default=0), dtype=torch.uint8, device=device)
    for wish in wishes:
        tensor, stored = wish.tensor, wish.stored
        # in the model's dtype, not the file's, which only rank 0 knows
        shape, dtype = wish.whole
        whole = room[: wish.bytes].view(dtype).view(shape)
        if stored is not None and failure is None:
            everything = tuple(((0, size),) for size in whole.shape)
            try:
                for file, pieces in groupby(stored.pieces, key=lambda p: p.entry.file):
                    with reading(file) as opened:
                        for piece in pieces:
                            fill(whole, opened, piece, everything)
            except Exception as error:  # the others wait for it, so it is told at the end
                failure = f"{type(error).__name__}: {error}"
        if distributed.get_world_size() > 1:
            distributed.broadcast(whole, src=0)
        if wish.layer is not None:
            pack(wish.layer, take(whole, source(wish.layer).ranges))
            continue
        mine = take(whole, runs(tensor, wish.order)) if isinstance(tensor, DTensor) else whole
        local(tensor).copy_(mine)
    return failure
