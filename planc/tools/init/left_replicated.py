"""The part of a model that a drafted plan leaves replicated, the reasons, and whether a plan that
ships leaves less.
"""

from __future__ import annotations

from collections.abc import Iterator

from planc import compiler
from planc.checks.replicated import replicated_parameters
from planc.diagnostics.diagnostic import Sink
from planc.model.facts import Facts, generic, parse_path
from planc.proof.small_mesh import RANKS
from planc.syntax import ast, plan_files
from planc.tools.init.plan_text import parsed_text
from planc.tools.init.search import Search

_MUCH = 0.2
"""The share of the parameters from which on it is said what they are."""
_PART = 0.02
_MORE = 0.005
"""By how much more a plan that ships must split."""


def replicated_shares(files: tuple[ast.File, ...], facts: Facts) -> dict[str, float] | None:
    """By module, the share of all parameters that every tensor rank holds, the largest first; None
    where a plan splits nothing or does not fit.
    """
    done = compiler.compile(files, facts, Sink(), world_size=RANKS, settings=(f"tp={RANKS}",))
    if done.lowered is None or done.applied is None:
        return None
    parameters = replicated_parameters(*done.applied)
    if parameters is None:
        return None
    modules: dict[str, float] = {}
    for count, name in parameters:
        owner = name.rpartition(".")[0]
        modules[owner] = modules.get(owner, 0.0) + count / facts.root.count
    return dict(sorted(modules.items(), key=lambda m: -m[1]))


def comments(text: str, facts: Facts, search: Search, sink: Sink) -> Iterator[str]:
    """Yields paragraphs for the top of a drafted plan; PL662 and PL663 say the same."""
    shares = replicated_shares(parsed_text(text), facts)
    mine = 1.0 if shares is None else sum(shares.values())
    if shares is not None and mine >= _MUCH:
        parts = {name: part for name, part in shares.items() if part >= _PART}
        shown = [
            f"{name} ({part:.0%}): {_why(name, facts, search)}" for name, part in parts.items()
        ]
        message = f"{mine:.0%} of the parameters stay whole on every rank of tp"
        sink.info("PL663", message, facts=shown)
        yield f"{message}. {'. '.join(shown)}."
    shipped = _shipped_share(facts)
    if shipped is None:
        return
    name, theirs = shipped
    if mine - theirs >= _MORE:
        message = f"{name} ships for {facts.family}, and splits {1 - theirs:.1%} of the parameters"
        sink.info("PL662", f"{message}; this plan splits {1 - mine:.1%}", help="use that plan")
        yield f"{message}; this plan splits {1 - mine:.1%}."


def _shipped_share(facts: Facts) -> tuple[str, float] | None:
    """The plan that ships for the family, and the share that it leaves whole."""
    quiet = Sink()
    files = plan_files.read_for(facts.names, quiet, user_folders=False)
    if not files:
        return None
    shares = replicated_shares(files, facts)
    return None if shares is None else (files[-1].origin.source.name, sum(shares.values()))


def _why(name: str, facts: Facts, search: Search) -> str:
    """Why the modules of a set are not split."""
    key = tuple(s if isinstance(s, str) else "[]" for s in parse_path(name))  # of a merged set
    modules = next(m for m in facts.model.below() if m.key == key)
    plain = ".".join(s for s in modules.path if isinstance(s, str))
    path = next((p for p in search.parts if plain.startswith(p)), "")
    if path in search.unreached:
        return "the run of the proxy model does not reach it"
    inner = generic(name.replace("[", ".").replace("]", "")).removeprefix(f"{path}.*.")
    tried = (*search.parts.get(path, ()), *search.outside)
    choice = next((c for c in tried if inner in c.members or name in c.members), None)
    if choice is not None:
        return choice.why or "no way to shard it was right"
    if search.given is not None:
        return "transformers' own plan does not split it"
    module = modules.module
    if search.ran is not None and search.ran.order and modules.first_name not in search.ran.order:
        return "the proxy model's run does not call it"
    if module.kind in ("linear", "conv1d", "embedding"):
        return "no other linear of its block takes or gives what it does"
    names = ", ".join(f"{p.name} {list(p.shape)}" for p in module.parameters[:3])
    return f"{module.cls} has parameters of its own ({names}), and no style is known to split them"
