"""PL160: a split output that no one takes, or a split input that no one gives."""

from __future__ import annotations

from planc.checks.table import active, around, splits_output, takes_split
from planc.diagnostic import Sink
from planc.ir.plan import Plan, TensorRule
from planc.model.facts import Facts, Modules
from planc.model.indices import Indices


def pairs(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Inside one module, what colwise splits by features a rowwise layer puts together again.

    A warning and not an error: a module's own code may do it in a way that can't be seen here.
    """
    if "tensor" in plan.broken:
        return
    sets = [(parent, *_sides(own)) for parent, own in around(facts, active(plan))]
    for parent, given, taken in sets:
        if bool(given) == bool(taken) or _next_door(parent, given, taken, sets):
            continue
        if given and _hands_on(parent, given, sets):
            continue
        if given:
            sink.warning(
                "PL160",
                f"no rowwise layer of `{parent}` takes the split output of "
                f"`{given[0].modules.path[-1]}`",
                *dict.fromkeys(r.origin for r in given),
                facts=["every rank goes on with a part of the features"],
                help="put `rowwise` on the projection that follows, or gather: "
                "`colwise(-> replicate)`",
            )
        else:
            sink.warning(
                "PL160",
                f"no colwise layer of `{parent}` gives `{taken[0].modules.path[-1]}` the split "
                "input that it takes",
                *dict.fromkeys(r.origin for r in taken),
                facts=["every rank takes its whole input for a part of the features"],
                help="put `colwise` on the projections before it, or state a whole input: "
                "`rowwise(replicate -> replicate)`",
            )


def _sides(own: tuple[TensorRule, ...]) -> tuple[list[TensorRule], list[TensorRule]]:
    """The linears that give a split output, and those that take a split input."""
    linears = [r for r in own if r.modules.module.kind == "linear"]
    return [r for r in linears if splits_output(r)], [r for r in linears if takes_split(r)]


def _hands_on(
    parent: Modules,
    given: list[TensorRule],
    sets: list[tuple[Modules, list[TensorRule], list[TensorRule]]],
) -> bool:
    """Whether all that gives is the end of a Sequential, and a rowwise layer beside that takes it.

    So are adapters built: their outputs are added to those of a colwise layer.
    """
    if parent.module.cls != "Sequential":
        return False
    last = parent.module.children[-1].segment
    if any(r.modules.path[-1] != last for r in given):
        return False
    outer = parent.path
    while outer and isinstance(outer[-1], Indices):
        outer = outer[:-1]
    around = Modules(outer[:-1], parent.module)  # which holds it, or the list that it is in
    return any(s[2] and around.overlap(s[0]) is not None for s in sets)


def _next_door(
    parent: Modules,
    given: list[TensorRule],
    taken: list[TensorRule],
    sets: list[tuple[Modules, list[TensorRule], list[TensorRule]]],
) -> bool:
    """Whether the other side is right beside the parent, as in BERT's `attention.{self,output}`,
    or right around or inside it, as in CPM-Ant's `ffn.{w_in.w_0,w_out}`.

    Only where the parent has no other linear, which might be the one that was forgotten.
    """
    linears = sum(c.times for c in parent.module.children if c.module.kind == "linear")
    if len({r.modules.path[-1] for r in given or taken}) < linears:
        return False
    outer = parent.path[:-1]
    beside = [
        s for s in sets if outer in (s[0].path[:-1], s[0].path) or s[0].path[:-1] == parent.path
    ]
    if given:
        return any(others and not mine for _, mine, others in beside)
    return any(others and not mine for _, others, mine in beside)
