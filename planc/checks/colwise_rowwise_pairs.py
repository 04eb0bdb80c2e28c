"""PL160: a sharded output that nothing consumes, or a sharded input that nothing produces."""

from planc.checks.queries import active, around, splits_output, takes_split
from planc.diagnostic import Sink
from planc.model.facts import Facts, Module, Modules, Segment
from planc.model.indices import Indices
from planc.plan.ir import Plan, TensorRule


def colwise_rowwise_pairs(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Inside one module, a rowwise layer reduces the features that a colwise layer shards.

    This is a warning, not an error: the module's own code may do it in a way that is not visible in
    the module table.
    """
    if "tensor" in plan.broken:
        return
    sets = [(parent, *_sides(own)) for parent, own in around(facts, active(plan))]
    for parent, given, taken in sets:
        if bool(given) == bool(taken) or _next_door(parent, given, taken, sets):
            continue
        rules = given or taken
        name = f"`{rules[0].modules.path[-1]}`"
        if given:
            message = f"the sharded output of {name} has no rowwise layer in `{parent}`"
            fact = "every rank continues with a shard of the features"
            how, whole = (
                "`rowwise` on the projection that follows, or gather",
                "colwise(-> replicate)",
            )
        else:
            needs = "needs an input sharded on the features"
            message = f"{name} {needs}, and `{parent}` has no colwise layer"
            fact = "every rank treats its replicated input as a shard of the features"
            how = "`colwise` on the projections before it, or state a replicated input"
            whole = "rowwise(replicate -> replicate)"
        origins = dict.fromkeys(r.origin for r in rules)
        sink.warning("PL160", message, *origins, facts=[fact], help=f"put {how}: `{whole}`")


_Sets = list[tuple[Modules, list[TensorRule], list[TensorRule]]]


def _sides(own: tuple[TensorRule, ...]) -> tuple[list[TensorRule], list[TensorRule]]:
    """The linears with a sharded output, and the linears that take a sharded input."""
    linears = [r for r in own if r.modules.module.kind == "linear"]
    return [r for r in linears if splits_output(r)], [r for r in linears if takes_split(r)]


def _next_door(
    parent: Modules, given: list[TensorRule], taken: list[TensorRule], sets: _Sets
) -> bool:
    """Whether the other side is a sibling of the parent, as in BERT's `attention.{self,output}`.

    This holds only where the parent has no other linear, which might be the one without a rule. An
    entry of a list counts as a sibling of the list: `to_out[0]` beside `to_q`, `net[2]` beside
    `net[0].proj`.
    """
    at = _home(parent)
    inside = [s for s in sets if _meet(_home(s[0]), at) and s[0] is not parent]
    if any(others if given else mine for _, mine, others in inside):
        return True
    linears = sum(c.times for c in parent.module.children if c.module.kind == "linear")
    if len({r.modules.path[-1] for r in given or taken}) < linears:
        return False
    outer = _outer(at)
    if any(_meet(_home(s), outer) and (others if given else mine) for s, mine, others in sets):
        return True
    below = [s for s in sets if _meet(_outer(_home(s[0])), at) or _meet(_outer(_home(s[0])), outer)]
    return any(
        (others and not mine) if given else (mine and not others) for _, mine, others in below
    )


_Path = tuple[Segment, ...]


def _home(parent: Modules) -> _Path:
    """The path of the module that calls the parent's children; a list calls none itself."""
    return _outer(parent.path) if parent.module.kind == "list" else parent.path


def _outer(path: _Path) -> _Path:
    """The path of the enclosing module, skipping a list."""
    rest = path[:-1]
    return rest[:-1] if path and isinstance(path[-1], Indices) else rest


def _meet(one: _Path, two: _Path) -> bool:
    module = Module(cls="", kind="other")
    return Modules(one, module).overlap(Modules(two, module)) is not None
