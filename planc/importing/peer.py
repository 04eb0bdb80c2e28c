"""Which keys of a peer's files a plan takes over, and why the others are left.

The tables are data: `grammars/import` has a file for each library.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from planc.resources import GRAMMARS

NAMES = (
    "accelerate",
    "axolotl",
    "automodel",
    "torchtitan",
    "transformers",
    "deepspeed",
    "megatron",
)

LEFT = {
    "optimizer": "the training script: optimizer, schedule, steps and clipping",
    "batch": "the training script: batch sizes and sequence lengths",
    "data": "the training script: data, tokenizer and packing",
    "task": "the training script: what it trains for, and its loss",
    "saving": "the training script: saving, resuming, logging and profiling",
    "model_left": "the model: its configuration, its code, its kernels",
    "launch": "the launcher: hosts, ranks, backend and environment",
    "tool": "a setting of the tool itself",
    "always": "nothing to say: torch's FSDP2 and planc do so by themselves",
}
"""Why a key is no part of a plan, by the word that the tables use."""

LOST = {
    "low_bits": "training in 8 or 4 bits is not supported",
    "buckets": "FSDP2 gathers unit by unit, and has no buckets or thresholds",
    "disk": "offload goes to host memory alone",
    "pipeline": "torch's schedules have no such setting",
    "fusion": "fused or overlapped communication is not supported",
    "experts": "tokens go to their experts by an all-to-all of torch",
    "frozen": "a `train` section says it: `train { MODULE : frozen }`",
    "parts": "the mesh is the same for all parts of a model",
    "adapter_left": "an `adapters` section has peft's plain LoRA",
    "zero": "ZeRO's further means of saving memory have no counterpart",
    "compress": "pruning, quantization while training and distillation are not supported",
    "other_file": "it names another file: import that one too",
    "compile_how": "a `compile` section compiles each block with torch's defaults",
    "checkpoint_left": "an `override checkpoint` section says which modules and operators",
    "precision_left": "`precision` casts parameters, gradients and outputs, and no more",
    "replicate_left": "set the axis `dp_replicate` to the number of groups of ranks",
    "units": "the units are those of the family's plan; `override fsdp` has others",
    "offload_optimizer": "optimizer state goes to the host with its parameters: `offload(cpu)`",
    "statement": "planc reads the text of the file and runs none of it",
}
"""What a plan cannot say, by the word that the tables use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One library whose configuration planc reads.

    Args:
        name, title: the word of `--from`, and its name in comments and messages.
        suffixes: of its files; an empty one stands for any text of arguments.
        signs: keys by which its files are recognized, as patterns.
        keys: patterns of keys, by what becomes of them: a setting of `planc.importing.settings`, or
            a word of LEFT or LOST. `*` stands for any text, and a pattern covers what is below its
            keys. Of several that match, the longest decides.
        absent: settings that the library assumes where the file does not have them.
        rename: a regular expression and its replacement, applied to each key first.
    """

    name: str
    title: str
    suffixes: list[str]
    signs: str
    keys: Mapping[str, str]
    absent: Mapping[str, object]
    rename: tuple[str, str] = ("$^", "")

    def meaning(self, path: str) -> str | None:
        """What becomes of a key: the word of the key itself, or of the longest pattern."""
        path = re.sub(*self.rename, path)
        table = ((p, word) for word, patterns in self.keys.items() for p in patterns.split())
        found = [(p == path, len(p), word) for p, word in table if matches(p, path)]
        return max(found)[2] if found else None

    def marks(self, paths: tuple[str, ...]) -> int:
        """The number of patterns among the signs that one of the keys matches."""
        return sum(any(matches(p, path) for path in paths) for p in self.signs.split())


@cache
def peers() -> dict[str, Peer]:
    """All libraries by name."""
    folder = GRAMMARS / "import"
    texts = {name: (folder / f"{name}.toml").read_text(encoding="utf-8") for name in NAMES}
    return {name: Peer(name=name, **tomllib.loads(text)) for name, text in texts.items()}


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern covers a key: the key itself, or one above it."""
    return bool(_compiled(pattern).match(path))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", ".*") + r"(?=[.\[]|$)", re.DOTALL)
