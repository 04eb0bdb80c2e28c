"""PL498: plan rules that Megatron-FSDP cannot honor.

Megatron-FSDP takes the whole model in one call: units are classes, one precision applies to all
of them, and parameters outside units are sharded too. Each finding names a rule that would be
dropped or would train another model.

Source: `megatron_fsdp` 0.6.1, `fully_shard_model` and the functions that it calls.
"""

from planc.checks.queries import active
from planc.diagnostics.diagnostic import Sink, one_of
from planc.ir.nodes import Fsdp, Plan, Unit
from planc.ir.parameter_owners import owned_modules
from planc.model.facts import Facts, Modules
from planc.ops import phrases
from planc.sections.megatron_fsdp.ops import STRATEGIES, MegatronShard

_WHOLE = STRATEGIES[-1]
_SPLIT = (
    "it computes the layout of a shard from the shape of the full tensor (Megatron-LM issue "
    "5786), and adds a gradient to it that may have another layout",
)


def check(plan: Plan, section: Fsdp, own: MegatronShard, facts: Facts, sink: Sink) -> None:
    """Reports every rule that Megatron-FSDP would refuse, or that would have no effect."""
    if plan.mesh.size(*section.shard, *section.replicate) > 1:
        _scalars(plan, facts, sink)
    _settings(section, sink)
    _precision(plan, section, own, facts, sink)
    _strategies(section, own, plan.mesh.size(*section.replicate), sink)
    for unit in section.units:
        _unit(unit, section, own, facts, sink)
    _together(section, own, sink)
    _elsewhere(plan, section, sink)


def _settings(section: Fsdp, sink: Sink) -> None:
    """Settings that only torch's FSDP has."""
    out = "remove it, or write `backend = torch`"
    if section.prefetch is not None:
        message = "Megatron-FSDP does its own prefetching"
        sink.error("PL498", message, section.prefetch.origin, help=out)
    if section.offload is not None:
        message = "Megatron-FSDP keeps its shards on the device"
        sink.error("PL498", message, section.offload.origin, help=out)
    if section.divide is not None and section.divide.factor != 1:
        message = f"Megatron-FSDP cannot divide gradients by {section.divide.factor}"
        told = "it averages them, or sums them with `divide = 1`"
        sink.error("PL498", message, section.divide.origin, help=told)
    for spread in section.spreads:
        message = "Megatron-FSDP shards all parameters of a unit over the same ranks"
        sink.error("PL498", message, spread.origin, help=out)
    for ignored in section.ignored:
        message = f"Megatron-FSDP shards all parameters: `{ignored.modules}` cannot be excluded"
        sink.error("PL498", message, ignored.origin, help=out)


def _scalars(plan: Plan, facts: Facts, sink: Sink) -> None:
    """It shards rows; `fully_shard` gets parameters of one element in the place of scalars."""
    for one in owned_modules(plan, facts):
        bare = [p.name for p in one.modules.module.parameters if not p.shape]
        if bare and one.unit is not None:
            of = f" of `{one.modules}`" if str(one.modules) else ""
            message = f"`{bare[0]}`{of} is a scalar, which Megatron-FSDP cannot shard"
            help = "make it a tensor of one element in the model's code"
            sink.error("PL443", message, one.unit.origin, help=help)


def _precision(plan: Plan, section: Fsdp, own: MegatronShard, facts: Facts, sink: Sink) -> None:
    """Megatron-FSDP computes in the parameters' own dtypes and casts neither inputs nor outputs."""
    said = section.precision
    if said is None:
        return
    if said.output is not None or not said.cast_inputs:
        name = "output" if said.output is not None else "cast_inputs"
        message = f"Megatron-FSDP casts neither inputs nor outputs: `{name}` has no effect"
        sink.error("PL498", message, said.origin, help=f"remove `{name}`")
    if said.reduce and own.grad_comm:
        message = "`reduce` and `grad_comm` both set the dtype in which gradients are communicated"
        sink.error("PL498", message, said.origin, help="keep one of the two")
    kept = {
        plan.dtype(parameter): f"{held.modules}.{parameter.name}"
        for held in owned_modules(plan, facts)
        for parameter in held.modules.module.parameters
    }
    wrong = [f"{name} is {dtype}" for dtype, name in kept.items() if dtype != said.param]
    if said.param and wrong:
        message = f"Megatron-FSDP computes in the dtype of the parameters, not in {said.param}"
        cast = f"load {{ dtype = {phrases.dtype(said.param)} }}"
        told = f"write `{cast}`; the optimizer keeps separate weights"
        sink.error("PL498", message, said.origin, help=told, facts=tuple(sorted(wrong)))


