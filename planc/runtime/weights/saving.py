"""Checkpoints that another plan can resume from, and exports that transformers reads."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.optim import Optimizer

from planc.diagnostic import Diagnostic
from planc.model.checkpoint_conversion import HubNames
from planc.ops.configure import Configure
from planc.ops.lowered import Lowered
from planc.runtime.gradients import full_state_dict, on_rank_0
from planc.runtime.preconditions import problem
from planc.runtime.sharded_tensors import reshard
from planc.runtime.standalone import shards
from planc.runtime.standalone.dcp_chunks import storable
from planc.runtime.standalone.lora_init import adapter_layers
from planc.runtime.standalone.pipeline import stages_of
from planc.runtime.standalone.safetensors_files import INDEX, SINGLE
from planc.runtime.weights.loading import raise_on_all_ranks
from planc.runtime.weights.optimizers import flat_state, storage_order
from planc.runtime.weights.peft_files import Tuned, change, merge_findings, write_tensors

METADATA = ".metadata"  # torch.distributed.checkpoint writes this file last


def save(
    model: nn.Module,
    folder: Path,
    *,
    optimizer: Optimizer | None = None,
    step: int | None = None,
    extra: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a torch.distributed.checkpoint that another plan or world size can resume from.

    The checkpoint is written beside the folder and renamed when it is complete, so the previous one
    can be loaded after a crash at any time. Every rank calls this, and all ranks see the folder.
    4-bit weights are left out: they never change, and their files hold them unquantized.

    Args:
        model: a model with a plan applied.
        folder: created, or replaced if it holds a checkpoint.
        optimizer: an optimizer of the model's parameters, whose state is saved too.
        step: a number that `load` returns.
        extra: what `extras.states` made of the script's own objects.

    Raises:
        PlanError: PL497, the folder holds something else, or writing failed. On every rank.
    """
    new, old = _beside(folder)
    raise_on_all_ranks(_on_rank0(lambda: _clear(folder, new)))
    reshard(model)
    tensors, own = dict(shards.named_tensors(model)), shards.rank_orders(model)
    four = shards.four_bit_layers(model)
    names = [n[0] for n in shards.tied_names(model) if n[0] not in four]
    state: dict[str, Any] = {"model": {n: storable(tensors[n], own.get(n)) for n in names}}
    if optimizer is not None:
        flat = flat_state(model, optimizer)
        state["optimizer"] = {
            name: storable(value, storage_order(name, value, own))
            if isinstance(value, Tensor)
            else value
            for name, value in flat.items()
        }
    if step is not None:
        state["step"] = step
    state |= extra or {}
    failed: list[Diagnostic] = []
    try:
        checkpoint.save(state, checkpoint_id=new)
    except (Exception, checkpoint.CheckpointException) as error:  # such as a full disk
        failed.append(problem("PL497", f"{folder} could not be written: {reason(error)}"))
    raise_on_all_ranks(failed)
    raise_on_all_ranks(_on_rank0(lambda: _publish(folder, new, old)))


def saved(folder: Path) -> Path:
    """Where the last complete checkpoint of a folder is, also after a crash during a rename."""
    _, old = _beside(folder)
    return old if not folder.exists() and (old / METADATA).is_file() else folder


def _beside(folder: Path) -> tuple[Path, Path]:
    """Where a checkpoint is written, and where the previous one is moved during the renames."""
    folder = folder.absolute()
    return folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")


def _on_rank0(work: Callable[[], None]) -> list[Diagnostic]:
    """Runs file operations on rank 0; the other ranks wait in the next exchange of findings."""
    if distributed.get_rank() != 0:
        return []
    try:
        work()
    except OSError as error:
        return [problem("PL497", reason(error))]
    return []


