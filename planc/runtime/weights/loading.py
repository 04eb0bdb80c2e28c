"""Loads weights from files: all are checked first, then each rank reads its own slices."""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Literal
from zlib import crc32

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule

from planc.diagnostics.diagnostic import Diagnostic, PlanError, one_of
from planc.model.checkpoint_conversion import recipes
from planc.ops.load import Load
from planc.runtime.lora import init_adapters, renew_magnitudes
from planc.runtime.preconditions import of_all_ranks, problem
from planc.runtime.sharded_tensors import reshard
from planc.runtime.standalone.buffers import computed_buffers
from planc.runtime.standalone.dequantize import SUFFIXES, dequantize, quantized_weights
from planc.runtime.standalone.load_weights import (
    first_found,
    listed_names,
    match_tensors,
    materialize,
    on_other_stages,
    read_rank0,
    read_slices,
)
from planc.runtime.standalone.lora_init import unset_adapters
from planc.runtime.standalone.safetensors_files import StoredTensor, tensors_in_folder
from planc.runtime.standalone.shards import (
    Runs,
    is_adapter,
    named_tensors,
    plain_name,
    select_ranges,
)
from planc.runtime.weights.stored_tensors import ConvertedTensor, assemble_tensor

Weights = Literal["slices", "rank0"]
Compared = Literal["samples", "files"]
_NO_SECTION = Load()
_NOTHING_LOADED = "nothing was loaded: build the model from the configuration beside the weights"
_MAY_LACK = '; for a new head, pass `new=["score"]`, and `unused=["lm_head"]` for one of the folder'


@dataclass(frozen=True, slots=True)
class Excused:
    """The modules or parameters that a folder may lack (`new`), or a model (`unused`)."""

    new: tuple[str, ...]
    unused: tuple[str, ...]

    def apply(
        self,
        model: nn.Module,
        stored: Mapping[str, StoredTensor],
        folder: Path,
        findings: list[Diagnostic],
    ) -> tuple[dict[str, StoredTensor], list[str]]:
        """The stored tensors without unused ones, and the names of the model's new ones; adds PL468
        where one is not true.
        """
        known = [n for n, _ in named_tensors(model)]
        model_names = {*known, *on_other_stages(model)}
        new = [n for n in dict.fromkeys(known) if _is_inside(n, self.new)]
        wrong = [(o, "the model has no such parameter") for o in _without(self.new, model_names)]
        wrong += [(n, f"{folder} holds it") for n in new if n in stored]
        findings += [problem("PL468", f"new = {n!r}: {why}") for n, why in wrong]
        none = _without(self.unused, stored)
        findings += [problem("PL468", f"unused = {n!r}: {folder} holds no such name") for n in none]
        return {n: t for n, t in stored.items() if not _is_inside(n, self.unused)}, new


NOTHING = Excused((), ())


