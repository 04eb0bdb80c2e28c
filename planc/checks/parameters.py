"""PL401, PL402, PL440, PL441, PL451 to PL453: tied, ignored and frozen parameters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

from planc.checks.queries import active, axis_label, holds, unit_of
from planc.diagnostics.diagnostic import Label, Sink
from planc.ir.nodes import Ignored, Plan, TensorRule, Unit
from planc.ir.parameter_owners import owned_modules
from planc.model.facts import Facts, Modules, Parameter
from planc.ops.styles import Attributes, Input, Output

Half = tuple[str, Modules, Parameter]


@dataclass(frozen=True, slots=True)
class _Parted:
    """The names of one tensor, and the two units that contain it."""

    one: Half
    two: Half
    first: Unit | None
    second: Unit | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedStyles:
    """Two names of one tensor that the plan shards differently.

    Args:
        names: of the parameter.
        labels: the rules that shard it, and the size of their axis.
        replicated: the names that no rule shards.
    """

    HELP: ClassVar[str] = (
        "shard both on the vocabulary: `rowwise` on the embedding with `colwise(-> replicate)` on "
        "the head"
    )

    names: tuple[str, str]
    labels: tuple[Label, ...]
    replicated: tuple[str, ...]

    @property
    def facts(self) -> tuple[str, ...]:
        return tuple(f"{name} is replicated" for name in self.replicated)

    @property
    def message(self) -> str:
        first, second = self.names
        return f"`{first}` and `{second}` are tied, and the plan shards them differently"


def tied_parameters(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Tied parameters must be sharded alike and belong to one unit.

    torch's `fully_shard` refuses a parameter that is in two groups; two styles would make two
    tensors of the model's one.
    """
    for pair in split_apart(plan, facts) if "tensor" not in plan.broken else ():
        sink.warning("PL401", pair.message, *pair.labels, facts=pair.facts, help=TiedStyles.HELP)
    parted: list[_Parted] = []
    for first, second in (
        _pairs(facts) if plan.fsdp is not None and "fsdp" not in plan.broken else ()
    ):
        units = _units(first, second, plan, sink)
        parted += [_Parted(first, second, *units)] if units else []
    _report_tied(parted, facts, sink)


def _pairs(facts: Facts) -> Iterator[tuple[Half, Half]]:
    """The first name of each tied parameter with every other one."""
    for group in facts.ties:
        first, *others = ((name, *facts.find(name)) for name in group)
        yield from ((first, other) for other in others)


def _split(half: Half, plan: Plan) -> tuple[TensorRule, int] | None:
    """The first rule that shards a tensor by one of its names, and the dim."""
    _, modules, parameter = half
    rules = (r for r in active(plan) if r.modules.overlap(modules))
    return next(((r, split.dim) for r in rules if (split := r.split(parameter))), None)


def split_apart(plan: Plan, facts: Facts) -> Iterator[TiedStyles]:
    """Yields the pairs of tied parameters that the plan shards differently."""
    for pair in _pairs(facts):
        splits = [_split(half, plan) for half in pair]
        first_split, second_split = (each and (each[0].axis, each[1]) for each in splits)
        if first_split == second_split:
            continue
        named_splits = [(half[0], *each) for half, each in zip(pair, splits, strict=True) if each]
        labels = [
            Label(span=rule.origin, text=f"{name} is sharded on dim {dim}")
            for name, rule, dim in named_splits
        ]
        yield TiedStyles(
            names=(pair[0][0], pair[1][0]),
            labels=(*labels, axis_label(plan, named_splits[0][1])),
            replicated=tuple(h[0] for h, each in zip(pair, splits, strict=True) if not each),
        )


def _is_separated(first: Half, second: Half, plan: Plan, sink: Sink) -> bool:
    """Whether one name is ignored, which takes the other name out of its unit too."""
    section = plan.fsdp
    assert section is not None
    said = [
        (next((i for i in section.ignored if holds(i.modules, half[1])), None), half)
        for half in (first, second)
    ]
    ignored = [(i, half) for i, half in said if i]
    if len(ignored) == 1:
        rule, half = ignored[0]
        other = second if half is first else first
        message = f"`{half[0]}` and `{other[0]}` are tied, and only one of them is ignored"
        sink.error("PL402", message, rule.origin, help=f"ignore `{other[1]}` too, or neither")
    return bool(ignored)


