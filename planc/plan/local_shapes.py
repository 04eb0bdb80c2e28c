"""Local shapes under tensor parallelism, which FSDP shards further."""

from collections.abc import Iterable, Sequence

from planc.model.facts import Modules, Parameter
from planc.ops.styles import Split, part_sizes, weight_split
from planc.plan.ir import Plan, TensorRule

AUTO = -1
"""`shard_dim = auto`, until it is resolved."""


def split_dim(local: tuple[int, ...], dim: int, ranks: int) -> bool:
    """Whether FSDP can shard that dim (not dim 0) of a shape: torch requires it to be divisible."""
    return 0 < dim < len(local) and local[dim] % ranks == 0


def local_shape(parameter: Parameter, rules: Iterable[TensorRule], plan: Plan) -> tuple[int, ...]:
    """The shape of a parameter's shard after the rules, on the rank with the largest shard.

    Each rule shards the result of those before it; in a packed dim, each part is sharded.
    """
    shape = parameter.shape
    dims: dict[int, list[Split]] = {}
    ranks: dict[int, list[int]] = {}
    for rule in rules if shape else ():
        split = weight_split(rule.style, rule.modules.module.kind, parameter.name, len(shape))
        if split is not None:
            dims.setdefault(split.dim, []).append(split)
            ranks.setdefault(split.dim, []).append(plan.mesh.size(rule.axis))
    local = list(shape)
    for dim, splits in dims.items():
        packed = next((s for s in splits if s.packed), None)
        sizes = part_sizes(packed, shape[dim]) if packed else (shape[dim],)
        for count in ranks[dim]:
            sizes = tuple(-(-size // count) for size in sizes)
        local[dim] = sum(sizes)
    return tuple(local)


def ruled(
    modules: Modules, rules: Iterable[TensorRule]
) -> list[tuple[Modules, tuple[TensorRule, ...]]]:
    """The modules, split by the rules on them: each part with all of its rules, in order."""
    parts: list[tuple[Modules, tuple[TensorRule, ...]]] = [(modules, ())]
    for rule in rules:
        split = []
        for part, found in parts:
            both = part.overlap(rule.modules)
            if both is None:
                split.append((part, found))
            else:
                split += [(both, (*found, rule)), *((rest, found) for rest in part.minus(both))]
        parts = split
    return parts


def even_dim(shapes: Sequence[tuple[int, ...]], ranks: int) -> int | None:
    """The value of `shard_dim = auto`: 0 where every rank gets rows of every parameter.

    torch pads dim 0, so with fewer rows than ranks some ranks hold only padding, which is
    all-gathered like data. Any other dim must be divisible.

    Args:
        shapes: of the parameters, after tensor parallelism.
        ranks: the number of ranks that shard them.

    Returns:
        The dim, or None where some parameter has fewer rows than there are ranks, and no other dim
        is divisible in all such parameters.
    """
    short = [s for s in shapes if len(s) > 1 and s[0] < ranks]
    if not short:
        return 0
    for dim in range(1, max(map(len, short))):
        if all(len(s) > dim and s[dim] % ranks == 0 for s in short):
            return dim
    return None
