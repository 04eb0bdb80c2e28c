"""Weights into a parallel model: what an emitted script loads by.

The emitted Python carries what it needs of this file, and of `slices.py`, as they stand, so it
imports torch and safetensors alone, and its lines are of the length that formatters give without
being told. `Run.load` reads other forms of a checkpoint beside, which this names and refuses.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="var-annotated"

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors import safe_open
from torch import distributed, nn
from torch.distributed.checkpoint import FileSystemReader, load

from planc.runtime.standalone.shards import (
    blocks_of,
    irregular_one,
    on_host,
    part_of,
    plain_name,
    rank_orders,
    slices_of,
    taken,
)


def keep_in(model, dtype, fp32=""):
    """Gives parameters the type that they are kept in; some names stay in float32."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            own = torch.float32 if fp32 and re.fullmatch(fp32, name) else dtype
            parameter.data = parameter.data.to(own)


def on_meta(model):
    """The model has no memory yet."""
    if not all(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("build the model on the meta device")


def allocate(model, device):
    """Memory for what is on meta; parameters stay the same objects, so ties hold."""
    done, host = set(), on_host(model)
    for module in list(model.modules()):
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta and parameter not in done:
                home = "cpu" if id(parameter) in host else device
                fresh = torch.empty_like(parameter.detach(), device=home)
                made = nn.Parameter(fresh, requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, made)
                done.add(parameter)
        lacking = [n for n, b in module._buffers.items() if b is not None and b.is_meta]
        for name in lacking:
            fresh = torch.empty_like(module._buffers[name], device=device)
            module._buffers[name] = fresh
        compute(model, module, module._non_persistent_buffers_set & set(lacking))
    model._apply(lambda tensor: tensor)  # FSDP takes up the memory of its shards


def compute(model, module, names):
    """Buffers that no file holds, such as rotary frequencies: the model computes them.

    Twice, over other values: what comes out differently was not computed.
    """
    found = []
    for value in (3, 5) if names else ():
        for name in names:
            module._buffers[name].fill_(value)
        with torch.no_grad():
            model._init_weights(module)
        found.append({name: module._buffers[name].clone() for name in names})
    for name in names:
        if not torch.equal(found[0][name], found[1][name]):
            kind = type(module).__name__
            raise ValueError(f"nothing computes the buffer {name} of {kind}")


def tensors_of(model):
    """(names, tensor, order) of what a checkpoint holds; a tied one has more names.

    In the place of a weight in 4 bits stands its layer.
    """
    orders, found = rank_orders(model), {}
    four = {id(m.weight): m for m in model.modules() if hasattr(m, "pack")}
    for path, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), ([], tensor))[0].append(plain_name(path))
    return [
        (names, four.get(id(tensor), tensor.detach()), orders.get(names[0]))
        for names, tensor in found.values()
    ]


def of_adapter(name):
    """Whether a name is that of a part of an adapter."""
    return any(part.startswith("lora_") for part in name.split("."))


def shape_of(tensor):
    """The shape that files have of a tensor, or of the weight of a layer in 4 bits."""
    return tuple(tensor.source[0] if hasattr(tensor, "pack") else tensor.shape)


def agreed(problems):
    """Raises on every rank what any rank found."""
    everyone = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, problems)
    if found := next(filter(None, [problems, *everyone]), None):
        raise ValueError("nothing was loaded: " + "; ".join(found))


def matched(model, shapes, folder):
    """The stored name of each of a model's tensors; all that does not fit is one error.

    A checkpoint of a bare body names its parts without the name that the body has in a
    model with a head, and the other way round.
    """
    tensors = tensors_of(model)
    known = {name for names, _, _ in tensors for name in names}
    base = f"{getattr(model, 'base_model_prefix', '')}."
    ways = [{n: n for n in shapes}, {base + n: n for n in shapes}]
    ways.append({n.removeprefix(base): n for n in shapes})
    stored = max(ways, key=lambda way: len(known & way.keys()))
    stored |= {n: n for n in shapes if n not in stored.values()}
    found, lacking, wrong = [], [], []
    adapters = any(map(of_adapter, stored))
    for names, tensor, order in tensors:
        if of_adapter(names[0]) and not adapters:
            continue  # a checkpoint of the model below them
        own = [stored[name] for name in names if name in stored]
        found.append((own[0] if own else None, tensor, order))
        lacking += [] if own else names[:1]
        for name in own:
            if tuple(shapes[name]) != shape_of(tensor):
                told = f"{name} is {list(shapes[name])}"
                wrong.append(f"{told}, the model's {list(shape_of(tensor))}")
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignored = [r"rotary_emb\.inv_freq$", *ignored]
    more = [n for n in stored if n not in known]
    more = [n for n in more if not any(re.search(i, n) for i in ignored)]
    problems = [f"{folder} lacks {listed_names(lacking)}"] if lacking else []
    told = "it holds what the model does not:"
    problems += [f"{told} {listed_names(more)}"] if more else []
    problems += [f"it holds other shapes: {', '.join(wrong)}"] if wrong else []
    if lacking and more:
        other = "of another form, such as one with its experts one by one"
        problems.append(f"a checkpoint {other}, is for planc's Run.load")
    return found, problems