def _units(
    first_half: Half, second_half: Half, plan: Plan, sink: Sink
) -> tuple[Unit | None, Unit | None] | None:
    """The two units that separate a tensor; None where there are none, or they were reported."""
    if _is_separated(first_half, second_half, plan, sink):
        return None
    first, second = unit_of(plan, first_half[1]), unit_of(plan, second_half[1])
    alike = first is second and (
        first is None or first.group or first.root or first_half[1] == second_half[1]
    )
    return None if alike else (first, second)


def _report_tied(parted: list[_Parted], facts: Facts, sink: Sink) -> None:
    """PL402 once for each pair of modules that share parameters, not for each parameter."""
    groups: dict[tuple[str, str, int, int], list[_Parted]] = {}
    for each in parted:
        heads = _heads(each.one[0], each.two[0])
        groups.setdefault((*heads, id(each.first), id(each.second)), []).append(each)
    for several in groups.values():
        each = several[0]
        names, held = (each.one[0], each.two[0]), (each.one[1], each.two[1])
        text = f"`{names[0]}` and `{names[1]}` are tied, and they are in two units"
        if len(several) > 1:
            names = _sharing(several)
            held = (facts.module_at(names[0]), facts.module_at(names[1]))
            text = f"`{names[0]}` and `{names[1]}` share {len(several)} parameters, in two units"
        labels = [
            Label(span=unit.origin, text=f"{name} is here")
            for unit, name in ((each.first, names[0]), (each.second, names[1]))
            if unit
        ]
        advice = f"put both into one unit: `group({held[0]}, {held[1]}) : unit`"
        sink.error("PL402", text, *labels, help=advice)


def _sharing(several: Sequence[_Parted]) -> tuple[str, str]:
    """The smallest two modules that contain both names of several tensors."""
    ones = [each.one[0].split(".")[:-1] for each in several]
    depth = len(list(takewhile(lambda parts: len(set(parts)) == 1, zip(*ones, strict=False))))
    away = len(ones[0]) - depth
    two = several[0].two[0].split(".")[:-1]
    return ".".join(ones[0][:depth]), ".".join(two[: len(two) - away])


def _heads(first: str, second: str) -> tuple[str, str]:
    """Two names of one tensor without their common suffix: the modules that share it."""
    mine, other = first.split("."), second.split(".")
    while mine and other and mine[-1] == other[-1]:
        mine.pop()
        other.pop()
    return ".".join(mine), ".".join(other)


def ignored_parameters(plan: Plan, facts: Facts, sink: Sink) -> None:
    """FSDP neither shards nor reduces ignored parameters: over several ranks they must be frozen.

    Source: `ignored_params` of `fully_shard` in torch.
    """
    section = plan.fsdp
    if section is None or not section.ignored:
        return
    for rule in section.ignored:
        _report_conflict(rule, plan, sink)
    if plan.mesh.size(*section.shard, *section.replicate) == 1 or not plan.freezes_known:
        return
    names_by_rule: dict[Ignored, list[str]] = {}
    for assignment in owned_modules(plan, facts):
        if assignment.ignored is not None:
            trained = [p for p in assignment.modules.module.parameters if assignment.trains(p)]
            names_by_rule.setdefault(assignment.ignored, []).extend(
                f"{assignment.modules}.{p.name}" for p in trained
            )
    for rule, names in names_by_rule.items():
        if names:
            more = ", ..." if len(names) > 3 else ""
            shown = ", ".join(f"`{n}`" for n in names[:3]) + more
            message = f"FSDP does not reduce the gradients of {shown}, which are ignored and train"
            help = f"freeze them: `train {{` and in it `{rule.modules} : frozen`"
            sink.error("PL440", message, rule.origin, help=help)


def _report_conflict(ignore: Ignored, plan: Plan, sink: Sink) -> None:
    """A style makes weights DTensors and a unit shards them: that rule or `ignore` is wrong."""
    assert plan.fsdp is not None
    units = ((member, u.origin) for u in plan.fsdp.units for member in u.members)
    said = [(member, origin, "a unit") for member, origin in units if member.path]
    rules = (r for r in plan.tensor if not isinstance(r.style, Attributes | Input | Output))
    said += [(rule.modules, rule.origin, "a style") for rule in rules]
    for modules, origin, what in said:
        if modules.is_within(ignore.modules):
            sink.error(
                "PL441",
                f"`{modules}` is ignored, and has {what}",
                Label(span=ignore.origin, text=f"ignores `{ignore.modules}`"),
                Label(span=origin, text=f"sets {what}"),
                help="keep one of the two",
            )
