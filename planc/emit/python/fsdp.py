"""FSDP in the emitted script: meshes, policies, units, and what is set on units afterwards."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TypeVar

from planc.emit.python.module_loops import IN, Lines, entries, loop_over, looped, variable
from planc.emit.python.printer import Group, lay, quoted, remark
from planc.model.facts import Modules
from planc.model.indices import Indices
from planc.ops.fsdp import Divide, FullyShard, Prefetch, Spread
from planc.ops.lowered import Lowered
from planc.plan.unit_lists import entries as listed
from planc.plan.unit_lists import entry

Lying = tuple[tuple[Spread, ...], tuple[str, ...], tuple[str, ...]]
"""What lies otherwise than the rest of a unit, and what the unit itself is over."""


def shard(ops: Sequence[FullyShard], lowered: Lowered) -> Lines:
    last = ""
    for line in _shard(ops, lowered):
        if last and line.startswith(f"{IN}def "):
            yield ""  # as ruff would have it
        yield (last := line)


def _shard(ops: Sequence[FullyShard], lowered: Lowered) -> Lines:
    flat: dict[tuple[str, ...], str] = {}
    parts: list[FullyShard | Spread] = [*ops, *(s for op in ops for s in op.spreads)]
    for axes in (axes for part in parts for axes in (part.replicate, part.shard)):
        if len(axes) > 1 and axes not in flat:
            flat[axes] = variable("_".join(_ordered(axes, lowered)))
            yield from lay(_flat(flat[axes], _ordered(axes, lowered)), IN)
    paired = _numbered("hsdp_mesh", (pair for op in parts if (pair := _pair(op, flat, lowered))))
    for pair, name in paired.items():
        yield from lay(Group(f"{name} = DeviceMesh._concatenate([", pair, "])"), IN)
    policies = _numbered("policy", (policy for op in ops if (policy := _policy(op))))
    for policy, name in policies.items():
        yield from lay(Group(f"{name} = MixedPrecisionPolicy(", policy), IN)
    ignored = _numbered("ignored", (op.ignored for op in ops if op.ignored))
    for modules, name in ignored.items():
        yield f"{IN}{name} = set()"
        for some in modules:
            loop = loop_over(some, lowered.layers)
            call = f"{name}.update({loop.item}.parameters())"
            yield from looped(loop.head, call, "")
    if any(op.shard_dim or any(s.shard_dim for s in op.spreads) for op in ops):
        yield from _ALONG
    lying = yield from _spreads(ops, flat, paired, lowered)
    kinds = {
        op: (
            paired.get(_pair(op, flat, lowered)) or _data(op, flat),
            policies.get(_policy(op)),
            ignored.get(op.ignored),
            _offload(op),
        )
        for op in ops
    }
    names = _numbered("fsdp", kinds.values())
    for (mesh, rule, kept, host), name in names.items():
        said = (("mesh", mesh), ("mp_policy", rule), ("ignored_params", kept), host)
        items = tuple(f"{quoted(key)}: {value}" for key, value in said if value)
        yield from lay(Group(f"{name} = {{", items, "}"), IN)
    for op in ops:
        yield from _unit(op, f"**{names[kinds[op]]}", lying.get(_lying(op), ""), lowered)


def _spreads(
    ops: Sequence[FullyShard],
    flat: Mapping[tuple[str, ...], str],
    paired: Mapping[tuple[str, ...], str],
    lowered: Lowered,
) -> Generator[str, None, dict[Lying, str]]:
    """`lying`, what lies on a mesh of its own: by parameter, how it is split and over what."""
    with_own = [op for op in ops if op.spreads]
    names = _numbered("lying", map(_lying, with_own))
    if names:
        yield from _LYING
    infos: dict[str, str] = {}
    for op in {_lying(op): op for op in with_own}.values():
        name = names[_lying(op)]
        yield f"{IN}{name} = {{}}"
        for spread in op.spreads:
            info = "None"
            if (spread.shard, spread.replicate) != (op.shard, op.replicate):
                mesh = paired.get(_pair(spread, flat, lowered)) or _data(spread, flat)
                if mesh not in infos:
                    infos[mesh] = variable(f"{'_'.join(_ordered(spread.shard, lowered))}_info")
                    yield from lay(_info(infos[mesh], mesh, spread), IN)
                info = infos[mesh]
            loop = loop_over(spread.modules, lowered.layers)
            how = f"({_split(spread, lowered)}, {info})"
            own = Group("dict.fromkeys(", (f"{loop.item}.parameters()", how))
            yield from looped(loop.head, Group(f"{name}.update(", (own,)), "")
    return names


def _lying(op: FullyShard) -> Lying:
    return op.spreads, op.shard, op.replicate


def _info(name: str, mesh: str, spread: Spread) -> Group:
    if spread.replicate:
        return Group(f"{name} = HSDPMeshInfo(", (mesh, "shard_mesh_dim=1", "replicate_mesh_dim=0"))
    return Group(f"{name} = FSDPMeshInfo(", (mesh, "shard_mesh_dim=0"))


def _split(part: FullyShard | Spread, lowered: Lowered) -> str:
    return (
        f"along({part.shard_dim}, {lowered.axis_size(*part.shard)})" if part.shard_dim else "None"
    )


_LYING = (
    f"{IN}def spread(lying, rest=None):",
    f"{IN}    # some parameters of a unit lie on a mesh of their own, as torch allows since 2.12",
    f"{IN}    def placement(parameter):",
    f"{IN}        split, info = lying.get(parameter, (rest, None))",
    f"{IN}        shard = split(parameter) if split else None",
    f"{IN}        return ShardPlacementResult(shard, info) if info else shard",
    "",
    f"{IN}    return placement",
    "",
)

_ALONG = (
    f"{IN}def along(dim, ranks):",
    f"{IN}    # what has such a dim, that divides, is split along it; the rest along dim 0",
    f"{IN}    def placement(parameter):",
    f'{IN}        shape = getattr(parameter, "_local_tensor", parameter).shape',
    f"{IN}        fits = len(shape) > dim and shape[dim] % ranks == 0",
    f"{IN}        return Shard(dim) if fits else None",
    "",
    f"{IN}    return placement",
    "",
)

Key = TypeVar("Key")


def _numbered(name: str, keys: Iterable[Key]) -> dict[Key, str]:
    """A variable for each of the different keys, numbered where they are several."""
    different = list(dict.fromkeys(keys))
    if len(different) == 1:
        return {different[0]: name}
    return {key: f"{name}_{number}" for number, key in enumerate(different, start=1)}


def _unit(op: FullyShard, shared: str, lying: str, lowered: Lowered) -> Lines:
    if not op.shard:
        call, own = "replicate(", tuple[str, ...]()
    else:
        call, own = "fully_shard(", (f"reshard_after_forward={op.reshard}",)
    if lying:
        rest = f", {_split(op, lowered)}" if op.shard_dim else ""
        own += (f"shard_placement_fn=spread({lying}{rest})",)
    elif op.shard_dim:
        own += (f"shard_placement_fn={_split(op, lowered)}",)
    if op.group:
        members = Group("[", tuple(e for m in op.members for e in entries(m)), "]")
        yield from looped((), Group(call, (members, shared, *own)), op.place)
        return
    loop = loop_over(op.members[0], lowered.layers)
    yield from looped(loop.head, Group(call, (loop.item, shared, *own)), op.place)


def _data(op: FullyShard | Spread, flat: Mapping[tuple[str, ...], str]) -> str:
    """The mesh of a unit, where the root mesh can give it."""
    if not op.shard:
        return _dimension(op.replicate, flat)
    if op.replicate:
        return f"mesh[{quoted(op.replicate[0])}, {quoted(op.shard[0])}]"
    return _dimension(op.shard, flat)


def _pair(
    op: FullyShard | Spread, flat: Mapping[tuple[str, ...], str], lowered: Lowered
) -> tuple[str, ...]:
    """The two meshes of a hybrid unit that the root mesh cannot give as one.

    It gives its own axes, in their order: neither flattened ones nor the reverse.
    """
    names = (*op.replicate, *op.shard)
    if not op.replicate or not op.shard or (len(names) == 2 and names == _ordered(names, lowered)):
        return ()
    return _dimension(op.replicate, flat), _dimension(op.shard, flat)


def _dimension(axes: tuple[str, ...], flat: Mapping[tuple[str, ...], str]) -> str:
    return flat.get(axes) or f"mesh[{quoted(axes[0])}]"


def _flat(name: str, axes: tuple[str, ...]) -> Group:
    """The statement that makes several axes, outermost first, one dimension."""
    names = ", ".join(quoted(a) for a in axes)
    return Group(f"{name} = mesh[{names}]._flatten(", (quoted("_".join(axes)),))


def _ordered(axes: tuple[str, ...], lowered: Lowered) -> tuple[str, ...]:
    """Axes in the order of the mesh, outermost first."""
    return tuple(a.name for a in lowered.axes if a.name in axes)


def _policy(op: FullyShard) -> tuple[str, ...]:
    """The arguments of a unit's precision; none where it has none of its own."""
    dtypes = (("param_dtype", op.param), ("reduce_dtype", op.reduce), ("output_dtype", op.output))
    parts = [f"{argument}=torch.{value}" for argument, value in dtypes if value]
    return tuple(parts if op.cast_inputs else [*parts, "cast_forward_inputs=False"])


