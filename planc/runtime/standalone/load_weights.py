"""Loads weights into a parallel model: checks names, allocates memory, reads files.

`Run.load` calls these functions, and emitted scripts inline them without their types.
`planc.runtime.weights` has the rest of `Run.load`: diagnostics with codes, checkpoints
with tensors that have to be converted, such as experts that are stored one by one, and
the optimizer.

torch's reader of safetensors, `torch.distributed.checkpoint.HuggingFaceStorageReader`
(torch 2.13), was measured and is not used. Each rank reads its slices with it, too, and
neither is better (`tests/bench/loading.py`, 239 million parameters in float32 on four
processes: 1.69 s and 198.1 MiB a rank here, 1.71 s and 198.9 MiB there; in a second run
on a busier machine 2.5 s and 2.2 s). But it
reads every `*.safetensors` of a folder, whatever the index says, so that a second copy
of the weights in the folder is used silently; it raises only for the first missing name
or wrong shape, and ignores names that the model lacks; it does not support converted
tensors (stacked, concatenated, transposed), reading on one rank for all, or weights
that are quantized one at a time. It could replace `StoredTensor.copy_to` only.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.fsdp import FSDPModule

from planc.runtime.standalone.buffers import computed_buffers
from planc.runtime.standalone.dcp_chunks import storable
from planc.runtime.standalone.pipeline import stages_of
from planc.runtime.standalone.safetensors_files import (
    FLOATS,
    StoredTensor,
    tensors_in_folder,
)
from planc.runtime.standalone.shards import (
    Order,
    four_bit_layers,
    is_adapter,
    named_tensors,
    on_host,
    part_of,
    rank_orders,
    scalars_of,
    select_ranges,
    slices_of,
    tied_names,
)

# Before the model is parallel ---------------------------------------------------------


def keep_in(model: nn.Module, dtype: torch.dtype, fp32: str = "") -> None:
    """Casts parameters to the dtype of the load section; some stay in float32."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            kept_dtype = torch.float32 if fp32 and re.fullmatch(fp32, name) else dtype
            parameter.data = parameter.data.to(kept_dtype)


