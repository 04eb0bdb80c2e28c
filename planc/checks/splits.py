"""PL201 to PL203, PL226: heads, dims and experts that do not divide by the tensor axis."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

from planc.checks.queries import (
    active,
    axis_label,
    child_rules,
    divisors,
    holds,
    ranks,
    rules_by_parent,
    several,
    sharding_rules,
    splits_output,
    takes_split,
)
from planc.diagnostics.diagnostic import Label, Severity, Sink, one_of
from planc.diagnostics.source import Span
from planc.infer.apply_adapters import is_factor
from planc.ir.local_shapes import local_shape, split_by_rules
from planc.ir.nodes import Plan, Precision, TensorRule
from planc.ir.parameter_owners import owned_modules
from planc.model.facts import DTYPE_BYTES, Facts, Module, Modules, Parameter
from planc.model.module_table import GROUPED, HEAD_SIZES, LATENT_HEAD_SIZES
from planc.ops import phrases
from planc.ops.contract import part_sizes
from planc.ops.styles import Colwise, Rowwise, style_name


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """A projection whose output features are heads."""

    rule: TensorRule
    name: str
    count: int


def attention_heads(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Attention reads `head_dim` features as one head, so each rank must hold whole heads.

    The attribute has other names in some families, and latent attention has several sizes.
    transformers writes `view(..., -1, head_dim)` and keeps the whole model's number of key/value
    groups, so both query heads and key/value heads must divide. Otherwise the forward pass fails in
    that view, or each rank pairs the wrong heads.
    """
    attentions_by_heads: dict[tuple[HeadSplit, ...], list[Modules]] = {}
    for parent, rules_inside in rules_by_parent(facts, active(plan)):
        heads = _without_fused([*_splits(rules_inside, parent.module)])
        attentions_by_heads.setdefault(tuple(heads), []).append(parent)
    for splits, attentions in attentions_by_heads.items():
        _attention(_together(attentions), splits, plan, facts, sink)


def _together(modules: list[Modules]) -> Modules:
    """Attention modules with the same projections as one set, whatever else differs in them."""
    first, *rest = modules
    for other in rest:
        first = first.union(other) or first
    return first


def _head_size(module: Module, features: int, output: bool) -> int:
    """The features of a head in a projection of an attention module; 0 if they are unknown."""
    sizes = [*filter(None, map(module.fact, HEAD_SIZES))]
    query, key, value = (module.fact(name) for name in LATENT_HEAD_SIZES)
    if query and key and value:
        # the last one projects keys and values together
        sizes += [query, key + value] if output else [value]
    heads = module.fact("num_heads") or module.fact("num_attention_heads")
    return next((size for size in sizes if heads and size * heads == features), [*sizes, 0][0])


def _without_fused(splits: list[HeadSplit]) -> list[HeadSplit]:
    """Leaves out a projection of queries, keys and values that alternate: each of its heads has
    three times the features.
    """
    heads = [s.count for s in splits if not splits_output(s.rule)]
    return [
        s for s in splits if not (splits_output(s.rule) and [s.count] == [3 * n for n in heads])
    ]