def _offload(op: FullyShard) -> tuple[str, str]:
    if not op.offload:
        return "", ""
    pin = "torch.cuda.is_available()" if op.pin else "False"
    return "offload_policy", f"CPUOffloadPolicy(pin_memory={pin})"


# What is set on units ----------------------------------------------------------------------------


def divide(op: Divide, lowered: Lowered) -> Lines:
    """Gloo has no reduction that scales first, so on the CPU units sum and then divide."""
    for members in op.units:
        loop = loop_over(members, lowered.layers)
        call = f"{loop.item}.set_gradient_divide_factor({op.factor})"
        yield from looped(loop.head, call, op.place)
    if op.units:
        return
    yield from lay("for unit in model.modules():", IN, note=remark(op.place))
    yield f"{IN}    if isinstance(unit, FSDPModule):"
    yield f"{IN}        unit.set_gradient_divide_factor({op.factor})"
    yield f'{IN}        unit.set_force_sum_reduction_for_comms(mesh.device_type == "cpu")'


def prefetch(op: Prefetch) -> Lines:
    """The units of each entry of a list; the first of them gathers those of the next entries."""
    ways = (("forward", op.forward, op.units), ("backward", op.backward, op.returning))
    for way, depth, units in ways:
        if not depth:
            continue
        yield from _blocks(units, remark(op.place))
        if way == "backward":
            yield f"{IN}blocks.reverse()"
        yield f"{IN}for i, (first, *_) in enumerate(blocks):"
        following = f"blocks[i + 1 : i + {depth + 1}]"
        yield f"{IN}    ahead = [unit for block in {following} for unit in block]"
        yield f"{IN}    if ahead:"
        yield f"{IN}        first.set_modules_to_{way}_prefetch(ahead)"


def _blocks(units: Sequence[Modules], note: str) -> Lines:
    """`blocks`, a list of units for each entry: by one loop where all entries have the same."""
    indices = listed(tuple(units))
    yield from lay(f"blocks = [[] for _ in range({indices.last + 1})]", IN, note=note)
    for modules in units:
        at = entry(modules)
        assert at is not None
        loop = loop_over(modules, 0)
        yield from looped(loop.head, f"blocks[{_index(modules, at)}].append({loop.item})", "")
    yield f"{IN}blocks = [block for block in blocks if block]"


def _index(modules: Modules, at: int) -> str:
    """The variable of `loop_over`'s loop over the outermost list, or the one index."""
    segment = modules.path[at]
    assert isinstance(segment, Indices)
    return "i" if len(segment) > 1 else str(segment.first)
