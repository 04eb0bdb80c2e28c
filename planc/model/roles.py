"""The roles of a model's modules, from its module table: one name for what most models have."""

import re
from dataclasses import dataclass, fields

from planc.model.config import integer_of
from planc.model.facts import Facts, Modules
from planc.model.layer_kinds import block_lists
from planc.model.module_table import BATCHED_EXPERTS, FUSED_EXPERTS

TOWER = re.compile(r"vis|image|audio|speech|sound", re.I)
"""Paths of block lists that belong to a tower."""
_ATTENTION = re.compile("att(entio)?n|short_?conv", re.I)
"""The classes of modules in which tokens see each other: attention and short convolutions."""
_BETWEEN = re.compile(f"{TOWER.pattern}|projector|merger|connector|adapter", re.I)
"""Modules of a tower, and those between a tower and the language model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleModules:
    """The modules of each role, by the name that a plan has for it; empty where a model has none.

    Args:
        blocks: the entries of the block lists outside of towers.
        embedding: of tokens, with those that have the same tensor.
        final_norm: the norm after the blocks.
        head: the linear layer that outputs logits.
        experts: the modules with the weights of all experts of a block.
    """

    blocks: tuple[Modules, ...] = ()
    embedding: tuple[Modules, ...] = ()
    final_norm: tuple[Modules, ...] = ()
    head: tuple[Modules, ...] = ()
    experts: tuple[Modules, ...] = ()


LACKS = {
    "blocks": "no list of layers",
    "embedding": "no embedding with a row for each token",
    "final_norm": "no norm beside its list of blocks",
    "head": "no linear layer with an output for each token",
    "experts": "no module with the weights of all experts of a block",
}
"""Phrases for the module that a model without a role lacks."""
assert tuple(LACKS) == tuple(f.name for f in fields(RoleModules))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The modules around the blocks, in the model's order.

    Args:
        embeddings: of tokens, the most likely one first.
        tables: all embeddings.
        heads, norms: linears that output logits, and norms.
    """

    embeddings: tuple[Modules, ...]
    tables: tuple[Modules, ...]
    heads: tuple[Modules, ...]
    norms: tuple[Modules, ...]


def lists(facts: Facts) -> list[Modules]:
    """The lists of blocks with parameters, those of towers last."""
    block_modules = (m for m in block_lists(facts.model) if m.module.count)
    return sorted(block_modules, key=lambda m: bool(TOWER.search(str(m))))


def ends(facts: Facts) -> Ends:
    """The modules outside of the blocks, by their kind and the size of the vocabulary."""
    blocks = lists(facts)
    # a selector cannot name an entry of a model that is a list itself
    modules = (m for m in facts.model.below() if not str(m).startswith("["))
    outside = [m for m in modules if not any(m.is_within(at) for at in blocks)]
    tables = [m for m in outside if m.module.kind == "embedding"]
    vocabulary = stated = integer_of(facts.config, "vocab_size")
    rows = [_outputs(m) for m in tables]
    if vocabulary not in rows:
        gives = {_outputs(m) for m in outside if m.module.kind == "linear"}
        vocabulary = next((n for n in rows if n in gives), max(rows, default=None))
    named = [m for m in tables if _outputs(m) == vocabulary] or tables[:1]
    tied = facts.tied_modules
    last = (m for m in outside if m.module.kind == "linear" and not _BETWEEN.search(str(m)))
    return Ends(
        embeddings=tuple(sorted(named, key=lambda m: str(m) not in tied)),
        tables=tuple(tables),
        heads=tuple(m for m in last if _outputs(m) in (vocabulary, stated)),
        norms=tuple(m for m in outside if m.module.kind == "norm"),
    )


def same_tensor(facts: Facts, table: Modules) -> tuple[Modules, ...]:
    """The other embeddings that have the same tensor as one."""
    groups = [{name.rpartition(".")[0] for name in group} for group in facts.ties]
    tables = (m for m in facts.model.below() if m.module.kind == "embedding")
    return tuple(m for m in tables if m != table and any({str(table), str(m)} <= g for g in groups))


def roles(facts: Facts) -> RoleModules:
    """The roles of a model's modules."""
    block_modules = [m for m in lists(facts) if not TOWER.search(str(m))]
    around = ends(facts)
    inside = (m for m in facts.model.below() if any(m.is_within(at) for at in block_modules))
    embedding = around.embeddings[:1]
    return RoleModules(
        blocks=tuple(entry for at in block_modules for entry in at.children),
        embedding=(
            *embedding,
            *(other for table in embedding for other in same_tensor(facts, table)),
        ),
        final_norm=tuple(norm for norm in [_after(block_modules[-1], facts)] if norm)
        if block_modules
        else (),
        head=around.heads[-1:],
        experts=tuple(m for m in inside if _is_fused(m)),
    )


def block_names(facts: Facts) -> list[str]:
    """The torch names of the blocks outside of towers, in the order of each list.

    An entry of a list holds the blocks of one kind, so the last entry need not hold the last block.
    """
    lists: dict[str, list[str]] = {}
    for blocks in roles(facts).blocks:
        for name in blocks.names():
            lists.setdefault(name.rpartition(".")[0], []).append(name.rpartition(".")[2])
    for keys in lists.values():
        if all(key.isdigit() for key in keys):
            keys.sort(key=int)
    return [f"{path}.{key}" for path, keys in lists.items() for key in keys]


def attention(facts: Facts) -> tuple[Modules, ...]:
    """The outermost modules of the blocks that are attention, by the names of their classes."""
    blocks = roles(facts).blocks
    inside = [m for m in facts.model.below() if any(m.is_within(b) for b in blocks)]
    named = [m for m in inside if m not in blocks and _ATTENTION.search(m.module.cls)]
    return tuple(m for m in named if not any(m.is_within(n) for n in named if n != m))


def _after(blocks: Modules, facts: Facts) -> Modules | None:
    """The norm after a list of blocks: the first that stands behind it, else the last before."""
    parent = next(m for m in facts.model.below() if m.path == blocks.path[:-1])
    children = parent.children
    at = children.index(blocks)
    norms = (m for m in (*children[at:], *reversed(children[:at])) if m.module.kind == "norm")
    return next((m for m in norms if "embed" not in str(m.path[-1])), None)


def _is_fused(modules: Modules) -> bool:
    return any(modules.module.fact(name) is not None for name in (FUSED_EXPERTS, BATCHED_EXPERTS))


def _outputs(modules: Modules) -> int:
    return modules.module.parameters[0].shape[0] if modules.module.parameters else 0
