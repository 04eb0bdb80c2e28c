"""An optimizer's state dict in torch's flattened form, keyed by parameter names.

Keys are `state.NAME.exp_avg` and `param_groups.NAME.lr`. A name is the same under every plan, while
a parameter's index and its shards are not.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from planc.diagnostics.diagnostic import Diagnostic
from planc.runtime.preconditions import problem
from planc.runtime.sharded_tensors import sharded_like, with_chunk_of
from planc.runtime.standalone.dcp_chunks import Pieces, storable
from planc.runtime.standalone.kept_states import state_values
from planc.runtime.standalone.load_weights import listed_names
from planc.runtime.standalone.optimizer import PlannedOptimizer
from planc.runtime.standalone.shards import (
    Order,
    irregular,
    named_tensors,
    part_of,
    rank_orders,
    tied_names,
)

STATE, GROUPS = "state.", "param_groups."


def flat_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's flattened state dict, tensors as a checkpoint stores them. A parameter before
    its first step has no state.
    """
    out: dict[str, Any] = {}
    orders = rank_orders(model)
    for name, parameter, group in _parameters(model, optimizer):
        for key, kept in optimizer.state.get(parameter, {}).items():
            stored = value = state_values(kept, parameter)
            if isinstance(value, Tensor):  # one like its parameter has its order
                order = orders.get(name) if value.shape == parameter.shape else None
                stored = storable(with_chunk_of(value, parameter), order)
            out[f"{STATE}{name}.{key}"] = stored
        for key, value in group.items():
            if key != "params":
                out[f"{GROUPS}{name}.{key}"] = value
    return out


def own_state(
    model: nn.Module,
    optimizer: Optimizer,
    stored: Mapping[str, Any],
    read: Callable[[list[str]], Mapping[str, Any]],
) -> tuple[dict[str, Any], list[str]]:
    """The values that an optimizer loads from a checkpoint's state, and the names of the parameters
    that begin without a state: another algorithm cannot use the saved one.

    Args:
        stored: torch's metadata of each key.
        read: gives the values of keys that hold no tensors.
    """
    groups = {name: group for name, _, group in _parameters(model, optimizer)}
    keys: dict[str, set[str]] = {}
    for key in stored:
        if key.startswith(GROUPS):
            keys.setdefault(owner(key), set()).add(key.rpartition(".")[2])
    told = (f"{GROUPS}{n}.{k}" for n, fields in keys.items() for k in _TOLD if k in fields)
    values = read([*told])
    anew = []
    for name, fields in keys.items():
        saved = {k: values.get(f"{GROUPS}{name}.{k}") for k in fields}
        before, after = _algorithm(saved), _algorithm(groups.get(name, {}))
        if before and after and before != after:
            anew.append(name)
    out = {*anew}
    kept = {k: m for k, m in stored.items() if k.startswith(GROUPS) or owner(k) not in out}
    with_state = {owner(k) for k in stored if k.startswith(STATE)}
    return kept, [name for name in anew if name in with_state]


_TOLD = ("algorithm", "planned")
"""The settings of a group that a plan's optimizer records."""
_MARKS = {"ns_steps": "muon", "dampening": "sgd", "beta2_decay": "adafactor", "amsgrad": "adamw"}
"""By what alone groups of torch's own optimizers have, the algorithm with their states."""


def _algorithm(group: Mapping[str, Any]) -> str:
    """The algorithm that steps a group, as its values tell; for a class, with its name and
    arguments.
    """
    known = group.get("algorithm")
    if known is None:
        return next((name for mark, name in _MARKS.items() if mark in group), "")
    planned = group.get("planned")
    return f"class {planned[2]}" if known == "class" and planned else str(known)


def check_state(
    model: nn.Module, optimizer: Optimizer, stored: Mapping[str, Any], findings: list[Diagnostic]
) -> None:
    """Checks that an optimizer state in a checkpoint fits an optimizer.

    Args:
        model: the model that owns the parameters.
        optimizer: the optimizer to fill.
        stored: torch's metadata of each key.
        findings: receives PL496 for parameters that either side lacks and for wrong shapes.
    """
    parameters = {name: p for name, p, _ in _parameters(model, optimizer)}
    known = {owner(key) for key in stored if key.startswith(GROUPS)}
    if missing := [n for n in parameters if n not in known]:
        findings.append(_names("lacks", missing))
    if extra := sorted(known - set(parameters)):
        findings.append(_names("has parameters that this optimizer lacks:", extra))
    for key, meta in stored.items():
        parameter = parameters.get(owner(key))
        if parameter is not None and isinstance(meta, TensorStorageMetadata):
            shape, full_shape = tuple(meta.size), tuple(parameter.shape)
            factors = (
                (*full_shape[:-1], 1),
                (*full_shape[:-2], 1, *full_shape[-1:]),
            )  # of Adafactor
            if shape not in ((), full_shape, *factors):
                text = f"{key} is {list(shape)}, the parameter is {list(full_shape)}"
                findings.append(problem("PL496", f"the checkpoint's optimizer: {text}"))


