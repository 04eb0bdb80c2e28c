"""The experts of an engine's ranks: stacks of those that each group of ranks has."""

from collections.abc import Mapping, Sequence

from planc.ir.engine_tensors import EngineTensors, HubTensor
from planc.ir.patches import Box, Patch
from planc.ir.serving import STACKS, ServeRule


def _experts_of(group: int, groups: int, experts: int) -> range:
    """The experts of a group of ranks; the first groups have one more."""
    fewest, more = divmod(experts, groups)
    start = group * fewest + min(group, more)
    return range(start, start + fewest + (group < more))


def place_experts(
    layout: EngineTensors,
    rule: ServeRule,
    key: str,
    experts: Mapping[int, Mapping[str, HubTensor]],
) -> None:
    """[experts, parts * width, hidden] or [experts, hidden, width] of the experts of a rank."""
    ep, parts = layout.serving.ep, rule.parts
    for number in experts:
        if lacking := [part for part in parts if part not in experts[number]]:
            there = next(iter(experts[number].values())).name
            there_part = next(iter(experts[number]))
            layout.report_lack(rule, there.replace(there_part, lacking[0]), there)
            return
    inside = layout.share(layout.serving.size, ep, "ranks for groups of experts", rule)
    dim = 0 if len(parts) > 1 else 1
    first = experts[min(experts)][parts[0]]
    what = f"rows of an expert's {parts[0]}"
    width = layout.share(first.shape[dim], inside, what, rule, first)
    if len(parts) > 1:
        layout.check_blocks(width, what, rule, first)
    inner = list(first.shape)
    inner[dim] = width * len(parts)
    numbers = sorted(experts)
    for group in range(ep):
        mine = [numbers[n] for n in _experts_of(group, ep, len(numbers))]
        ranks = range(group * inside, (group + 1) * inside)
        layout.add_tensor(first, key, (len(mine), *inner), ranks)
        for here, expert in enumerate(mine):
            for number, part in enumerate(parts):
                for at, rank in enumerate(ranks):
                    tensor = experts[expert][part]
                    box, local = [(0, n) for n in tensor.shape], [(0, n) for n in inner]
                    box[dim] = at * width, (at + 1) * width
                    local[dim] = number * width, (number + 1) * width
                    patch = Patch(
                        hub=tensor.name,
                        box=tuple(box),
                        key=key,
                        local=((here, here + 1), *local),
                        dims=(None, 0, 1),
                    )
                    layout.hold(tensor, patch, [rank])


def expert_of(tensor: HubTensor, end: str, parts: Sequence[str]) -> tuple[str, int, str] | None:
    """The engine's name of the stack that an expert's weight is in, the expert's number and the
    part; None if it is no expert of the rule.
    """
    owner = end.rpartition(".")[0]
    while owner:
        before, owner_mark, rest = f".{tensor.module}".partition(f".{owner}.")
        number, _, part = rest.partition(".")
        if owner_mark and number.isdecimal() and part in parts:
            inner = end if tensor.leaf == "weight" else end.removesuffix("weight") + tensor.leaf
            return f"{before}.{inner}".removeprefix("."), int(number), part
        owner = owner.rpartition(".")[0]
    return None


def place_stack(layout: EngineTensors, rule: ServeRule, key: str, tensor: HubTensor) -> None:
    """A stack of all experts in the files, each of [rows, columns] or [rows]."""
    size, ep, shape = layout.serving.size, layout.serving.ep, tensor.shape
    inside = layout.share(size, ep, "ranks for groups of experts", rule)
    dims = (0, 2, 1) if rule.transposed and len(shape) == 3 else tuple(range(len(shape)))
    split, parts = STACKS[rule.kind], 2 if rule.kind == "experts_merged" else 1
    inner = [shape[dim] for dim in dims]
    width = 0
    if split < len(shape):
        what = f"{'columns' if split == 2 else 'rows'} of the experts in {tensor.name}"
        width = layout.share(inner[split], inside * parts, what, rule)
        inner[split] = width * parts
    for group in range(ep):
        mine = _experts_of(group, ep, shape[0])
        ranks = range(group * inside, (group + 1) * inside)
        inner[0] = len(mine)
        layout.add_tensor(tensor, key, tuple(inner), ranks)
        for at, rank in enumerate(ranks):
            for part in range(parts if width else at == 0):  # a bias is added once
                local: list[tuple[int, int]] = [(0, n) for n in inner]
                there = [(mine.start, mine.stop), *local[1:]]
                if width:
                    start = (part * inside + at) * width
                    there[split] = start, start + width
                    local[split] = part * width, (part + 1) * width
                box: Box = tuple(there[dims.index(dim)] for dim in range(len(shape)))
                patch = Patch(hub=tensor.name, box=box, key=key, local=tuple(local), dims=dims)
                layout.hold(tensor, patch, [rank])


def stack_name(name: str, end: str, part: str) -> str | None:
    """The engine's name of a stack in the files; None if it is another tensor."""
    owner = end.rpartition(".")[0]
    while owner:
        for inner in (f"{owner}.{part}", f"{owner}.{part}.weight"):
            if f".{name}".endswith(f".{inner}"):
                return f"{name.removesuffix(inner)}{end}"
        owner = owner.rpartition(".")[0]
    return None
