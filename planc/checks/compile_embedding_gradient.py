"""PL432: compiled blocks directly after an embedding whose reduced output is a local tensor."""

from planc.checks.queries import active
from planc.diagnostic import Label, Sink
from planc.model.facts import Facts
from planc.model.indices import Indices
from planc.ops.compile import Compile
from planc.ops.styles import Replicate, Rowwise
from planc.plan.ir import Plan


def _first_block(rule: Compile) -> bool:
    """Whether the first block of a list, which consumes the embedding, is compiled as a whole.

    The gradient was right where only later blocks or only parts of blocks were compiled.
    """
    last = rule.modules.path[-1] if rule.modules.path else ""
    return isinstance(last, Indices) and 0 in last


def compile_embedding_gradient(plan: Plan, facts: Facts, sink: Sink) -> None:
    """torch 2.13 loses the gradient of a vocabulary-parallel embedding in this arrangement.

    Observed on four gloo processes with the aot_eager and inductor backends: the forward pass and
    all other gradients are right, and the embedding's gradient is 0. Under sequence parallelism
    (the output stays a DTensor) and with a colwise embedding it is right. It is right in gemma3
    too, which scales its embeddings before the first block, but the module table does not show
    that, so gemma3 is reported as well.
    """
    first = next((r for r in plan.compile if _first_block(r)), None)
    if first is None:
        return
    for rule in active(plan):
        style = rule.style
        if rule.modules.module.kind != "embedding" or not isinstance(style, Rowwise):
            continue
        if style.local and isinstance(style.output, Replicate):
            sink.error(
                "PL432",
                f"torch loses the gradient of `{rule.modules}` where compiled blocks follow it",
                Label(span=rule.origin, text="its output is a sum over the ranks"),
                Label(span=first.origin, text="compiled"),
                facts=["torch 2.13: the embedding's gradient is 0, all others are right"],
                help="use sequence parallelism (`rowwise(-> shard(1), local = false)`), or "
                "`colwise(-> replicate)` where the embedding is not tied",
            )
