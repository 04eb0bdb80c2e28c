"""Loads weights from files: all are checked first, then each rank reads its own slices."""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn

from planc.diagnostic import Diagnostic, PlanError
from planc.model.checkpoint_conversion import recipes
from planc.runtime.lora import init_adapters
from planc.runtime.preconditions import of_all_ranks, problem
from planc.runtime.sharded_tensors import reshard
from planc.runtime.standalone.buffers import computed_buffers
from planc.runtime.standalone.dequantize import dequantized
from planc.runtime.standalone.load_weights import (
    first_found,
    listed_names,
    matched,
    materialize,
    on_other_stages,
    read_rank0,
    read_slices,
)
from planc.runtime.standalone.lora_init import unset_adapters
from planc.runtime.standalone.safetensors_files import StoredTensor, tensors_in_folder
from planc.runtime.standalone.shards import is_adapter, named_tensors, plain_name
from planc.runtime.weights.new_parameters import NOTHING, Excused, initialized, report
from planc.runtime.weights.same_files import Compared, different_files
from planc.runtime.weights.stored_tensors import ConvertedTensor, made

Weights = Literal["slices", "rank0"]
Quantized = tuple[str | None, tuple[int, ...]]
PLAIN: Quantized = (None, ())
_BLOCK = (128, 128)
_NOTHING_LOADED = "nothing was loaded: build the model from the configuration beside the weights"
_MAY_LACK = '; for a new head, pass `new=["score"]`, and `unused=["lm_head"]` for one of the folder'


def load_files(
    model: nn.Module,
    folder: Path,
    *,
    weights: Weights,
    device: str,
    compare: Compared = "samples",
    excused: Excused = NOTHING,
    quantized: Quantized = PLAIN,
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
        quantized: how the folder stores weights in fewer bits, and their blocks.

    Raises:
        PlanError: PL457, the folder stores them so and the plan does not say it; PL461, the ranks
            have different files; PL468, `excused` is not true; PL496, all names and shapes that do
            not fit; PL497, missing or broken files. On every rank.
    """
    findings: list[Diagnostic] = []
    found: dict[str, StoredTensor] = {}
    drawn: dict[str, StoredTensor] = {}
    reshard(model)
    seed = of_all_ranks(torch.initial_seed())[0] if excused.new else 0
    if weights == "slices" or distributed.get_rank() == 0:
        broken: list[str] = []
        stored = tensors_in_folder(folder, broken)
        findings += [problem("PL497", text) for text in broken]
        stored = _plain(stored, *quantized, findings)
        if not findings:
            stored, new = excused.applied(model, stored, folder, findings)
            stored = _converted(model, stored, findings)
            found = checked(model, stored, folder, findings, without=new)
            drawn = initialized(model, [n for n in new if n not in found], seed, findings)
            found |= drawn
        if adapters := [name for name in found if is_adapter(name)]:
            text = f"{folder} holds adapters, {listed_names(adapters)}"
            findings.append(problem("PL496", text, help="load them with `run.load_adapters`"))
    if weights == "slices":
        findings += different_files(folder, compare, findings)
    allocate(model, findings, device)
    try:
        if weights == "slices":
            read_slices(model, found)
        else:
            read_rank0(model, found, device)
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
    if found := first_found(findings, group):
        raise PlanError(found)


# Names and shapes --------------------------------------------------------------------------------


def _plain(
    stored: Mapping[str, StoredTensor],
    how: str | None,
    block: tuple[int, ...],
    findings: list[Diagnostic],
) -> dict[str, StoredTensor]:
    """The tensors of a folder, quantized ones as plain ones; PL457 if the plan does not say so."""
    if how is not None:
        problems: list[str] = []
        found = dequantized(stored, problems, how, block)
        findings += [problem("PL496", text) for text in problems]
        return found
    for kind in ("fp8", "mxfp4"):
        if len(dequantized(stored, [], kind, _BLOCK)) < len(stored):
            text = f"the folder stores weights in {kind}, with scales"
            help = f"write `dequantize = {kind}` into the load section of the plan"
            findings.append(problem("PL457", text, help=help))
    return dict(stored)


def _converted(
    model: nn.Module, stored: Mapping[str, StoredTensor], findings: list[Diagnostic]
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint under the model's names, after transformers' conversions.

    For example, the experts of a layer may be one tensor in the model and many in the files.
    """
    known, others = dict(named_tensors(model)), on_other_stages(model)
    every = known.keys() | others
    if every >= stored.keys():
        return {name: tensor for name, tensor in stored.items() if name not in others}
    out: dict[str, StoredTensor] = {}
    for name, recipe in recipes(model, stored, every).items():
        if name in others:
            continue
        whole = made(recipe, stored)
        if isinstance(whole, ConvertedTensor):
            out[name] = whole
        else:
            findings.append(problem("PL496", f"{name} cannot be assembled: {whole}"))
    return out


def checked(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    folder: Path,
    findings: list[Diagnostic],
    *,
    without: Iterable[str] = (),
) -> dict[str, StoredTensor]:
    """`matched`, whose problems are findings: PL496, one each for missing names, unexpected names
    and wrong shapes.
    """
    problems: list[str] = []
    found = matched(model, stored, folder, problems, frozenset(without))
    help = _NOTHING_LOADED + _MAY_LACK
    findings += [problem("PL496", text, help=help) for text in problems]
    return found


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