def reason(error: BaseException) -> str:
    """The first line of an error; torch's checkpoint errors collect those of all ranks."""
    if isinstance(error, checkpoint.CheckpointException) and error.failures:
        rank, (inner, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {reason(inner)}"
    text = [line for line in str(error).strip().splitlines() if line.strip()]
    return text[0].strip() if text else type(error).__name__


def _clear(folder: Path, new: Path) -> None:
    """Creates the folder `new`; raises if `folder` holds files that are not a checkpoint."""
    if folder.exists() and not (folder / METADATA).is_file():
        if not folder.is_dir() or any(folder.iterdir()):
            raise FileExistsError(f"{folder} exists and is not a checkpoint: choose another folder")
        folder.rmdir()
    if new.exists():
        shutil.rmtree(new)
    new.mkdir(parents=True)


def _publish(folder: Path, new: Path, old: Path) -> None:
    """Renames `new` to `folder`; `folder` or `old` is a complete checkpoint at every moment."""
    if folder.exists():
        if old.exists():
            shutil.rmtree(old)
        folder.rename(old)
    new.rename(folder)
    _sync(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def _sync(folder: Path) -> None:
    """Writes a folder's entries to disk: a rename survives a power failure only after that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Export ------------------------------------------------------------------------------------------


def export(
    model: nn.Module,
    lowered: Lowered,
    folder: Path,
    *,
    shard_size: int,
    adapters: Tuned | None = None,
    replace: bool = False,
) -> None:
    """Writes safetensors, their index and `config.json` for transformers' `from_pretrained`.

    Tensors are all-gathered one at a time; rank 0 holds those of one file. Tied tensors are
    written once, and names and tensors are those of the model's checkpoints on the hub, such as one
    tensor for each expert. Every rank calls it.

    Args:
        model: a model with a plan applied; its dtypes are kept.
        lowered: the plan; it has the model's class and the fields that it set in `config.json`.
        folder: created if it does not exist.
        shard_size: the maximum size of a file in bytes, unless a single tensor is larger.
        adapters: whether adapters are merged or left out; required if the model has adapters.
        replace: whether weights in the folder are replaced, once all new files are written.

    Raises:
        PlanError: PL189, the model has adapters and `adapters` is None, or merging would untie
            weights; PL686, 4-bit weights; PL497, the folder holds weights already, or writing
            failed. On every rank.
    """
    raise_on_all_ranks(merge_findings(model, adapters))
    if replace:
        new = folder.with_name(f".{folder.name}.new")
        raise_on_all_ranks(_on_rank0(lambda: shutil.rmtree(new, ignore_errors=True)))
        export(model, lowered, new, shard_size=shard_size, adapters=adapters)
        raise_on_all_ranks(_on_rank0(lambda: _replace_weights(folder, new)))
        return
    raise_on_all_ranks(_on_rank0(lambda: _empty(folder)))
    reshard(model)
    changes = adapter_layers(model) if adapters == "merged" else {}
    if stages_of(model):
        _export_stages(model, lowered, folder, shard_size, changes)
        return
    names = [
        _kept(model, group) for group in shards.tied_names(model) if not shards.is_adapter(group[0])
    ]
    tensors, own = dict(shards.named_tensors(model)), shards.rank_orders(model)
    hub, scalars = HubNames(model), shards.scalars_of(model)
    groups = [(group, [tensors[n] for n in group]) for group in hub.converted_together(names)]
    files = _Files(folder, list(_parts(groups, shard_size)), hub)
    for part in files.parts:
        full: dict[str, Tensor] = {}
        for name in part:
            value = shards.whole_of(tensors[name], own.get(name), scalar=name in scalars)
            if name.removesuffix(".weight") in changes:
                value = value + change(changes[name.removesuffix(".weight")])
            if distributed.get_rank() == 0:
                full[name] = value.to("cpu").contiguous()
            del value
        files.write(full)
    raise_on_all_ranks(files.failed)
    raise_on_all_ranks(_on_rank0(lambda: _describe(files, model, lowered)))


def _export_stages(
    model: nn.Module, lowered: Lowered, folder: Path, shard_size: int, changes: Mapping[str, Any]
) -> None:
    """Rank 0 gathers the weights of all stages on the CPU, and writes them.

    Args:
        changes: the layers of this rank's stages whose adapters are merged, by name.
    """
    full = {n: t for n, t in full_state_dict(model).items() if not shards.is_adapter(n)}
    mine = {f"{name}.weight": change(layer).cpu() for name, layer in changes.items()}
    for name, by in on_rank_0(mine, model).items():
        full[name] = full[name] + by
    first = {tensor.data_ptr(): name for name, tensor in reversed(full.items())}
    hub = HubNames(model)
    groups = hub.converted_together([*reversed(first.values())])
    sized = [(group, [full[name] for name in group]) for group in groups]
    files = _Files(folder, list(_parts(sized, shard_size)), hub)
    for part in files.parts:
        files.write({name: full[name].contiguous() for name in part})
    raise_on_all_ranks(files.failed)
    raise_on_all_ranks(_on_rank0(lambda: _describe(files, model, lowered)))


class _Files:
    """The files of an export, which rank 0 writes one by one.

    Args:
        folder: where they go.
        parts: the names of the model's tensors that go into each file.
        hub: how files name and cut them.
    """

    def __init__(self, folder: Path, parts: list[list[str]], hub: HubNames) -> None:
        self.folder, self.parts, self._hub = folder, parts, hub
        self.failed: list[Diagnostic] = []
        self.sizes: dict[str, int] = {}  # in bytes, by the name in a file
        self.places: dict[str, str] = {}  # the file of each name
        self._written = 0

    def write(self, full: dict[str, Tensor]) -> None:
        """Writes the next file on rank 0; after a failure nothing."""
        self._written += 1
        if distributed.get_rank() == 0 and not self.failed:
            self.failed = _on_rank0(lambda: self._write(full))

    def _write(self, full: dict[str, Tensor]) -> None:
        number, count = self._written, len(self.parts)
        name = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        stored = {n: t.contiguous() for n, t in self._hub.stored(full).items()}
        write_tensors(self.folder / name, stored)
        self.sizes |= {n: t.numel() * t.element_size() for n, t in stored.items()}
        self.places |= dict.fromkeys(stored, name)


def _empty(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if there := next(folder.glob("*.safetensors*"), None):
        raise FileExistsError(
            f"{folder} holds {there.name} already: choose another folder, or pass replace=True"
        )


def _replace_weights(folder: Path, new: Path) -> None:
    """Moves the files of `new` to a folder, and removes the weights that were in it."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {file.name for file in new.iterdir()}
    old = [file for file in folder.glob("*.safetensors*") if file.name not in made]
    for file in sorted(new.iterdir(), key=lambda file: file.name == INDEX):  # the index last
        file.replace(folder / file.name)
    for file in sorted(old, key=lambda file: file.name != INDEX):  # and an old one first
        file.unlink()
    new.rmdir()


def _kept(model: nn.Module, names: tuple[str, ...]) -> str:
    """The name under which a tied tensor is written: the one to which the model ties the others."""
    tied = tuple(getattr(model, "_tied_weights_keys", None) or ())
    return next((n for n in names if n not in tied), names[0])


def _parts(
    groups: Iterable[tuple[tuple[str, ...], list[Tensor]]], size: int
) -> Iterator[list[str]]:
    part: list[str] = []
    filled = 0
    for names, tensors in groups:
        own = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if part and filled + own > size:
            yield part
            part, filled = [], 0
        part += names
        filled += own
    yield part


def _describe(files: _Files, model: nn.Module, lowered: Lowered) -> None:
    """Writes the index if there are several files, and the configurations that the model has."""
    folder = files.folder
    if len(files.parts) > 1:
        total = {"total_size": sum(files.sizes.values())}
        _text(folder / INDEX, {"metadata": total, "weight_map": files.places})
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "to_json_string", None)):
        _text(folder / "generation_config.json", json.loads(generation.to_json_string()))
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_json_string", None)):
        return
    values = json.loads(config.to_json_string())
    for op in lowered.ops:
        if isinstance(op, Configure):  # for training only, such as `use_cache = false`
            owner, _, name = op.name.rpartition(".")
            inner = values
            for part in owner.split(".") if owner else ():
                inner = inner.get(part, {})
            inner.pop(name, None)
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    values["architectures"] = [lowered.model]
    if len(dtypes) == 1:
        values["dtype"] = dtypes.pop()
    _text(folder / "config.json", values)


def _text(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