def _splits(rules: tuple[TensorRule, ...], attention: Module) -> Iterator[HeadSplit]:
    for rule in rules:
        weight = rule.modules.module.parameter("weight")
        shape = weight.shape if weight else ()
        if len(shape) != 2 or rule.modules.module.kind != "linear":
            continue
        if not isinstance(rule.style, Colwise | Rowwise):
            continue
        features = shape[0] if splits_output(rule) else shape[1] if takes_split(rule) else 0
        name = str(rule.modules.path[-1])
        size = _head_size(attention, features, splits_output(rule))
        for part in dict.fromkeys(_parts(rule, features)):
            if part and size and part % size == 0:
                yield HeadSplit(rule, name, part // size)


def _parts(rule: TensorRule, features: int) -> tuple[int, ...]:
    assert isinstance(rule.style, Colwise | Rowwise)
    parts = rule.style.parts
    if isinstance(parts, tuple) and sum(parts) != features:
        return ()  # PL221
    return parts if isinstance(parts, tuple) else (features // parts,)


def _attention(
    parent: Modules, splits: tuple[HeadSplit, ...], plan: Plan, facts: Facts, sink: Sink
) -> None:
    bad = sorted((s for s in splits if s.count % ranks(plan, s.rule)), key=lambda s: s.count)
    if not bad:
        return
    fewest = bad[0]
    axis = fewest.rule.axis
    common = gcd(*(s.count for s in splits))
    outer = [s for s in splits if splits_output(s.rule)] or list(splits)
    labels: dict[Span, Label] = {}
    for split in bad:  # projections of one rule share a mark
        label = Label(span=split.rule.origin, text=f"{split.name} is split by head")
        labels.setdefault(split.rule.origin, label)
    sink.error(
        "PL201",
        f"{fewest.count} {_kind(fewest, outer)}heads of `{parent}` cannot be split over "
        f"{axis} = {ranks(plan, fewest.rule)}",
        *labels.values(),
        axis_label(plan, fewest.rule),
        facts=_facts(parent, outer, facts),
        help=f"{axis} can be {one_of(map(str, divisors(common)))} for this model",
    )


def _kind(fewest: HeadSplit, splits: list[HeadSplit]) -> str:
    """`key/value ` where the projection has fewer heads than another one, else an empty text."""
    most = max(s.count for s in splits)
    return "key/value " if fewest.count < most else "attention "


def _facts(parent: Modules, splits: list[HeadSplit], facts: Facts) -> list[str]:
    module = parent.module
    sizes = [(n, v) for n in (*HEAD_SIZES, *LATENT_HEAD_SIZES) if (v := module.fact(n))]
    lines = [f"{name} = {value}  ({module.cls})" for name, value in sizes]
    for field in ("num_attention_heads", "num_key_value_heads", "n_head"):
        value = facts.config.get(field)
        if isinstance(value, int):
            lines.append(f"{field} = {value}  ({facts.source(field)})")
    counts = ", ".join(f"{s.name} {s.count}" for s in splits)
    return [*lines, f"heads by projection: {counts}"]


_COSTLY = 0.1
"""Percent. A smaller excess of one rank's shard costs nothing that can be measured."""


def divisibility(plan: Plan, facts: Facts, sink: Sink) -> None:
    """torch shards a dim as torch.chunk does, so the last ranks may hold less.

    Observed on four processes (torch 2.13): a vocabulary of 131 over 2 ranks is right for a rowwise
    embedding and a colwise head. A colwise output that is passed on as a local tensor to a rowwise
    layer fails, because that layer assumes equal shards on all ranks ("must have same reduction
    dim"); with `local = false` it is right. A rank with an empty shard fails in either case.
    """
    for rule in sharding_rules(active(plan)):
        if not isinstance(rule.style, Colwise | Rowwise) or rule.style.parts != 1:
            continue  # PL220 speaks of them
        parameters = rule.modules.module.parameters
        size = next((p.shape[split.dim] for p in parameters if (split := rule.split(p))), None)
        if size is not None and size % ranks(plan, rule) and not _by_head(rule, facts):
            _report(rule, size, plan, facts, sink)


def _by_head(rule: TensorRule, facts: Facts) -> bool:
    split = splits_output(rule) or takes_split(rule)
    names = (*HEAD_SIZES, *LATENT_HEAD_SIZES)
    around = (p.module.fact(name) for p in facts.parents(rule.modules) for name in names)
    return split and any(size is not None for size in around)


def _report(rule: TensorRule, size: int, plan: Plan, facts: Facts, sink: Sink) -> None:
    over = ranks(plan, rule)
    most = -(-size // over)
    least = max(0, size - most * (over - 1))
    marks = (Label(span=rule.origin, text="split here"), axis_label(plan, rule))
    what = f"`{rule.modules}` splits {size:,} {_features(rule)} over {rule.axis} = {over}"
    partner = _partner(rule, plan, facts)
    if least == 0:
        sink.error(
            "PL202",
            f"{what}, and the last rank gets nothing",
            *marks,
            facts=[f"{most:,} per rank, so {-(-size // most)} ranks hold all of them"],
            help=f"{rule.axis} can be {_choices(size)} here",
        )
    elif isinstance(rule.style, Colwise) and rule.style.local and partner is not None:
        sink.error(
            "PL202",
            f"{what} unevenly, and `{partner.modules}` requires equal shards",
            *marks,
            Label(span=partner.origin, text="uses its output"),
            facts=[f"the first rank gets {most:,}, the last {least:,}"],
            help=f"{rule.axis} can be {_choices(size)}; or return a DTensor (`colwise(local = "
            "false)`), which supports uneven shards",
        )
    else:
        excess = 100 * (most * over - size) / size
        sink.report(
            Severity.WARNING if excess >= _COSTLY else Severity.INFO,
            "PL203",
            f"{what} unevenly: the first rank gets {most:,}, the last {least:,}",
            *marks,
            facts=[
                f"the result is right; the rank with the most holds {excess:.1f}% more than in "
                "an even split"
            ],
            help=f"{style_name(rule.style)} is even for {rule.axis} = {_choices(size)}",
        )


def _features(rule: TensorRule) -> str:
    if rule.modules.module.kind == "embedding":
        return "hidden features" if isinstance(rule.style, Colwise) else "tokens"
    return "output features" if isinstance(rule.style, Colwise) else "input features"


def _partner(rule: TensorRule, plan: Plan, facts: Facts) -> TensorRule | None:
    """The rowwise layer beside a colwise one that takes its output as a local tensor."""
    if not splits_output(rule):
        return None
    beside = (r for at in facts.parents(rule.modules) for r in child_rules(at, active(plan)))
    return next(filter(takes_split, beside), None)


def _choices(size: int) -> str:
    return one_of(str(n) for n in divisors(size, 64))


_ALIGNMENT = 16
"""The bytes of which each row of a grouped matrix product is a multiple.

Source: `check_valid_strides_and_return_transposed` in ATen/native/GroupedMMUtils.h of torch. One of
a weight's last two dims is its rows in the forward; in the backward each of them is.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """A dim of a rank's weight whose size is no multiple of `step`.

    Args:
        modules, rules: the experts, and the rules on them.
        precision: of the unit that all-gathers the weight.
        parameter, local, dim: the weight, its shape on a rank, and the dim.
        dtype: in which the product is computed.
    """

    modules: Modules
    rules: tuple[TensorRule, ...]
    precision: Precision | None
    parameter: Parameter
    local: tuple[int, ...]
    dim: int
    dtype: str
    step: int


def _size(rows: _Rows) -> int:
    return rows.local[rows.dim]


def grouped_experts(plan: Plan, facts: Facts, sink: Sink) -> None:
    """transformers runs fused experts as one grouped matrix product, unless the model is built with
    another `experts_implementation`. Experts with a forward of their own have no such limit.

    Observed with torch 2.13: "strides should be multiple of 16 bytes" in the first forward, or in
    the first backward for the output features of a weight that is [experts, out, in].
    """
    rows_by_key: dict[object, list[_Rows]] = {}
    for assignment in owned_modules(plan, facts) if "fsdp" not in plan.broken else ():
        if not assignment.modules.module.fact(GROUPED):
            continue
        precision = plan.fsdp.policy(assignment.unit) if plan.fsdp else None
        for modules, rules in split_by_rules(assignment.modules, plan.tensor):
            rows = min(_unaligned_rows(modules, rules, precision, plan), key=_size, default=None)
            if rows is not None:
                origins = tuple(rule.origin for rule in rules)
                rows_by_key.setdefault((rows.parameter, rows.dtype, origins), []).append(rows)
    for same in rows_by_key.values():
        _unreadable(same, plan, sink)


def _unaligned_rows(
    modules: Modules, rules: tuple[TensorRule, ...], precision: Precision | None, plan: Plan
) -> Iterator[_Rows]:
    for parameter in modules.module.parameters:
        if is_factor(parameter.name):  # rows of its rank are padded
            continue
        dtype = (precision and precision.param) or plan.dtype(parameter)
        step = max(1, _ALIGNMENT // DTYPE_BYTES.get(dtype, _ALIGNMENT))
        local = local_shape(parameter, rules, plan)
        ranks = prod(plan.mesh.size(rule.axis) for rule in rules if rule.split(parameter))
        # in a graph, transformers multiplies expert by expert in every dtype but this one
        traced = dtype != "bfloat16" and any(holds(c.modules, modules) for c in plan.compilations)
        if len(local) != 3 or traced or parameter.numel != prod(local) * ranks:
            continue  # PL220 speaks of uneven shards
        for dim in (1, 2):
            if local[dim] % step:
                yield _Rows(
                    modules=modules,
                    rules=rules,
                    precision=precision,
                    parameter=parameter,
                    local=local,
                    dim=dim,
                    dtype=dtype,
                    step=step,
                )


def _unreadable(same: list[_Rows], plan: Plan, sink: Sink) -> None:
    """One finding for all experts that the same rules split alike."""
    rows = same[0]
    short = phrases.value(rows.dtype)
    wide = [(r, r.split(rows.parameter)) for r in rows.rules if plan.mesh.size(r.axis) > 1]
    splits = [(rule, split) for rule, split in wide if split and split.dim == rows.dim]
    labels = [Label(span=rule.origin, text="split here") for rule, _ in splits]
    if rows.precision and rows.precision.param:
        labels.append(Label(span=rows.precision.origin, text=f"computes in {short}"))
    labels += [axis_label(plan, rule) for rule, _ in splits]
    help = 'build the model with `experts_implementation="batched_mm"`, as config.json may state it'
    if len(splits) == 1:
        ((rule, split),) = splits
        parts = part_sizes(split, rows.parameter.shape[rows.dim])
        fit = (n for n in divisors(min(parts), 64) if not any(p % n for p in parts))
        choices = [str(n) for n in fit if sum(parts) // n % rows.step == 0]
        help = f"{rule.axis} can be {one_of(choices)} here; or {help}" if choices else help
    shape = ", ".join(f"{n:,}" for n in rows.local)
    sink.error(
        "PL226",
        f"`{rows.parameter.name}` of {several(r.modules for r in same)} is [{shape}] on each rank, "
        f"and a grouped matrix product in {short} takes multiples of {rows.step}",
        *labels or [Label(span=plan.origin)],
        facts=[
            f"torch requires rows of a multiple of {_ALIGNMENT} bytes, and {_size(rows):,} numbers "
            f"in {short} are {_size(rows) * _ALIGNMENT // rows.step:,}"
        ],
        help=help,
    )
