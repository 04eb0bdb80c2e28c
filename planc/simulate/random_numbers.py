"""Random numbers in a simulation, whose ranks are threads, and in the reference run.

torch has one default generator for each device, which threads share, so each rank gets a separate
one. The reference run reuses the numbers of the ranks, so that outputs and gradients can be
compared.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from planc.compat.trees import TorchDispatchMode


class RankGenerators(threading.local):
    """The default generator of each rank: what `torch.manual_seed` and its like reach."""

    def __init__(self) -> None:
        self.mine = torch.Generator()  # in each thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mine, name)


class RankRandom(TorchDispatchMode):  # type: ignore[misc]  # torch has no types for it
    """Makes the operations of a thread use the generator of its rank.

    torch has one default generator, which threads share. A model's calls of `torch.manual_seed`
    reach the rank's generator without this mode; operations that draw need it.
    """

    _one_at_a_time = threading.Lock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        mine, shared = torch.random.default_generator.mine, torch._C.default_generator
        with self._one_at_a_time:
            before = shared.get_state()
            shared.set_state(mine.get_state())
            try:
                return func(*args, **(kwargs or {}))
            finally:
                mine.set_state(shared.get_state())
                shared.set_state(before)


_IN_PLACE = ("bernoulli_", "uniform_", "normal_", "exponential_", "random_")
_MADE = ("bernoulli", "rand", "rand_like", "randn", "randn_like", "randint", "randint_like")
_NOISE = frozenset((*_IN_PLACE, *_MADE, "randperm", "multinomial", "native_dropout"))
"""The operations that return random numbers; `native_dropout` also returns its mask."""
_LOOKS = ("_local_scalar_dense", "nonzero")


def _noise(func: Any, out: Any) -> torch.Tensor | None:
    """The random numbers in an operation's result, local ones of a DTensor; None if it has none."""
    if getattr(func, "overloadpacket", func).__name__ not in _NOISE:
        return None
    drawn = out[1] if isinstance(out, tuple) else out
    return drawn._local_tensor if isinstance(drawn, DTensor) else drawn


class Recorded(TorchDispatchMode):  # type: ignore[misc]
    """Records the random numbers of a forward pass in order, and whether Python code reads values
    of tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[torch.Tensor] = []
        self.looked = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.looked = self.looked or getattr(func, "overloadpacket", func).__name__ in _LOOKS
        if (drawn := _noise(func, out)) is not None:
            self.drawn.append(drawn.detach().clone())
        return out


_EQUAL = 0.7
"""The value of random numbers that are equal in all rows, in the range of each distribution."""


class EqualNumbers(TorchDispatchMode):  # type: ignore[misc]
    """Gives operations equal random numbers in all rows, and none is dropped, so that results of
    different batches can be compared.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (drawn := _noise(func, out)) is None:
            return out
        if isinstance(out, tuple):  # native_dropout
            drawn.fill_(True)
            out[0].copy_(args[0])
        elif func.overloadpacket.__name__ == "randperm":
            drawn.copy_(torch.arange(len(drawn), dtype=drawn.dtype, device=drawn.device))
        else:
            drawn.fill_(_EQUAL if drawn.is_floating_point() else 0)
        return out


@dataclass(frozen=True, slots=True)
class DifferentDraw:
    """Random numbers of the ranks that are not those of the plain model.

    Args:
        module: the torch name of the module that generates them.
        line: the line of the model's code.
        problem: what is wrong with them.
        wrong: whether replicas differ; False if only the distribution is another one, None if
            they cannot be compared.
    """

    module: str
    line: str
    problem: str
    wrong: bool | None


class Replayed(TorchDispatchMode):  # type: ignore[misc]
    """Gives the operations of the reference run the recorded random numbers of the ranks, in order.

    Ranks that hold the full tensor must have the same numbers. The numbers of ranks that hold
    shards are concatenated, and must differ.
    """

    def __init__(
        self, drawn: list[list[torch.Tensor]], where: Callable[[], tuple[str, str]]
    ) -> None:
        super().__init__()
        self._drawn = drawn
        self._where = where
        self._at = 0
        self.different_draws: list[DifferentDraw] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (noise := _noise(func, out)) is not None:
            parts = [of_rank[self._at] for of_rank in self._drawn if len(of_rank) > self._at]
            self._at += 1
            if len(parts) < len(self._drawn):
                self._tell("a rank generates random numbers fewer times than one process", None)
            elif (whole := self._full_tensor(parts, noise.shape)) is not None:
                noise.copy_(whole)
                if isinstance(out, tuple):  # native_dropout: the masked input, and the mask
                    out[0].copy_(args[0] * noise / (1 - args[1]))
        return out

    def _full_tensor(self, parts: list[torch.Tensor], shape: torch.Size) -> torch.Tensor | None:
        same = all(torch.equal(part, parts[0]) for part in parts)
        if all(part.shape == shape for part in parts):
            if not same:
                self._tell("the ranks have different random numbers for the same activations", True)
            return parts[0]
        shards = parts
        if same:  # ranks of several axes, of which some may hold the same shard
            dims = enumerate(zip(parts[0].shape, shape, strict=False))
            shards = parts[:1] * max(
                (wide // local for _, (local, wide) in dims if local), default=1
            )
        for dim in range(len(shape)):
            others = [[*p.shape[:dim], *p.shape[dim + 1 :]] for p in shards]
            fits = others == [[*shape[:dim], *shape[dim + 1 :]]] * len(shards)
            if fits and sum(shard.shape[dim] for shard in shards) == shape[dim]:
                if any(torch.equal(a, b) for a, b in pairwise(shards) if a.numel() >= _MANY):
                    self._tell("the ranks have the same random numbers for different shards", False)
                return torch.cat(shards, dim)
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        text = f"random numbers have the shapes {shapes} on the ranks"
        self._tell(f"{text}, and {list(shape)} in one process", None)
        return None

    def _tell(self, problem: str, wrong: bool | None) -> None:
        self.different_draws.append(DifferentDraw(*self._where(), problem, wrong))


_MANY = 128
"""The count of numbers that are not equal by chance: masks that keep nine of ten are with 1e-11."""
