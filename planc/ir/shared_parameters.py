"""The stages of a pipeline that hold one parameter: an embedding that is the head's weight too,
blocks that share a module, several heads that share a table.
"""

from dataclasses import replace

from planc.model.facts import Facts, Modules, merge_sets
from planc.model.layer_kinds import blocks_added_to
from planc.ops.pipeline import Copies, Pipeline


def cut_at(op: Pipeline, bounds: tuple[int, ...], facts: Facts) -> Pipeline:
    """A pipeline whose stages begin at other blocks of a model."""
    added = blocks_added_to(op.blocks, facts)
    op = replace(op, bounds=bounds, added=added if added > bounds[1] else 0)
    return with_copies(op, facts)


def with_copies(op: Pipeline, facts: Facts) -> Pipeline:
    """A pipeline with the parameters that modules of several of its stages share.

    Args:
        op: its blocks, bounds, inputs and outputs.
        facts: the model with these modules.
    """
    held = [op.stage_modules(stage) for stage in range(op.stages)]
    names_by_stages: dict[tuple[int, ...], tuple[list[str], list[Modules]]] = {}
    for names in facts.ties:
        owners = [facts.find(name)[0] for name in names]
        stages = tuple(
            stage
            for stage, parts in enumerate(held)
            if any(owner.is_within(part) for owner in owners for part in parts)
        )
        if len(stages) > 1:
            parameters, modules = names_by_stages.setdefault(stages, ([], []))
            parameters.append(names[0])
            modules += owners
    ties, shared = names_by_stages.pop((0, op.stages - 1), ([], []))
    all_stages = tuple(range(op.stages))
    again = tuple(replace(copy, stages=all_stages) for copy in op.copies if not copy.modules)
    rest = (
        Copies(
            stages=stages, parameters=tuple(names), modules=tuple(merge_sets(dict.fromkeys(owners)))
        )
        for stages, (names, owners) in names_by_stages.items()
    )
    return replace(
        op,
        ties=tuple(ties),
        shared=tuple(merge_sets(dict.fromkeys(shared))),
        copies=(*again, *rest),
    )