def _strategies(section: Fsdp, own: MegatronShard, copies: int, sink: Sink) -> None:
    """Options that `fully_shard_model` refuses, gets wrong, or resets silently."""
    at = own.origin_of("outer") or own.origin
    if own.outer != "no_shard" and not section.replicate:
        told = "write `fsdp on dp_shard, replicate on dp_replicate {`, or remove it"
        message = "`outer_strategy` applies to replicate axes, and the plan has none"
        sink.error("PL498", message, at, help=told)
    if own.outer != "no_shard" and own.strategy != _WHOLE:
        message = f"`outer_strategy = {own.outer}` needs `strategy = {_WHOLE}`"
        sink.error("PL498", message, at, help=f"remove it, or write `strategy = {_WHOLE}`")
    summed = section.divide is not None and section.divide.factor == 1
    if own.outer != "no_shard" and copies > 1 and not summed:
        outer = f"`outer_strategy = {own.outer}`"
        message = f"Megatron-FSDP 0.6 sums gradients instead of averaging them with {outer}"
        told = "write `divide = 1`, and divide the loss by the number of ranks, or remove it"
        sink.error(
            "PL498", message, at, help=told, facts=("it averages them with every other strategy",)
        )
    at = own.origin_of("strategy") or own.origin
    if own.strategy == "no_shard" and copies > 1:
        message = "Megatron-FSDP 0.6 has no optimizer for `strategy = no_shard` on replicate axes"
        told = "shard over all data axes: `no_shard` replicates over them"
        facts = ("it states the layout of one of two mesh dimensions",)
        sink.error("PL498", message, at, help=told, facts=facts)
    at = own.origin_of("options") or own.origin
    forced = {"overlap_grad_reduce": STRATEGIES[2:], "overlap_param_gather": STRATEGIES[3:]}
    for name, strategies in forced.items():
        if (name, False) in own.options and own.strategy in strategies:
            message = f"`{name}` is always true with `strategy = {own.strategy}`"
            sink.error("PL498", message, at, help="remove it")


def _unit(unit: Unit, section: Fsdp, own: MegatronShard, facts: Facts, sink: Sink) -> None:
    out = "remove it, or write `backend = torch`"
    members = ", ".join(f"`{m}`" for m in unit.members)
    if unit.group:
        message = f"Megatron-FSDP has no groups: {members} cannot be one unit"
        sink.error(
            "PL498", message, unit.origin, help="leave these to the root: it shards them too"
        )
        return
    for name, said in (
        ("precision", unit.precision is not None),
        ("on", unit.shard is not None),
        ("shard_dim", bool(unit.shard_dim)),
    ):
        if said:
            message = f"Megatron-FSDP does not support `{name}` on a single unit"
            sink.error("PL498", message, unit.origin, help=out)
    _resharding(unit, own, sink)
    if not unit.root:
        _class(unit.members[0], unit, section, facts, sink)


def _resharding(unit: Unit, own: MegatronShard, sink: Sink) -> None:
    """Megatron-FSDP reshards units after forward and keeps root parameters whole (ZeRO-3 only)."""
    if "reshard" not in unit.explicit:
        return
    gathers = own.strategy == _WHOLE and not unit.root
    if unit.reshard is gathers:
        return
    what = "keeps parameters outside every unit gathered"
    if gathers:
        what = "always reshards units after forward"
    if own.strategy != _WHOLE:
        what = f"keeps full parameters with `strategy = {own.strategy}`"
    sink.error("PL498", f"Megatron-FSDP {what}", unit.origin, help="remove `reshard`")


