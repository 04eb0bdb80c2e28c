"""Experts with a capacity: each accepts a limited number of a row's tokens.

The capacity of an expert for a row is that of one process, on every mesh. So the tokens
that it drops depend only on the row, and neither on the ranks that compute it nor on
padding, which is not counted.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from planc.runtime.standalone.collectives import all_gather
from planc.runtime.standalone.context_states import of_local
from planc.runtime.standalone.context_tokens import order_of
from planc.runtime.standalone.documents import CURRENT, carry_facts
from planc.runtime.standalone.shards import part_of

CAPACITY = "_capacity"
"""The attribute of a module of experts that has its `Capacity`."""


def slots_of(tokens: Tensor, chosen: int, experts: int, capacity: float) -> Tensor:
    """The tokens of each row that an expert takes: `capacity` times the mean.

    Source: GShard (arXiv:2006.16668), section 2.2, whose groups are rows here.

    Args:
        tokens: of each row.
        chosen: experts of each token.
        experts: how many there are.
        capacity: the factor; as a decimal number, so that 1.1 * 10 is 11.
    """
    exact = tokens.double() * (chosen * capacity / experts)
    return exact.mul(1e6).round().div(1e6).ceil()


def choices_with_slot(index: Tensor, scores: Tensor | None, slots: Tensor) -> Tensor:
    """Whether each choice gets a slot of its expert, `[rows, choices]`.

    Args:
        index: the expert of each choice, `[rows, choices]`, in the order of the row.
        scores: the higher ones come first; equal ones, and all without, in that order.
        slots: of each expert in a row, `[rows]`.
    """
    place = torch.arange(index.shape[1], device=index.device)
    order = place.expand_as(index)
    if scores is not None:
        order = scores.argsort(dim=1, descending=True, stable=True)
    by_expert = index.gather(1, order).argsort(dim=1, stable=True)
    order = order.gather(1, by_expert)
    grouped = index.gather(1, order)
    taken = place - torch.searchsorted(grouped, grouped) < slots[:, None]
    return torch.empty_like(taken).scatter_(1, order, taken)


class Rows:
    """The rows of a pass: how many there are, and `[rows, tokens]`, which tokens are no
    padding; None for all.
    """

    tokens: Tensor | None = None

    def __init__(self, given: Sequence[Any], named: dict[str, Any]) -> None:
        first = next(v for v in (*given, *named.values()) if isinstance(v, Tensor))
        for name in ("input_ids", "inputs_embeds"):
            first = first if named.get(name) is None else named[name]
        self.count, length = first.shape[:2]
        mask = named.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self.tokens = mask[:, -length:].bool()  # a cache has those before


def note_rows(_model: nn.Module, args: Any, kwargs: Any) -> None:
    """Notes the rows of a pass, whose blocks may be computed again."""
    CURRENT.rows = Rows(args, kwargs)


def forget_rows(_model: nn.Module, _args: Any, _output: Any) -> None:
    """The pass has ended."""
    CURRENT.rows = None


class Capacity:
    """The slots of a module of experts.

    Args:
        experts: how many there are, on all ranks.
        capacity: as of `slots_of`.
        drop: which of too many tokens: those with the lowest weights (`probs`), or the
            last ones (`position`). Weights are compared in bfloat16, so that those
            which differ by a rounding, as of equal tokens on other ranks, are equal.
        context: ranks that each have a part of every row; None for whole rows.
        balance: which part, as of `ContextParallel`.
    """

    def __init__(
        self,
        experts: int,
        capacity: float,
        drop: str,
        context: DeviceMesh | None = None,
        balance: str = "none",
    ) -> None:
        self.experts, self.capacity, self.drop = experts, capacity, drop
        self.group: Any = None if context is None else context.get_group()
        self.balance = balance
        self.counted: Callable[[Tensor], None] | None = None
        """Gets the number of choices that a pass drops, where one asks."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()  # type: ignore[untyped-decorator]
    def select_choices(self, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each choice is kept, and the number that are dropped, without
        padding.

        Args:
            index: the experts of this rank's tokens, `[tokens, chosen]`.
            weights: of these experts.
        """
        rows = getattr(CURRENT, "rows", None)
        if rows is None or index.numel() % (rows.count * index.shape[-1]):
            text = "experts with a capacity get tokens whose rows are not known"
            raise ValueError(f"{text}: they run in another pass than the model's")
        choices = index.reshape(rows.count, -1, index.shape[-1])
        scores = None
        if self.drop == "probs":
            scores = weights.bfloat16().float().view_as(choices)
        way = self.of_rows if self.group is None else self.of_parts
        kept, chosen = way(choices, scores, rows.tokens)
        return kept.reshape(index.shape), (~kept & chosen).sum()

    def of_rows(
        self, choices: Tensor, scores: Tensor | None, tokens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """For unsharded rows, `[rows, tokens, chosen]`: whether each choice is kept,
        and whether it is of an expert and no padding.
        """
        chosen = choices < self.experts
        if tokens is not None:
            chosen = chosen & tokens[..., None]
        each, many = choices.shape[1:]
        count = choices.new_tensor(each) if tokens is None else tokens.sum(1)
        slots = slots_of(count.expand(len(choices)), many, self.experts, self.capacity)
        flat = None if scores is None else scores.flatten(1)
        valid = choices.masked_fill(~chosen, self.experts).flatten(1)
        return choices_with_slot(valid, flat, slots).view_as(choices) & chosen, chosen

    def of_parts(
        self, choices: Tensor, scores: Tensor | None, tokens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same of this rank's parts of the rows, all of which are gathered."""
        ranks, facts = self.group.size(), [choices]
        if scores is not None:  # numbers of experts are exact in float32
            facts = [choices.float(), scores]
        parts = tokens is not None and tokens.shape[1] == choices.shape[1]
        if tokens is not None and parts:
            facts.append(tokens[..., None].to(facts[0].dtype))
        mine = torch.cat(facts, -1).contiguous()
        gathered = mine.new_empty((ranks * len(mine), *mine.shape[1:]))
        all_gather(gathered, mine, group=self.group)
        gathered = gathered.unflatten(0, (ranks, -1)).movedim(0, 1).flatten(1, 2)
        order = order_of(choices, ranks, self.balance)  # rank by rank
        row = gathered[:, order.argsort()]
        if parts:
            tokens = row[..., -1].bool()
        index, *rest = row[..., : row.shape[-1] - parts].split(choices.shape[-1], -1)
        kept = self.of_rows(index.long(), rest[0] if rest else None, tokens)
        local = order.view(ranks, -1)[self.group.rank()]
        return kept[0][:, local], kept[1][:, local]


def limit_experts(
    model: nn.Module,
    modules: Sequence[nn.Module],
    *,
    sent: bool = False,
    **settings: Any,
) -> None:
    """Gives experts a number of slots in each row of tokens.

    What is dropped has no part in the output, nor a gradient; weights of what is left
    stay as they are.

    Args:
        model: gets the rows, and has its checkpoints, also in other stages of a rank.
        modules: of experts; their forward takes the hidden states of all tokens, the
            experts of each, and their weights.
        sent: whether their tokens go to other ranks: then those of what is dropped do
            not, by the number of no expert. Else its weights are 0.
        settings: of `Capacity`.
    """
    for module in modules:
        limit_module(module, Capacity(**settings), sent)
    if note_rows not in model._forward_pre_hooks.values():
        carry_facts(model)
        model.register_forward_pre_hook(note_rows, with_kwargs=True)
        model.register_forward_hook(forget_rows, always_call=True)


def limit_module(module: nn.Module, limit: Capacity, sent: bool) -> None:
    """Gives the experts of a module its slots; see `limit_experts`."""
    module.__dict__[CAPACITY] = limit
    forward, order = module.forward, signature(module.forward)

    @wraps(forward)
    def limited_forward(*args: Any, **kwargs: Any) -> Tensor:
        hidden, index, weights = order.bind(*args, **kwargs).args
        kept, dropped = limit.select_choices(part_of(index), part_of(weights))
        if limit.counted is not None:
            limit.counted(dropped)
        if sent:
            index = index.masked_fill(~kept, limit.experts)
        else:
            weights = of_local(lambda some: some * kept.view_as(some), weights, -1)
        out: Tensor = forward(hidden, index, weights)
        return out

    module.forward = limited_forward
