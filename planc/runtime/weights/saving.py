"""Checkpoints that another plan can resume from, and exports that transformers reads."""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.optim import Optimizer

from planc.diagnostics.diagnostic import Diagnostic, first_line
from planc.model.checkpoint_conversion import HubNames, written_name
from planc.ops.configure import Configure
from planc.ops.lowered import Lowered
from planc.runtime.gradients import full_state_dict, on_rank_0
from planc.runtime.preconditions import problem
from planc.runtime.sharded_tensors import reshard
from planc.runtime.standalone import shards
from planc.runtime.standalone.dcp_chunks import storable
from planc.runtime.standalone.pipeline import stages_of
from planc.runtime.standalone.safetensors_files import INDEX, SINGLE
from planc.runtime.weights import extras, writing
from planc.runtime.weights.background import Background, snapshot
from planc.runtime.weights.extras import Extra
from planc.runtime.weights.left_out import checksums
from planc.runtime.weights.loading import raise_on_all_ranks
from planc.runtime.weights.optimizers import flat_state
from planc.runtime.weights.peft_files import Tuned, changes, merge_findings, write_tensors

METADATA = ".metadata"  # torch.distributed.checkpoint writes this file last


def save(
    model: nn.Module,
    folder: Path,
    *,
    optimizer: Optimizer | None,
    step: int | None,
    extra: Extra,
    data_rank: int,
    left_out: Collection[str],
    background: Background | None = None,
) -> None:
    """Writes a torch.distributed.checkpoint that another plan or world size can resume from.

    The checkpoint is written beside the folder and renamed when it is complete, so the previous one
    can be loaded after a crash at any time. Every rank calls this, and all ranks see the folder.
    4-bit weights are left out: they never change, and their files hold them unquantized. Checksums
    of the parameters in `left_out` take their place.

    Other arguments, and errors, are those of `Run.save`; with `background` a copy is written there.
    """
    new, old = _temporary_folders(folder)
    more, findings = extras.states(model, extras.others_in(model, extra), data_rank)
    raise_on_all_ranks(findings or _on_rank0(lambda: _clear(folder, new)))
    reshard(model)
    tensors, orders = dict(shards.named_tensors(model)), shards.rank_orders(model)
    four = shards.four_bit_layers(model)
    names = [n[0] for n in shards.tied_names(model) if n[0] not in {*four, *left_out}]
    state: dict[str, Any] = {"model": {n: storable(tensors[n], orders.get(n)) for n in names}}
    state |= checksums(model, left_out)
    if optimizer is not None:
        state["optimizer"] = flat_state(model, optimizer)
    if step is not None:
        state["step"] = step
    for start, each in extras.optimizers_in(model, extra).items():
        state |= {start + key: value for key, value in flat_state(model, each).items()}
    state |= more
    state = snapshot(state) if background else state
    what = f"{folder} could not be written"

    def write(group: Any = None) -> None:
        attempt(partial(writing.write, state, new, extras.OWN, group), what, group)
        raise_on_all_ranks(_on_rank0(lambda: _publish(folder, new, old)), group)

    if background:
        background.start(write, what)
    else:
        write()


def last_checkpoint(folder: Path) -> Path:
    """The last complete checkpoint of a folder, also after a crash during a rename."""
    _, old = _temporary_folders(folder)
    return old if not folder.exists() and (old / METADATA).is_file() else folder


def _temporary_folders(folder: Path) -> tuple[Path, Path]:
    """The folder in which a checkpoint is written, and that of the previous one during the
    renames.
    """
    folder = folder.absolute()
    return folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")


def _on_rank0(work: Callable[[], None]) -> list[Diagnostic]:
    """Runs file operations on rank 0; the other ranks wait in the next exchange of findings."""
    if distributed.get_rank() != 0:
        return []
    try:
        work()
    except OSError as error:
        return [problem("PL497", _reason(error))]
    return []


def attempt(work: Callable[[], object], what: str, group: Any = None) -> None:
    """Runs a collective of torch's checkpoints; raises PL497 on every rank if it fails on one."""
    failed: list[Diagnostic] = []
    try:
        work()
    except (Exception, checkpoint.CheckpointException) as error:  # such as a full disk
        failed.append(problem("PL497", f"{what}: {_reason(error)}"))
    raise_on_all_ranks(failed, group)


def _reason(error: BaseException) -> str:
    """The first line of an error; torch's checkpoint errors collect those of all ranks."""
    if isinstance(error, checkpoint.CheckpointException) and error.failures:
        rank, (inner, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_reason(inner)}"
    return first_line(error)


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
    tensor for each expert. Every rank calls it; arguments and errors are those of `Run.export`.
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
    make = _of_all_stages if stages_of(model) else _one_by_one
    added = changes(model) if adapters == "merged" else {}
    _write(model, lowered, folder, make(model, added), shard_size)


Source = tuple[Mapping[str, Tensor], Callable[[str], Tensor | None]]
"""The tensors of an export, for their sizes; and what makes a full one on rank 0, on the CPU, which
every rank that has its name calls.
"""


