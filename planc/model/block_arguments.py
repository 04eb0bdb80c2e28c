"""The tensors that blocks take in a forward pass, with their sizes: what a stage of a pipeline
sends to the next one.

The model runs once at its real widths on tensors without values. A cache has what was recorded, so
that a warm answer imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from planc.diagnostics.diagnostic import Sink
from planc.model.cache import entry_name, keep, missing, recall
from planc.model.config import config_of
from planc.model.facts import DTYPE_BYTES, Facts

_FORMAT = "block arguments 1"
"""Raised when what is recorded changes."""
_ROWS, _TOKENS = 7, 53
"""The batch on which arguments are recorded: numbers that are hardly sizes of a model."""
_SIZES = {-1: _ROWS, -2: _TOKENS, -3: _ROWS * _TOKENS}
"""The sizes that replace rows, tokens and both in one dim in a recorded shape."""
_COMPUTE = "bfloat16"
_KNOWN: dict[str, BlockArguments | None] = {}


class ArgumentForm(NamedTuple):
    """A tensor that a block takes.

    Args:
        shape: with -1 for the rows of the batch, -2 for its tokens, -3 for both in one dim.
        dtype: of an element; empty for that of the parameters.
    """

    shape: tuple[int, ...]
    dtype: str

    def size(self, rows: int, tokens: int, width: int) -> int:
        """Bytes for a batch of so many rows and tokens; `width` are those of an element of the
        parameters' dtype.
        """
        known = {-1: rows, -2: tokens, -3: rows * tokens}
        return prod(known.get(n, n) for n in self.shape) * DTYPE_BYTES.get(self.dtype, width)

    @property
    def trains(self) -> bool:
        """Whether a gradient comes back."""
        return not self.dtype or "float" in self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockArguments:
    """
    Args:
        forms: of all tensors.
        hidden: the number of each block's hidden states among them.
        beside: the numbers of the tensors in other arguments of each block, by the argument.
    """

    forms: tuple[ArgumentForm, ...]
    hidden: tuple[int, ...]
    beside: tuple[Mapping[str, tuple[int, ...]], ...]

    def sent_forms(
        self, block: int, given: Sequence[str], states: Sequence[str]
    ) -> list[ArgumentForm]:
        """The tensors sent to the stage that begins at a block, each once: its hidden states, its
        `states`, and the values `given` to it and to all later blocks.
        """
        numbers = [self.hidden[block]]
        for name in given:
            numbers += (n for later in self.beside[block:] for n in later.get(name, ()))
        for name in states:
            numbers += self.beside[block].get(name, ())
        return [self.forms[n] for n in dict.fromkeys(numbers)]


def block_arguments(facts: Facts, blocks: str, names: Sequence[str]) -> BlockArguments | None:
    """The tensors that the blocks of a list take as arguments; None for a model that cannot run so.

    Args:
        facts: a transformers model.
        blocks: the torch name of the list.
        names: arguments besides hidden states, by name, or by position where the model's code
            passes them without a name.
    """
    if "model_type" not in facts.config or facts.code:
        return None
    config = json.dumps(facts.config, sort_keys=True, default=str)
    key = entry_name(f"{_FORMAT} {blocks} {' '.join(names)}", config)
    if key not in _KNOWN:
        data = recall(key)
        if data is None and not missing():
            data = _record(facts, blocks, names)
            keep(key, data)
        try:
            _KNOWN[key] = _read(data)
        except (KeyError, TypeError):  # missing, malformed, or a model that does not run
            _KNOWN[key] = None
    return _KNOWN[key]


def _read(data: Any) -> BlockArguments:
    return BlockArguments(
        forms=tuple(ArgumentForm(tuple(shape), dtype) for shape, dtype in data["forms"]),
        hidden=tuple(data["hidden"]),
        beside=tuple(
            {n: tuple(tensors) for n, tensors in names_of_block.items()}
            for names_of_block in data["beside"]
        ),
    )


def _record(facts: Facts, blocks: str, names: Sequence[str]) -> dict[str, Any]:
    from planc.model.sources.huggingface import importing, prepare, training_model

    values = {**facts.config, "architectures": [facts.name]}
    try:
        with importing():
            import torch

            from planc.compat.fakes import FakeTensorMode

            prepared = prepare(config_of(values, "the model"), Sink())
        if prepared is None:
            return {}
        with FakeTensorMode(), torch.no_grad():
            model = training_model(*prepared, _COMPUTE, "sdpa")
            return _run(model, blocks, names)
    except Exception:  # its code reads values, or takes other inputs
        return {}


def _run(model: Any, blocks: str, names: Sequence[str]) -> dict[str, Any]:
    import torch

    from planc.model.sources.huggingface import one_sequence_a_row, quiet

    numbers: dict[int, int] = {}
    alive: list[Any] = []  # so that no later tensor has the number of an earlier one
    hidden: list[int] = []
    beside: list[dict[str, list[int]]] = []

    def number(tensor: Any) -> int:
        alive.append(tensor)
        return numbers.setdefault(id(tensor), len(numbers))

    def note_block(_module: Any, args: Any, kwargs: Any) -> None:
        first = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        hidden.append(number(first))
        arguments = {n: args[int(n)] if n.isdecimal() else kwargs.get(n) for n in names}
        beside.append({n: [*map(number, _tensors(value))] for n, value in arguments.items()})

    for block in model.get_submodule(blocks):
        block.register_forward_pre_hook(note_block, with_kwargs=True)
    tokens = torch.zeros((_ROWS, _TOKENS), dtype=torch.long)
    with quiet(), one_sequence_a_row():
        model(input_ids=tokens)
    forms = {numbers[id(t)]: _form(t) for t in alive}
    return {"forms": [forms[n] for n in range(len(forms))], "hidden": hidden, "beside": beside}


def _tensors(value: Any) -> Iterator[Any]:
    """The tensors in an argument of a block, which may be a table."""
    import torch

    from planc.compat.trees import tree_leaves

    leaves = tree_leaves(dict(value) if hasattr(value, "keys") else value)
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _form(tensor: Any) -> tuple[list[int], str]:
    stands = {size: mark for mark, size in _SIZES.items()}
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [stands.get(n, n) for n in tensor.shape], "" if dtype == _COMPUTE else dtype
