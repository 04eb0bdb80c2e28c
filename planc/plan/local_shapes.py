"""The shapes that tensor parallelism leaves, which FSDP splits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from planc.model.facts import Modules, Parameter
from planc.ops.styles import part_sizes, weight_split
from planc.plan.ir import Plan, TensorRule

AUTO = -1
"""`shard_dim = auto`, until it is settled."""


def split_dim(local: tuple[int, ...], dim: int, ranks: int) -> bool:
    """Whether FSDP can split that dim (not the first) of a shape: torch splits it evenly alone."""
    return 0 < dim < len(local) and local[dim] % ranks == 0


def local_shape(parameter: Parameter, rule: TensorRule | None, plan: Plan) -> tuple[int, ...]:
    """The shape that a rule leaves of a parameter, on the rank that holds most."""
    local = list(parameter.shape)
    if rule is not None and local:
        kind, ranks = rule.modules.module.kind, plan.mesh.size(rule.axis)
        split = weight_split(rule.style, kind, parameter.name, len(local))
        if split is not None:
            sizes = part_sizes(split, local[split.dim]) if split.packed else (local[split.dim],)
            local[split.dim] = sum(-(-size // ranks) for size in sizes)
    return tuple(local)


def ruled(
    modules: Modules, rules: Iterable[TensorRule]
) -> Iterator[tuple[Modules, TensorRule | None]]:
    """The modules, split by the rule that decides them."""
    left = [modules]
    for rule in rules:
        for part in list(left):
            both = part.overlap(rule.modules)
            if both is not None:
                left.remove(part)
                left.extend(part.minus(both))
                yield both, rule
    for part in left:
        yield part, None


def even_dim(shapes: Sequence[tuple[int, ...]], ranks: int) -> int | None:
    """What `shard_dim = auto` comes to: 0 where every rank gets something of it, else another.

    torch splits dim 0 unevenly too, with padding, so that fewer rows than ranks leave some of them
    nothing and gather as much for it. It splits any other dim evenly alone.

    Args:
        shapes: of the parameters, after tensor parallelism.
        ranks: how many split them.

    Returns:
        The dim, or None where some parameter has fewer rows than there are ranks, and no dim of
        all of those divides.
    """
    short = [s for s in shapes if len(s) > 1 and s[0] < ranks]
    if not short:
        return 0
    for dim in range(1, max(map(len, short))):
        if all(len(s) > dim and s[dim] % ranks == 0 for s in short):
            return dim
    return None
