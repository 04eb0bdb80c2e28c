"""PL529, PL550 to PL552: sizes of `ep` that do not fit, and expert capacities that cannot work."""

from planc.checks.queries import active, divisors, holds, several, sharding_rules
from planc.diagnostics.diagnostic import Label, Sink, one_of
from planc.ir.experts import dividing, expert_count, splits_divided
from planc.ir.mesh_axes import EXPERT_AXES, EXPERT_TENSOR
from planc.ir.nodes import ExpertRule, Plan
from planc.ir.parameter_owners import Owned, owned_modules
from planc.model.facts import Facts
from planc.model.module_table import BATCHED_EXPERTS
from planc.ops.base import AxisRole
from planc.ops.expert_parallel import ALL_REDUCE
from planc.ops.lowered import ExpertMesh


def expert_parallel(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Dispatch needs fused experts, [experts, ...], whose forward takes the experts of each token;
    FSDP must shard them over the ranks that have equal experts, or gradients miss tokens.
    """
    experts = plan.mesh.experts
    reasons = {rule: _not_experts(rule, plan) for rule in plan.experts}
    for rule, reason in reasons.items() if "expert" not in plan.broken else ():
        if reason:
            message, *labels = reason
            sink.error(
                "PL551",
                message,
                Label(span=rule.origin, text="their tokens are dispatched here"),
                *labels,
                help="name fused experts, such as `model.layers.*.mlp.experts`",
            )
        else:
            if experts is not None:
                _sizes(rule, experts, plan, sink)
            _limits(rule, plan, sink)
    if experts is not None and not {"expert", "fsdp"} & plan.broken and not any(reasons.values()):
        _units(experts, plan, facts, sink)


def _not_experts(rule: ExpertRule, plan: Plan) -> tuple[str, *tuple[Label, ...]] | None:
    """The reason why ranks cannot hold different experts of the modules, and the lines at fault."""
    module, name = rule.modules.module, f"`{rule.modules}`"
    if expert_count(module) is None:
        parameters = ", ".join(f"{p.name} {list(p.shape)}" for p in module.parameters[:2])
        text = (
            f"its parameters are {parameters}" if parameters else "it has no parameters of its own"
        )
        return (f"{name} ({module.cls}) has no fused experts: {text}",)
    if module.count > sum(p.numel for p in module.parameters):
        return (f"{name} has parameters inside other modules, which all of its experts share",)
    if reason := _style(rule, plan):
        return reason
    for compiled in plan.compilations:
        if compiled.fullgraph and plan.mesh.experts and holds(compiled.modules, rule.modules):
            label = Label(span=compiled.origin, text="fullgraph")
            return (
                f"{name} is compiled with fullgraph, but tokens per rank are known only in a run",
                label,
            )
    backend = plan.fsdp.backend if plan.fsdp else None
    if backend is not None and plan.mesh.experts:
        label = Label(span=backend.origin, text=backend.TITLE)
        return (
            f"{name} is in a unit of {backend.TITLE}, which does not support expert parallelism",
            label,
        )
    return None


def _style(rule: ExpertRule, plan: Plan) -> tuple[str, *tuple[Label, ...]] | None:
    """Why a style and the dispatch cannot both shard these experts, or why one has to."""
    experts, name = plan.mesh.experts, f"`{rule.modules}`"
    styles = [
        s for s in sharding_rules(active(plan)) if experts and s.modules.overlap(rule.modules)
    ]
    for style in styles:
        label = Label(span=style.origin, text=f"sharded over {style.axis} here")
        if not splits_divided(style, plan):
            return (
                f"{name} is sharded by a style, and its experts are divided over ranks: styles "
                f"split the inside of experts where `{EXPERT_TENSOR}` is the size of their axis",
                label,
            )
        splits = (style.split(p) for p in style.modules.module.parameters)
        if any(split is not None and split.dim == 0 for split in splits):
            return f"{name} has its experts divided over ranks, and a style shards that dim", label
    if experts and experts.inside and [*rule.modules.parts_outside(s.modules for s in styles)]:
        label = Label(span=experts.ranks.origin, text=f"with {EXPERT_TENSOR}")
        return (
            f"no style splits the inside of {name} over {' * '.join(experts.inside)}, as "
            f"`{EXPERT_TENSOR}` says",
            label,
        )
    return None


def _limits(rule: ExpertRule, plan: Plan, sink: Sink) -> None:
    """PL529: what decides which tokens of a row find a slot is not known where experts run."""
    if rule.capacity is None:
        return
    name, label = f"`{rule.modules}`", Label(span=rule.origin, text="limited here")
    if rule.modules.module.fact(BATCHED_EXPERTS) is not None:
        message = f"{name} ({rule.modules.module.cls}) gets all tokens for each expert"
        fact = "its router gives no numbers of experts, of which some could be dropped"
        sink.error("PL529", message, label, facts=[fact], help="remove `capacity`")
        return
    wide = [r for r in plan.context if plan.mesh.size(r.axis) > 1]
    for context in wide:
        if len(wide) > 1 or context.op is None or context.op.balance == "per_document":
            message = f"the tokens of a row that {name} gets have no order that is known"
            sink.error(
                "PL529",
                message,
                label,
                Label(span=context.origin, text=f"ranks of {context.axis} share rows"),
                help="write `balance = head_tail` or `none`, with an attention of planc's own",
            )
            return
    _compiled_limits(rule, plan, sink)


def _compiled_limits(rule: ExpertRule, plan: Plan, sink: Sink) -> None:
    """PL529: a compiled graph has no place for what is looked up of a row; one that is computed
    again has lost the row.
    """
    name, label = f"`{rule.modules}`", Label(span=rule.origin, text="limited here")
    for compiled in plan.compilations:
        inside = rule.modules.part_inside(compiled.modules)
        if inside is None:
            continue
        checkpoint = next((c for c in plan.checkpoint_rules if inside.part_inside(c.modules)), None)
        if not (checkpoint or compiled.fullgraph):
            continue
        message = f"{name} is compiled, where its rows are not known when it is computed again"
        more = [Label(span=checkpoint.origin, text="computed again")] if checkpoint else []
        help = "remove `capacity`, the checkpoints, or this line"
        if compiled.fullgraph:
            message = f"{name} is compiled as one graph, in which the rows of tokens are not known"
            more, help = [], "remove `fullgraph`"
        other = Label(span=compiled.origin, text="compiled here")
        sink.error("PL529", message, label, other, *more, help=help)
        return


def _sizes(rule: ExpertRule, experts: ExpertMesh, plan: Plan, sink: Sink) -> None:
    """PL550: the number of expert-parallel ranks does not fit the experts or the dispatch."""
    ranks = experts.ranks
    count = expert_count(rule.modules.module) or 0
    alike = (a.name for a in plan.mesh.of_role(AxisRole.TENSOR) if a.name in experts.axes)
    tensor = plan.mesh.size(*alike)
    label = ranks.label
    outside = [
        a
        for a in plan.mesh.of_role(AxisRole.TENSOR)
        if a.size > 1 and a.name not in (*experts.axes, *experts.inside)
    ]
    if outside:
        sink.error(
            "PL550",
            f"{ranks.name} excludes the ranks of `{outside[0].name}`, which have the same tokens",
            Label(span=outside[0].origin, text=f"{outside[0].name} is {outside[0].size}"),
            label,
            help=f"name the tensor axis `{EXPERT_AXES[-1]}`",
        )
    elif count % ranks.size:
        fits = one_of([str(n) for n in divisors(count, 64)])
        divided = f"{count:,} experts of `{rule.modules}`"
        message = f"{ranks.name} = {ranks.size:,} does not divide the {divided}"
        hint = f"{ranks.name} can be {fits} here"
        sink.error("PL550", message, Label(span=rule.origin), label, help=hint)
    elif rule.dispatch == ALL_REDUCE and tensor % ranks.size:
        having = f"only the {tensor:,} ranks of a tensor axis have them"
        other = f", or a divisor of {tensor:,} for {ranks.name}"
        if experts.inside:
            having, other = "they have tokens of their own", ""
        sink.error(
            "PL550",
            f"`dispatch(all_reduce)` needs the same tokens on all {ranks.size:,} ranks of "
            f"{ranks.name}, and {having}",
            Label(span=rule.origin),
            label,
            help=f"write `dispatch(all_to_all)`{other}",
        )


def _units(experts: ExpertMesh, plan: Plan, facts: Facts, sink: Sink) -> None:
    """PL552: FSDP shards expert-parallel weights over `ep_shard`, and nothing else."""
    rest = (experts.rest.name,)
    outer = _outer_axes(experts, plan)
    equal = (plan.mesh.wide(rest), outer)
    all_ranks = plan.fsdp is not None and plan.mesh.wide(plan.fsdp.shard) == outer
    wrong: dict[object, list[Owned]] = {}
    for assignment in owned_modules(plan, facts):
        part = assignment.spread or assignment.unit
        divided = any(rule.modules.overlap(assignment.modules) for rule in dividing(plan))
        if divided and plan.fsdp and part:
            fits = plan.mesh.wide(plan.fsdp.axes(part)[0]) in equal
        elif divided:
            # without FSDP, nothing sums the gradients of the ranks with the same experts
            fits = not assignment.has_trainable or (plan.fsdp is None and experts.rest.size == 1)
        else:
            fits = part is None or part.shard != rest or all_ranks
        if not fits:
            wrong.setdefault(part, []).append(assignment)
    for assignments in wrong.values():
        placed = assignments[0].spread or assignments[0].unit
        named = several(assignment.modules for assignment in assignments)
        rules = [
            r
            for r in dividing(plan)
            for assignment in assignments
            if r.modules.overlap(assignment.modules)
        ]
        labels = [Label(span=r.origin, text="expert-parallel here") for r in rules[:1]]
        labels += [Label(span=placed.origin, text="their unit")] if placed else []
        labels = labels or [Label(span=plan.fsdp.origin if plan.fsdp else plan.origin)]
        if rules:
            on = " * ".join(plan.fsdp.axes(placed)[0]) if plan.fsdp and placed else "no ranks"
            message = f"{named} is expert-parallel over {experts.ranks.name}, but FSDP uses {on}"
            help = f"write `{rules[0].modules} : unit(on = {rest[0]})`"
            fact = f"the ranks of {rest[0]} = {experts.rest.size} hold the same experts"
        else:
            message = (
                f"{named} is sharded over {rest[0]}, which is only for expert-parallel weights"
            )
            fact, help = "other parameters are equal on all ranks", f"remove `on = {rest[0]}`"
        sink.error("PL552", message, *labels, facts=[fact], help=help)


def _outer_axes(experts: ExpertMesh, plan: Plan) -> tuple[str, ...] | None:
    """The axes whose ranks hold the same experts; None if `ep` covers only a part of an axis."""
    axes = [*plan.mesh.wide(experts.axes)]
    while plan.mesh.size(*axes) > experts.rest.size:
        axes.pop()
    return (*axes,) if plan.mesh.size(*axes) == experts.rest.size else None
