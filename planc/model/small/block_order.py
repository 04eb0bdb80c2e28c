"""What a model's forward does before, in and after its blocks, seen in a run of a small model.

A pipeline cuts a model between two blocks of a list. Which modules belong to the first stage and
which to the last one, what a block returns, and which values reach a block from earlier ones
besides the hidden states is known to the model's own code alone, so the code is run. The answer is
cached by the configuration and the library versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from planc.model import cache
from planc.model.facts import Facts, below, generic
from planc.model.small.shrink import small_values

if TYPE_CHECKING:
    from torch import nn

_FORMAT = 2
_OF_TOWERS = ("pixel_values", "input_features")
"""Inputs that a tower reads, which only the first stage has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder:
    """The order of a forward pass. Names of modules have `*` for indices.

    Args:
        before, after: modules with parameters that run before the first block, after the last one.
        apart: those that run between two blocks, or before and after them.
        returned: the number of values in the tuple that a block returns; 0 for a plain tensor.
        crossing: arguments of blocks, besides hidden states, that modules with parameters computed.
        problem: why the list cannot be cut at all; empty if it can.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    returned: int = 0
    crossing: tuple[str, ...] = ()
    problem: str = ""


def block_order(facts: Facts, blocks: str) -> BlockOrder:
    """The order in which a model runs its modules around a list of blocks.

    Args:
        facts: the model; if it has code, running it is allowed.
        blocks: the torch name of the list, such as `model.layers`.
    """
    values: dict[str, Any] = {}
    code = facts.code
    if not facts.unconfigured:
        made = small_values(facts, ranks=2)
        if isinstance(made, str):
            return BlockOrder(problem=made)
        values = made.values
    of_library = values and not code  # other code can change while its name stays the same
    key = cache.entry_name(f"blocks {_FORMAT} {blocks}", config=values)
    kept = cache.recall(key) if of_library else None
    if isinstance(kept, dict):
        fields: Any = {n: tuple(v) if isinstance(v, list) else v for n, v in kept.items()}
        return BlockOrder(**fields)
    from planc.model.small.user_model import builder_of

    try:
        found = _run(
            builder_of(values, code, facts.user_model, given=facts.inputs_and_loss), blocks
        )
    except Exception as error:
        return BlockOrder(problem=f"the small model does not run: {error}")
    if of_library:
        cache.keep(key, asdict(found))
    return found


def _run(builder: Any, blocks: str) -> BlockOrder:
    import warnings

    from planc.model.small.transformers_model import without_cache

    model, inputs = builder.build(0), builder.sample()
    without_cache(model)
    seen = _Seen(model, blocks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(**inputs)
    found = seen.order()
    if read := next((name for name in _OF_TOWERS if name in inputs), None):
        # the features take the places of tokens, which on a later stage are received already
        reason = f"on every stage its code puts features of `{read}` among the hidden states"
        return replace(found, problem=found.problem or reason)
    return found


class _Seen:
    """Hooks on a model that note its calls."""

    def __init__(self, model: nn.Module, blocks: str) -> None:
        self.model, self.blocks = model, blocks
        self.calls: list[str | int] = []
        self.returned: set[int] = set()
        self.crossing: dict[str, None] = {}
        for i, block in enumerate(model.get_submodule(blocks).children()):
            block.register_forward_pre_hook(self._entering(i), with_kwargs=True)
            block.register_forward_hook(self._leaving)
        for name, module in model.named_modules():
            inside = name == blocks or below(name, blocks)
            if not inside and any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._called(name))

    def _called(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)

    def _entering(self, number: int) -> Any:
        import inspect

        from torch import Tensor
        from torch.utils import _pytree

        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            self.calls.append(number)
            names = [*inspect.signature(block.forward).parameters]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            tensors = {
                name: [t for t in _pytree.tree_leaves(value) if isinstance(t, Tensor)]
                for name, value in given.items()
            }
            hidden = next((some[0] for some in tensors.values() if some), None)
            for name, some in tensors.items():
                if number and any(t.requires_grad and t is not hidden for t in some):
                    self.crossing[name] = None

        return hook

    def _leaving(self, _block: nn.Module, _args: Any, output: Any) -> None:
        from torch import Tensor

        plain = isinstance(output, Tensor)
        self.returned.add(0 if plain else len(output) if isinstance(output, tuple) else -1)

    def order(self) -> BlockOrder:
        numbers = [call for call in self.calls if isinstance(call, int)]
        count = len([*self.model.get_submodule(self.blocks).children()])
        problem = ""
        if numbers != [*range(count)]:
            problem = f"the model does not call the blocks of `{self.blocks}` once each, in order"
        elif len(self.returned) != 1 or -1 in self.returned:
            problem = f"the blocks of `{self.blocks}` return no tensor and no tuple of one size"
        if problem:
            return BlockOrder(problem=problem)
        first, last = self.calls.index(0), self.calls.index(count - 1)
        before = {c for c in self.calls[:first] if isinstance(c, str)}
        between = {c for c in self.calls[first:last] if isinstance(c, str)}
        after = {c for c in self.calls[last:] if isinstance(c, str)}
        apart = between | before & after
        return BlockOrder(
            before=_sorted(before - apart),
            after=_sorted(after - apart),
            apart=_sorted(apart),
            returned=self.returned.pop(),
            crossing=tuple(self.crossing),
        )


def _sorted(names: set[str]) -> tuple[str, ...]:
    return tuple(sorted(map(generic, names)))
