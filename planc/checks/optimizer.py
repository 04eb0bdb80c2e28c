"""PL575 to PL579, PL590: what the optimizer section steps, as matrices, with states in 8 bits."""

from math import gcd

from planc.checks.queries import looked_up, several
from planc.diagnostic import Sink
from planc.model.facts import Facts
from planc.ops.optimizer import Muon
from planc.plan.ir import OptimizerRule, Plan
from planc.plan.optimizer_groups import Stepped, cut_of, cut_rows, fused_parts, steps_of

_FUSED = {
    "qkv_proj": "q, k and v",
    "gate_up_proj": "gate and up",
    "c_attn": "q, k and v",
    "Wqkv": "q, k and v",
}
"""Names that transformers gives to concatenated projections."""


def optimizer(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Every trainable parameter has one rule, and Muon takes matrices whose parts are known."""
    if not plan.optimizer or {"optimizer", "train", "tensor"} & plan.broken:
        return
    steps = [*steps_of(plan, facts)]
    _undecided(steps, plan, sink)
    used = {id(step.rule) for step in steps}
    for rule in plan.optimizer:
        if id(rule) not in used:
            what = "matrix" if isinstance(rule.op.algorithm, Muon) else "parameter"
            message = f"this rule steps no {what}: other rules take those of `{rule.modules}`"
            sink.warning("PL579", message, rule.origin, help="remove the rule")
    for cut in cut_rows(plan, facts):
        _blocks(*cut, sink)
    for step in steps:
        if step.rule is not None and isinstance(step.rule.op.algorithm, Muon):
            _matrix(step, step.rule, plan, facts, sink)


def _undecided(steps: list[Stepped], plan: Plan, sink: Sink) -> None:
    left = [s for s in steps if s.rule is None]
    if not left:
        return
    names = several(dict.fromkeys(s.modules for s in left))
    sink.error(
        "PL575",
        f"no rule of the optimizer section steps {names}",
        plan.optimizer[0].origin,
        facts=[f"{sum(s.parameter.numel * len(s.modules) for s in left):,} trainable elements"],
        help="add `root : adamw` for all that has no rule of its own; what must not train is "
        "`frozen` in a train section",
    )


def _blocks(step: Stepped, rule: OptimizerRule, slices: tuple[int, ...], sink: Sink) -> None:
    """PL590 where the slices of rows on a rank are not whole blocks."""
    block, whole = rule.op.block or 1, gcd(*slices)
    if whole % block == 0:
        return
    fits = whole & -whole
    smaller = f"write `block = {fits}`, which divides them; " if fits >= _LEAST else ""
    size, *others = dict.fromkeys(slices)
    sink.error(
        "PL590",
        f"the rows of `{step.modules}.{step.parameter.name}` on a rank are no whole blocks",
        rule.origin,
        facts=[
            f"a rank has {size:,} numbers of a row{' and other slices' if others else ''}, a block "
            f"of states in 8 bits has {block:,}",
            "blocks that a mesh cuts have other scales than those of one process",
        ],
        help=f"{smaller}`state = bf16` has no blocks",
    )


_LEAST = 16
"""The smallest block that a message names: its scale is a quarter of what its numbers take."""


def _matrix(step: Stepped, rule: OptimizerRule, plan: Plan, facts: Facts, sink: Sink) -> None:
    name = f"{step.modules}.{step.parameter.name}"
    cut = cut_of(step, plan, facts)
    if isinstance(cut, str):
        sink.error(
            "PL577",
            f"`{name}` has no such units: {cut}",
            rule.origin,
            facts=[f"its shape is {list(step.parameter.shape)}"],
            help="say what is one matrix: `muon(per = matrix)`, or `muon(parts = [a, b, c])` "
            "with the rows of each",
        )
        return
    if (what := looked_up(step.modules, step.parameter, facts)) is not None:
        sink.warning(
            "PL576",
            f"`{name}` is {what}, which Muon is not made for",
            rule.origin,
            facts=["its rows are looked up or chosen one by one, not mixed by a product"],
            help=f"step it otherwise: `{step.modules} : adamw`",
        )
    last = step.modules.path[-1] if step.modules.path else ""
    if last in _FUSED and not cut.sizes and rule.per is None and fused_parts(step, plan) is None:
        sink.warning(
            "PL578",
            f"`{step.modules}` holds {_FUSED[str(last)]}, and Muon would take them for one matrix",
            rule.origin,
            facts=["the update is another one than that of each projection by itself"],
            help="say the rows of each, `muon(parts = [a, b, c])`; or, where one matrix is meant, "
            "`muon(per = matrix)`",
        )