def on_meta(model: nn.Module) -> None:
    """Raises unless all parameters are on meta."""
    if not all(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("build the model on the meta device")


# Names and shapes ---------------------------------------------------------------------


def first_found(findings: list[Any], group: Any = None) -> list[Any]:
    """This rank's findings, else those of the first rank with some; a collective."""
    everyone: list[Any] = [findings]
    if distributed.get_world_size(group) > 1:
        everyone = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(everyone, findings, group=group)
    return next(filter(None, [findings, *everyone]), [])


def match_tensors(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    folder: Path,
    problems: list[str],
    without: Collection[str] = (),
) -> dict[str, StoredTensor]:
    """The stored tensor for each tensor of a model, by the first of its names.

    Args:
        model: the model; its names are those before anything was wrapped.
        stored: the tensors of the checkpoint; without adapters among them, it is a
        checkpoint of the base model.
        folder: the checkpoint, for messages.
        problems: receives one text each for missing names, unexpected names and wrong
        shapes.
        without: names that may be missing.
    """
    tensors, four = dict(named_tensors(model)), four_bit_layers(model)
    others, scalars = on_other_stages(model), scalars_of(model)
    known = rename_for_model(model, stored, {*tensors, *others})
    inside = {name: stored[key] for key, name in known.items() if name not in others}
    adapters = any(map(is_adapter, inside))
    matches: dict[str, StoredTensor] = {}
    missing: list[str] = []
    wrong: list[str] = []
    for names in tied_names(model):
        present = [name for name in names if name in inside]
        if present:
            matches[names[0]] = inside[present[0]]
        elif names[0] not in without and (adapters or not is_adapter(names[0])):
            missing.append(names[0])
        tensor = tensors[names[0]]
        shape = four[names[0]].source[0] if names[0] in four else tuple(tensor.shape)
        if names[0] in scalars and any(_is_scalar_in_file(inside[n]) for n in present):
            shape = ()
        differences = (
            difference(name, tensor, shape, inside[name]) for name in present
        )
        wrong += filter(None, differences)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignored = [r"rotary_emb\.inv_freq$", *ignored]  # older libraries stored it
    extra = [name for name in inside if name not in tensors]
    extra = [n for n in extra if not any(re.search(pattern, n) for pattern in ignored)]
    text = f"{folder} has names that the model lacks:"
    problems += [f"{folder} lacks {listed_names(missing)}"] if missing else []
    problems += [f"{text} {listed_names(extra)}"] if extra else []
    problems += [f"{folder} has other shapes: {'; '.join(wrong)}"] if wrong else []
    return matches


def on_other_stages(model: nn.Module) -> set[str]:
    """The names of the tensors that other stages of a pipeline hold."""
    stages = stages_of(model)
    return stages.names - dict(named_tensors(model)).keys() if stages else set()


def rename_for_model(
    model: nn.Module, stored: Iterable[str], known: Collection[str]
) -> dict[str, str]:
    """The model's name for each name in a checkpoint; an unknown name is unchanged.

    Names in a checkpoint of a model without a head lack the prefix that they have in a
    model with a head (`transformer.`), and vice versa.
    """
    base = f"{getattr(model, 'base_model_prefix', '') or ''}."
    names = list(stored)

    def apply(way: Callable[[str], str]) -> dict[str, str]:
        return {name: way(name) if way(name) in known else name for name in names}

    ways = [
        apply(str),
        apply(lambda n: base + n),
        apply(lambda n: n.removeprefix(base)),
    ]
    return max(ways, key=lambda way: sum(name in known for name in way.values()))


def _is_scalar_in_file(stored: StoredTensor) -> bool:
    """Torch's checkpoints, which are folders, are read with the unit's one element."""
    return not stored.shape and stored.file.is_file()


def difference(
    name: str, tensor: Tensor, shape: tuple[int, ...], stored: StoredTensor
) -> str | None:
    """Why a stored tensor does not fit a tensor of the model; None if it does."""
    if shape != stored.shape:
        return f"{name} is {list(stored.shape)}, the model's {list(shape)}"
    if tensor.is_floating_point() != (stored.dtype in FLOATS):
        scales = " without scales" if stored.dtype.startswith("F") else ""
        return f"{name} is {stored.dtype}{scales}, the model's {tensor.dtype}"
    return None


def listed_names(names: Iterable[str]) -> str:
    """Names as text; names that differ in numbers only are one entry with a count."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    shown = {p: f"{p} ({len(g)} of them)" if g[1:] else g[0] for p, g in groups.items()}
    return ", ".join(shown.values())


# Memory -------------------------------------------------------------------------------


def materialize(model: nn.Module, values: Mapping[int, Tensor], device: str) -> None:
    """Allocates tensors on meta: parameters without values, buffers with computed ones.

    Parameters stay the same objects, so ties, optimizers and FSDP units remain valid.

    Args:
        model: a model with a plan applied.
        values: the values of buffers, by their ids.
        device: the type of the model's device.
    """
    done: dict[int, Tensor] = {}
    seen: set[int] = set()
    host = on_host(model)
    for module in model.modules():
        for parameter in module._parameters.values():
            if (
                parameter is not None
                and parameter.is_meta
                and id(parameter) not in seen
            ):
                home = "cpu" if id(parameter) in host else device
                fresh = torch.empty_like(parameter.detach(), device=home)
                replacement = nn.Parameter(fresh, requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, replacement)
                seen.add(id(parameter))
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            if id(buffer) not in done:
                value = values.get(id(buffer))
                fresh = (
                    torch.empty_like(buffer, device=device) if value is None else value
                )
                done[id(buffer)] = fresh.to(device)
            module._buffers[name] = done[id(buffer)]
    if seen and any(isinstance(module, FSDPModule) for module in model.modules()):
        model._apply(
            lambda tensor: tensor
        )  # FSDP registers the new memory of its shards


# Reading ------------------------------------------------------------------------------


def targets(
    model: nn.Module, matches: Mapping[str, StoredTensor]
) -> list[tuple[Tensor, StoredTensor | None, Order | None, Any]]:
    """(tensor, stored tensor, storage order, 4-bit layer) of each tensor.

    The sequence is the same on all ranks. Adapters are left out.
    """
    tensors, orders = dict(named_tensors(model)), rank_orders(model)
    four = four_bit_layers(model)
    names = [group[0] for group in tied_names(model) if not is_adapter(group[0])]
    return [(tensors[n], matches.get(n), orders.get(n), four.get(n)) for n in names]


def read_slices(model: nn.Module, matches: Mapping[str, StoredTensor]) -> None:
    """Reads the slices of this rank from the files.

    Args:
        model: a model that is allocated.
        matches: the stored tensor for each tensor, by the first of its names.
    """
    with torch.no_grad():
        for tensor, stored, order, layer in targets(model, matches):
            if stored is None:
                raise ValueError("a tensor of the model has no values")
            if layer is None:
                stored.copy_to(part_of(tensor), slices_of(tensor, order))
                continue
            # only one unquantized weight is in memory at a time
            _, dtype, ranges = layer.source
            sizes = [sum(stop - start for start, stop in runs) for runs in ranges]
            weight = torch.empty(sizes, dtype=dtype)
            stored.copy_to(weight, ranges)
            layer.keep(weight)


def read_rank0(
    model: nn.Module, matches: Mapping[str, StoredTensor], device: str
) -> None:
    """Rank 0 reads each full tensor and broadcasts it; every rank copies its slices.

    Args:
        model: a model that is allocated.
        matches: on rank 0 as for `read_slices`; unused on other ranks.
        device: the device type of the process group.
    """
    wanted = targets(model, matches)
    # the model's dtype, because only rank 0 knows the file's
    kinds = [
        (tuple(t.shape), t.dtype) if w is None else w.source[:2] for t, *_, w in wanted
    ]
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in kinds]
    # one buffer for all, because a backend may keep sent memory for a while
    room = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)
    failure: Exception | None = None
    with torch.no_grad():
        for (tensor, stored, order, layer), (shape, dtype) in zip(
            wanted, kinds, strict=True
        ):
            full = room[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
            if stored is not None and failure is None:
                try:
                    stored.copy_to(full, tuple(((0, size),) for size in shape))
                except (
                    Exception
                ) as error:  # other ranks wait for the broadcast, so raise later
                    failure = error
            if distributed.get_world_size() > 1:
                distributed.broadcast(full, src=0)
            if layer is None:
                part_of(tensor).copy_(select_ranges(full, slices_of(tensor, order)))
            else:
                layer.keep(select_ranges(full, layer.source[2]))
    if failure is not None:
        raise failure


# torch.distributed.checkpoint ---------------------------------------------------------


def tensors_in_checkpoint(
    folder: Path, metadata: Mapping[str, Any], names: Iterable[str]
) -> dict[str, StoredTensor]:
    """The model's tensors in a checkpoint; their keys may begin with `model.`.

    Args:
        folder: the checkpoint.
        metadata: torch's metadata of each key.
        names: the names of the model's tensors.
    """
    start = "model." if any(f"model.{name}" in metadata for name in names) else ""
    tensors: dict[str, StoredTensor] = {}
    for key, meta in metadata.items():
        other = key == "step" or key.startswith("optimizer.")
        if other or not key.startswith(start) or not hasattr(meta, "size"):
            continue
        dtype = meta.properties.dtype
        plain = dtype.is_floating_point and dtype.itemsize > 1
        kind = "F" if plain else str(dtype).removeprefix("torch.").upper()
        tensors[key[len(start) :]] = StoredTensor(folder, key, tuple(meta.size), kind)
    return tensors


def checkpoint_targets(
    model: nn.Module, matches: Mapping[str, StoredTensor]
) -> dict[str, Tensor]:
    """The tensors that torch.distributed.checkpoint loads, by the checkpoint's keys."""
    tensors, orders = dict(named_tensors(model)), rank_orders(model)
    return {s.name: storable(tensors[n], orders.get(n)) for n, s in matches.items()}


# Entry points of emitted scripts ------------------------------------------------------


def checked_files(
    model: nn.Module,
    folder: str,
    reads: bool = True,
    plain: Callable[[Any, list[str]], dict[str, StoredTensor]] | None = None,
) -> tuple[dict[str, StoredTensor], dict[int, Tensor]]:
    """The stored tensor for each tensor of a model, and values for buffers.

    Args:
        model: a model with a plan applied.
        folder: a folder of safetensors.
        reads: whether this rank reads the files.
        plain: where they store weights in fewer bits, what makes plain ones of these.

    Raises:
        ValueError: all names and shapes that do not fit, on every rank.
    """
    problems: list[str] = []
    matches: dict[str, StoredTensor] = {}
    stored = tensors_in_folder(Path(folder), problems) if reads else {}
    if plain is not None:
        stored = plain(stored, problems)
    if reads and not problems:
        matches = match_tensors(model, stored, Path(folder), problems)
        if len(problems) > 1:
            other = "of another form, such as one with one tensor for each expert"
            problems.append(f"a checkpoint {other}, is for planc's Run.load")
        if any(map(is_adapter, stored)):
            problems.append("adapters among them are for planc's Run.load_adapters")
    return matches, agreed_buffers(model, problems)


def checked_checkpoint(
    model: nn.Module, folder: str
) -> tuple[dict[str, StoredTensor], dict[int, Tensor]]:
    """Like `checked_files`, for a folder of `torch.distributed.checkpoint`."""
    problems: list[str] = []
    matches: dict[str, StoredTensor] = {}
    try:
        metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
        names = dict(named_tensors(model))
        stored = tensors_in_checkpoint(Path(folder), metadata, names)
        matches = match_tensors(model, stored, Path(folder), problems)
    except Exception as error:
        problems.append(f"{folder} cannot be read: {error}")
    if four_bit_layers(model):
        problems = ["weights in 4 bits are read from safetensors"]
    return matches, agreed_buffers(model, problems)


def agreed_buffers(model: nn.Module, problems: list[str]) -> dict[int, Tensor]:
    """Values for buffers; raises on every rank if any rank has findings."""
    values, lost = computed_buffers(model)
    text = f"no file holds and no module can recompute {listed_names(lost)}"
    problems += [text] if lost else []
    if findings := first_found(problems):
        raise ValueError("nothing was loaded: " + "; ".join(findings))
    return values


def read_checkpoint(
    model: nn.Module, matches: Mapping[str, StoredTensor], folder: str
) -> None:
    """Reads the slices of this rank from a `torch.distributed.checkpoint`."""
    with torch.no_grad():
        reader = FileSystemReader(folder)
        load(checkpoint_targets(model, matches), storage_reader=reader)