def load_files(
    model: nn.Module,
    folder: Path,
    *,
    weights: Weights,
    device: str,
    compare: Compared = "samples",
    excused: Excused = NOTHING,
    section: Load = _NO_SECTION,
) -> None:
    """Loads a model from a folder of safetensors. Every rank calls it.

    Names, shapes and files are checked on every rank before a value is written.

    Args:
        model: a model with a plan applied; on meta it is allocated here.
        folder: as for `tensors_in_folder`; for `rank0` only rank 0 needs to see it.
        weights: `slices`, each rank reads its own slices; `rank0`, rank 0 reads all and sends them.
        device: the type of device for a model on meta.
        compare: how the ranks compare the files that they read.
        excused: what the folder or the model may lack.
        section: of the plan, which says how the folder stores weights in fewer bits.

    Raises:
        PlanError: PL457, the folder stores them so and the plan does not say it; PL461, the ranks
            have different files; PL468, `excused` is not true; PL496, all names and shapes that do
            not fit; PL497, missing or broken files. On every rank.
    """
    findings: list[Diagnostic] = []
    matches: dict[str, StoredTensor] = {}
    drawn: dict[str, StoredTensor] = {}
    reshard(model)
    seed = of_all_ranks(torch.initial_seed())[0] if excused.new else 0
    if weights == "slices" or distributed.get_rank() == 0:
        broken: list[str] = []
        stored = tensors_in_folder(folder, broken)
        findings += [problem("PL497", text) for text in broken]
        stored = _plain(stored, section, findings)
        if not findings:
            stored, new = excused.apply(model, stored, folder, findings)
            stored = _convert(model, stored, findings)
            matches = match_or_report(model, stored, folder, findings, without=new)
            drawn = initialize(model, [n for n in new if n not in matches], seed, findings)
            matches |= drawn
        if adapters := [name for name in matches if is_adapter(name)]:
            text = f"{folder} holds adapters, {listed_names(adapters)}"
            findings.append(problem("PL496", text, help="load them with `run.load_adapters`"))
    if weights == "slices":
        findings += different_files(folder, compare, findings)
    allocate(model, findings, device)
    try:
        if weights == "slices":
            read_slices(model, matches)
        else:
            read_rank0(model, matches, device)
        renew_magnitudes(model)
    except Exception as error:
        text = f"reading failed midway: {type(error).__name__}: {error}"
        findings.append(problem("PL497", text))
    raise_on_all_ranks(findings)
    if excused.new:
        report(drawn)


def raise_on_all_ranks(findings: list[Diagnostic], group: Any = None) -> None:
    """Raises on every rank if any rank has findings: its own, else those of the first such rank.

    Args:
        findings: those of this rank.
        group: of all ranks; the default process group, or another one for another thread.
    """
    if first_findings := first_found(findings, group):
        raise PlanError(first_findings)


# Names and shapes --------------------------------------------------------------------------------


def _plain(
    stored: Mapping[str, StoredTensor], section: Load, findings: list[Diagnostic]
) -> dict[str, StoredTensor]:
    """The tensors of a folder, quantized ones as plain ones; PL457 if the plan does not say so."""
    if section.dequantize is not None:
        problems: list[str] = []
        tensors = dequantize(stored, problems, section.dequantize, section.block)
        findings += [problem("PL496", text) for text in problems]
        return tensors
    for kind in SUFFIXES:
        if any(quantized_weights(stored, kind)):
            text = f"the folder stores weights in {kind}, with scales"
            help = f"write `dequantize = {kind}` into the load section of the plan"
            findings.append(problem("PL457", text, help=help))
    return dict(stored)


