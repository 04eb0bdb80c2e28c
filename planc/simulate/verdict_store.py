"""The verdicts of `planc check` and `planc verify`, found by the digest of the lowered plan.

`planc.apply` asks here whether the plan that it is about to run was proved or refuted. Layout flow
caches its outcomes by the small lowered plan, which only a compilation knows, and certificates are
for one dtype of the weights; so both proofs write their verdict again, under a key of the lowered
plan without byte counts, the model, the library versions and planc's own sources. An entry contains
the digest of its content: a damaged one counts as missing, and one that is older than planc's
sources is never found. Imports no torch.
"""

from dataclasses import asdict, replace
from functools import cache as once
from typing import Literal, get_args

from planc.diagnostics.diagnostic import one_of
from planc.model import cache
from planc.model.facts import Facts
from planc.ops import phrases
from planc.ops.document import digest
from planc.ops.lowered import Lowered
from planc.runtime.known_verdict import KnownVerdict, Level, strongest
from planc.simulate import certificate
from planc.simulate.certificate import digest_of, files

_FORMAT = 2
_NEVER = KnownVerdict(
    level="unproved",
    text="never proved: run `planc check` with the same model, world size and settings",
)
_NEVER_OF_THE_SCRIPT = KnownVerdict(
    level="unproved",
    text="never proved with the code that this script runs: call `planc.check` in the script, or "
    "`planc.apply` with `prove=True`",
)

Proof = Literal["layout flow", "processes"]
_SAID: dict[Proof, tuple[Level, ...]] = {
    "layout flow": ("undecided", "proved", "refuted"),
    "processes": ("verified", "refuted"),
}
"""The levels of each proof; an entry with another level was not written by it."""


def remember(
    lowered: Lowered,
    facts: Facts,
    verdict: KnownVerdict,
    *,
    by: Proof = "layout flow",
    plan: str = "",
) -> None:
    """Writes the verdict of a proof; a no-op if the cache folder cannot be written.

    Args:
        plan: the digest of the plan's text, by which the meshes that it was proved on are known.
    """
    key, stored = _key(lowered, facts, by), asdict(verdict)
    if cache.recall(key) != stored:  # to write takes longer than to read
        cache.keep(key, stored)
    proved, mesh = _proved_on(plan, facts), _mesh(lowered)
    if plan and verdict.level in ("proved", "verified") and mesh not in proved:
        cache.keep(_key_of_text(plan, facts), [*proved, mesh])


def recall(lowered: Lowered, facts: Facts, plan: str = "") -> KnownVerdict:
    """The verdict on a lowered plan for a model: real processes count more than layout flow, but a
    plan that one of the two refutes is refuted.

    Args:
        plan: the digest of the plan's text; what is unproved then says what it was proved on.
    """
    proofs: tuple[Proof, ...] = get_args(Proof)
    if verdict := strongest(_verdict(lowered, facts, by) for by in proofs):
        return verdict
    never = _NEVER if facts.user_model is None else _NEVER_OF_THE_SCRIPT
    proved, mesh = _proved_on(plan, facts), _mesh(lowered)
    if not proved or mesh in proved:
        return never
    on = f"never proved on {mesh}, but on {one_of(proved, last='and')}"
    return replace(never, text=never.text.replace("never proved", on, 1))


def _mesh(lowered: Lowered) -> str:
    ranks = f"{lowered.world_size:,} rank{'s' * (lowered.world_size > 1)}"
    return f"{ranks} ({phrases.mesh(lowered.axes)})"


def _proved_on(plan: str, facts: Facts) -> list[str]:
    """The meshes that a plan's text was proved on, whatever the settings."""
    meshes = cache.recall(_key_of_text(plan, facts)) if plan else None
    return [mesh for mesh in meshes if isinstance(mesh, str)] if isinstance(meshes, list) else []


def _key_of_text(plan: str, facts: Facts) -> str:
    of = certificate.key_of(plan, certificate.identity(facts))
    return cache.entry_name(f"proved on {_FORMAT}", of, sources=_all_sources())


def _key(lowered: Lowered, facts: Facts, by: Proof) -> str:
    """Proofs run in float32, so bytes, which depend on the dtype of the weights, are left out."""
    stages = (replace(stage, parameters=0, gathered=0) for stage in lowered.stages)
    plain = replace(lowered, stages=tuple(stages)).map_ops(
        lambda ops: (op.drop_sizes() for op in ops)
    )
    key = certificate.key_of(digest(plain), certificate.identity(facts), lowered.packages)
    return cache.entry_name(f"verdict {_FORMAT} by {by}", key, sources=_all_sources())


def _verdict(lowered: Lowered, facts: Facts, by: Proof) -> KnownVerdict | None:
    kept = cache.recall(_key(lowered, facts, by))
    if not isinstance(kept, dict) or set(kept) != {"level", "text", "even"}:
        return None
    known = kept["level"] in _SAID[by] and isinstance(kept["text"], str)
    return KnownVerdict(**kept) if known and isinstance(kept["even"], bool) else None


@once
def _all_sources() -> str:
    """The sha256 of the rest of planc, since from a lowered plan to its small one every stage has
    a say; the keys of certificates have that of the sources that run and judge.
    """
    return digest_of(sorted({*files(("",))} - {*files()}))
