"""Parameters that a folder of weights lacks because they are new, such as a head."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule

from planc.diagnostic import Diagnostic
from planc.runtime.preconditions import of_all_ranks, problem
from planc.runtime.standalone.load_weights import listed_names, on_other_stages
from planc.runtime.standalone.safetensors_files import StoredTensor
from planc.runtime.standalone.shards import Runs, named_tensors, plain_name, taken

_log = logging.getLogger("planc")


def _inside(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


@dataclass(frozen=True, slots=True)
class Excused:
    """The modules or parameters that a folder may lack (`new`), or a model (`unused`)."""

    new: tuple[str, ...]
    unused: tuple[str, ...]

    def applied(
        self,
        model: nn.Module,
        stored: Mapping[str, StoredTensor],
        folder: Path,
        findings: list[Diagnostic],
    ) -> tuple[dict[str, StoredTensor], list[str]]:
        """The stored tensors without unused ones, and the names of the model's new ones; adds PL468
        where one is not true.
        """
        known = [n for n, _ in named_tensors(model)]
        every = {*known, *on_other_stages(model)}
        new = [n for n in dict.fromkeys(known) if _inside(n, self.new)]
        wrong = [(o, "the model has no such parameter") for o in _without(self.new, every)]
        wrong += [(n, f"{folder} holds it") for n in new if n in stored]
        findings += [problem("PL468", f"new = {n!r}: {why}") for n, why in wrong]
        none = _without(self.unused, stored)
        findings += [problem("PL468", f"unused = {n!r}: {folder} holds no such name") for n in none]
        return {n: t for n, t in stored.items() if not _inside(n, self.unused)}, new


NOTHING = Excused((), ())


def _without(modules: Iterable[str], names: Iterable[str]) -> list[str]:
    every = list(names)
    return [module for module in modules if not any(_inside(n, (module,)) for n in every)]


class _Made(StoredTensor):
    """Values in memory, read as those of a file are."""

    def __init__(self, name: str, value: Tensor) -> None:
        super().__init__(Path(), name, tuple(value.shape), "F")
        self.value = value

    def copy_to(self, target: Tensor, ranges: Sequence[Runs]) -> None:
        target.copy_(taken(self.value, ranges))


def initialized(
    model: nn.Module, names: Sequence[str], seed: int, findings: list[Diagnostic]
) -> dict[str, StoredTensor]:
    """Values for new parameters, as the model's own code draws them: its `_init_weights`, or the
    module's `reset_parameters`. They follow from the seed and the names alone.

    Adds PL468 for a parameter that this code leaves as it was.
    """
    out: dict[str, StoredTensor] = {}
    for path, module in model.named_modules():
        own = {f"{plain_name(path)}.{n}".strip("."): n for n in module._parameters}
        wanted = {name: own[name] for name in names if name in own}
        if not wanted:
            continue
        whole = _whole(module)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed((seed + crc32(path.encode())) % 2**63)
            by = _initialize(model, whole)
        for name, last in wanted.items():
            value = whole._parameters[last]
            if value is None or value.isnan().any():
                text = f"new = {name!r}: {by} gives it no values"
                help = "give its module a `reset_parameters`, or load a folder that holds it"
                findings.append(problem("PL468", text, help=help))
            else:
                out[name] = _Made(name, value.detach())
    return out


def report(names: Iterable[str]) -> None:
    """Names the parameters of all ranks that no file had, on rank 0; a collective."""
    every = dict.fromkeys(name for some in of_all_ranks([*names]) for name in some)
    if distributed.get_rank() == 0:
        _log.warning("new parameters, as the model initializes them: %s", listed_names(every))


def _whole(module: nn.Module) -> nn.Module:
    """A module with whole parameters on the CPU, without values."""
    kind = next(k for k in type(module).__mro__ if not issubclass(k, FSDPModule))
    made: nn.Module = object.__new__(kind)
    made.__dict__ = {**module.__dict__}
    made._parameters = {
        name: None if p is None else nn.Parameter(torch.full(p.shape, torch.nan, dtype=p.dtype))
        for name, p in module._parameters.items()
    }
    return made


def _initialize(model: nn.Module, module: nn.Module) -> str:
    """Gives a module its first values; returns the name of the code that did."""
    if callable(of_model := getattr(model, "_init_weights", None)):
        of_model(module)
        return f"{type(model).__name__}._init_weights"
    if callable(own := getattr(module, "reset_parameters", None)):
        own()
    return f"{type(module).__name__}.reset_parameters"
