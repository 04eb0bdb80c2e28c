"""Saves and loads adapters in peft's file format, and merges them into the weights."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed, nn

from planc.diagnostics.diagnostic import Diagnostic
from planc.ops.lora import MAGNITUDE, Adapt, either
from planc.ops.lowered import Lowered
from planc.runtime.gradients import on_rank_0
from planc.runtime.lora import NAME, keep_magnitudes
from planc.runtime.preconditions import problem
from planc.runtime.sharded_tensors import reshard
from planc.runtime.standalone import shards
from planc.runtime.standalone.load_weights import on_other_stages
from planc.runtime.standalone.lora_init import (
    adapter_layers,
    row_norms,
    whole_change,
    whole_weight,
)
from planc.runtime.standalone.pipeline import stages_of
from planc.runtime.standalone.safetensors_files import StoredTensor, tensors_in_file
from planc.runtime.weights import peft_experts
from planc.runtime.weights.loading import different_files, raise_on_all_ranks
from planc.runtime.weights.peft_experts import SWAPPED_BEFORE, Pair, version_of

Tuned = Literal["merged", "left_out"]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_Found = tuple[StoredTensor, StoredTensor]
_PREFIX = "base_model.model."
_OTHER = ("lora_bias", "fan_in_fan_out")
"""Fields of peft's configuration that a plan cannot express; if one is set, the adapter is of
another kind."""


def save(model: nn.Module, lowered: Lowered, folder: Path) -> None:
    """Writes peft's two files, with other trainable modules as `modules_to_save`; every rank calls
    it.

    Raises PL189, also where some adapters have DoRA and others not, PL497, or PL688, a layer trains
    beside its own adapter, on every rank.
    """
    findings = [*_require_adapters(lowered, "to save"), *_both_kinds(lowered)]
    raise_on_all_ranks([*findings, *_trained_with_adapter(model)])
    reshard(model)
    tensors, order = dict(shards.named_tensors(model)), shards.rank_orders(model)
    local_tensors: dict[str, Tensor] = {}
    scalars = shards.scalars_of(model)
    for name in _trained_tensors(model):
        value = shards.whole_of(tensors[name], order.get(name), scalar=name in scalars)
        if distributed.get_rank() == 0 or stages_of(model):
            local_tensors[name] = value.to("cpu", copy=True).contiguous()
    full = on_rank_0(local_tensors, model)
    pairs = peft_experts.pairs_of(lowered.adapters)
    names = _names(full, pairs)
    failed: list[Diagnostic] = []
    if distributed.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _config(model, lowered, [*full]).save_pretrained(str(folder))
            peft_experts.stored_shapes(full, pairs)
            write_tensors(folder / WEIGHTS, {names[n]: t for n, t in full.items()})
        except OSError as error:
            failed.append(problem("PL497", f"{folder} could not be written: {error}"))
    raise_on_all_ranks(failed)


def load(model: nn.Module, lowered: Lowered, folder: Path) -> None:
    """Fills the adapters; each rank reads its own slices. Every rank calls it.

    Raises:
        PlanError: PL189, PL461, PL496, PL497. On every rank.
    """
    findings = _require_adapters(lowered, "to load")
    reshard(model)
    tensors, order = dict(shards.named_tensors(model)), shards.rank_orders(model)
    pairs = peft_experts.pairs_of(lowered.adapters)
    wanted = {stored: name for name, stored in _names(_trained_tensors(model), pairs).items()}
    if any(tensors[name].is_meta for name in wanted.values()):
        text = "the model is on the meta device, and has no memory for adapters"
        findings.append(problem("PL189", text, help="call `run.load` first"))
    config, entries = _read(lowered, folder, findings) if not findings else ({}, {})
    for stored in _names(on_other_stages(model), pairs).values():
        entries.pop(stored, None)
    swaps: list[tuple[Pair, _Found, bool]] = []
    if not findings:
        scalars = shards.scalars_of(model)
        shapes = {n: () if n in scalars else tuple(tensors[n].shape) for n in wanted.values()}
        of_pairs = {name for pair in pairs for name in pair.names}
        findings += _mismatches(wanted, shapes, entries, folder, of_pairs)
    if not findings:
        swaps, wrong = _experts(model, pairs, entries, config)
        findings += [problem("PL496", f"{folder}: {text}") for text in wrong]
    findings += different_files(folder, "samples", findings)
    raise_on_all_ranks(findings)
    try:
        with torch.no_grad():
            for pair, factors, swap in swaps:
                peft_experts.read(pair, factors, swap, tensors, order)
            keep_magnitudes(model, wanted.values())
            for stored, name in wanted.items():
                if name in of_pairs:
                    continue
                ranges = shards.slices_of(tensors[name], order.get(name))
                entries[stored].copy_to(shards.part_of(tensors[name]), ranges)
    except Exception as error:
        findings.append(problem("PL497", f"reading {folder} failed midway: {error}"))
    raise_on_all_ranks(findings)


def _require_adapters(lowered: Lowered, what: str) -> list[Diagnostic]:
    if lowered.adapters:
        return []
    text = f"the plan {lowered.plan} has no adapters {what}"
    return [problem("PL189", text, help="`run.save` and `run.load` are for the whole model")]


def _both_kinds(lowered: Lowered) -> list[Diagnostic]:
    """PL189 for DoRA on some layers alone: peft's files have one flag for all."""
    alike = len({op.dora for op in lowered.adapters}) < 2
    text = "some adapters have DoRA and others have not: peft's files have one flag for all"
    how_to = "`run.save` keeps both; or write `dora = true` for all, or for none"
    return [] if alike else [problem("PL189", text, help=how_to)]


