"""`fully_shard`, and the settings of its units."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Annotated, ClassVar, Self

from planc.model.facts import Modules
from planc.ops import base, call, phrases
from planc.ops.claims import ROOT, UNIT, CallClaim, ObservedCall

_FUNCTIONS = "standalone.fsdp:"


def _replication_text(axes: tuple[str, ...]) -> str:
    return f"replicated over {phrases.axes(axes)}" if axes else "not replicated"


def reshard_text(value: bool | int) -> str:
    """Says what a unit does with its gathered parameters after the forward pass."""
    if value is True:
        return "reshard after forward"
    return "keep" if value is False else f"reshard to {value} after forward"


WORDS: base.Words = {
    "shard": ("over", lambda axes: phrases.axes(axes) or "none"),
    "replicate": ("", _replication_text),
    "reshard": ("", reshard_text),
    "param": ("parameters", phrases.value),
    "reduce": ("gradients", phrases.value),
    "cast_inputs": ("cast inputs", phrases.value),
    "nbytes": ("per rank", phrases.value),
    "frozen": ("frozen", phrases.size),
    "saved": ("gathered in fp8, less", phrases.size),
    "group": ("unit", lambda group: group or "alone"),
    "shard_dim": ("dim", phrases.value),
    "pin": ("pinned", phrases.value),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Parameters of a unit that are sharded over another mesh or dim than the rest of the unit.

    Args:
        modules: the parameters in these modules and in their submodules.
        shard, replicate, shard_dim: as of the unit.
    """

    ABOUT: ClassVar[tuple[str, ...]] = ("modules",)
    WORDS: ClassVar = WORDS

    modules: Modules
    shard: base.Some[base.Axis]
    replicate: base.Axes = field(default=(), metadata=base.OMIT)
    shard_dim: base.ShardDim = field(default=0, metadata=base.OMIT)

    def headline(self, mesh: base.AxisSizes | None = None) -> str:
        return ", ".join(filter(None, (where(self, mesh), along(self))))


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyShard(base.Op):
    """`fully_shard`: one unit per module of `members[0]`, or one unit for a group.

    Args:
        shard: the axes that parameters are sharded over; several are flattened to one mesh
            dimension. Empty for torch's composable `replicate`.
        replicate: the axes that parameters are replicated over.
        reshard: `reshard_after_forward`.
        param, reduce, output: the dtype names of the mixed precision policy, None for none.
        cast_inputs: the policy's `cast_forward_inputs`.
        nbytes: bytes of one unit's parameters that one rank holds at rest.
        gathered: bytes of one unit while it is all-gathered (in `param` precision).
        frozen: bytes that all units gather of parameters that take no gradient.
        saved: bytes that one unit gathers less, as weights that train are gathered in fp8.
        ignored: submodules whose parameters are replicated and belong to no unit.
        shard_dim: the dim that FSDP shards, where a parameter has it and it is divisible; else 0.
        offload: whether shards are kept in CPU memory.
        pin: whether that memory is pinned, where there is a device to copy to.
        scalars: whether it has parameters without dims, which get one.
        spreads: parameters inside that are sharded otherwise, outer modules before inner ones.
    """

    members: base.Some[Modules]
    group: bool = False
    shard: base.Axes
    replicate: base.Axes = ()
    reshard: bool | base.Size
    param: base.Dtype | None = None
    reduce: base.Dtype | None = None
    output: base.Dtype | None = None
    cast_inputs: bool = True
    nbytes: base.Count = 0
    gathered: base.Count = 0
    ignored: tuple[Modules, ...] = field(default=(), metadata=base.OMIT)
    shard_dim: base.ShardDim = field(default=0, metadata=base.OMIT)
    offload: bool = field(default=False, metadata=base.OMIT)
    pin: bool = field(default=False, metadata=base.OMIT)
    scalars: bool = field(default=False, metadata=base.OMIT)
    spreads: tuple[Spread, ...] = field(default=(), metadata=base.OMIT)
    frozen: base.Count = field(default=0, metadata=base.OMIT)
    saved: base.Count = field(default=0, metadata=base.OMIT)

    def problems(self) -> Iterator[tuple[base.Where, str]]:
        if not self.shard and not self.replicate:
            yield (), "a unit has no axis"
        if not self.group and len(self.members) > 1:
            yield ("members",), "only a group has several members"

    SCRIPT: ClassVar = call.ScriptFunction(
        "shard", "Shards parameters, gradients and optimizer state."
    )
    ROLE: ClassVar = base.AxisRole.DATA
    SIMULATION: ClassVar = base.SimulationKind.WITH_DATA

    @property
    def script(self) -> call.ScriptFunction:
        return self.SCRIPT if self.shard else _REPLICATE

    @property
    def split_axes(self) -> tuple[str, ...]:
        return (*self.shard, *self.replicate)

    @property
    def communication_axes(self) -> tuple[str, ...]:
        spreads = (axis for s in self.spreads for axis in (*s.shard, *s.replicate))
        return (*self.split_axes, *spreads)

    @property
    def traced_modules(self) -> tuple[Modules, ...]:
        return self.members

    @property
    def call_name(self) -> str:
        return "fully_shard" if self.shard else "replicate"

    def union(self, other: base.Op) -> Self | None:
        """Two units of one line as one operation; groups are not joined."""
        if not isinstance(other, FullyShard) or self.group or other.group:
            return None
        both = self.members[0].union(other.members[0])
        if both is None or self.place != other.place:
            return None
        joined = replace(self, members=(both,))
        return joined if replace(other, members=(both,)) == joined else None

    def simplify(self, context: call.Context, *, precision: bool) -> Self:
        """The unit without mixed precision unless asked; it is resharded if the mesh has too few
        ranks for the number in `reshard`.
        """
        ranks = context.size(self.shard)
        partial = self.reshard if not isinstance(self.reshard, bool) else 0
        reshard = True if partial and (partial >= ranks or ranks % partial) else self.reshard
        unit = replace(self, reshard=reshard, gathered=0, saved=0)
        return unit if precision else replace(unit, param=None, reduce=None, output=None)

    def drop_sizes(self) -> Self:
        return replace(self, nbytes=0, gathered=0, saved=0)

    def claims(self, collective: ObservedCall) -> CallClaim | None:
        """Claims what gathers and reduces its unit."""
        if not collective.unit or not {*collective.axes} <= {*self.communication_axes}:
            return None
        first = collective.unit.partition(",")[0].replace(ROOT, "")
        return UNIT if any(first in member.names() for member in self.members) else None

    def calls(self, context: call.Context) -> Iterator[call.Step]:
        if self.scalars:
            members = call.Members(self.members)
            yield call.Once(call=call.FunctionCall(f"{_FUNCTIONS}one_element", (members,)))
        function = "torch.distributed.fsdp:fully_shard"
        if not self.shard:
            function = "torch.distributed._composable.replicate_with_fsdp:replicate"
        keywords = (("", call.Shared("fsdp", self._common())), *self._keywords(context))
        if self.group:
            function_call = call.FunctionCall(function, (call.Members(self.members),), keywords)
            yield call.Once(call=function_call, note=self.place)
            return
        for modules in self.members:
            function_call = call.FunctionCall(function, (), keywords)
            yield call.Each(modules=modules, calls=(function_call,), note=self.place)
            if context.rooted != bool(modules.path):  # the root, or each unit where there is none
                resting = call.FunctionCall("standalone.passes:shards_at_rest")
                yield call.Each(modules=modules, calls=(resting,))

    PHASE: ClassVar = base.Phase.SHARD
    WORD: ClassVar = "fsdp"
    ABOUT: ClassVar[tuple[str, ...]] = ("members", "group", "spreads")
    WORDS: ClassVar = WORDS

    @property
    def name(self) -> str:
        """The unit as a plan writes it."""
        paths = [str(m) for m in self.members]
        inner = phrases.together(p for p in paths if phrases.parent(p))
        names = ", ".join([*inner, *(p for p in paths if not phrases.parent(p))])
        return f"group({names})" if self.group else names

    def headline(self, mesh: base.AxisSizes | None = None) -> str:
        """Axes, precision and where shards are kept, which units share."""
        return f"{where(self, mesh)}, {self.precision}{offloading(self)}"

    @property
    def precision(self) -> str:
        """The dtypes of the mixed precision policy."""
        kinds = (("parameters", self.param), ("gradients", self.reduce), ("output", self.output))
        words = [f"{name} {phrases.dtype(kind)}" for name, kind in kinds if kind]
        text = ", ".join(words) or "no mixed precision"
        return text if self.cast_inputs else f"{text}, inputs not cast"

    @property
    def resharding(self) -> str:
        return reshard_text(self.reshard)

    @classmethod
    def section(cls, ops: Sequence[Self], mesh: base.AxisSizes) -> Iterator[str]:
        """The units in the order of their calls, with a heading where the axes change."""
        for _, same in groupby(ops, key=lambda op: (op.shard, op.replicate)):
            units = list(same)
            word = cls.WORD if units[0].shard else "replicate"
            yield phrases.head(word, units[0].headline(mesh))
            yield from phrases.table(rows(units))
        for spread in dict.fromkeys(s for op in ops for s in op.spreads):
            row = ("spread", str(spread.modules), spread.headline(mesh))
            yield from phrases.listing([row])
        ignored = dict.fromkeys(str(m) for op in ops for m in op.ignored)
        note = "replicated, in no unit"
        yield from phrases.listing(("ignored", path, note) for path in ignored)

    def entries(self, common: Set[base.Group]) -> Iterator[base.Entry]:
        """Its spreads, and the unit; a group that both sides have is one entry, with its name."""
        for spread in self.spreads:
            entry = base.Entry(
                kind="spread", place=self.place, brief=spread.headline(), source=spread
            )
            for modules in filter(None, map(spread.modules.part_inside, self.members)):
                yield replace(entry, modules=modules)
        name, away = self.name if self.group else "", "offloaded" if self.offload else ""
        size = f"{phrases.size(self.nbytes)} per rank"
        brief = ", ".join(filter(None, (self.resharding, size, along(self), away)))
        entry = base.Entry(kind=self.WORD, place=self.place, brief=brief, source=self)
        if self.paths in common:
            yield replace(entry, label=name)
            return
        brief = f"in {name}, {brief}" if name else brief
        group = (base.Fact("group", name or None),)
        for members in self.members:
            yield replace(entry, modules=members, facts=group, brief=brief)

    @property
    def paths(self) -> base.Group:
        """The paths of a group's members; empty for a unit that is no group."""
        return frozenset(str(m) for m in self.members) if self.group else frozenset()

    def _common(self) -> call.Table:
        precision = call.drop_none(
            param_dtype=call.dtype(self.param),
            reduce_dtype=call.dtype(self.reduce),
            output_dtype=call.dtype(self.output),
            cast_forward_inputs=None if self.cast_inputs else False,
        )
        policy = call.FunctionCall("torch.distributed.fsdp:MixedPrecisionPolicy", (), precision)
        ignored = call.FunctionCall(f"{_FUNCTIONS}parameters_of", (call.Members(self.ignored),))
        # memory can only be pinned with a device
        pin = call.FunctionCall("torch:cuda.is_available") if self.pin else False
        host = call.FunctionCall(
            "torch.distributed.fsdp:CPUOffloadPolicy", (), (("pin_memory", pin),)
        )
        keywords = call.drop_none(
            mesh=call.MeshOf(self.shard, self.replicate),
            mp_policy=call.Shared("policy", policy) if precision else None,
            ignored_params=call.Shared("ignored", ignored) if self.ignored else None,
            offload_policy=host if self.offload else None,
        )
        return call.Table(keywords)

    def _keywords(self, context: call.Context) -> call.Keywords:
        placement = _split(self, context)
        if self.spreads:
            placements = tuple(self._spread(spread, context) for spread in self.spreads)
            overrides = call.Shared(
                "spreads", call.FunctionCall(f"{_FUNCTIONS}placements", placements)
            )
            rest = (placement,) if placement else ()
            placement = call.FunctionCall(f"{_FUNCTIONS}spread", (overrides, *rest))
        return call.drop_none(
            reshard_after_forward=self.reshard if self.shard else None, shard_placement_fn=placement
        )

    def _spread(self, spread: Spread, context: call.Context) -> call.Value:
        """(modules, `shard_placement_fn`, mesh info) of a spread; None where they are the unit's.

        Parameters with one process group must share the mesh info object.
        """
        info: call.Value = None
        if (spread.shard, spread.replicate) != (self.shard, self.replicate):
            kind = "HSDPMeshInfo" if spread.replicate else "FSDPMeshInfo"
            dims = call.drop_none(
                shard_mesh_dim=1 if spread.replicate else 0,
                replicate_mesh_dim=0 if spread.replicate else None,
            )
            function = f"torch.distributed.fsdp._fully_shard._fsdp_common:{kind}"
            mesh = call.MeshOf(spread.shard, spread.replicate)
            info = call.Shared(
                f"{'_'.join(spread.shard)}_info", call.FunctionCall(function, (mesh,), dims)
            )
        return call.Members((spread.modules,)), _split(spread, context), info


