"""PL152, PL433: modules that are never called, and a checkpointed root."""

from collections.abc import Iterator

from planc.diagnostic import Sink
from planc.model.facts import Facts, Modules
from planc.plan.ir import Plan
from planc.source import Span


def uncalled_modules(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A ModuleList has no forward: torch refuses it as a unit, and a style, checkpoint or compile
    target on it silently has no effect.

    Source: `_validate_module` in torch.distributed.fsdp, and torch.compile on four processes.
    """
    for modules, word, origin in _targets(plan):
        if modules.module.container:
            sink.error(
                "PL152",
                f"`{modules}` is a {modules.module.cls}: it is never called, so {word} it has "
                "no effect",
                origin,
                help=f"name its entries: `{modules}.*`",
            )
    for rule in plan.checkpoint:
        if not rule.modules.path:
            message = "the model itself cannot be checkpointed: it has no parent module"
            help = "name its blocks, as in `model.layers.* : full`"
            sink.error("PL433", message, rule.origin, help=help)


def _targets(plan: Plan) -> Iterator[tuple[Modules, str, Span]]:
    for rule in plan.tensor:
        yield rule.modules, "a style on", rule.origin
    for target in plan.checkpoint:
        yield target.modules, "checkpointing", target.origin
    for compiled in plan.compile:
        yield compiled.modules, "compiling", compiled.origin
    for unit in plan.fsdp.units if plan.fsdp else ():
        for member in unit.members:
            yield member, "sharding", unit.origin
