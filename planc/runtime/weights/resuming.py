"""Loads a model and its optimizer from a torch.distributed.checkpoint folder."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.optim import Optimizer

from planc.diagnostics.diagnostic import Diagnostic, one_of
from planc.ops.lowered import Lowered
from planc.runtime.lora import renew_magnitudes
from planc.runtime.preconditions import of_all_ranks, problem, stop
from planc.runtime.sharded_tensors import reshard
from planc.runtime.standalone.load_weights import (
    checkpoint_targets,
    listed_names,
    on_other_stages,
    tensors_in_checkpoint,
)
from planc.runtime.standalone.pipeline import stages_of
from planc.runtime.standalone.safetensors_files import StoredTensor
from planc.runtime.standalone.shards import four_bit_layers, named_tensors
from planc.runtime.weights import extras, left_out, loading, optimizers
from planc.runtime.weights.extras import Extra
from planc.runtime.weights.loading import Compared, Excused, different_files
from planc.runtime.weights.saving import METADATA, attempt, last_checkpoint

_OPTIMIZER, _STEP = "optimizer.", "step"
_log = logging.getLogger("planc")


def load(
    model: nn.Module,
    lowered: Lowered,
    folder: Path,
    *,
    weights: loading.Weights | None,
    optimizer: Optimizer | None,
    extra: Extra,
    compare: Compared,
    excused: Excused,
    data: tuple[int, int],
    device: str,
) -> int | None:
    """Loads a model from a folder of safetensors or a checkpoint; every rank calls it.

    Args:
        model: the model, as `lowered` has changed it.
        folder, weights, optimizer, extra, compare: as for `Run.load`, which has the errors.
        excused: its `new` and `unused`.
        data: the number of data ranks, and the one that this rank is.
        device: the type of the mesh's devices.
    """
    if weights not in (None, *get_args(loading.Weights)):
        known = one_of(map(repr, get_args(loading.Weights)))
        raise ValueError(f"weights is {weights!r}, it can be {known}")
    planned = lowered.load.weights
    problems: list[Diagnostic] = []
    if weights and planned and weights != planned:
        text = f"this call has weights = {weights}, the plan's load section {planned}"
        help = "leave it to the plan, or remove the setting from the plan"
        problems.append(problem("PL475", text, help=help))
    loading.raise_on_all_ranks(problems)
    folder = last_checkpoint(folder)
    kind = [(folder / METADATA).is_file()]
    if distributed.get_world_size() > 1:  # only rank 0 may see the folder
        distributed.broadcast_object_list(kind, src=0)
    if kind[0]:
        loading.raise_on_all_ranks(_of_folders_alone(folder, weights, excused))
        kept: dict[str, Any] = {"optimizer": optimizer, "extra": extra, "data": data}
        return _load_checkpoint(model, folder, **kept, device=device, compare=compare)
    if optimizer is not None or extra:
        problems.append(problem("PL497", f"{folder} is not a checkpoint with the state of a run"))
    elif planned == "checkpoint":
        text = f"the plan has weights = checkpoint, and {folder} is not a checkpoint"
        problems.append(problem("PL497", text))
    loading.raise_on_all_ranks(problems)
    how: loading.Weights = "rank0" if "rank0" in (weights, planned) else "slices"
    if how == "rank0" and stages_of(model):
        text = "rank 0 sends a tensor to ranks that all have it, and stages have different ones"
        raise stop("PL567", text, help="write `weights = slices`")
    loading.load_files(
        model,
        folder,
        weights=how,
        device=device,
        compare=compare,
        excused=excused,
        section=lowered.load,
    )
    return None


def _of_folders_alone(
    folder: Path, weights: loading.Weights | None, excused: Excused
) -> list[Diagnostic]:
    """PL497 and PL468 for arguments that are for folders of safetensors, not for a checkpoint."""
    out: list[Diagnostic] = []
    if weights == "rank0":
        out.append(problem("PL497", f"{folder} is a checkpoint: every rank reads its own"))
    if excused.new or excused.unused:
        text = f"{folder} is a checkpoint, and `new` and `unused` are for a folder of safetensors"
        out.append(problem("PL468", text, help="leave them out"))
    return out


def _load_checkpoint(
    model: nn.Module,
    folder: Path,
    *,
    optimizer: Optimizer | None,
    extra: Extra,
    data: tuple[int, int],
    device: str,
    compare: Compared,
) -> int | None:
    """Loads a checkpoint of `save` or torch, whose keys are the model's tensor names, or `model.`
    before them; it need not be one of this plan.
    """
    findings: list[Diagnostic] = []
    reshard(model)
    metadata = _metadata(folder, findings)
    findings += different_files(folder, compare, findings)
    matched: dict[str, StoredTensor] = {}
    others = on_other_stages(model)
    if not findings:
        stored = tensors_in_checkpoint(folder, metadata, dict(named_tensors(model)))
        stored = {name: tensor for name, tensor in stored.items() if name not in others}
        without = {*four_bit_layers(model), *left_out.names_in(metadata)}
        matched = loading.match_or_report(model, stored, folder, findings, without=without)
        findings += _four_bits(model, matched, folder)
    all_optimizers: dict[str, Optimizer] = extras.optimizers_in(model, extra)
    if optimizer is not None:
        all_optimizers[_OPTIMIZER] = optimizer
    flat = {start: _flat(metadata, start, others) for start in all_optimizers}
    for start, each in all_optimizers.items():  # nothing is allocated before every check has passed
        _check_optimizer(model, each, findings, start=start, flat=flat[start], folder=folder)
    rest = extras.others_in(model, extra)
    states, missing = extras.read_states(rest, folder, metadata, *data)
    loading.raise_on_all_ranks([*findings, *missing])
    flat = _states_to_load(model, folder, all_optimizers, flat)
    loading.allocate(model, left_out.differences(model, folder, metadata), device)
    filled, missing = extras.empty(model, rest, states, metadata)
    loading.raise_on_all_ranks(missing)
    target: dict[str, Any] = dict(checkpoint_targets(model, matched)) | filled.targets
    for start, each in all_optimizers.items():
        flat[start] = optimizers.empty_flat_state(model, each, flat[start])
        target |= {start + key: value for key, value in flat[start].items()}
    if _STEP in metadata:
        target[_STEP] = None
    with torch.no_grad():
        read = partial(checkpoint.load, target, checkpoint_id=folder, no_dist=True)
        attempt(read, f"{folder} could not be read")
    renew_magnitudes(model, matched)
    extras.load_states(rest, states, filled)
    for start, each in all_optimizers.items():
        optimizers.load_flat_state(model, each, {k: target[start + k] for k in flat[start]})
    optimizers.rates_of(rest.values())
    return None if (step := target.get(_STEP)) is None else int(step)


def _values(folder: Path, start: str, keys: list[str]) -> dict[str, Any]:
    """The values of keys of an optimizer that hold no tensors."""
    target: dict[str, Any] = dict.fromkeys(start + key for key in keys)
    if target:
        checkpoint.load(target, checkpoint_id=folder, no_dist=True)
    return {key: target[start + key] for key in keys}


def _states_to_load(
    model: nn.Module,
    folder: Path,
    all_optimizers: Mapping[str, Optimizer],
    flat: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """The states that optimizers load from a checkpoint. Rank 0 logs the parameters of all ranks
    whose saved states another algorithm made.
    """
    states: dict[str, dict[str, Any]] = {}
    names: list[str] = []
    for start, each in all_optimizers.items():
        read = partial(_values, folder, start)
        states[start], anew = optimizers.own_state(model, each, flat[start], read)
        names += anew
    told = dict.fromkeys(name for of_rank in of_all_ranks(names) for name in of_rank)
    if told and distributed.get_rank() == 0:
        text = "%s: another algorithm steps them than when the checkpoint was saved, so their "
        _log.warning(f"{text}states begin anew", listed_names(told))
    return states


def _check_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    findings: list[Diagnostic],
    *,
    start: str,
    flat: Mapping[str, Any],
    folder: Path,
) -> None:
    """Adds PL496 for a checkpoint without the state of an optimizer, or with one that does not fit;
    nothing where there is a finding already.
    """
    of = "" if start == _OPTIMIZER else f" of extra[{start[len('extra_optimizers.') : -1]!r}]"
    if not findings and not flat:
        findings.append(problem("PL496", f"{folder} holds no optimizer state{of}"))
    if not findings:
        optimizers.check_state(model, optimizer, flat, findings)


def _flat(metadata: Mapping[str, Any], start: str, others: Collection[str]) -> dict[str, Any]:
    """The keys of an optimizer's flattened state on this stage, without the prefix."""
    flat = {k[len(start) :]: m for k, m in metadata.items() if k.startswith(start)}
    return {k: m for k, m in flat.items() if optimizers.owner(k) not in others}