def _class(modules: Modules, unit: Unit, section: Fsdp, facts: Facts, sink: Sink) -> None:
    """A unit is every module of a class, and a module inside another unit is part of that unit."""
    cls = modules.module.cls
    alike = [m for m in facts.model.below() if m.module.cls == cls]
    mine = [m for u in section.units for m in u.members if m.module.cls == cls]
    left = [part for m in alike for part in m.parts_outside(mine)]
    if left:
        shown = ", ".join(map(str, left[:3])) + (", ..." if len(left) > 3 else "")
        message = f"Megatron-FSDP makes units of whole classes, and `{modules}` is a {cls}"
        told = "make units of all of them, or leave these to the root, which shards them too"
        sink.error("PL498", message, unit.origin, help=told, facts=(f"{shown} are too",))
    others = [m for u in section.units if u is not unit and not u.root for m in u.members]
    around = [o for o in others if len(o.path) < len(modules.path) and modules.part_inside(o)]
    for outer in around[:1]:
        message = f"Megatron-FSDP does not support nested units: `{modules}` is inside `{outer}`"
        sink.error("PL498", message, unit.origin, help="remove one of the two")


def _together(section: Fsdp, own: MegatronShard, sink: Sink) -> None:
    """Megatron-FSDP's hooks need at least one unit; torch's FSDP also shards a root alone."""
    if own.strategy == _WHOLE and all(u.root for u in section.units):
        told = "write `model.layers.* : unit`"
        sink.error(
            "PL498", "Megatron-FSDP needs a unit besides the root", section.origin, help=told
        )
    if not any(u.root for u in section.units):
        told = "write `root : unit`: it shards the parameters outside every other unit"
        sink.error(
            "PL498", "Megatron-FSDP always shards the whole model", section.origin, help=told
        )


def _elsewhere(plan: Plan, section: Fsdp, sink: Sink) -> None:
    """Rules of other sections that conflict with how it treats DTensors, meta and other axes."""
    if plan.load is not None and (plan.load.meta or plan.load.weights):
        name = "meta" if plan.load.meta else "weights"
        message = "Megatron-FSDP needs a model with allocated weights"
        told = f"remove `{name}`; `run.load` still fills the model"
        sink.error("PL498", message, plan.load.origin, help=told)
    adapted = plan.adapters.rules if plan.adapters else ()
    titles = ((r.compressed.TITLE, r.origin) for r in adapted if r.compressed)
    if (first := next(titles, None)) is not None:
        title, origin = first
        message = f"Megatron-FSDP with {title} is untested"
        sink.error("PL498", message, origin, help="remove `quant`, or write `backend = torch`")
    for stepped in plan.optimizer[:1]:
        message = "Megatron-FSDP steps weights of its own, with an optimizer of the script"
        told = "remove it, and pass an optimizer to `run.optimizer`, or write `backend = torch`"
        sink.error("PL498", message, stepped.origin, help=told)
    rule = next((r for r in active(plan) if r.modules.module.count), None)
    if rule is not None:
        message = "Megatron-FSDP 0.6 cannot shard weights that tensor parallelism has sharded"
        told = f"write `backend = torch`, or give `{rule.axis}` one rank"
        sink.error("PL498", message, rule.origin, help=told, facts=_SPLIT)
    used = {*section.shard, *section.replicate, *(r.axis for r in active(plan))}
    others = [a.name for a in plan.mesh.axes if a.size > 1 and a.name not in used]
    if others:
        named = one_of((f"`{n}`" for n in others), last="and")
        message = f"Megatron-FSDP gets only data axes, and not {named}"
        told = "shard or replicate over them, or set each to one rank"
        sink.error("PL498", message, section.origin, help=told)
