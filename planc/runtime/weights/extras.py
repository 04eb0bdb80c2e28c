"""What a script saves beside the model and the optimizer: schedulers, data loaders, counters."""

import io
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

import torch

from planc.diagnostic import Diagnostic
from planc.runtime.preconditions import problem

_KEY = "extra."


class Stateful(Protocol):
    """As of torch.distributed.checkpoint: what has a state and takes one."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


Extra = Mapping[str, Stateful]


def states(extra: Extra, data_rank: int) -> dict[str, bytes]:
    """What a checkpoint stores of each object: a state by the rank that has read the data, for a
    loader's state differs between those, and only between those.

    Raises:
        TypeError: an object has no `state_dict` or no `load_state_dict`.
    """
    out = {}
    for name, each in extra.items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            kind = type(each).__name__
            raise TypeError(f"extra[{name!r}] is a {kind}, without a state_dict to save and load")
        file = io.BytesIO()
        torch.save(each.state_dict(), file)
        out[f"{_KEY}{name}.{data_rank}"] = file.getvalue()
    return out


def stored_keys(
    extra: Extra, keys: Collection[str], data_size: int, data_rank: int
) -> tuple[dict[str, list[str]], list[Diagnostic]]:
    """The keys to read for each object: that of this rank, or of all ranks where the run that
    saved them had another number of ranks that read data; and PL496 for objects without one.
    """
    found, findings = {}, []
    for name in extra:
        own = [key for key in keys if key.rpartition(".")[0] == _KEY + name]
        if not own:
            findings.append(problem("PL496", f"the checkpoint holds no state of extra[{name!r}]"))
        mine = f"{_KEY}{name}.{data_rank}"
        found[name] = [mine] if len(own) == data_size and mine in own else sorted(own)
    return found, findings


def load_states(
    extra: Extra, keys: Mapping[str, list[str]], values: Mapping[str, bytes]
) -> Iterator[Diagnostic]:
    """Gives each object its state; PL496 for one that differs between ranks of which there are
    now more or fewer.
    """
    for name, each in extra.items():
        different = {values[key] for key in keys[name]}
        if len(different) > 1:
            yield problem(
                "PL496",
                f"extra[{name!r}] has another state on each of the {len(keys[name])} ranks that"
                " read data, and this run has another number of them",
                help=f"leave {name!r} out of `extra`, and set it up again for this run",
            )
            continue
        each.load_state_dict(torch.load(io.BytesIO(different.pop()), weights_only=False))