def _one_by_one(model: nn.Module, added: Mapping[str, Callable[[], Tensor]]) -> Source:
    """Each tensor is all-gathered when it is written.

    Args:
        added: the changes by adapters that are merged, by the name of the weight.
    """
    tensors, orders = dict(shards.named_tensors(model)), shards.rank_orders(model)
    scalars = shards.scalars_of(model)

    def read_full(name: str) -> Tensor | None:
        value = shards.whole_of(tensors[name], orders.get(name), scalar=name in scalars)
        if name in added:
            value = value + added[name]()
        return value.to("cpu").contiguous() if distributed.get_rank() == 0 else None

    tied = [names for names in shards.tied_names(model) if not shards.is_adapter(names[0])]
    return {
        name: tensors[name] for name in (written_name(model, names) for names in tied)
    }, read_full


def _of_all_stages(model: nn.Module, added: Mapping[str, Callable[[], Tensor]]) -> Source:
    """Rank 0 gathers the weights of all stages on the CPU; other ranks have none.

    Args:
        added: the changes by adapters that are merged, of the weights of this rank's stages.
    """
    full = {n: t for n, t in full_state_dict(model).items() if not shards.is_adapter(n)}
    mine = {name: change().cpu() for name, change in added.items()}
    for name, by in on_rank_0(mine, model).items():
        full[name] = full[name] + by
    first = {tensor.data_ptr(): name for name, tensor in reversed(full.items())}
    once = {name: full[name] for name in reversed(first.values())}
    return once, lambda name: once[name].contiguous()


def _write(
    model: nn.Module, lowered: Lowered, folder: Path, source: Source, shard_size: int
) -> None:
    """Writes the files of an export on rank 0, one by one; after a failure no more."""
    tensors, whole = source
    hub = HubNames(model)
    parts = list(_parts(hub.converted_together([*tensors]), tensors, shard_size))
    sizes: dict[str, int] = {}  # in bytes, by the name in a file
    places: dict[str, str] = {}  # the file of each name

    def write(file: str, full: dict[str, Tensor]) -> None:
        stored = {n: t.contiguous() for n, t in hub.to_stored(full).items()}
        write_tensors(folder / file, stored)
        sizes.update({n: t.numel() * t.element_size() for n, t in stored.items()})
        places.update(dict.fromkeys(stored, file))

    failed: list[Diagnostic] = []
    for number, part in enumerate(parts, 1):
        full: dict[str, Tensor] = {}  # those of the last file are freed first
        for name in part:
            if (value := whole(name)) is not None:
                full[name] = value
        file = f"model-{number:05}-of-{len(parts):05}.safetensors" if parts[1:] else SINGLE
        failed = failed or _on_rank0(partial(write, file, full))
    raise_on_all_ranks(failed)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
    described = partial(_describe, folder, model, lowered, index if parts[1:] else None, {*tensors})
    raise_on_all_ranks(_on_rank0(described))


def _empty(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if there := next(folder.glob("*.safetensors*"), None):
        raise FileExistsError(
            f"{folder} holds {there.name} already: choose another folder, or pass replace=True"
        )


def _replace_weights(folder: Path, new: Path) -> None:
    """Moves the files of `new` to a folder, and removes the weights that were in it."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {file.name for file in new.iterdir()}
    old = [file for file in folder.glob("*.safetensors*") if file.name not in written]
    for file in sorted(new.iterdir(), key=lambda file: file.name == INDEX):  # the index last
        file.replace(folder / file.name)
    for file in sorted(old, key=lambda file: file.name != INDEX):  # and an old one first
        file.unlink()
    new.rmdir()


def _parts(
    groups: Iterable[tuple[str, ...]], tensors: Mapping[str, Tensor], size: int
) -> Iterator[list[str]]:
    part: list[str] = []
    filled = 0
    for names in groups:
        part_bytes = sum(tensors[name].numel() * tensors[name].element_size() for name in names)
        if part and filled + part_bytes > size:
            yield part
            part, filled = [], 0
        part += names
        filled += part_bytes
    yield part


def _describe(
    folder: Path, model: nn.Module, lowered: Lowered, index: Any, names: Collection[str]
) -> None:
    """Writes the index, if there is one, and the configurations that the model has.

    Args:
        names: the written tensors, by their names in the model.
    """
    if index is not None:
        _text(folder / INDEX, index)
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "to_json_string", None)):
        _text(folder / "generation_config.json", json.loads(generation.to_json_string()))
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_json_string", None)):
        return
    values = json.loads(config.to_json_string())
    for op in lowered.find_ops(Configure):  # for training only, such as `use_cache = false`
        owner, _, name = op.name.rpartition(".")
        inner = values
        for part in owner.split(".") if owner else ():
            inner = inner.get(part, {})
        inner.pop(name, None)
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    values["architectures"] = [lowered.model]
    if len(dtypes) == 1:
        values["dtype"] = dtypes.pop()
    tied = _lacks_tied(model, names)
    if tied is not None and tied != bool(getattr(config, "tie_word_embeddings", False)):
        values["tie_word_embeddings"] = tied
    _text(folder / "config.json", values)


def _lacks_tied(model: nn.Module, names: Collection[str]) -> bool | None:
    """Whether the written tensors lack those that the class of the model ties to others, whatever
    its configuration states; None if the class ties none, or if they lack only some.
    """
    pairs = getattr(model, "_tied_weights_keys", None)
    pairs = pairs.items() if isinstance(pairs, Mapping) else ()
    lacking = {not set(pair) <= {*names} for pair in pairs if not {*names}.isdisjoint(pair)}
    return lacking.pop() if len(lacking) == 1 else None


def _text(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
