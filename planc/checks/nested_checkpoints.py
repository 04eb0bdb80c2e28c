"""PL430, PL431: checkpoint and compile targets that nest."""

from collections.abc import Sequence

from planc.diagnostic import Label, Sink
from planc.model.facts import Facts
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.compile import Compile
from planc.plan.ir import Plan


def nested_checkpoints(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A module inside another checkpointed module would be computed three times."""
    _nested(plan.checkpoint, "PL430", "checkpointed", sink)
    _nested(plan.compile, "PL431", "compiled", sink)


def _nested(rules: Sequence[Checkpoint | Compile], code: str, word: str, sink: Sink) -> None:
    for inner in rules:
        for outer in rules:
            deeper = len(inner.modules.path) > len(outer.modules.path)
            if deeper and inner.modules.within(outer.modules):
                sink.error(
                    code,
                    f"`{inner.modules}` is {word}, and so is `{outer.modules}`, which contains it",
                    Label(span=inner.origin, text="inside"),
                    Label(span=outer.origin, text="contains it"),
                    help="keep one of the two, or exclude entries with `override ... : none`"
                    if code == "PL430"
                    else "keep one of the two",
                )