def _trained_tensors(model: nn.Module) -> list[str]:
    """The tensors in an adapter file: the adapters, and other trainable modules whole."""
    tensors, modules = dict(shards.named_tensors(model)), set(_other_trained(model))
    return [n for n in tensors if shards.is_adapter(n) or _owner(n) in modules]


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _other_trained(model: nn.Module) -> list[str]:
    """The modules with trainable parameters of their own that are not adapters."""
    trained = (
        n for n, t in shards.named_tensors(model) if t.requires_grad and not shards.is_adapter(n)
    )
    return list(dict.fromkeys(map(_owner, trained)))


def _trained_with_adapter(model: nn.Module) -> list[Diagnostic]:
    adapted = [f"{name}." for name in adapter_layers(model)]
    for name in _other_trained(model):
        if f"{name}." in adapted:
            text = (
                f"{name} is trainable and has an adapter: peft's files have no place for its weight"
            )
            return [problem("PL688", text, help="write `none` for its adapter, or leave it frozen")]
        if not name or any(inner.startswith(f"{name}.") for inner in adapted):
            text = (
                f"{name or 'the model'} has trainable parameters of its own, and adapters inside: "
                "peft's files have no place for both"
            )
            return [problem("PL688", text, help="`run.save` keeps both; or leave it frozen")]
    return []


def _names(names: Iterable[str], pairs: Iterable[Pair]) -> dict[str, str]:
    """The names of some tensors in peft's files."""
    stored_names = {n: f"{s}.weight" for p in pairs for n, s in zip(p.names, p.stored, strict=True)}
    magnitude = (f"{MAGNITUDE}.{NAME}.weight", MAGNITUDE)
    plain = {
        n: n.removesuffix(f".{NAME}").replace(*magnitude).replace(f".{NAME}.weight", ".weight")
        for n in names
    }
    return {name: f"{_PREFIX}{stored_names.get(name, stored)}" for name, stored in plain.items()}


def _experts(
    model: nn.Module,
    pairs: Iterable[Pair],
    entries: dict[str, StoredTensor],
    config: dict[str, Any],
) -> tuple[list[tuple[Pair, _Found, bool]], list[str]]:
    """The factors in a file of experts on this rank, and messages for those of a wrong shape."""
    tensors, layers = dict(shards.named_tensors(model)), adapter_layers(model)
    swaps: list[tuple[Pair, _Found, bool]] = []
    wrong: list[str] = []
    for pair in (p for p in pairs if p.names[0] in tensors):
        a, b = (entries[stored] for stored in _names(pair.names, [pair]).values())
        turned = getattr(layers[pair.module], "is_transposed", False)
        swap = peft_experts.has_swapped_factors(pair, tensors, (a, b), turned, version_of(config))
        if swap is None:
            shapes = [list(tensors[name].shape) for name in pair.names]
            wrong.append(
                f"{a.name} and B are {list(a.shape)} and {list(b.shape)}, the plan's "
                f"factors of each expert {shapes[0]} and {shapes[1]}"
            )
        else:
            swaps.append((pair, (a, b), swap))
    return swaps, wrong


