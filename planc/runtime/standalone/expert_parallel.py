"""Experts on ranks of their own: the mesh of these ranks, the exchange of tokens."""

from collections.abc import Callable, Iterator
from functools import wraps
from inspect import signature
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import Shard

from planc.compat.meshes import DeviceMesh
from planc.runtime.standalone.collectives import Exchange, Sending, Sizes, all_gather
from planc.runtime.standalone.tensor_styles import distribute, rank_part, with_views

Forward = Callable[..., Tensor]
Share = tuple[Sizes, Sizes, Tensor]


def mesh_of_experts(
    mesh: DeviceMesh, axes: tuple[str, ...], names: tuple[str, str], ranks: int
) -> DeviceMesh:
    """Returns the ranks along some axes as a mesh of two dims: ranks with equal
    experts, then ranks with different experts, which are the innermost ones.

    torch's `_flatten` would also create a process group of all these ranks, which
    nothing uses. As in `_flatten`, the mesh caches the result.

    Args:
        mesh: of all axes.
        axes: outermost first.
        names: of the two dims.
        ranks: the number of expert-parallel ranks.
    """
    known = mesh.__dict__.setdefault("_of_experts", {})
    if (axes, ranks) not in known:
        layout = mesh[axes]._layout
        whole = type(layout)([layout.collapse()])
        inner = type(layout).from_sizes_strides((whole.numel() // ranks, ranks))
        known[axes, ranks] = DeviceMesh(
            mesh.device_type,
            _layout=whole.splice(0, 1, whole[0].composition(inner)),
            _rank_map=mesh._rank_map,
            mesh_dim_names=names,
            _root_mesh=mesh,
        )
    expert_mesh: DeviceMesh = known[axes, ranks]
    return expert_mesh


# Exchanges ----------------------------------------------------------------------------


class TakePart(torch.autograd.Function):  # type: ignore[misc]
    """A rank's part of rows that all ranks have; its gradient is that of all rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.count = group, len(rows)
        return part_of_rows(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_rows(gradient, ctx.count, ctx.group), None


class JoinParts(torch.autograd.Function):  # type: ignore[misc]
    """All rows from the parts of ranks, equal on each; so is their gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: int, group: Any) -> Tensor:
        ctx.group = group
        return all_rows(rows, count, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return part_of_rows(gradient, ctx.group).clone(), None, None


def part_of_rows(rows: Tensor, group: Any) -> Tensor:
    """The rows of this rank; the last ranks may have fewer, or none."""
    each = -(-len(rows) // group.size())
    first = min(each * group.rank(), len(rows))
    return rows[first : first + each]


def all_rows(part: Tensor, count: int, group: Any) -> Tensor:
    """The rows of all ranks, each with its part."""
    each = -(-count // group.size())
    mine = part.new_zeros((each, *part.shape[1:]))
    mine[: len(part)] = part
    gathered = part.new_empty((each * group.size(), *part.shape[1:]))
    all_gather(gathered, mine, group=group)
    return gathered[:count]


class SumGradients(torch.autograd.Function):  # type: ignore[misc]
    """A tensor that all ranks have; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed_over(gradient, ctx.group), None


class SumOutputs(torch.autograd.Function):  # type: ignore[misc]
    """The sum of all ranks' tensors, whose gradient is equal on all of them."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        return summed_over(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def summed_over(value: Tensor, group: Any) -> Tensor:
    """A new tensor with the sum over the ranks of a group."""
    total = value.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=group)
    return total


# Dispatch -----------------------------------------------------------------------------


def dispatch_experts(
    module: nn.Module,
    mesh: DeviceMesh,
    dispatch: str | Forward,
    *,
    shared: DeviceMesh | None = None,
    batched: bool = False,
    chunks: int = 1,
) -> None:
    """Divides the experts of a module over the ranks of a mesh.

    The parameters of the module are [experts, ...]. Its forward takes the hidden states
    [tokens, hidden], the experts of each token and their weights [tokens, chosen];
    or, batched, the hidden states of all experts [experts * tokens, hidden].

    Args:
        module: the experts.
        mesh: of one dim; rank r has the r-th part of the experts.
        dispatch: `all_to_all`, tokens go to the ranks of their experts and back; or
            `all_reduce`, each rank computes its experts for the tokens, which all
            ranks have, and the results are summed; or a function as those of `KINDS`.
        shared: ranks that have the same tokens, for `all_to_all`: each sends a part.
        batched: see above.
        chunks: of tokens, for `all_to_all`: one is sent while another is computed.
    """
    names = [name for name, p in module._parameters.items() if p is not None]
    for name in names:
        distribute(module, name, mesh, Shard(0))
    local = len(module._parameters[names[0]].to_local())
    with_views(module, dict.fromkeys(names, rank_part))
    forward, order = counting(module, local), signature(module.forward)
    alike = None if shared is None else shared.get_group()
    local_experts = LocalExperts(forward, local, mesh.get_group(), chunks)
    way = KINDS[dispatch, batched] if isinstance(dispatch, str) else dispatch

    @wraps(forward)
    def spread(*args: Any, **kwargs: Any) -> Tensor:
        hidden, *routed = order.bind(*args, **kwargs).args
        if batched:
            experts = local * mesh.size()
            tokens = [hidden.view(experts, -1, hidden.shape[-1]).transpose(0, 1)]
        else:
            inputs = (hidden, *routed)
            tokens = [rows.reshape(-1, rows.shape[-1]) for rows in inputs]
        count = len(tokens[0])
        if alike is not None:
            tokens = [TakePart.apply(rows, alike) for rows in tokens]
        out = way(local_experts, *tokens)
        if alike is not None:
            out = JoinParts.apply(out, count, alike)
        return (out.transpose(0, 1) if batched else out).reshape(hidden.shape)

    module.forward = spread


def counting(module: nn.Module, local: int) -> Forward:
    """A module's forward for the experts of a rank, which are as many as it counts."""
    forward = module.forward

    @wraps(forward)
    def forward_with_local_count(*args: Any) -> Tensor:
        whole, module.num_experts = module.num_experts, local
        try:
            return forward(*args)
        finally:
            module.num_experts = whole

    return forward_with_local_count


class LocalExperts:
    """The experts of this rank.

    Args:
        forward: computes them.
        count: how many they are, as on every rank.
        group: the ranks that have the others.
        chunks: of its tokens: one is sent while the one before is computed.
    """

    def __init__(
        self, forward: Forward, count: int, group: Any, chunks: int = 1
    ) -> None:
        self.forward = forward
        self.count = count
        self.group = group
        self.chunks = chunks

    def send(self, rows: Tensor, sent: Sizes, received: Sizes) -> Callable[[], Tensor]:
        """Sends rows; what it returns waits for others' rows, and gives them once."""
        if self.chunks > 1:
            return Sending(rows, sent, received, self.group).receive
        return [Exchange.apply(rows, sent, received, self.group)].pop


def in_turn(chunks: list[Iterator[Tensor]]) -> Tensor:
    """The experts' outputs for tokens in chunks; each chunk is sent while the one
    before is computed.

    Args:
        chunks: each is sent when it is first asked, computed when it is asked again,
            and then gives what came back.
    """
    next(chunks[0])
    for current, after in zip_longest(chunks, chunks[1:]):
        if after is not None:
            next(after)
        next(current)
    outputs = [next(current) for current in chunks]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def by_all_to_all(
    experts: LocalExperts, hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Sends each token to the ranks of its experts, and adds up what they send back."""
    parts = [tensor.tensor_split(experts.chunks) for tensor in (hidden, index, weights)]
    ways = shares(experts, [tensor.flatten() for tensor in parts[1]])
    return in_turn(
        [chunk(experts, *inputs) for inputs in zip(*parts, ways, strict=True)]
    )


def chunk(
    experts: LocalExperts, hidden: Tensor, index: Tensor, weights: Tensor, way: Share
) -> Iterator[Tensor]:
    """Some tokens on their way, as of `in_turn`."""
    (count, chosen), (sent, received, numbers) = index.shape, way
    # an index beyond the experts stands for none
    order = index.flatten().argsort(stable=True)[: sum(sent)]
    rows = experts.send(hidden[order // chosen], sent, received)
    shares = experts.send(weights.flatten()[order], sent, received)
    yield hidden
    # nothing here holds the rows that were sent and received
    back = experts.send(
        compute_rows(experts.forward, rows(), numbers, shares()), received, sent
    )
    yield hidden
    out = back()
    outputs = out.new_zeros((count * chosen, out.shape[-1]))
    outputs[order] = out  # which keeps no rows for backward, as index_copy would
    yield outputs.view(count, chosen, out.shape[-1]).sum(1)


def shares(experts: LocalExperts, flats: list[Tensor]) -> list[Share]:
    """For each chunk: the number of rows sent to each rank, the number received from
    each, and the local expert of each received row.

    Args:
        experts: the experts of this rank.
        flats: the experts of the tokens of each chunk.
    """
    local, ranks, count = experts.count, experts.group.size(), len(flats)
    counts = [
        torch.bincount(f, minlength=ranks * local)[: ranks * local] for f in flats
    ]
    sizes = torch.stack(counts, 1)  # [ranks * local, chunks], as ranks read it
    theirs = torch.empty_like(sizes)
    distributed.all_to_all_single(theirs, sizes, group=experts.group)
    sent = sizes.view(ranks, local, count).sum(1).T.tolist()
    received = theirs.view(ranks, local, count).sum(1).T.tolist()
    numbers = torch.arange(local, device=sizes.device).repeat(ranks)
    own_rows = (numbers.repeat_interleave(column) for column in theirs.T)
    return [*zip(sent, received, own_rows, strict=True)]


def by_all_reduce(
    experts: LocalExperts, hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Computes this rank's experts for all tokens, and adds up the ranks' results."""
    group = experts.group
    hidden, weights = (
        SumGradients.apply(tensor, group) for tensor in (hidden, weights)
    )
    numbers = index.flatten() - group.rank() * experts.count
    [mine] = torch.where((numbers >= 0) & (numbers < experts.count))
    rows = mine // index.shape[1]
    shares = weights.flatten()[mine]
    out = compute_rows(experts.forward, hidden[rows], numbers[mine], shares)
    total = out.new_zeros(hidden.shape).index_add(0, rows, out)
    return SumOutputs.apply(total, group)


def compute_rows(
    forward: Forward, rows: Tensor, numbers: Tensor, shares: Tensor
) -> Tensor:
    """The experts' outputs for their tokens, one expert a token.

    Without tokens a row of zeros is computed, so that parameters get gradients on every
    rank: FSDP reduces those that have one.
    """
    if len(rows):
        return forward(rows, numbers[:, None], shares[:, None])
    spare = rows.new_zeros((1, rows.shape[1])), numbers.new_zeros((1, 1))
    none = forward(*spare, shares.new_zeros((1, 1)))[:0]
    return none + rows + shares[:, None].to(rows.dtype)  # gradients go back through all


def batches_by_all_to_all(experts: LocalExperts, tokens: Tensor) -> Tensor:
    """Sends each expert's tokens [tokens, experts, hidden] to its rank, and back."""
    count, ranks = len(tokens), experts.group.size()
    counts = torch.empty(ranks, dtype=torch.int64, device=tokens.device)
    mine = torch.full((1,), count, dtype=torch.int64, device=tokens.device)
    all_gather(counts, mine, group=experts.group)
    parts, counts_by_rank = tokens.tensor_split(experts.chunks), counts.tolist()
    cut = (
        [n // experts.chunks + (at < n % experts.chunks) for n in counts_by_rank]
        for at in range(experts.chunks)
    )
    return in_turn(
        [batch_chunk(experts, *inputs) for inputs in zip(parts, cut, strict=True)]
    )


def batch_chunk(
    experts: LocalExperts, tokens: Tensor, counts: Sizes
) -> Iterator[Tensor]:
    """Some tokens of each expert on their way, as of `in_turn`; `counts` by rank."""
    local, ranks, (count, _, hidden) = experts.count, experts.group.size(), tokens.shape
    rows = tokens.reshape(count, ranks, local * hidden).transpose(0, 1).flatten(0, 1)
    there = experts.send(rows, sent := [count] * ranks, counts)
    yield tokens
    out = batch(experts.forward, there().view(-1, local, hidden)).flatten(1)
    back = experts.send(out, counts, sent)
    yield tokens
    out = back().view(ranks, count, local * hidden)
    yield out.transpose(0, 1).reshape(tokens.shape)


def batches_by_all_reduce(experts: LocalExperts, tokens: Tensor) -> Tensor:
    """Computes this rank's experts for all tokens, and adds the others' results."""
    first, last = (experts.count * (experts.group.rank() + i) for i in (0, 1))
    tokens = SumGradients.apply(tokens, experts.group)
    total = tokens.new_zeros(tokens.shape)
    total[:, first:last] = batch(experts.forward, tokens[:, first:last])
    return SumOutputs.apply(total, experts.group)


def batch(forward: Forward, tokens: Tensor) -> Tensor:
    """The experts' outputs for their tokens [tokens, experts, hidden]; see
    `compute_rows`.
    """
    count, experts, hidden = tokens.shape
    rows = tokens if count else tokens.new_zeros((1, experts, hidden))
    out = forward(rows.transpose(0, 1).reshape(-1, hidden))
    out = out.view(experts, -1, hidden).transpose(0, 1)
    return out if count else out[:0] + tokens


KINDS: dict[tuple[str, bool], Forward] = {
    ("all_to_all", False): by_all_to_all,
    ("all_reduce", False): by_all_reduce,
    ("all_to_all", True): batches_by_all_to_all,
    ("all_reduce", True): batches_by_all_reduce,
}