def empty_flat_state(
    model: nn.Module, optimizer: Optimizer, stored: Mapping[str, Any]
) -> dict[str, Any]:
    """A flattened state dict with a checkpoint's keys and memory for this rank's values, on the
    host where they do not stay as they are.
    """
    groups = {name: group for name, _, group in _parameters(model, optimizer)}
    parameters = {name: p for name, p, _ in _parameters(model, optimizer)}
    out: dict[str, Any] = {}
    orders = rank_orders(model)
    for key, meta in stored.items():
        parameter = parameters[owner(key)]
        parameter = with_chunk_of(parameter.detach(), parameter)
        out[key] = None
        if isinstance(meta, TensorStorageMetadata):
            shape, dtype = tuple(meta.size), meta.properties.dtype
            if shape == tuple(parameter.shape):
                away = groups[owner(key)].keys() & {"block", "host"}
                if away:
                    host = torch.empty_like(parameter, device="cpu")
                    parameter = with_chunk_of(host, parameter)
                out[key] = empty_shard(parameter, dtype, orders.get(owner(key)))
            else:
                out[key] = torch.empty(shape, dtype=dtype)
    return out


def load_flat_state(model: nn.Module, optimizer: Optimizer, loaded: Mapping[str, Any]) -> None:
    """Loads a flattened state dict into an optimizer."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    names = {name: p for name, p, _ in _parameters(model, optimizer)}
    state: dict[int, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    for key, value in loaded.items():
        name, last = owner(key), key.rpartition(".")[2]
        if key.startswith(GROUPS):
            values.setdefault(name, {})[last] = value
        else:
            placed = assemble(value, names[name]) if isinstance(value, Tensor) else value
            state.setdefault(numbers[id(names[name])], {})[last] = placed
    by_id = {id(p): name for name, p in names.items()}
    groups = []
    for group in optimizer.param_groups:
        params = [numbers[id(p)] for p in group["params"]]
        name = by_id[id(group["params"][0])] if params else ""
        groups.append({**group, **values.get(name, {}), "params": params})  # one may be empty
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def rates_of(objects: Iterable[Any]) -> None:
    """Gives schedules of a plan's optimizer, which were loaded like it, the rates of its groups: a
    plan with other groups may have saved them.
    """
    inner = (
        each
        for scheduler in objects
        for each in (scheduler, *getattr(scheduler, "_schedulers", ()))
    )
    for each in inner:
        optimizer = getattr(each, "optimizer", None)
        if isinstance(optimizer, PlannedOptimizer) and hasattr(each, "base_lrs"):
            each.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
            each._last_lr = [group["lr"] for group in optimizer.param_groups]


def empty_shard(like: Tensor, dtype: torch.dtype, order: Order | None = None) -> Tensor:
    """Memory for a checkpoint's tensor that is sharded like `like`."""
    if irregular(like, order):
        return Pieces.from_tensor(like, order, dtype)
    return torch.empty_like(like, dtype=dtype)


def assemble(value: Tensor, like: Tensor) -> Tensor:
    """The result of `empty_shard`; blocks become a DTensor with the placements of `like`."""
    if not isinstance(like, DTensor) or not isinstance(value, Pieces):
        return value
    if value.device == like.device:
        return sharded_like(value.part, like)
    assembled = torch.empty_like(like.detach(), dtype=value.dtype, device=value.device)
    part_of(assembled).copy_(value.part)
    return assembled


def _parameters(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """(name, parameter, its group) of each parameter of an optimizer.

    Raises:
        ValueError: the optimizer has a parameter that is not in the model.
    """
    tensors = dict(named_tensors(model))
    names = {id(tensors[group[0]]): group[0] for group in tied_names(model)}
    out = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    "the optimizer has a parameter that is not in this model: create it after the "
                    "plan was applied"
                )
            out.append((names[id(parameter)], parameter, group))
    return out


def _names(what: str, names: list[str]) -> Diagnostic:
    text = f"the checkpoint's optimizer {what} {listed_names(names)}"
    hint = "nothing was loaded: create the optimizer with the parameters that were saved"
    return problem("PL496", text, help=hint)


def owner(key: str) -> str:
    """The parameter's name in a key."""
    return key.removeprefix(STATE).removeprefix(GROUPS).rpartition(".")[0]
