"""How much of a model a drafted plan leaves whole on every rank, why, and whether a plan that ships
leaves less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planc import compiler
from planc.checks.replicated import replicated_parameters
from planc.diagnostic import Sink
from planc.draft.search import Search
from planc.model.facts import Facts, Modules, generic
from planc.proof.small_mesh import RANKS
from planc.source import Source
from planc.syntax import ast, plan_files
from planc.syntax.parse import parse

_MUCH = 0.2
"""The share of the parameters from which on it is said what they are."""
_PART = 0.02
_MORE = 0.005
"""By how much more a plan that ships must split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The parameters that every tensor rank holds: their share of all, and by module theirs."""

    share: float
    modules: dict[str, float]


def whole(files: tuple[ast.File, ...], facts: Facts) -> Whole | None:
    """What a plan leaves whole; None where it splits nothing or does not fit."""
    done = compiler.compile(files, facts, Sink(), world_size=RANKS, settings=(f"tp={RANKS}",))
    if done.lowered is None or done.applied is None:
        return None
    found = replicated_parameters(*done.applied)
    if found is None:
        return None
    modules: dict[str, float] = {}
    for count, name in found:
        owner = name.rpartition(".")[0]
        modules[owner] = modules.get(owner, 0.0) + count / facts.root.count
    share = sum(modules.values())
    return Whole(share=share, modules=dict(sorted(modules.items(), key=lambda m: -m[1])))


def comments(text: str, facts: Facts, search: Search, sink: Sink) -> Iterator[str]:
    """Yields paragraphs for the top of a drafted plan; PL662 and PL663 say the same."""
    own = whole((parse(Source("draft.plan", text), Sink()),), facts)
    if own is not None and own.share >= _MUCH:
        parts = {name: part for name, part in own.modules.items() if part >= _PART}
        shown = [
            f"{name} ({part:.0%}): {_why(name, facts, search)}" for name, part in parts.items()
        ]
        message = f"{own.share:.0%} of the parameters stay whole on every rank of tp"
        sink.info("PL663", message, facts=shown)
        yield f"{message}. {'. '.join(shown)}."
    shipped = _shipped(facts)
    if shipped is None:
        return
    name, other = shipped
    mine = 1.0 if own is None else own.share
    if mine - other.share >= _MORE:
        message = (
            f"{name} ships for {facts.family}, and splits {1 - other.share:.1%} of the parameters"
        )
        sink.info("PL662", f"{message}; this plan splits {1 - mine:.1%}", help="use that plan")
        yield f"{message}; this plan splits {1 - mine:.1%}."


def _shipped(facts: Facts) -> tuple[str, Whole] | None:
    """The plan that `planc check` takes for the family, and what it leaves whole."""
    quiet = Sink()
    files = plan_files.read_for(facts.family, quiet)
    if not files:
        return None
    found = whole(files, facts)
    return None if found is None else (files[-1].origin.source.name, found)


def _why(name: str, facts: Facts, search: Search) -> str:
    """Why the modules of a set are not split."""
    modules = next(m for m in facts.model.below() if str(m) == name)
    lists = {path: some for path, some in search.parts.items() if _in_list(modules, path)}
    path = next(iter(lists), "")
    if path in search.unreached:
        return "the run of the small model does not reach it"
    inner = generic(name.replace("[", ".").replace("]", "")).removeprefix(f"{path}.*.")
    tried = [
        c
        for c in (*lists.get(path, ()), *search.outside)
        if inner in c.members or name in c.members
    ]
    if tried:
        return "no way to shard it was right"
    module = modules.module
    if module.kind in ("linear", "conv1d", "embedding"):
        return "it is no part of attention, MLP or experts that planc recognizes"
    own = ", ".join(f"{p.name} {list(p.shape)}" for p in module.parameters[:3])
    return f"{module.cls} has parameters of its own ({own}), and no style is known to split them"


def _in_list(modules: Modules, path: str) -> bool:
    """Whether modules are in the list of blocks at a path."""
    return ".".join(s for s in modules.path if isinstance(s, str)).startswith(path)
