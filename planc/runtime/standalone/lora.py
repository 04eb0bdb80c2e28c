"""LoRA by peft, with the same values on every rank; for plans with adapters alone."""

# mypy: allow-subclassing-any

from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from planc.compat.peft import DoraLinearLayer
from planc.runtime.standalone.lora_init import (
    initialize_adapters,
    initialize_magnitudes,
    unset_adapters,
)
from planc.runtime.standalone.tensor_styles import (
    contiguous_gradient,
    contiguous_input,
    rank_part,
)


def inject_lora(model: nn.Module, seed: int, **config: Any) -> None:
    """Wraps layers by peft's `LoraConfig`, and freezes all but the adapters.

    Initial values depend on the seed and on the name of a layer only: ranks with some
    of the layers have those of the whole model. The random state is restored.
    """
    before = unset_adapters(model, meta=False)
    known = set(model.modules())
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(LoraConfig(**config), model)
    for name, module in model.named_modules():
        if {"lora_A", "lora_B"} & {*name.split(".")} and module not in known:
            module.register_forward_pre_hook(contiguous_input)
            module.register_forward_hook(contiguous_gradient)
        if type(module) is DoraLinearLayer and module not in known:
            module.__class__ = DoraOverRanks
    unset = unset_adapters(model, meta=False) - before
    pattern, init = config["target_modules"], config.get("init_lora_weights", True)
    initialize_adapters(model, unset, pattern, rank=config["r"], init=init, seed=seed)
    initialize_magnitudes(model, unset, pattern, init=init, seed=seed)


class DoraOverRanks(DoraLinearLayer):
    """peft's DoRA of a linear layer whose weight a style has distributed.

    The norms are of the rows of this rank. Ranks with some of the columns sum the
    squares of their parts. Magnitudes multiply the layer's output after it was
    redistributed, so they are of the features that a rank has there.
    """

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: Any,
        lora_B: Any,
        scaling: float,
        base_layer: Any,
        base_result: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Computes the addition of DoRA to the output of a layer, as in peft.

        Args:
            x: the layer's input [..., in], with dropout.
            lora_A, lora_B: the linear layers of the factors.
            scaling: of their product.
            base_layer: the frozen layer.
            base_result: its output [..., out], if its input had no dropout.
            others: what other versions of peft pass.
        """
        parts = {"lora_A": lora_A, "lora_B": lora_B, "scaling": scaling}
        weight = base_layer.weight
        if not isinstance(weight, DTensor):
            others |= {"base_layer": base_layer, "base_result": base_result}
            whole: Tensor = super().forward(x, **parts, **others)
            return whole
        base: Any = base_result
        if base is None:
            base = base_layer(x.to(weight.dtype)).to(x.dtype)
        magnitudes = self.weight
        with torch.no_grad():  # the paper takes norms as constants, and so does peft
            norms = self.norms(weight, lora_A.weight, lora_B.weight, scaling)
        scale = magnitudes / norms.to(magnitudes.dtype)
        plain = rank_part(base)
        if base_layer.bias is not None:
            plain = plain - self.over_features(base_layer.bias.detach())
        low_rank = rank_part(lora_B(lora_A(x))) * scaling
        added = (scale - 1) * plain + scale * low_rank
        if not isinstance(base, DTensor):
            return added
        mesh, places, shape = base.device_mesh, base.placements, base.shape
        return DTensor.from_local(
            added, mesh, places, run_check=False, shape=shape, stride=base.stride()
        )

    def norms(self, weight: DTensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        """The norms of the rows of `weight + scaling * b @ a` [out], of the features of
        the magnitudes; in float32 at least.

        Args:
            weight: [out, in], or [in, out] of transformers' Conv1D.
            a, b: the factors, [rank, in] and [out, rank].
            scaling: of their product.
        """
        shard, (place,) = weight.to_local(), weight.placements
        shard = shard.T if self.fan_in_fan_out else shard
        count = weight.shape[int(self.fan_in_fan_out)]
        change = rank_part(b) @ rank_part(a) * scaling
        size = torch.promote_types(change.dtype, torch.float32)
        rows = shard.to(change.dtype) + change
        squares = torch.linalg.vector_norm(rows, dim=1, dtype=size).square()
        held: Any = Shard(0) if place.is_shard(int(self.fan_in_fan_out)) else Partial()
        if place.is_replicate():
            held = Replicate()
        mesh = weight.device_mesh
        partial_squares = DTensor.from_local(
            squares, mesh, [held], run_check=False, shape=(count,), stride=(1,)
        )
        return self.over_features(partial_squares).sqrt()

    def over_features(self, values: Any) -> Tensor:
        """A vector of the layer's features, of those that the magnitudes are of."""
        split = self.weight.shape[0] < values.shape[0]
        place = Shard(0) if split else Replicate()
        local: Tensor = values.redistribute(placements=[place]).to_local()
        return local
