"""What a case of a silent error is: a right plan, and the same with one mistake in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from helpers import flat

FP32 = ("param_dtype=fp32", "reduce_dtype=fp32")
TP2 = ("tp=2", *FP32)
FILES = dict[str, str]

UNSUMMED = "the gradient of a replicated parameter is never summed"
TOO_OFTEN = "a gradient is summed once too often"
OUTPUTS = "an output is summed too often, or not at all"
LAYOUT = "a weight is split where the model's code does not split it"
NORMALIZER = "a wrong normalizer"
LOST = "masks, positions or packing are lost"
DROPPED = "ties are lost"
IGNORED = "a setting is accepted and nothing happens"
RECOMPUTED = "recomputation drops or repeats work"
PRECISION = "updates are lost to precision"
UPDATE = "an update is of shards, or of other matrices"
EIGHT_BITS = "products of numbers in 8 bits"
GROUP = "a wrong process group"
CLIPPING = "the norm and clipping over several meshes"
RANKS = "ranks read or start from something else"
VOCABULARY = "a loss over a split vocabulary"
CHECKPOINT = "a checkpoint comes back in another layout"
CHANGED = "a script changes the model after the plan is applied"
AROUND = "gradients and values go around the plan"
SWALLOWED = "an error of one process is none of several"
LOUD = "an error of one rank, or of torch, does not say what to do"
REFUSED = "a right script was refused"
RIGHT_TRUTH = (IGNORED, REFUSED)
"""The kinds whose cases train the right model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One silent error, beside its right twin.

    Args:
        name: a few words, unique.
        kind: the kind of mistake, a heading of the page.
        public: issues and pull requests that report it, such as `pytorch/torchtitan#4054`.
        how: what is wrong in this replay, in a sentence without a full stop.
        model: as of `numerics.values_of`, with `changes` to its configuration.
        plan: the file that is compiled, of those in `right` and `wrong`.
        right, wrong: the texts of plan files by name.
        settings: `name=value`, as for `--set`.
        fault: a function of `silent_faults` that breaks the runtime; the plan is right.
        script: a class of `silent_scripts`, `silent_loud_scripts` or `silent_trainers` that breaks
            the training script; the plan is right.
        twin: that of the right twin.
        before: a function of `silent_faults` that computes as planc did before the mistake was
            reported; the truth has it, and what judges the case has not.
        ignored: the files of `wrong` without what planc rejects, as a tool would run them that
            ignores it: the numbers are right, and something else runs than was asked for.
        right_changes: the changes of the twin's configuration, if they are others.
        beside: whether the truth is what the twin computes on four processes, because one process
            draws other random numbers.
    """

    name: str
    kind: str
    public: tuple[str, ...]
    how: str
    model: str = "llama"
    changes: dict[str, Any] = field(default_factory=dict)
    plan: str = "llama.plan"
    right: FILES = field(default_factory=dict)
    wrong: FILES = field(default_factory=dict)
    settings: tuple[str, ...] = TP2
    fault: str = ""
    script: str = ""
    twin: str = "Script"
    before: str = ""
    ignored: FILES = field(default_factory=dict)
    right_changes: dict[str, Any] | None = None
    beside: bool = False

    @property
    def where(self) -> str:
        """What the mistake is in: `plan`, `options`, `runtime`, `script`."""
        if self.fault or self.before:
            return "runtime"
        if self.script:
            return "script"
        return "plan" if self.right != self.wrong else "options"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A silent error of a kind of parallelism that is not replayed yet."""

    kind: str
    public: tuple[str, ...]
    how: str
    needs: str


def shipped(*names: str) -> FILES:
    """The texts of shipped plans with those that they extend, by file name."""
    return {f"{name}.plan": flat(name) for name in names}


def edited(files: FILES, name: str, *edits: tuple[str, str]) -> FILES:
    """The files with one text changed; every text that is replaced occurs in it."""
    text = files[name]
    for old, new in edits:
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new)
    return {**files, name: text}


def changed(plan: str, *edits: tuple[str, str]) -> dict[str, Any]:
    """The arguments of a case: a shipped plan, and its text with some replaced by another."""
    right = shipped(plan)
    wrong = edited(right, f"{plan}.plan", *edits)
    return {"plan": f"{plan}.plan", "right": right, "wrong": wrong}


def whole(plan: str) -> dict[str, Any]:
    """The arguments of a case whose plan is right: a shipped one."""
    right = shipped(plan)
    return {"plan": f"{plan}.plan", "right": right, "wrong": right}


def own(right: str, *edits: tuple[str, str], base: tuple[str, ...] = ("llama",)) -> dict[str, Any]:
    """The arguments of a case with a plan of its own, and with an edit in it."""
    files = {**shipped(*base), "own.plan": right}
    return {"plan": "own.plan", "right": files, "wrong": edited(files, "own.plan", *edits)}