_REPLICATE = call.ScriptFunction("copies", "Averages the gradients of replicated parameters.")


def _split(part: FullyShard | Spread, context: call.Context) -> call.FunctionCall | None:
    """The `shard_placement_fn` of a dim; None for dim 0, torch's default."""
    if not part.shard_dim:
        return None
    return call.FunctionCall(f"{_FUNCTIONS}along", (part.shard_dim, context.size(part.shard)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Divide(base.Op):
    """`set_gradient_divide_factor` of every unit, or of some.

    Args:
        factor: the divisor of summed gradients.
        units: units that reduce over more ranks than the others; empty for every unit.
    """

    factor: base.Positive
    units: tuple[Modules, ...] = field(default=(), metadata=base.OMIT)

    SCRIPT: ClassVar = call.ScriptFunction("divide", "Sets the divisor of summed gradients.")

    def calls(self, _context: call.Context) -> Iterator[call.Step]:
        if not self.units:
            function_call = call.FunctionCall(
                f"{_FUNCTIONS}divide_gradients", (call.MODEL, self.factor, call.DEVICE_TYPE)
            )
            yield call.Once(call=function_call, note=self.place)
        for modules in self.units:
            function_call = call.FunctionCall(".set_gradient_divide_factor", (self.factor,))
            yield call.Each(modules=modules, calls=(function_call,), note=self.place)

    SIMULATION: ClassVar = base.SimulationKind.WITH_DATA
    PHASE: ClassVar = base.Phase.UNITS
    WORD: ClassVar = "divide"
    ABOUT: ClassVar[tuple[str, ...]] = ("units",)
    WORDS: ClassVar = {"factor": ("gradients by", phrases.value)}

    def headline(self, _mesh: base.AxisSizes | None = None) -> str:
        return f"gradients are summed, then divided by {self.factor:,}"


Depth = Annotated[int, base.Form({"minimum": 0, "maximum": 1_000_000})]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch(base.Op):
    """`set_modules_to_forward_prefetch` and `..._backward_prefetch` along a list of units.

    Args:
        units: sets with the list's indices at one position of their paths; those of one block run
            in this order, outer units before the units inside them.
        forward, backward: how many blocks ahead are all-gathered; 0 leaves it to FSDP.
    """

    units: base.Some[Modules]
    forward: Depth = 0
    backward: Depth = 0

    SCRIPT: ClassVar = call.ScriptFunction(
        "prefetch", "Prefetches the parameters of the next blocks."
    )

    def calls(self, _context: call.Context) -> Iterator[call.Step]:
        ways = (("forward", self.forward, self.units), ("backward", self.backward, self.returning))
        for way, depth, units in ways:
            if depth:
                order = tuple(call.Numbered(modules) for modules in units)
                function_call = call.FunctionCall(f"{_FUNCTIONS}prefetch_{way}", (depth, *order))
                yield call.Once(call=function_call, note=self.place)

    SIMULATION: ClassVar = base.SimulationKind.WITH_DATA
    PHASE: ClassVar = base.Phase.UNITS
    WORD: ClassVar = "prefetch"
    ABOUT: ClassVar[tuple[str, ...]] = ("units",)

    def headline(self, _mesh: base.AxisSizes | None = None) -> str:
        """`1 ahead in forward, 2 ahead in backward`: the numbers of blocks that are all-gathered
        early.
        """
        ways = (("forward", self.forward), ("backward", self.backward))
        return ", ".join(f"{depth} ahead in {way}" for way, depth in ways if depth)

    @property
    def returning(self) -> tuple[Modules, ...]:
        """The units of a block in the order of the backward pass: reversed, but a unit before
        the units inside it, because its hook is on its output.
        """
        result: list[Modules] = []
        for modules in self.units:
            around = [i for i, outer in enumerate(result) if modules.is_within(outer)]
            result.insert(around[-1] + 1 if around else 0, modules)
        return tuple(result)


# Text --------------------------------------------------------------------------------------------


def where(of: FullyShard | Spread, mesh: base.AxisSizes | None) -> str:
    """The axes that parameters are sharded and replicated over."""
    text = f"on {phrases.axes(of.shard or of.replicate, mesh)}"
    if of.shard and of.replicate:
        text += f", replicated over {phrases.axes(of.replicate, mesh)}"
    return text


def along(of: FullyShard | Spread) -> str:
    return f"split along dim {of.shard_dim}" if of.shard_dim else ""


def offloading(op: FullyShard) -> str:
    if not op.offload:
        return ""
    return f", offloaded to {'pinned' if op.pin else 'unpinned'} host memory"


def rows(ops: Sequence[FullyShard]) -> Iterator[tuple[str, str, str, str]]:
    """(unit, reshard, bytes, a precision that differs from the first unit's) for each unit."""
    folded, common = _merge_units(ops), ops[0].precision
    columns = (
        [f"{times} x " if times > 1 else "" for _, times in folded],
        [phrases.size(op.nbytes) for op, _ in folded],
        [phrases.size(op.gathered) for op, _ in folded],
    )
    widths = [max(map(len, column)) for column in columns]
    for (op, _), *cells in zip(folded, *columns, strict=True):
        times, rest, whole = (c.rjust(w) for c, w in zip(cells, widths, strict=True))
        numbers = f"{times}{rest} per rank, {whole} gathered"
        precision = op.precision if op.precision != common else ""
        yield (
            op.name,
            op.resharding if op.shard else "",
            numbers if op.nbytes or op.gathered else "no parameters of its own",
            ", ".join(filter(None, (precision, along(op)))),
        )


def _merge_units(ops: Sequence[FullyShard]) -> list[tuple[FullyShard, int]]:
    """(unit, number of units); the groups of one line that have equal sizes are merged."""
    groups: list[tuple[FullyShard, int]] = []
    for op in ops:
        before = groups[-1][0] if groups else None
        both = _merge_groups(before, op) if before and before.group and op.group else None
        if both:
            groups[-1] = (both, groups[-1][1] + 1)
        else:
            groups.append((op, 1 if op.group else len(op.members[0])))
    return groups


def _merge_groups(first: FullyShard, second: FullyShard) -> FullyShard | None:
    """Two groups of blocks in the same lists, merged; None where they differ."""
    if first.place != second.place or len(first.members) != len(second.members):
        return None
    unions = tuple(a.union(b) for a, b in zip(first.members, second.members, strict=True))
    members = tuple(m for m in unions if m is not None)
    joined = replace(first, members=members)
    same = len(members) == len(unions) and replace(second, members=members) == joined
    return joined if same else None
