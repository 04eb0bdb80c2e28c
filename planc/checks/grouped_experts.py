"""PL226: shards of experts that torch's grouped matrix product cannot read."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from planc.checks.queries import axis_label, holds, legal, several
from planc.diagnostic import Label, Sink, one_of
from planc.model.facts import DTYPE_BYTES, Facts, Modules, Parameter
from planc.model.module_table import GROUPED
from planc.ops import phrases
from planc.ops.styles import Split, part_sizes, weight_split
from planc.plan.ir import Plan, Precision, TensorRule
from planc.plan.local_shapes import local_shape, ruled
from planc.plan.parameter_owners import owned

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
    found: dict[object, list[_Rows]] = {}
    for own in owned(plan, facts) if "fsdp" not in plan.broken else ():
        if not own.modules.module.fact(GROUPED):
            continue
        precision = plan.fsdp.policy(own.unit) if plan.fsdp else None
        for modules, rules in ruled(own.modules, plan.tensor):
            rows = min(_unaligned(modules, rules, precision, plan), key=_size, default=None)
            if rows is not None:
                origins = tuple(rule.origin for rule in rules)
                found.setdefault((rows.parameter, rows.dtype, origins), []).append(rows)
    for same in found.values():
        _report(same, plan, sink)


def _unaligned(
    modules: Modules, rules: tuple[TensorRule, ...], precision: Precision | None, plan: Plan
) -> Iterator[_Rows]:
    for parameter in modules.module.parameters:
        dtype = (precision and precision.param) or plan.dtype(parameter)
        step = max(1, _ALIGNMENT // DTYPE_BYTES.get(dtype, _ALIGNMENT))
        local = local_shape(parameter, rules, plan)
        ranks = prod(plan.mesh.size(rule.axis) for rule, _ in _splits(modules, rules, parameter))
        # in a graph, transformers multiplies expert by expert in every dtype but this one
        traced = dtype != "bfloat16" and any(holds(c.modules, modules) for c in plan.compile)
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


def _splits(
    modules: Modules, rules: tuple[TensorRule, ...], parameter: Parameter
) -> list[tuple[TensorRule, Split]]:
    """The rules that split a parameter, and how."""
    kind, ndim = modules.module.kind, len(parameter.shape)
    found = ((r, weight_split(r.style, kind, parameter.name, ndim)) for r in rules)
    return [(rule, split) for rule, split in found if split is not None]


def _report(same: list[_Rows], plan: Plan, sink: Sink) -> None:
    """One finding for all experts that the same rules split alike."""
    rows = same[0]
    short = phrases.value(rows.dtype)
    every = _splits(rows.modules, rows.rules, rows.parameter)
    splits = [(r, s) for r, s in every if s.dim == rows.dim and plan.mesh.size(r.axis) > 1]
    labels = [Label(span=rule.origin, text="split here") for rule, _ in splits]
    if rows.precision and rows.precision.param:
        labels.append(Label(span=rows.precision.origin, text=f"computes in {short}"))
    labels += [axis_label(plan, rule) for rule, _ in splits]
    help = 'build the model with `experts_implementation="batched_mm"`, as config.json may state it'
    if len(splits) == 1:
        ((rule, split),) = splits
        parts = part_sizes(split, rows.parameter.shape[rows.dim])
        fit = (n for n in legal(min(parts), most=64) if not any(p % n for p in parts))
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