# The configuration -------------------------------------------------------------------------------


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a file of safetensors, which is there as a whole or not at all."""
    partial = file.with_name(f".{file.name}.partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.rename(file)


def _config(model: nn.Module, lowered: Lowered, stored: Iterable[str]) -> Any:
    """One `LoraConfig` for all operations: the most frequent rank, and patterns for the others.

    Args:
        stored: the tensors in the file.
    """
    import peft

    ops = lowered.adapters
    stabilized = all(op.rslora for op in ops)  # one flag, for all layers
    alphas = {op: op.alpha if stabilized else op.scale * op.rank for op in ops}
    counted: Counter[tuple[int, float]] = Counter()
    for op in ops:
        counted[op.rank, alphas[op]] += sum(len(m) for m in op.members)
    (rank, alpha), _ = counted.most_common(1)[0]
    layers, experts = ([op for op in ops if bool(op.parameters) == e] for e in (False, True))
    old = experts and version_of({"peft_version": peft.__version__}) < SWAPPED_BEFORE
    causal = type(model).__name__.endswith("ForCausalLM")
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    return peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type, unused-ignore]
        lora_dropout=0.0 if experts else max(op.dropout for op in ops),
        target_modules=_targets(model, layers) if layers else [],
        target_parameters=peft_experts.targets(model, experts) if experts else None,
        use_rslora=stabilized,
        use_dora=any(op.dora for op in ops),
        rank_pattern={_pattern(op): op.rank for op in ops if op.rank != rank},
        alpha_pattern={_pattern(op): alphas[op] for op in ops if alphas[op] != alpha},
        # the shapes of experts are those of this version
        peft_version=".".join(map(str, (*SWAPPED_BEFORE, 0))) if old else None,
        task_type="CAUSAL_LM" if causal else None,
        base_model_name_or_path=name or None,
        modules_to_save=[*dict.fromkeys(_owner(n) for n in stored if not shards.is_adapter(n))]
        or None,
        inference_mode=True,
    )


def _pattern(op: Adapt) -> str:
    """The pattern of an operation's names in peft, which include the weights of experts."""
    return rf"({op.pattern})\.{either(op.parameters)}" if op.parameters else op.pattern


def _targets(model: nn.Module, ops: Iterable[Adapt]) -> list[str] | str:
    """The last names of the layers if no other layer has them, else a regular expression."""
    adapted = {name for op in ops for name in op.names()}
    last = {name.rpartition(".")[2] for name in adapted}
    there = dict(shards.named_tensors(model)).keys() | on_other_stages(model)
    layers = {n.removesuffix(".weight") for n in there if not shards.is_adapter(n)}
    alike = {name for name in layers if name.rpartition(".")[2] in last}
    return sorted(last) if alike == adapted else "|".join(f"({op.pattern})" for op in ops)


