"""Context parallelism of models whose attention is their own code.

Such a model gets whole rows, so that its masks and positions are right; the hidden
states of its blocks are of each rank's tokens. A module that needs the tokens of all,
such as attention, gets them gathered, and keeps this rank's of what it computes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from planc.runtime.standalone.context import CONTEXT
from planc.runtime.standalone.context_rows import ContextOfRows


class ContextInBlocks(ContextOfRows):
    """The state of one model; other arguments are those of `ContextParallel`.

    Args:
        blocks: the first block and the last.
        heads: the modules that compute logits.
        seeing: the modules in blocks that need the tokens of all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        *,
        blocks: Sequence[str],
        heads: Sequence[nn.Module],
        seeing: Sequence[nn.Module],
        **settings: Any,
    ) -> None:
        super().__init__(model, mesh, **settings)
        modules = lists_with(model, blocks)
        first, last = (modules.index(model.get_submodule(name)) for name in blocks)
        self.attach(modules[first : last + 1], heads, seeing)

    def attach(
        self,
        blocks: Sequence[nn.Module],
        heads: Sequence[nn.Module],
        seeing: Sequence[nn.Module],
    ) -> None:
        """Makes modules leave, and get, the tokens of other ranks.

        Args:
            blocks: all, in order.
            heads, seeing: as of the class.
        """
        blocks[0].register_forward_pre_hook(self._cut, with_kwargs=True)
        blocks[-1].register_forward_hook(self._after_blocks)
        for part in (part for block in blocks for part in block.children()):
            if not {*part.modules()} & {*seeing}:
                part.register_forward_pre_hook(self._of_own, with_kwargs=True)
        for head in heads:  # code before it may count on whole rows
            head.register_forward_pre_hook(self._cut, with_kwargs=True)
        for module in seeing:
            module.register_forward_pre_hook(self._see, with_kwargs=True)
            module.register_forward_hook(self._leave_out)

    def refusal(self, model: nn.Module, states: Sequence[str]) -> str:
        return ""

    def tables_of(self, model: nn.Module) -> list[nn.Module]:
        return []  # they count whole rows

    def prepare(self, model: nn.Module) -> None:
        model.__dict__[CONTEXT] = self

    def _enter(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._enter_rows(model, self._arguments(args, kwargs))
        return args, kwargs

    def _cut(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cuts hidden states, the first argument; all else is of whole rows."""
        if args:
            return (self.local_tokens(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: self.local_tokens(kwargs[name])}

    def _of_own(self, _part: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Own tokens of values such as ids, for a part that has own hidden states."""
        hidden = next(filter(is_hidden, (*args, *kwargs.values())), None)
        if hidden is None:
            return args, kwargs
        rows, length = len(hidden), hidden.shape[1] * self.size

        def part(value: Any) -> Any:
            whole = isinstance(value, Tensor) and value.shape == (rows, length)
            return self.local_tokens(value) if whole else value

        return of_each(part, args, kwargs)

    def _after_blocks(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple | list):
            return type(output)([self.gather_tokens(output[0]), *output[1:]])
        return self.gather_tokens(output)

    def _see(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        hidden = next(filter(is_hidden, (*args, *kwargs.values())))

        def gather_hidden(value: Any) -> Any:
            same = is_hidden(value) and value.shape[:2] == hidden.shape[:2]
            return self.gather_tokens(value) if same else value

        return of_each(gather_hidden, args, kwargs)

    def _leave_out(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple | list):
            values = (self.local_tokens(v) if is_hidden(v) else v for v in output)
            return type(output)(values)
        return self.local_tokens(output)


def lists_with(model: nn.Module, blocks: Iterable[str]) -> list[nn.Module]:
    """All entries of the lists that some blocks are in, in order."""
    paths = dict.fromkeys(name.rpartition(".")[0] for name in blocks)
    return [block for path in paths for block in model.get_submodule(path).children()]


def of_each(change: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Applies a function to each positional and keyword argument of a module."""
    return tuple(map(change, args)), {n: change(v) for n, v in kwargs.items()}


def is_hidden(value: Any) -> bool:
    """Whether a value has features of each token, `[rows, tokens, features]`."""
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


def context_in_blocks(model: nn.Module, mesh: DeviceMesh, **settings: Any) -> None:
    """`ContextInBlocks` with its other arguments; then
    `model.context_parallel.batch(batch)` is a rank's part of a batch.
    """
    ContextInBlocks(model, mesh, **settings)
