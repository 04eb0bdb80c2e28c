"""The optimizer that a plan describes: AdamW, SGD, Adafactor, and Muon by owners.

Muon orthogonalizes whole matrices, and ranks hold shards of them. Each matrix has an
owner, one of the ranks that hold a piece of it: one all-to-all brings the pieces of all
matrices to their owners, another one brings the orthogonalized updates back. Momentum,
weight decay and parameters stay sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from planc.runtime.standalone.adafactor import Factored
from planc.runtime.standalone.kept_states import (
    create_state,
    plan_settings,
    read_as,
    resume_group,
    state_like,
    state_values,
    written_back,
)
from planc.runtime.standalone.own_optimizer import Own, OwnSteps
from planc.runtime.standalone.shards import (
    Block,
    Order,
    block_in,
    blocks_of,
    gradient_part,
    model_ranges,
    part_of,
    plain_name,
    positions_of,
    rank_orders,
    splits,
)

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""The coefficients of Muon's iteration. Source: `torch.optim.Muon`."""
BUCKET = 2**28
"""About how many elements a rank exchanges at once: 1 GiB of float32."""
AT_ONCE = 2**25
"""About how many elements a rank computes with at once: 128 MiB of float32."""

Cut = tuple[Any, ...]
"""(dim, sizes) of the matrices in a parameter, and True where their positions
alternate; () for a whole one, or a stack."""

# Groups -------------------------------------------------------------------------------


def optimize(module: nn.Module, algorithm: str, **terms: Any) -> None:
    """Records how the parameters inside a module are stepped, for `planned_optimizer`.

    Args:
        module: with the parameters; a record on a module inside it wins.
        algorithm: `adamw`, `sgd`, `adafactor`, `muon` or `class`.
        terms: `lr` and `weight_decay`, factors of the script's; `state`, the dtype of
            the state; `block`, how many values of a state in 8 bits have one scale;
            `host`, whether the states are in the host's memory between steps; those of
            the algorithm. `units` of Muon has the names of the
            module's own parameters that it takes, each with the dim along which the
            parameter is cut into matrices and their sizes, and True where their
            positions alternate; () for a whole matrix.
            `kind` is a class, with its own `arguments`; it has no `state`.
    """
    module.optimizer_terms = {"algorithm": algorithm, **terms}


