"""Saves the states of a script beside the model and its optimizer: other optimizers, averages of
weights, schedulers, data loaders, counters.

A state is stored once for each rank that reads other data, with a mark in the place of each tensor
that has the layout of the model. Such a tensor is stored as the model's are, once for the run, so
it can be read under another mesh.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from planc.diagnostics.diagnostic import Diagnostic
from planc.runtime.preconditions import of_all_ranks, problem
from planc.runtime.safeguards.checksums import tensor_sum
from planc.runtime.sharded_tensors import reshard, sharded_like, with_chunk_of
from planc.runtime.standalone.dcp_chunks import storable
from planc.runtime.standalone.load_weights import on_other_stages
from planc.runtime.standalone.pipeline import stages_of
from planc.runtime.standalone.shards import Order, named_tensors, part_of, plain_name, rank_orders
from planc.runtime.weights.optimizers import assemble, empty_shard

OWN, _TENSORS = "extra.", "extra_tensors."
"""The prefixes of keys: for states of the ranks that read the same data, and for tensors."""
_STORED = "planc.stored"
"""The first element of a mark: (`planc.stored`, the path, the model's name or "", local or not)."""


class Stateful(Protocol):
    """An object with a state dict, as in torch.distributed.checkpoint."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


Extra = Mapping[str, Stateful]
Path_ = tuple[Any, ...]


def optimizers_in(model: nn.Module, extra: Extra) -> dict[str, Optimizer]:
    """The optimizers of the model's parameters, by the prefix of their keys in a checkpoint."""
    model_tensors = {id(tensor) for _, tensor in named_tensors(model)}
    return {
        f"extra_optimizers.{name}.": each
        for name, each in extra.items()
        if isinstance(each, Optimizer)
        and all(id(p) in model_tensors for group in each.param_groups for p in group["params"])
    }


def others_in(model: nn.Module, extra: Extra) -> dict[str, Stateful]:
    """The objects that are not optimizers of the model's parameters."""
    known = {id(each) for each in optimizers_in(model, extra).values()}
    return {name: each for name, each in extra.items() if id(each) not in known}


@dataclass(frozen=True, slots=True)
class _Layouts:
    """The model's tensors by name, and in the order of its parameters."""

    tensors: Mapping[str, Tensor]
    listed: tuple[str, ...]
    trained: tuple[str, ...]

    @classmethod
    def from_model(cls, model: nn.Module) -> "_Layouts":
        parameters = [(plain_name(n), p) for n, p in model.named_parameters()]
        return cls(
            dict(named_tensors(model)),
            tuple(n for n, _ in parameters),
            tuple(n for n, p in parameters if p.requires_grad),
        )

    def name(self, path: Path_, value: Tensor, length: int) -> str:
        """The tensor of the model whose layout a value has, by its path in a state: its name, or
        its place in a list of all parameters; "" if there is none.
        """
        last = path[-1]
        names = [plain_name(last)] if isinstance(last, str) else []
        names += [name.removeprefix("module.") for name in names]  # of torch's AveragedModel
        if isinstance(last, int):
            lists = (
                names_of_list
                for names_of_list in (self.listed, self.trained)
                if len(names_of_list) == length
            )
            names = [names_of_list[last] for names_of_list in lists if last < length]
        return next((n for n in names if self._fits(n, value)), "")

    def _fits(self, name: str, value: Tensor) -> bool:
        tensor = self.tensors.get(name)
        if tensor is None:
            return False
        if isinstance(value, DTensor) and isinstance(tensor, DTensor):
            layout = tensor.shape, tensor.placements, tensor.device_mesh
            return layout == (value.shape, value.placements, value.device_mesh)
        return not isinstance(value, DTensor) and value.shape in (
            tensor.shape,
            part_of(tensor).shape,
        )


def _map_leaves(
    state: Any, change: Callable[[Path_, Any, int], Any], path: Path_ = (), length: int = 0
) -> Any:
    """A state with another value for each leaf, and without those that become `_map_leaves`."""
    if _is_mark(state) or not isinstance(state, dict | list | tuple):
        return change(path, state, length)
    items = state.items() if isinstance(state, dict) else enumerate(state)
    new = [(k, _map_leaves(v, change, (*path, k), len(state))) for k, v in items]
    new = [(k, v) for k, v in new if v is not _map_leaves]
    if isinstance(state, dict):
        return _dict_of(state, dict(new))
    values = [v for _, v in new]
    if isinstance(state, list):
        return values
    return type(state)(*values) if hasattr(state, "_fields") else tuple(values)


def _dict_of(kind: Any, items: dict[Any, Any]) -> Any:
    """Other items in a dictionary of the kind of another one: an OrderedDict has attributes."""
    if type(kind) is dict:
        return items
    copy = kind.copy()
    copy.clear()
    copy.update(items)
    return copy


def _is_mark(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 4 and value[0] == _STORED


def _key(name: str, path: Path_) -> str:
    return f"{_TENSORS}{name}." + ".".join(map(str, path))


# Saving ------------------------------------------------------------------------------------------


_DIFFERS = "that differs between ranks which read the same data"


def states(
    model: nn.Module, extra: Extra, data_rank: int
) -> tuple[dict[str, Any], list[Diagnostic]]:
    """The entries of a checkpoint for objects that are not the model's optimizers; and PL459 for
    tensors that no other rank could load. Every rank calls it.

    Raises:
        TypeError: an object has no `state_dict` or no `load_state_dict`.
    """
    _require_states(extra)
    for each in (model, *(e for e in extra.values() if isinstance(e, nn.Module))):
        reshard(each)
    layouts, orders, staged = _Layouts.from_model(model), rank_orders(model), bool(stages_of(model))
    out: dict[str, Any] = {}
    sums: dict[tuple[str, Path_], Tensor] = {}
    ordered = {tuple(layouts.tensors[n].shape) for n in orders}
    refused: list[tuple[str, Path_, str]] = []
    skeletons = {}
    for name, each in extra.items():

        def keep(path: Path_, value: Any, length: int, name: str = name) -> Any:
            if not isinstance(value, Tensor):
                return value
            like = layouts.name(path, value, length) if path else ""
            model_tensor = layouts.tensors.get(like)
            if not like and not isinstance(value, DTensor):
                sums[name, path] = tensor_sum(value)
            elif model_tensor is None and (staged or tuple(value.shape) in ordered):
                refused.append((name, path, "whose parameter its name does not tell"))
            if (name, path) in sums or refused:
                return value
            plain = isinstance(model_tensor, DTensor) and not isinstance(value, DTensor)
            local = plain and value.shape == part_of(model_tensor).shape
            if model_tensor is not None:
                value = sharded_like(value, model_tensor) if local else value
                value = with_chunk_of(value, model_tensor)
            out[_key(name, path)] = storable(
                value, orders.get(like) if not plain or local else None
            )
            return (_STORED, path, like, local)

        skeletons[name] = _map_leaves(each.state_dict(), keep)
    told = {place: int(value) for place, value in sums.items()}
    skeletons = _of_data_rank(data_rank, told, skeletons, staged, refused)
    out |= {f"{OWN}{name}.{data_rank}": _pickle(each) for name, each in skeletons.items()}
    return out, [_tensor_error(*refusal) for refusal in refused[:1]]


def _of_data_rank(
    data_rank: int,
    sums: Mapping[tuple[str, Path_], int],
    skeletons: dict[str, Any],
    staged: bool,
    refused: list[tuple[str, Path_, str]],
) -> dict[str, Any]:
    """The states of the ranks that read the same data, those of all stages together; refuses what
    is no shard and differs between these ranks.
    """
    everyone = of_all_ranks((data_rank, sums, skeletons if staged else {}))
    mine = [each[1:] for each in everyone if each[0] == data_rank]
    if staged:
        return {n: _together([states[n] for _, states in mine], n, refused) for n in skeletons}
    different = (p for p, v in sums.items() if any(t.get(p) != v for t, _ in mine))
    refused += [(*place, _DIFFERS) for place in different]
    return skeletons


def _require_states(extra: Extra) -> None:
    for name, each in extra.items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            kind = type(each).__name__
            raise TypeError(f"extra[{name!r}] is a {kind}, without a state_dict to save and load")


def _pickle(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _tensor_error(name: str, path: Path_, why: str) -> Diagnostic:
    place = "".join(f"[{part!r}]" for part in path)
    return problem(
        "PL459",
        f"extra[{name!r}] has a tensor {why}: state_dict(){place}",
        help="give its state the names of the model's tensors, `{name: value}`, or keep whole"
        " tensors, such as those of `run.full_state_dict(every_rank=True)`",
    )


def _together(parts: list[Any], name: str, refused: list[tuple[str, Path_, str]]) -> Any:
    """One state of those of all stages: dictionaries have the keys of all."""
    first = parts[0]
    if all(isinstance(part, dict) for part in parts):
        keys = dict.fromkeys(key for part in parts for key in part)
        joined = {
            key: _together([part[key] for part in parts if key in part], name, refused)
            for key in keys
        }
        return _dict_of(first, joined)
    marks = [leaf[1:3] for part in parts for _, leaf in _leaves(part) if _is_mark(leaf)]
    if len(parts) > 1 and any(m not in marks[:1] for m in marks):
        refused.append((name, marks[0][0], "in a list, of which each stage has another part"))
    return first


# Loading -----------------------------------------------------------------------------------------


def read_states(
    extra: Extra, folder: Path, keys: Mapping[str, Any], data_size: int, data_rank: int
) -> tuple[dict[str, Any], list[Diagnostic]]:
    """The stored state of each object, with marks; that of this rank, or of all ranks where the run
    that saved them had another number of ranks that read data. PL496 for objects without one, and
    for one that differs between ranks of which there are now more or fewer.
    """
    keys_by_name: dict[str, list[str]] = {}
    findings: list[Diagnostic] = []
    for name in extra:
        stored_keys = [key for key in keys if key.rpartition(".")[0] == OWN + name]
        if not stored_keys:
            findings.append(problem("PL496", f"the checkpoint holds no state of extra[{name!r}]"))
        mine = f"{OWN}{name}.{data_rank}"
        keys_by_name[name] = (
            [mine] if len(stored_keys) == data_size and mine in stored_keys else sorted(stored_keys)
        )
    values: dict[str, Any] = dict.fromkeys(
        key for name_keys in keys_by_name.values() for key in name_keys
    )
    if values:
        checkpoint.load(values, checkpoint_id=folder, no_dist=True)
    out = {}
    for name, name_keys in keys_by_name.items():
        different = {values[key] for key in name_keys}
        if len(different) > 1:
            text = (
                f"extra[{name!r}] has another state on each of the {len(name_keys)} ranks that"
                " read data, and this run has another number of them"
            )
            help = f"leave {name!r} out of `extra`, and set it up again for this run"
            findings.append(problem("PL496", text, help=help))
        elif different:
            out[name] = torch.load(io.BytesIO(different.pop()), weights_only=False)
    return out, findings


@dataclass(frozen=True, slots=True)
class Filled:
    """The tensors of a state by their keys in a checkpoint: memory to read into, with what makes
    the tensor that the object gets.
    """

    targets: dict[str, Tensor]
    made: dict[str, Callable[[], Tensor]]


def empty(
    model: nn.Module, extra: Extra, skeletons: Mapping[str, Any], metadata: Mapping[str, Any]
) -> tuple[Filled, list[Diagnostic]]:
    """Memory for the tensors of all states, in this run's layout: that of the object's own tensors
    where it has them, else that of the model's.
    """
    layouts, orders = _Layouts.from_model(model), rank_orders(model)
    out, findings = Filled({}, {}), []
    for name, state in skeletons.items():
        marks = [leaf for _, leaf in _leaves(state) if _is_mark(leaf)]
        live = _leaves(extra[name].state_dict()) if marks else ()
        now = {path: leaf for path, leaf in live if isinstance(leaf, Tensor)}
        for mark in marks:
            _, path, like, local = mark
            key, model_tensor, current = _key(name, path), layouts.tensors.get(like), now.get(path)
            if like in on_other_stages(model):
                continue
            meta = metadata[key]
            if model_tensor is None and not (
                isinstance(current, DTensor) and current.shape == meta.size
            ):
                place = "".join(f"[{part!r}]" for part in path)
                text = f"extra[{name!r}] has no tensor {place} of {list(meta.size)} to read into"
                findings.append(
                    problem("PL496", text, help="create it as in the run that saved it")
                )
                continue
            target = _target(current, model_tensor, orders.get(like), local, meta)
            out.targets[key], out.made[key] = target
    return out, findings


def _target(
    current: Tensor | None, model_tensor: Tensor | None, order: Order | None, local: bool, meta: Any
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Memory to read a tensor into, and what makes the tensor that the object gets.

    Args:
        current: the object's tensor, if it has it.
        model_tensor: the model's tensor of that layout, if it is known.
        order: the order in which the model's is stored.
        local: whether the object had this rank's part alone when it was saved.
        meta: torch's metadata of the stored tensor.
    """
    dtype = meta.properties.dtype
    if (
        current is not None
        and not isinstance(current, DTensor)
        and isinstance(model_tensor, DTensor)
    ):
        local = current.shape == part_of(model_tensor).shape
        if not local:  # whole on every rank
            whole = torch.empty(meta.size, dtype=dtype, device=current.device)
            return whole, lambda: whole
    like = model_tensor if model_tensor is not None else current
    assert like is not None
    like = with_chunk_of(like.detach(), like)
    value = empty_shard(like, dtype, order)

    def create() -> Tensor:
        tensor = assemble(value, like)
        return part_of(tensor) if local else tensor

    return value, create


def _leaves(state: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    if _is_mark(state) or not isinstance(state, dict | list | tuple):
        yield path, state
        return
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        yield from _leaves(value, (*path, key))


def load_states(extra: Extra, skeletons: Mapping[str, Any], filled: Filled) -> None:
    """Gives each object its state, once the tensors are read."""
    for name, state in skeletons.items():

        def value(_: Path_, leaf: Any, __: int, name: str = name) -> Any:
            if not _is_mark(leaf):
                return leaf
            make = filled.made.get(_key(name, leaf[1]))
            return make() if make else _map_leaves  # of another stage

        extra[name].load_state_dict(_map_leaves(state, value))
