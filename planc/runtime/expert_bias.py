"""The biases by which routers choose experts: moved towards equal loads, without a loss for it."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from planc.runtime.collectives import named_modules

BIASES = ("e_score_correction_bias", "expert_bias")
"""The names of the bias in transformers: a buffer, or a parameter that is not trained."""


@torch.no_grad()  # type: ignore[untyped-decorator]
def balance(model: nn.Module, loads: Mapping[str, Sequence[int]], rate: float) -> None:
    """Adds `rate` to the bias of each expert with fewer tokens than the mean, and takes it from
    those with more. Every rank calls it with the same loads.

    Source: DeepSeek-V3 Technical Report (arXiv:2412.19437), section 2.1.2.

    Args:
        model: under a plan.
        loads: the tokens of each expert by the name of the module that holds the experts; the
            router is beside it.
        rate: the step, gamma in the report, where it is 0.001.

    Raises:
        ValueError: no router beside these experts has a bias.
    """
    modules = named_modules(model)
    biases = [(bias, counts) for n, counts in loads.items() for bias in _router_biases(n, modules)]
    if not biases:
        raise ValueError(f"no router of {type(model).__name__} has a bias: {' or '.join(BIASES)}")
    for bias, counts in biases:
        if any(counts) and bias.numel():  # other stages have none
            _move(bias, torch.tensor(counts, dtype=torch.float64), rate)


def _router_biases(name: str, modules: Mapping[str, nn.Module]) -> Iterator[Tensor]:
    """The bias of the router beside a module of experts."""
    around = modules.get(name.rpartition(".")[0])
    for module in around.modules() if around is not None else ():
        for bias in (getattr(module, n, None) for n in BIASES):
            if isinstance(bias, Tensor):
                yield bias


def _move(bias: Tensor, counts: Tensor, rate: float) -> None:
    change = (rate * (counts.mean() - counts).sign()).to(bias.device, bias.dtype)
    change = change.view(bias.shape)
    if isinstance(bias, DTensor):  # a parameter, which its unit has sharded
        mesh, placements = bias.device_mesh, bias.placements
        change = distribute_tensor(change, mesh, placements, src_data_rank=None)
    bias.add_(change)
