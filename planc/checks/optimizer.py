"""PL575 to PL579: what the optimizer section steps, and what it takes for matrices."""

from planc.checks.packed_weights import FUSED
from planc.checks.queries import several
from planc.diagnostic import Sink
from planc.model.facts import Facts
from planc.model.small.config_fields import EXPERTS
from planc.ops.optimizer import Muon
from planc.plan.ir import OptimizerRule, Plan
from planc.plan.optimizer_groups import Stepped, cut_of, fused_parts, steps_of


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
    if (what := _no_matrix(step, facts)) is not None:
        sink.warning(
            "PL576",
            f"`{name}` is {what}, which Muon is not made for",
            rule.origin,
            facts=["its rows are looked up or chosen one by one, not mixed by a product"],
            help=f"step it otherwise: `{step.modules} : adamw`",
        )
    last = step.modules.path[-1] if step.modules.path else ""
    if last in FUSED and not cut.sizes and rule.per is None and fused_parts(step, plan) is None:
        sink.warning(
            "PL578",
            f"`{step.modules}` holds {FUSED[str(last)]}, and Muon would take them for one matrix",
            rule.origin,
            facts=["the update is another one than that of each projection by itself"],
            help="say the rows of each, `muon(parts = [a, b, c])`; or, where one matrix is meant, "
            "`muon(per = matrix)`",
        )


def _no_matrix(step: Stepped, facts: Facts) -> str | None:
    """Names a weight that a matrix optimizer does not fit; None for a matrix.

    Source: Jordan et al., Muon: embeddings and heads are stepped by AdamW.
    """
    rows = step.parameter.shape[0]
    if step.modules.module.kind == "embedding":
        return "an embedding"
    if len(step.parameter.shape) != 2:
        return None
    if rows == facts.config.get("vocab_size"):
        return "the head"
    if rows > 1 and rows in {facts.config.get(field) for field in EXPERTS}:
        return "a router"
    return None