def planned_optimizer(
    model: nn.Module, lr: float, weight_decay: float = 0.0
) -> PlannedOptimizer:
    """The optimizer of all trainable parameters, in the groups that the plan decides.

    Every rank calls it after the plan is applied: it may create process groups.

    Args:
        model: with the plan applied.
        lr, weight_decay: what the plan's factors multiply.

    Raises:
        ValueError: a trainable parameter is in no group.
    """
    groups: dict[Any, dict[str, Any]] = {}
    classes: dict[Any, Own] = {}
    cuts: dict[int, tuple[Order | None, Cut]] = {}
    orders = rank_orders(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            terms = terms_of(model, name)
            user_class = terms.pop("kind", None), terms.pop("arguments", None)
            units = terms.pop("units", {})
            cut = units.get(name.rpartition(".")[2], ())
            cuts[id(parameter)] = orders.get(plain_name(name)), cut
            # operators of a class take parameters of one mesh
            mesh = getattr(parameter, "device_mesh", None) if user_class[0] else None
            key = repr(terms), repr(user_class), mesh
            said = plan_settings(terms, user_class)
            group = groups.setdefault(key, {**terms, "planned": said, "params": []})
            group["params"].append(parameter)
            classes[key] = user_class
    for group in groups.values():
        group["lr"] = lr * group["lr"]
        group["weight_decay"] = weight_decay * group["weight_decay"]
    return PlannedOptimizer(list(groups.values()), cuts, list(classes.values()))


def terms_of(model: nn.Module, name: str) -> dict[str, Any]:
    """The terms of a parameter's optimizer, recorded by the innermost module around
    it.
    """
    path, _, parameter_name = name.rpartition(".")
    inner = True
    while True:
        terms = getattr(model.get_submodule(path), "optimizer_terms", None)
        units = None if terms is None else terms.get("units")
        if terms is not None and (units is None or (inner and parameter_name in units)):
            return dict(terms)
        if not path:
            raise ValueError(f"the plan's optimizer does not step {name}")
        path, _, last = path.rpartition(".")
        # a wrapper stands for its module
        inner = inner and last in ("_checkpoint_wrapped_module", "_orig_mod")


class PlannedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """AdamW, SGD, Adafactor, Muon and classes, by the `algorithm` of each group.

    States have the names that torch's optimizers use, and the layout of parameters.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        cuts: dict[int, tuple[Order | None, Cut]],
        classes: list[Own],
    ) -> None:
        super().__init__(groups, {})
        self.buckets: dict[int, list[Bucket | Factored | OwnSteps]] = {
            number: [OwnSteps(user_class, self.param_groups[number])]
            for number, user_class in enumerate(classes)
            if user_class[0]
        }
        wanted = [
            (number, where, bucket)
            for number, group in enumerate(self.param_groups)
            if group["algorithm"] in ("muon", "adafactor")
            for where, bucket in make_buckets(group["params"])
        ]
        created = process_groups([where for _, where, _ in wanted])
        seen: dict[Any, Any] = {}
        for (number, where, bucket), group in zip(wanted, created, strict=True):
            into = self.buckets.setdefault(number, [])
            if self.param_groups[number]["algorithm"] == "adafactor":
                held = [held_by(p, cuts[id(p)][0], where)[where.me] for p in bucket]
                into.append(Factored(bucket, held, group, where.device))
                continue
            units = [units_of(p, *cuts[id(p)], where=where, known=seen) for p in bucket]
            into.append(Bucket(bucket, units, group, where))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all groups; every rank calls it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            for bucket in self.buckets.get(number, ()):
                bucket.step(group, self.state)
            stepped = (p for p in group["params"] if p.grad is not None)
            for like in alike(stepped):
                if group["algorithm"] == "adamw":
                    step_adamw(like, group, self.state)
                elif group["algorithm"] == "sgd":
                    step_sgd(like, group, self.state)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state dict, with the values of states that are stored
        otherwise.
        """
        saved: dict[str, Any] = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        saved["state"] = {
            n: {key: state_values(value, parameters[n]) for key, value in state.items()}
            for n, state in saved["state"].items()
        }
        return saved

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads states in their own dtype, and keeps them as the plan of this optimizer
        says; torch casts them to the parameters', on the parameters' devices.
        """
        both = zip(self.param_groups, state_dict["param_groups"], strict=True)
        resumed = [resume_group(group, saved) for group, saved in both]
        super().load_state_dict({**state_dict, "state": {}})
        for group, values in zip(self.param_groups, resumed, strict=True):
            group.update({**values, "params": group["params"]})
            for key in [key for key in group if key not in values]:
                del group[key]
        loaded = [n for group in state_dict["param_groups"] for n in group["params"]]
        pairs = ((p, group) for group in self.param_groups for p in group["params"])
        for number, (p, group) in zip(loaded, pairs, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                moves = isinstance(value, Tensor) and key != "step"
                self.state[p][key] = (
                    create_state(value, p, key, group) if moves else value
                )


def step_adamw(parameters: Sequence[Tensor], group: Any, state: Any) -> None:
    """AdamW on local shards: all that it computes is elementwise."""
    for p in parameters:
        state[p].setdefault("step", torch.tensor(0.0))
    first = [state_like(p, state[p], "exp_avg", group) for p in parameters]
    second = [state_like(p, state[p], "exp_avg_sq", group) for p in parameters]
    m, v = (read_as(s, part_of(parameters[0])) for s in (first, second))
    adamw(
        [part_of(p) for p in parameters],
        [gradient_part(p) for p in parameters],
        m,
        v,
        [],
        [state[p]["step"] for p in parameters],
        foreach=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    written_back([*first, *second], [*m, *v])


def step_sgd(parameters: Sequence[Tensor], group: Any, state: Any) -> None:
    """SGD on local shards; its weight decay is that of torch's SGD, a part of the
    gradient.
    """
    # without dampening a buffer of zeros becomes the gradient, as torch's first one
    key, moves = "momentum_buffer", group["momentum"] > 0
    held = [state_like(p, state[p], key, group) for p in parameters if moves]
    buffers = read_as(held, part_of(parameters[0]))
    sgd(
        [part_of(p) for p in parameters],
        [gradient_part(p) for p in parameters],
        buffers if moves else [None] * len(parameters),
        foreach=True,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=group["nesterov"],
        maximize=False,
    )
    written_back(held, buffers)


def alike(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters in lists of one dtype and device, of about `AT_ONCE` elements of this
    rank: a step holds copies of one list at a time.
    """
    by_kind: dict[Any, list[Tensor]] = {}
    for p in parameters:
        by_kind.setdefault((p.dtype, p.device), []).append(p)
    for of_kind in by_kind.values():
        part, count = list[Tensor](), 0
        for p in of_kind:
            if part and count + part_of(p).numel() > AT_ONCE:
                yield part
                part, count = [], 0
            part.append(p)
            count += part_of(p).numel()
        yield part


# Who holds which piece ----------------------------------------------------------------


class Ranks:
    """The ranks along the dims of a mesh that shard a parameter.

    Attributes:
        mesh, dims: of the parameter; no mesh for a plain tensor.
        ranks: their numbers in the world, in the order of the process group.
        coordinates: of each in the mesh.
        me: the index of this rank.
        device: on which they exchange.
    """

    def __init__(self, mesh: DeviceMesh | None, dims: tuple[int, ...]) -> None:
        self.mesh, self.dims = mesh, dims
        self.ranks: list[int] = [0]
        self.coordinates: list[tuple[int, ...]] = [()]
        self.me = 0
        self.device = None if mesh is None else mesh.device_type
        if mesh is None:
            return
        here: Any = mesh.get_coordinate()
        chosen = [slice(None) if i in dims else at for i, at in enumerate(here)]
        self.ranks = sorted(mesh.mesh[tuple(chosen)].reshape(-1).tolist())
        self.coordinates = [
            tuple((mesh.mesh == rank).nonzero()[0].tolist()) for rank in self.ranks
        ]
        self.me = self.coordinates.index(tuple(here))


def make_buckets(parameters: Iterable[Tensor]) -> Iterator[tuple[Ranks, list[Tensor]]]:
    """Groups parameters that are sharded over the same ranks, for one all-to-all."""
    by_ranks: dict[Any, list[Tensor]] = {}
    for p in parameters:
        mesh: Any = p.device_mesh if isinstance(p, DTensor) else None
        placements = p.placements if isinstance(p, DTensor) else ()
        wide = (i for i, q in enumerate(placements) if splits(q) and mesh.size(i) > 1)
        by_ranks.setdefault((mesh, tuple(wide), p.dtype, p.device), []).append(p)
    for (mesh, dims, _, _), of_ranks in by_ranks.items():
        where = Ranks(mesh, dims)
        total, passed = max(1, sum(p.numel() for p in of_ranks)), 0
        count = -(-total // (BUCKET * len(where.ranks)))
        parts: dict[int, list[Tensor]] = {}
        for p in of_ranks:  # as many elements in each
            parts.setdefault(passed * count // total, []).append(p)
            passed += p.numel()
        yield from ((where, part) for part in parts.values())


def process_groups(wanted: Sequence[Ranks]) -> list[Any]:
    """The process group of each, None for a single rank.

    Groups over several dims are created by all ranks in one order.
    """
    by_rank: list[list[tuple[int, ...]]] = [[]]
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        mine = sorted({tuple(w.ranks) for w in wanted if len(w.dims) > 1})
        by_rank = [[]] * distributed.get_world_size()
        distributed.all_gather_object(by_rank, mine)
    groups = {
        ranks: distributed.new_group(list(ranks))
        for ranks in sorted({ranks for of_rank in by_rank for ranks in of_rank})
    }
    return [
        None
        if w.mesh is None or not w.dims
        else w.mesh.get_group(w.dims[0])
        if len(w.dims) == 1
        else groups[tuple(w.ranks)]
        for w in wanted
    ]


class Matrix:
    """A matrix that is orthogonalized: a weight, a part of one, a head or an expert.

    Attributes:
        number: of its parameter in the bucket.
        shape: of the matrix.
        held: per rank, the blocks of it in that rank's shard.
        sizes: per rank, their number of elements.
        owner: the index of the rank that orthogonalizes it.
    """

    def __init__(self, shape: tuple[int, ...], held: list[list[Block]]) -> None:
        self.number, self.owner = -1, -1
        self.shape, self.held = shape, held
        self.sizes = [sum(map(block_size, blocks)) for blocks in held]

    @property
    def work(self) -> int:
        """The cost of orthogonalization, up to a factor."""
        return min(self.shape) ** 2 * max(self.shape)


def block_size(block: Block) -> int:
    """The elements of a block."""
    return math.prod(s.stop - s.start for s in block[1])


def units_of(
    parameter: Tensor,
    order: Order | None,
    cut: Cut,
    *,
    where: Ranks,
    known: dict[Any, Any],
) -> list[Matrix]:
    """The matrices of a parameter, with the pieces that each rank holds of them.

    Which rank holds what follows from placements, without a message.

    Args:
        parameter: of two dims, or of three: a stack of matrices.
        order: the order in which the parameter is stored, if not the model's.
        cut: the matrices in it.
        where: the ranks that hold it.
        known: what parameters of one shape and layout share, filled here.
    """
    shape = tuple(parameter.shape)
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    mesh = () if where.mesh is None else tuple(where.mesh.shape)
    layout = (mesh, *where.coordinates, *map(str, placements))
    key = (shape, layout, str(order), cut)
    if key not in known:
        held = held_by(parameter, order, where)
        known[key] = [
            (
                tuple(map(len, window[-2:])),
                [blocks_in(blocks, window) for blocks in held],
            )
            for window in windows_of(shape, cut)
        ]
    return [Matrix(size, held) for size, held in known[key]]


def held_by(parameter: Tensor, order: Order | None, where: Ranks) -> list[list[Block]]:
    """Per rank, the blocks of a parameter in its shard."""
    shape = tuple(parameter.shape)
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    mesh = () if where.mesh is None else tuple(where.mesh.shape)
    return [
        [*blocks_of(model_ranges(positions_of(shape, mesh, at, placements), order))]
        for at in where.coordinates
    ]


def windows_of(shape: tuple[int, ...], cut: Cut) -> Iterator[list[range]]:
    """For each matrix of a parameter, its positions in each dim."""
    whole = [range(size) for size in shape]
    dim, sizes, *alternate = cut or (len(shape) - 2, (shape[-2],))
    ends, count = [*accumulate(sizes)], len(sizes)
    if alternate:
        ranges = [range(first, shape[dim], count) for first in range(count)]
    else:
        ranges = [*map(range, [0, *ends], ends)]
    for entry in range(shape[0]) if len(shape) == 3 else (None,):
        for part in ranges:
            window = whole if entry is None else [range(entry, entry + 1), *whole[1:]]
            yield [*window[:dim], part, *window[dim + 1 :]]


def blocks_in(blocks: Iterable[Block], window: list[range]) -> list[Block]:
    """The blocks of a rank in a matrix: (slices of the shard, slices of the matrix)."""
    overlaps = (block_in(block, window) for block in blocks)
    return [(inner, outer[-2:]) for inner, outer in filter(None, overlaps)]


# Muon ---------------------------------------------------------------------------------


class Bucket:
    """Matrices that two all-to-alls a step bring to their owners and back."""

    def __init__(
        self,
        parameters: list[Tensor],
        units: list[list[Matrix]],
        group: Any,
        where: Ranks,
    ) -> None:
        self.parameters, self.group, self.me = parameters, group, where.me
        self.device = where.device
        for number, parts in enumerate(units):
            for unit in parts:
                unit.number = number
        self.units = [unit for parts in units for unit in parts]
        load = [0] * len(where.ranks)
        # the longest work first, each on the least loaded rank that holds a piece
        for unit in sorted(self.units, key=lambda unit: -unit.work):
            held = [rank for rank, size in enumerate(unit.sizes) if size]
            unit.owner = min(held, key=lambda r: (load[r], -unit.sizes[r], r))
            load[unit.owner] += unit.work
        self.mine = [unit for unit in self.units if unit.owner == self.me]
        ranks = range(len(where.ranks))
        self.to = [[u for u in self.units if u.owner == rank] for rank in ranks]
        self.sent = [sum(u.sizes[self.me] for u in parts) for parts in self.to]
        self.received = [sum(u.sizes[rank] for u in self.mine) for rank in ranks]

    def step(self, group: Any, state: Any) -> None:
        """Momentum, orthogonalization, weight decay and step of the parameters."""
        updates: list[Tensor] = []
        for p in self.parameters:
            buffer = state_like(p, state[p], "momentum_buffer", group)
            if p.grad is None:  # other ranks may have one, and exchange it
                updates.append(torch.zeros_like(part_of(p)))
                continue
            gradient = gradient_part(p)
            [average] = read_as([buffer], gradient)
            moved = average.lerp(gradient, 1 - group["momentum"])
            buffer.copy_(moved)
            ahead = gradient.lerp(moved, group["momentum"])
            updates.append(ahead if group["nesterov"] else moved)
        dtype = group["compute"] or torch.promote_types(updates[0].dtype, torch.float32)
        done = self.orthogonalize(updates, group, dtype)
        for p, update in zip(self.parameters, done, strict=True):
            if p.grad is not None:
                shard = part_of(p)
                shard.mul_(1 - group["lr"] * group["weight_decay"])
                shard.add_(update, alpha=-group["lr"])

    def orthogonalize(
        self, updates: list[Tensor], group: Any, dtype: torch.dtype
    ) -> list[Tensor]:
        """Orthogonalizes and scales updates in place; each rank has shards of them."""
        shards = [
            (updates[unit.number], inner)
            for units in self.to
            for unit in units
            for inner, _ in unit.held[self.me]
        ]
        flat = self.exchange(pack_pieces(shards, updates[0]), self.received, self.sent)
        whole = [flat.new_empty(unit.shape) for unit in self.mine]
        pieces = [
            (matrix, outer)
            for rank in range(len(self.sent))
            for unit, matrix in zip(self.mine, whole, strict=True)
            for _, outer in unit.held[rank]
        ]
        unpack(flat, pieces)
        del flat  # matrices are as much as the shards, and held once
        self.turn(whole, group, dtype)
        flat = pack_pieces(pieces, updates[0])
        del pieces, whole
        unpack(self.exchange(flat, self.sent, self.received), shards)
        return updates

    def exchange(self, flat: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Runs an all-to-all of pieces, in rank order; the result is on the mesh's
        device.
        """
        if self.group is None:
            return flat
        flat = flat.to(self.device)  # an offloaded shard
        out = flat.new_empty(sum(received))
        distributed.all_to_all_single(out, flat, received, sent, group=self.group)
        return out

    def turn(self, whole: list[Tensor], group: Any, dtype: torch.dtype) -> None:
        """Orthogonalizes this rank's matrices in place, those of one shape together."""
        shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for matrix in whole:
            shapes.setdefault(tuple(matrix.shape), []).append(matrix)
        for (rows, columns), matrices in shapes.items():
            if group["adjust_lr"] == "match_rms_adamw":
                factor = 0.2 * math.sqrt(max(rows, columns))
            else:
                factor = math.sqrt(max(1.0, rows / columns))
            count = max(1, AT_ONCE // (rows * columns))
            for at in range(0, len(matrices), count):
                chunk = matrices[at : at + count]
                turned = orthogonal(torch.stack(chunk).to(dtype), group["ns_steps"])
                for matrix, value in zip(chunk, turned, strict=True):
                    matrix.copy_(value * factor)


Piece = tuple[Tensor, tuple[slice, ...]]
"""A tensor, and the part of it that is sent or received."""


def pack_pieces(pieces: Sequence[Piece], like: Tensor) -> Tensor:
    """The pieces, one after the other."""
    sizes = [tensor[part].numel() for tensor, part in pieces]
    device = pieces[0][0].device if pieces else like.device
    flat = like.new_empty(sum(sizes), device=device)
    for (tensor, part), target in zip(pieces, flat.split(sizes), strict=True):
        target.view_as(tensor[part]).copy_(tensor[part])
    return flat


def unpack(flat: Tensor, pieces: Sequence[Piece]) -> None:
    """Fills the pieces from what `pack_pieces` made of them."""
    sizes = [tensor[part].numel() for tensor, part in pieces]
    for (tensor, part), source in zip(pieces, flat.split(sizes), strict=True):
        tensor[part].copy_(source.view_as(tensor[part]))


def orthogonal(x: Tensor, steps: int, eps: float = 1e-7) -> Tensor:
    """Newton-Schulz iterations of a batch of matrices [n, rows, columns].

    Source: Jordan et al., Muon; `torch.optim.Muon`.
    """
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if tall else x
