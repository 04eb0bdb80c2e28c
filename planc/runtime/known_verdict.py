"""The verdict of earlier proofs on the plan that is about to run; imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from planc.diagnostics.diagnostic import PlanError, Sink, one_of

Required = Literal["nothing", "proved", "verified"]
"""The verdict that `planc.apply` can require: `proved`, by layout flow or on processes; `verified`,
on processes; `nothing`, so that a plan runs even if it is known to be refuted."""


Level = Literal["unproved", "undecided", "proved", "verified", "refuted"]


_LEVELS = get_args(Level)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownVerdict:
    """The verdict on a lowered plan that a rank knows: `unproved` is not asked, `undecided` not
    answered.

    `even`: it is wrong for lengths that the tensor axes do not divide.
    """

    level: Level
    text: str
    even: bool = False


def strongest(verdicts: Iterable[KnownVerdict | None]) -> KnownVerdict | None:
    """The verdict of all ranks together: each machine has a cache of its own, and what is known on
    one holds on all. A plan that one cache knows as refuted is refuted.
    """
    known = [verdict for verdict in verdicts if verdict is not None]
    best = max(known, key=lambda v: _LEVELS.index(v.level), default=None)
    return best and replace(best, even=any(verdict.even for verdict in known))


def known_requirement(require: str | None) -> None:
    """Raises ValueError if there is no such requirement."""
    if require is not None and require not in get_args(Required):
        words = one_of(map(repr, get_args(Required)))
        raise ValueError(f"require is {words}, not {require!r}")


def accept(verdict: KnownVerdict | None, require: Required | None) -> None:
    """Raises PL480 for a refuted plan; else PL481 or PL482 for one that isn't as `require` says: on
    all ranks, whose verdict this is.
    """
    if verdict is None or require == "nothing":
        return
    sink, level = Sink(), verdict.level
    help: str | None
    if level == "refuted":
        help = "fix the plan and run `planc check` again"
        sink.error("PL480", f"this plan trains another model: {verdict.text}", help=help)
    elif require == "proved" and level not in ("proved", "verified"):
        message = f"the run requires a proved plan, and this one is {verdict.text}"
        help = None if level == "unproved" else "`planc verify` runs it on real processes"
        sink.error("PL481", message, help=help)
    elif require == "verified" and level != "verified":
        message = f"the run requires a verified plan, and this one is {verdict.text}"
        help = "run `planc verify` with the same model, world size and settings"
        sink.error("PL482", message, help=help)
    if sink.has_errors:
        raise PlanError(sink, rank=0)
