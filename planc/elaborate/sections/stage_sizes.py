"""The number of blocks of each stage of a pipeline: as many in each, or as much work."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from planc.model.config import chosen_experts
from planc.model.facts import Module
from planc.model.module_table import BATCHED_EXPERTS, FUSED_EXPERTS


def even(count: int, stages: int, first: int, last: int) -> list[int]:
    """The blocks of each stage: as many each, but for the first and the last one.

    Blocks that remain go to the stages in the middle, which have no embedding and no head.
    """
    each, rest = divmod(count - first - last, stages)
    sizes = [each] * stages
    for i in [*range(1, stages - 1), 0, stages - 1][:rest]:
        sizes[i] += 1
    sizes[0] += first
    sizes[-1] += last
    return sizes


def balance_stages(blocks: Sequence[int], first: int, last: int, stages: int) -> list[int]:
    """The blocks of each stage for which the stage with the most work has the least, and of those
    the most equal: a pipeline is as fast as its slowest stage.

    Args:
        blocks: the work of each block, in order.
        first, last: the work of what the first and the last stage have besides blocks.

    Returns:
        A number of blocks for each stage, none of them 0; empty if there are too few blocks.
    """
    count = len(blocks)
    if count < stages:
        return []
    until = [0, *accumulate(blocks)]
    # of the blocks before an index in so many stages: the most work, the sum of squares, the cut
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    cuts: list[list[int]] = []
    for stage in range(stages):
        more = (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
        row: list[tuple[int, int, int]] = []
        for stop in range(stage + 1, count - stages + stage + 2):
            options = []
            for i, (most, squares, _) in enumerate(best):
                start = stage + i
                if start < stop:
                    work = until[stop] - until[start] + more
                    options.append((max(most, work), squares + work * work, start))
            row.append(min(options))
        cuts.append([start for *_, start in row])
        best = row
    sizes, stop = [], count
    for stage in reversed(range(stages)):
        start = cuts[stage][stop - stage - 1]
        sizes.append(stop - start)
        stop = start
    return sizes[::-1]


def work(module: Module, config: Mapping[str, object]) -> int:
    """The multiplications by weights for one token: what a forward pass takes but for attention,
    which depends on the length of sequences, and two thirds of a step.
    """
    if module.kind == "embedding":
        return 0
    experts = module.fact(FUSED_EXPERTS) or module.fact(BATCHED_EXPERTS) or 0
    total = _of_token(sum(p.numel for p in module.parameters), experts, config)
    for child in module.children:
        each = work(child.module, config) * child.times
        listed = child.module.children if child.name == "experts" else ()
        total += _of_token(each, listed[0].times if len(listed) == 1 else 0, config)
    return total


def _of_token(elements: int, experts: int, config: Mapping[str, object]) -> int:
    """Elements of all experts -> those of the experts that a token goes to."""
    chosen = chosen_experts(config)
    return elements * min(chosen, experts) // experts if chosen and experts else elements
