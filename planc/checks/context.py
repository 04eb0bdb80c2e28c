"""PL010, PL540 to PL542, PL546, PL547: parts of sequences that a plan or a model cannot
have.
"""

from planc.diagnostics.diagnostic import Label, Sink
from planc.ir.nodes import ContextRule, Plan
from planc.model.config import is_diffusers
from planc.model.facts import Facts
from planc.model.patches import KNOWN
from planc.ops.base import AxisRole
from planc.ops.context import ContextParallel


def context(plan: Plan, facts: Facts, sink: Sink) -> None:
    """The ranks that share a sequence average their gradients, and compute what depends on its
    whole length alike.
    """
    if plan.broken & {"context", "fsdp"}:
        return
    for rule in plan.context:
        if plan.fsdp is not None and (backend := plan.fsdp.backend) is not None:
            what = f"context parallelism under {backend.TITLE} is not supported yet"
            sink.error("PL010", what, rule.origin, help="use torch's FSDP")
        elif plan.mesh.size(rule.axis) > 1:
            _check_reduction(rule, plan, sink)
            if rule.op is not None and facts.config.get("is_encoder_decoder"):
                _encoder(rule.op, facts, sink)
            elif rule.op is not None:
                if is_diffusers(facts.config):
                    _patches(rule.op, facts, sink)
                _heads(rule, plan, facts, sink)
                _states(rule.op, facts, sink)


def _encoder(op: ContextParallel, facts: Facts, sink: Sink) -> None:
    sink.error(
        "PL541",
        f"{facts.name} is an encoder with a decoder: it has two sequences, and planc splits one",
        Label(span=op.origin, text=f"splits sequences over {op.axis}"),
        facts=[f"is_encoder_decoder = true  ({facts.source('is_encoder_decoder')})"],
        help=f"set `{op.axis} = 1`",
    )


def _check_reduction(rule: ContextRule, plan: Plan, sink: Sink) -> None:
    section = plan.fsdp
    if section is not None and rule.axis in (*section.shard, *section.replicate):
        return
    labels = [Label(span=section.origin, text="over other axes")] if section else []
    sink.error(
        "PL540",
        f"nothing averages the gradients of the ranks of {rule.axis}, which have parts of the same "
        "sequences",
        Label(span=rule.origin, text=f"splits them over {rule.axis}"),
        *labels,
        help=f"write `fsdp on dp_shard * {rule.axis}`",
    )


def _heads(rule: ContextRule, plan: Plan, facts: Facts, sink: Sink) -> None:
    """PL542: each rank gets some heads of more tokens, after tensor parallelism has split them."""
    tensor = plan.mesh.wide(a.name for a in plan.mesh.of_role(AxisRole.TENSOR))
    kinds = {"num_key_value_heads": "key/value heads", "num_attention_heads": "attention heads"}
    size = plan.mesh.size(rule.axis)
    for op in plan.exchanges:
        if size % op.ulysses:
            message = f"{rule.axis} = {size} is not divisible by `ulysses = {op.ulysses}`"
            help = f"write a divisor of {size}"
            sink.error("PL542", message, op.origin, help=help)
            return
        ranks = op.ulysses_ranks(size)
        sharing_ranks = plan.mesh.size(*tensor) * ranks
        for field, kind in kinds.items():
            heads = facts.config.get(field)
            if isinstance(heads, int) and heads % sharing_ranks and ranks > 1:
                context_ranks = rule.axis if ranks == size else f"{ranks} ranks of {rule.axis}"
                where = " * ".join((*tensor, context_ranks)) + f" = {sharing_ranks}" * (
                    ranks == size or bool(tensor)
                )
                sink.error(
                    "PL542",
                    f"{heads} {kind} cannot be split over {where}",
                    op.origin,
                    facts=[f"{field} = {heads}  ({facts.source(field)})"],
                    help="`attention = all_gather` splits no heads",
                )
                return


def _states(op: ContextParallel, facts: Facts, sink: Sink) -> None:
    for name, origin in op.origins:
        if name == "exchange" and not op.states:
            sink.warning(
                "PL546",
                f"`exchange` is for recurrent states, and {facts.name} has none",
                origin,
                help="remove it: attention exchanges what `attention` says",
            )


def _patches(op: ContextParallel, facts: Facts, sink: Sink) -> None:
    """PL547: models of images whose patches cannot be split, or not as a line says."""
    balance = next((origin for name, origin in op.origins if name == "balance"), None)
    image = facts.config.get("image_condition_type")
    if not op.patches:
        what = f"planc does not know where {facts.name} has the patches of an image"
        help = f"set the axis to 1; known are {', '.join(KNOWN)}"
        sink.error("PL547", what, op.origin, help=help)
    elif op.attention == "gather":
        what = "`gather` is for attention of which planc knows nothing"
        help = "`attention = all_gather` gathers keys and values of patches"
        sink.error("PL547", what, op.origin, help=help)
    elif image == "token_replace":
        what = "blocks that treat the patches of the first frame apart cannot have a part of them"
        where = facts.source("image_condition_type")
        said = [f"image_condition_type = {image}  ({where})"]
        sink.error("PL547", what, op.origin, facts=said, help="set the axis to 1")
    elif op.balance != "none" and balance is not None:
        what = "patches see all others, so a run of them is as much work for each rank"
        sink.error("PL547", what, balance, help="remove it, or write `balance = none`")
