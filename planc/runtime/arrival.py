"""Weights into a parallel model with what torch has for it: what an emitted script loads by.

The emitted Python carries what it needs of this file as it stands, so it imports torch alone, and
its lines are of the length that formatters give without being told. `Run.load` does more: it
names all that does not fit at once, reads other forms of a checkpoint, and is right for shards
that torch misplaces.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-subclassing-any

from __future__ import annotations

import re

import torch
from torch import distributed, nn
from torch.distributed.checkpoint import (
    FileSystemReader,
    HuggingFaceStorageReader,
    load,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)


def keep_in(model, dtype, fp32=""):
    """Gives the parameters the type that they are kept in; of some names it is float32."""
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
    done = set()
    for module in list(model.modules()):
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta and parameter not in done:
                fresh = torch.empty_like(parameter.detach(), device=device)
                made = nn.Parameter(fresh, requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, made)
                done.add(parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
                if name in module._non_persistent_buffers_set:
                    done.add(module)
    model._apply(lambda tensor: tensor)  # FSDP takes up the memory of its shards
    for module in model.modules():
        if module in done:  # rotary frequencies, say, are in no file
            with torch.no_grad():
                model._init_weights(module)


def weights_of(model):
    """Each tensor by the name that it had before anything was wrapped, ties once."""
    wrappers = ("_checkpoint_wrapped_module.", "_orig_mod.")
    named, seen = {}, set()
    for path, tensor in model.state_dict(keep_vars=True).items():
        name = path
        for wrapper in wrappers:
            name = name.replace(wrapper, "")
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor.detach()
    return named


def read_slices(model, folder):
    """Each rank reads its own."""
    load(weights_of(model), storage_reader=HuggingFaceStorageReader(folder))


def read_checkpoint(model, folder):
    """Each rank reads its own; the keys may begin with `model.`, as where an optimizer is there."""
    own, reader = weights_of(model), FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    nested = any(f"model.{name}" in stored for name in own)
    load({"model": own} if nested else own, storage_reader=reader)


def read_rank0(model, folder):
    """Rank 0 reads, and each tensor is sent from it."""
    whole = {}
    if distributed.get_rank() == 0:
        state = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype)
            for name, tensor in weights_of(model).items()
        }
        load(state, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
        whole = state
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, whole, options=options)
