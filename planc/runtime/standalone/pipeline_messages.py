"""The tensors between two stages as one message: hidden states, and what goes beside.

A header, sent once for each shape of a batch, describes the message.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from planc.compat.trees import (
    tree_flatten,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

HEADER = 2**16
"""Bytes of the header."""
ALIGNED = 16
"""Bytes to a multiple of which each tensor in a message is padded."""
Form = dict[str, Any]
"""The form of a sent tensor: local shape and dtype; of a DTensor, its axis and layout
too."""


def form_of(tensor: Tensor) -> Form:
    """The description of a tensor between two stages.

    Raises:
        ValueError: its layout is neither replicated nor sharded over one axis.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    form: Form = {
        "shape": [*local.shape],
        "dtype": str(local.dtype).removeprefix("torch."),
    }
    if isinstance(tensor, DTensor):
        (placement,) = tensor.placements
        if not isinstance(placement, Replicate | Shard):
            raise ValueError(f"the hidden states between two stages are {placement}")
        names = tensor.device_mesh.mesh_dim_names
        assert names is not None
        form["mesh"] = names[0]
        form["dim"] = placement.dim if isinstance(placement, Shard) else None
        form["whole"] = [*tensor.shape]  # the shards of a length may be uneven
    return form


def laid_out(received: Tensor, form: Form, mesh: DeviceMesh) -> Tensor:
    """A received tensor with the layout that it had."""
    if "mesh" not in form:
        return received
    placement = Replicate() if form["dim"] is None else Shard(form["dim"])
    whole = torch.Size(form["whole"])
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(
        received,
        mesh[form["mesh"]],
        [placement],
        run_check=False,
        shape=whole,
        stride=stride,
    )


def trains(form: Form) -> bool:
    """Whether a tensor has a gradient."""
    dtype = getattr(torch, form["dtype"])
    return bool(dtype.is_floating_point)


class Message:
    """The form of what a stage sends.

    Args:
        forms: of each tensor, the hidden states first.
        values: what goes beside, as JSON of pytree, and for each leaf the number of its
            tensor; a leaf that is no tensor is none.
    """

    def __init__(self, forms: Sequence[Form], values: tuple[str, list[Any]]) -> None:
        self.forms, self.values = forms, values

    @classmethod
    def describe(cls, hidden: Tensor, beside: Any) -> "tuple[Message, list[Tensor]]":
        """The form of hidden states and of values beside, and the tensors. One that
        several blocks take is sent once.
        """
        leaves, spec = tree_flatten(beside)
        tensors = {id(hidden): hidden}
        tensors |= {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        number = {key: i for i, key in enumerate(tensors)}
        places = [number.get(id(leaf)) for leaf in leaves]
        text = treespec_dumps(spec) if leaves else ""
        forms = [form_of(tensor) for tensor in tensors.values()]
        return cls(forms, (text, places)), [*tensors.values()]

    def extra_values(self, tensors: Sequence[Tensor]) -> Any:
        """The values beside the hidden states, of received tensors."""
        text, places = self.values
        leaves = [None if place is None else tensors[place] for place in places]
        spec = treespec_loads(text) if text else None
        return tree_unflatten(leaves, spec) if spec else None

    def header(self, device: torch.device) -> Tensor:
        """The bytes that describe the message."""
        text = json.dumps([self.forms, self.values]).encode().ljust(HEADER, b"\0")
        if len(text) > HEADER:
            raise ValueError(f"a stage sends {len(self.forms)} tensors: too many")
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)

    @classmethod
    def read(cls, header: Tensor) -> "Message":
        """The message that a header describes."""
        forms, values = json.loads(bytes(header.tolist()).rstrip(b"\0"))
        return cls(forms, values)

    @property
    def gradients(self) -> "Message":
        """The form of the gradients."""
        return Message([form for form in self.forms if trains(form)], ("", []))

    def empty(self, device: torch.device) -> Tensor:
        """A tensor that receives the message."""
        if len(self.forms) == 1:
            return blank(self.forms[0], device)
        return torch.empty(sum(map(size, self.forms)), dtype=torch.uint8, device=device)

    def parts(self, packed: Tensor) -> list[Tensor]:
        """The tensors of a message, which share its memory."""
        if len(self.forms) == 1:
            return [packed]
        tensors: list[Tensor] = []
        start = 0
        for form in self.forms:
            part = packed[start : start + length(form)]
            tensors.append(part.view(getattr(torch, form["dtype"])).view(form["shape"]))
            start += size(form)
        return tensors

    def fill_missing(
        self, tensors: Sequence[Tensor | None], device: torch.device
    ) -> list[Tensor]:
        """Tensors of these forms: zeros where there is none, as nothing uses it."""
        pairs = zip(tensors, self.forms, strict=True)
        return [blank(f, device).zero_() if t is None else t for t, f in pairs]

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of these forms as one."""
        if len(tensors) == 1:
            return tensors[0].detach().contiguous()
        parts = []
        for tensor, form in zip(tensors, self.forms, strict=True):
            parts.append(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
            parts.append(parts[-1].new_zeros(size(form) - length(form)))
        return torch.cat(parts)


def blank(form: Form, device: torch.device) -> Tensor:
    """An empty tensor of a form."""
    return torch.empty(
        form["shape"], dtype=getattr(torch, form["dtype"]), device=device
    )


def length(form: Form) -> int:
    """The bytes of a tensor."""
    count = 1
    for dim in form["shape"]:
        count *= dim
    return count * int(getattr(torch, form["dtype"]).itemsize)


def size(form: Form) -> int:
    """The bytes of a tensor in a message of several."""
    return -(-length(form) // ALIGNED) * ALIGNED