def _four_bits(
    model: nn.Module, matched: Mapping[str, StoredTensor], folder: Path
) -> list[Diagnostic]:
    """PL687 for 4-bit weights that the checkpoint has unquantized, or that have no values yet."""
    four = four_bit_layers(model)
    if packed := [name for name in matched if name in four]:
        text = f"{folder} holds {packed[0]}, which the plan keeps in 4 bits"
        return [problem("PL687", text, help="read it from a folder of safetensors")]
    if missing := [name for name, layer in four.items() if layer.quant_state is None]:
        text = f"{folder} holds no weights in 4 bits, and {missing[0]} has no values yet"
        return [problem("PL687", text, help="call `run.load` first, on the base model's folder")]
    return []


def _metadata(folder: Path, findings: list[Diagnostic]) -> Mapping[str, Any]:
    try:
        metadata = checkpoint.FileSystemReader(folder).read_metadata()
        findings += _short(folder, metadata.storage_data or {})
        return dict(metadata.state_dict_metadata)
    except Exception as error:  # a broken pickle can raise any exception
        why = f"{type(error).__name__}: {error}"
        findings.append(problem("PL497", f"{folder} is not a complete checkpoint: {why}"))
        return {}


def _short(folder: Path, stored: Mapping[Any, Any]) -> list[Diagnostic]:
    """PL497 for files that are missing, or shorter than the metadata says."""
    needed: dict[str, int] = {}
    for info in stored.values():
        end = info.offset + info.length
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), end)
    out: list[Diagnostic] = []
    for name, size in sorted(needed.items()):
        file = folder / name
        if not file.is_file():
            out.append(problem("PL497", f"{folder} lacks its file {name}"))
        elif file.stat().st_size < size:
            sizes = f"{file.stat().st_size:,} bytes, not {size:,}"
            out.append(problem("PL497", f"{file} is truncated: {sizes}"))
    return out