def _read(
    lowered: Lowered, folder: Path, findings: list[Diagnostic]
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """The configuration and the tensors of a folder; what differs from the plan is a finding."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        entries = {entry.name: entry for entry in tensors_in_file(folder / WEIGHTS)}
    except Exception as error:
        findings.append(problem("PL497", f"{folder} holds no adapter of peft: {error}"))
        return {}, {}
    unsupported = [name for name in _OTHER if config.get(name)]
    if config.get("peft_type") != "LORA" or unsupported:
        kind = ", ".join([f"peft_type = {config.get('peft_type')}", *unsupported])
        text = f"{folder} holds adapters that a plan cannot describe: {kind}"
        findings.append(problem("PL496", text))
    for op in lowered.adapters:
        for name in op.names():
            alpha, rank = (
                _pattern_value(config, n, [name, *op.parameters]) for n in ("alpha", "rank")
            )
            scaled = replace(op, alpha=alpha or 1, rank=int(rank) or 1)
            scaled = replace(scaled, rslora=bool(config.get("use_rslora")))
            if not isclose(scaled.scale, op.scale):
                text = (
                    f"the adapter of {name} has {_scale_text(scaled)}, the plan's {_scale_text(op)}"
                )
                findings.append(problem("PL496", f"{folder}: {text}"))
                break
    return config, entries


def _scale_text(op: Adapt) -> str:
    return f"alpha {op.alpha:g} over {'the root of ' * op.rslora}rank {op.rank}"


def _pattern_value(config: dict[str, Any], field: str, names: list[str]) -> float:
    """A layer's rank or alpha: a matching pattern takes precedence over the default, as in peft.

    Args:
        names: of the layer; of experts also that of a weight.
    """
    name = ".".join(names[:2])
    patterns = config.get(f"{field}_pattern") or {}
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return float(value)
    return float(config.get({"alpha": "lora_alpha", "rank": "r"}[field]) or 0)


def _mismatches(
    wanted: dict[str, str],
    shapes: dict[str, tuple[int, ...]],
    entries: dict[str, StoredTensor],
    folder: Path,
    apart: set[str],
) -> Iterator[Diagnostic]:
    """Yields a finding for names that a file lacks or that the plan lacks, and for wrong shapes
    except of the names in `apart`.
    """
    missing = [name for name in wanted if name not in entries]
    extra = [name for name in entries if name not in wanted]
    for what, names in (("lacks", missing), ("has names that the plan lacks:", extra)):
        if names:
            rest = f", and {len(names) - 3} more" if len(names) > 3 else ""
            text = f"{folder} {what} {', '.join(names[:3])}{rest}"
            yield problem("PL496", text, help="nothing was loaded")
    for name in (n for n in wanted if n in entries and wanted[n] not in apart):
        planned, stored = shapes[wanted[name]], entries[name].shape
        if planned != stored:
            yield problem(
                "PL496", f"{folder}: {name} is {list(stored)}, the plan's {list(planned)}"
            )


# Merging -----------------------------------------------------------------------------------------


def merge_findings(model: nn.Module, how: Tuned | None) -> list[Diagnostic]:
    """PL189: an export without a choice for adapters, or that cannot merge them; PL686: 4-bit."""
    if four := next(iter(shards.four_bit_layers(model)), None):
        text = f"{four} is in 4 bits, and no export can restore the original weights"
        how_to = "`run.save_adapters`; load them under the plan with `lora`, and export from there"
        return [problem("PL686", text, help=how_to)]
    adapted = adapter_layers(model)
    if not adapted or how == "left_out":
        return []
    if how != "merged":
        text = "the model has adapters, which `from_pretrained` does not read from an export"
        how_to = 'pass `adapters="merged"` or `"left_out"`; `run.save_adapters` writes them'
        return [problem("PL189", text, help=how_to)]
    tied = [g for g in shards.tied_names(model) if len(g) > 1]
    parted = [n for group in tied for n in group if n.rpartition(".")[0] in adapted]
    if not parted:
        return []
    text = f"{parted[0]} is tied to another weight, which does not have its adapter"
    return [problem("PL189", text, help='pass `adapters="left_out"`, and call `run.save_adapters`')]


def changes(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Functions that compute the change of each weight that has an adapter, by the weight's
    name.
    """
    return dict(peft_experts.changes(model, change))


def change(layer: Any) -> Tensor:
    """The change of a layer's weight by its adapter; a collective if the adapter is sharded.

    DoRA's is to the whole that peft's `merge` makes of both.
    """
    added = whole_change(layer)
    if not getattr(layer, MAGNITUDE, None):
        return added
    weight = whole_weight(layer.base_layer)
    scale = whole_weight(getattr(layer, MAGNITUDE)[NAME]) / row_norms(layer)
    scale = scale if layer.fan_in_fan_out else scale[:, None]
    merged: Tensor = scale * (weight + added)
    return merged - weight