def _convert(
    model: nn.Module, stored: Mapping[str, StoredTensor], findings: list[Diagnostic]
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint under the model's names, after transformers' conversions.

    For example, the experts of a layer may be one tensor in the model and many in the files.
    """
    known, others = dict(named_tensors(model)), on_other_stages(model)
    model_names = known.keys() | others
    if model_names >= stored.keys():
        return {name: tensor for name, tensor in stored.items() if name not in others}
    out: dict[str, StoredTensor] = {}
    for name, recipe in recipes(model, stored, model_names).items():
        if name in others:
            continue
        whole = assemble_tensor(recipe, stored)
        if isinstance(whole, ConvertedTensor):
            out[name] = whole
        else:
            findings.append(problem("PL496", f"{name} cannot be assembled: {whole}"))
    return out


def match_or_report(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    folder: Path,
    findings: list[Diagnostic],
    *,
    without: Iterable[str] = (),
) -> dict[str, StoredTensor]:
    """Matches stored tensors to a model, as `match_tensors`; reports its problems as findings.

    Missing names, unexpected names and wrong shapes are one PL496 each.
    """
    problems: list[str] = []
    matches = match_tensors(model, stored, folder, problems, frozenset(without))
    help = _NOTHING_LOADED + _MAY_LACK
    findings += [problem("PL496", text, help=help) for text in problems]
    return matches


# Memory ------------------------------------------------------------------------------------------


def allocate(model: nn.Module, findings: list[Diagnostic], device: str) -> None:
    """Allocates tensors on meta, once no rank has a finding.

    Adapters, which the model's files lack, get the initial values that they would have had on the
    CPU.

    Raises:
        PlanError: `findings`; PL496, for tensors on meta that have no source of values, and for
            buffers whose computed values differ between ranks. On every rank.
    """
    values, lost = computed_buffers(model)
    if lost:
        text = f"no file holds and no module can recompute {listed_names(lost)}"
        how = "build the model on the CPU, or give the module a `reset_buffers` method"
        findings.append(problem("PL496", text, help=f"{how} that fills them"))
    raise_on_all_ranks(findings)
    raise_on_all_ranks(_differing_buffers(model, values))
    unset = unset_adapters(model)
    materialize(model, values, device)
    if unset:
        init_adapters(model, unset)


def _differing_buffers(model: nn.Module, values: Mapping[int, Tensor]) -> list[Diagnostic]:
    """PL496 for buffers whose computed values differ between ranks; a collective."""
    mine: dict[str, str] = {}
    for name, buffer in model.named_buffers():
        if id(buffer) in values and buffer.numel():
            data = values[id(buffer)].cpu().flatten().view(torch.uint8).numpy()
            mine[plain_name(name)] = sha256(data.tobytes()).hexdigest()
    everyone = of_all_ranks(mine)
    names = [n for n in mine if any(other.get(n) != mine[n] for other in everyone)]
    if not names:
        return []
    text = f"the ranks computed different values of {listed_names(names)}"
    return [problem("PL496", text, help=_NOTHING_LOADED)]


# The files of all ranks --------------------------------------------------------------------------


_BLOCK = 4096
_BLOCKS = 64
"""The samples of a file that has no header of tensors."""


def different_files(
    folder: Path, compare: Compared, findings: list[Diagnostic]
) -> list[Diagnostic]:
    """PL461 if the ranks have different files in a folder of weights or a checkpoint: each reads
    its own slices, often from a disk of its own, and those of a stale copy are of another model.
    One small collective, in which every rank takes part.

    Args:
        compare: `samples`, sizes, headers and a block of each tensor; `files`, all bytes.
        findings: those of this rank; with any, here or elsewhere, nothing is compared.
    """
    digests = {} if findings else dict(file_digests(folder, compare))
    digests_by_rank = of_all_ranks(digests)
    if not all(digests_by_rank):
        return []
    for name in sorted({name for rank_digests in digests_by_rank for name in rank_digests}):
        values = [rank_digests.get(name) for rank_digests in digests_by_rank]
        if len(common := Counter(values)) > 1:
            usual = common.most_common(1)[0][0]
            odd = [str(rank) for rank, value in enumerate(values) if value != usual]
            ranks = one_of(odd[:6], last="and") + (", ..." if odd[6:] else "")
            text = f"{folder}/{name} is another file on rank{'s' if odd[1:] else ''} {ranks}"
            help = (
                "copy one folder to all machines; `run.load(folder, weights='rank0')` reads "
                "safetensors on rank 0 alone"
            )
            return [problem("PL461", text, help=help)]
    return []


def file_digests(folder: Path, compare: Compared) -> Iterator[tuple[str, str]]:
    """The name and a digest of each file of weights in a folder, or of the file itself."""
    files = [folder] if folder.is_file() else folder.iterdir()
    for path in sorted(files):
        if path.suffix in (".safetensors", ".distcp") or path.name == ".metadata":
            size = path.stat().st_size
            total = sha256(str(size).encode())
            with path.open("rb") as file:
                for start, length in _places(file, path, size, compare):
                    file.seek(start)
                    total.update(file.read(length))
            yield path.name, total.hexdigest()


def _places(file: BinaryIO, path: Path, size: int, compare: Compared) -> Iterator[tuple[int, int]]:
    """The start and length of what is read of a file; of each tensor a block in its middle."""
    if compare == "files" or size <= _BLOCK * _BLOCKS:
        yield from ((start, 1 << 24) for start in range(0, size, 1 << 24))
    elif path.suffix == ".safetensors":
        header = int.from_bytes(file.read(8), "little")
        yield 0, 8 + header
        file.seek(8)
        tensors = json.loads(file.read(header))
        for name, tensor in tensors.items():
            if name != "__metadata__":
                start, stop = tensor["data_offsets"]
                first = max(start, (start + stop - _BLOCK) // 2)
                yield 8 + header + first, min(_BLOCK, stop - start)
    else:
        step = (size - _BLOCK) // (_BLOCKS - 1)
        yield from ((number * step, _BLOCK) for number in range(_BLOCKS))


# New parameters ----------------------------------------------------------------------------------


_log = logging.getLogger("planc")


def _is_inside(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _without(modules: Iterable[str], names: Iterable[str]) -> list[str]:
    present = list(names)
    return [module for module in modules if not any(_is_inside(n, (module,)) for n in present)]


class _InitialValues(StoredTensor):
    """The initial values of a new parameter, with the interface of a tensor in a file."""

    def __init__(self, name: str, value: Tensor) -> None:
        super().__init__(Path(), name, tuple(value.shape), "F")
        self.value = value

    def copy_to(self, target: Tensor, ranges: Sequence[Runs]) -> None:
        target.copy_(select_ranges(self.value, ranges))


def initialize(
    model: nn.Module, names: Sequence[str], seed: int, findings: list[Diagnostic]
) -> dict[str, StoredTensor]:
    """Initial values of new parameters, from the model's `_init_weights` or the module's
    `reset_parameters`. They depend only on the seed and the names, and not on the mesh.

    Adds PL468 for a parameter that this code does not set.
    """
    out: dict[str, StoredTensor] = {}
    for path, module in model.named_modules():
        short_names = {f"{plain_name(path)}.{n}".strip("."): n for n in module._parameters}
        wanted = {name: short_names[name] for name in names if name in short_names}
        if not wanted:
            continue
        whole = _full_module(module)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed((seed + crc32(path.encode())) % 2**63)
            by = _initialize(model, whole)
        for name, last in wanted.items():
            value = whole._parameters[last]
            if value is None or value.isnan().any():
                text = f"new = {name!r}: {by} gives it no values"
                help = "give its module a `reset_parameters`, or load a folder that holds it"
                findings.append(problem("PL468", text, help=help))
            else:
                out[name] = _InitialValues(name, value.detach())
    return out


def report(names: Iterable[str]) -> None:
    """Logs the new parameters of all ranks on rank 0; a collective."""
    new_names = dict.fromkeys(name for rank_names in of_all_ranks([*names]) for name in rank_names)
    if distributed.get_rank() == 0:
        _log.warning("new parameters, as the model initializes them: %s", listed_names(new_names))


def _full_module(module: nn.Module) -> nn.Module:
    """A copy of a module with unsharded parameters on the CPU, filled with NaN."""
    kind = next(k for k in type(module).__mro__ if not issubclass(k, FSDPModule))
    full_module: nn.Module = object.__new__(kind)
    full_module.__dict__ = {**module.__dict__}
    full_module._parameters = {
        name: None if p is None else nn.Parameter(torch.full(p.shape, torch.nan, dtype=p.dtype))
        for name, p in module._parameters.items()
    }
    return full_module


def _initialize(model: nn.Module, module: nn.Module) -> str:
    """Initializes the parameters of a module; returns the name of the function that did it."""
    if callable(of_model := getattr(model, "_init_weights", None)):
        of_model(module)
        return f"{type(model).__name__}._init_weights"
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()
    return f"{type(module).__name__}.reset_parameters"