def listed_names(names):
    """Names as text, those that differ by numbers alone as one, with their count."""
    groups = {}
    for name in names:
        groups.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    told = {p: f"{p} ({len(g)} of them)" if g[1:] else g[0] for p, g in groups.items()}
    return ", ".join(told.values())


def headers(folder):
    """(file, shape) of each tensor in a folder of safetensors, by name."""
    index = Path(folder) / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"].values()
        files = [Path(folder) / name for name in dict.fromkeys(names)]
    else:
        files = sorted(Path(folder).glob("*.safetensors"))
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                found[name] = (file, tuple(opened.get_slice(name).get_shape()))
    return found


def listed(model, folder):
    """(file, name, tensor, order) of each of `tensors_of`; and what is wrong."""
    try:
        where = headers(folder)
        shapes = {name: shape for name, (_, shape) in where.items()}
        found, problems = matched(model, shapes, folder)
        if any(map(of_adapter, shapes)):
            problems.append("adapters among them are for planc's Run.load_adapters")
    except Exception as error:
        return [], [f"{folder} cannot be read: {error}"]
    read = [] if problems else [(where[name][0], name, *own) for name, *own in found]
    return read, problems


def read_slices(model, folder):
    """Each rank reads its own."""
    wanted, problems = listed(model, folder)
    agreed(problems)
    for file in dict.fromkeys(file for file, *_ in wanted):
        with safe_open(file, framework="pt") as opened:
            for name, tensor, order in (w[1:] for w in wanted if w[0] == file):
                own = opened.get_slice(name)
                if hasattr(tensor, "pack"):
                    tensor.pack(own)
                    continue
                part = part_of(tensor)
                if not tensor.shape:
                    part.copy_(opened.get_tensor(name))
                    continue
                for inner, outer in blocks_of(slices_of(tensor, order)):
                    if all(s.stop > s.start for s in outer):
                        part[inner].copy_(own[outer])


def read_rank0(model, folder):
    """Rank 0 reads, and each tensor is sent from it."""
    first = distributed.get_rank() == 0
    wanted, problems = listed(model, folder) if first else ([], [])
    agreed(problems)
    tensors = [own for own in tensors_of(model) if not of_adapter(own[0][0])]
    for at, (_, tensor, order) in enumerate(tensors):
        four = hasattr(tensor, "pack")
        part = part_of(tensor.weight if four else tensor)
        dtype = tensor.source[1] if four else tensor.dtype
        full = torch.empty(shape_of(tensor), dtype=dtype, device=part.device)
        if first:
            file, name, *_ = wanted[at]
            with safe_open(file, framework="pt") as opened:
                full.copy_(opened.get_tensor(name))
        distributed.broadcast(full, src=0)
        if four:
            tensor.pack(full)
            continue
        part.copy_(taken(full, slices_of(tensor, order)))


def read_checkpoint(model, folder):
    """Each rank reads its own; keys may begin with `model.`, beside an optimizer's."""
    reader = FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    names = {name for names, _, _ in tensors_of(model) for name in names}
    start = "model." if any(f"model.{name}" in stored for name in names) else ""
    sized = {n: m.size for n, m in stored.items() if hasattr(m, "size")}
    own = {n[len(start) :]: size for n, size in sized.items() if n.startswith(start)}
    found, problems = matched(model, own, folder)
    if any(hasattr(tensor, "pack") for _, tensor, _ in found):
        problems = ["weights in 4 bits are read from safetensors"]
    agreed(problems)
    state = {}
    for name, tensor, order in found:
        state[start + name] = tensor
        if irregular_one(tensor, order):  # torch would read another place
            state[start + name] = torch.empty(tensor.shape, dtype=tensor.dtype)
    load(state, storage_reader=reader)
    for name, tensor, order in found:
        if irregular_one(tensor, order):
            full = state[start + name]
            part_of(tensor).copy_(taken(full, slices_of(tensor, order)))
