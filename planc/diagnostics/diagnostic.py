"""Findings about a user's mistakes, as data.

A stage appends diagnostics to a `Sink` and goes on; `planc.diagnostics.render` writes them in all
output formats. The text behind each code is a page of `docs/diagnostics`, which `planc explain`
prints too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypedDict, Unpack

from planc.diagnostics.source import Span


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A place in a source and what it has to do with the finding."""

    span: Span
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """One finding.

    Args:
        code: `PLnnn`; its page explains it.
        severity: an error makes the plan unusable, a warning is a finding that trains right,
            an info is a fact worth knowing.
        message: one line that names the values that decided.
        labels: the places involved, the one to look at first in front; empty for a finding about
            the invocation or the model.
        facts: facts that are not in the plan, each with its source, such as
            `num_key_value_heads = 8  (config.json)`.
        help: what to do about it.
    """

    code: str
    severity: Severity
    message: str
    labels: tuple[Label, ...] = ()
    facts: tuple[str, ...] = ()
    help: str | None = None

    @property
    def one_line(self) -> str:
        """In one line, with its place and its help, as exceptions and logs have it."""
        place = f"{self.labels[0].span.place}: " if self.labels else ""
        tail = f" ({self.help})" if self.help else ""
        return f"{place}{self.severity}[{self.code}]: {self.message}{tail}"

    @property
    def short(self) -> str:
        """In one line, with its place and its code, as the reason of a verdict."""
        place = f"{self.labels[0].span.place}: " if self.labels else ""
        return f"{place}{self.message} ({self.code})"

    @property
    def edit(self) -> tuple[Span, str] | None:
        """The name that the first label shows and its replacement, where the help corrects it."""
        if not isinstance(self.help, DidYouMean) or not self.labels:
            return None
        span = self.labels[0].span
        matches = list(re.finditer(rf"(?<!\w){re.escape(self.help.written)}(?!\w)", span.text))
        if len(matches) != 1:
            return None
        start = span.start + matches[0].start()
        return span.source.span(start, start + len(self.help.written)), self.help.meant


class _More(TypedDict, total=False):
    """The optional parts of a finding, besides its message and its places."""

    facts: Iterable[str]
    help: str | None


@dataclass(slots=True)
class Sink:
    """Collects the findings of one run, each once; none is removed, and `replace` explains one.

    A proof can overrule findings. These are only in `overruled_findings`; iteration, `diagnostics`,
    `errors` and `has_errors` leave them out.
    """

    _found: dict[Diagnostic, None] = field(default_factory=dict)
    _overruled: set[str] = field(default_factory=set)

    def add(self, *diagnostics: Diagnostic) -> None:
        self._found.update(dict.fromkeys(diagnostics))

    def replace(self, finding: Diagnostic, explained: Diagnostic) -> None:
        """Puts a finding whose cause is known now in the place of the same one without it."""
        self._found = {explained if kept == finding else kept: None for kept in self._found}

    def adjust(self, severity: Mapping[str, str]) -> Sink:
        """The findings that stand, with the severities that a user gives to some codes.

        Args:
            severity: by code: `error`, `warning`, `info` or `ignore`. An error stays an error: the
                plan is wrong, whoever reads it.
        """
        result = Sink()
        for finding in self:
            asked = severity.get(finding.code, finding.severity)
            if finding.severity is Severity.ERROR:
                asked = finding.severity
            if asked != "ignore":
                result.add(replace(finding, severity=Severity(asked)))
        return result

    def overrule(self, codes: Iterable[str]) -> None:
        """Records that a proof decides the findings of some codes: it shows them to be wrong, or
        reports the same itself, with what it saw.

        Args:
            codes: whose findings structure could only presume (`planc.diagnostics.codes.PRESUMED`).
        """
        self._overruled.update(codes)

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """The findings that stand, in the order in which they were reported."""
        return tuple(d for d in self._found if d.code not in self._overruled)

    @property
    def overruled_findings(self) -> tuple[Diagnostic, ...]:
        """The findings that a proof overruled, in the order in which they were reported."""
        return tuple(d for d in self._found if d.code in self._overruled)

    def report(
        self,
        severity: Severity,
        code: str,
        message: str,
        *where: Span | Label,
        facts: Iterable[str] = (),
        help: str | None = None,
    ) -> None:
        finding = Diagnostic(
            code=code,
            severity=severity,
            message=message,
            labels=tuple(w if isinstance(w, Label) else Label(span=w) for w in where),
            facts=tuple(facts),
            help=help,
        )
        self.add(finding)

    def error(self, code: str, message: str, *where: Span | Label, **more: Unpack[_More]) -> None:
        self.report(Severity.ERROR, code, message, *where, **more)

    def warning(self, code: str, message: str, *where: Span | Label, **more: Unpack[_More]) -> None:
        self.report(Severity.WARNING, code, message, *where, **more)

    def info(self, code: str, message: str, *where: Span | Label, **more: Unpack[_More]) -> None:
        self.report(Severity.INFO, code, message, *where, **more)

    @property
    def errors(self) -> int:
        return sum(d.severity is Severity.ERROR for d in self)

    @property
    def has_errors(self) -> bool:
        return self.errors > 0

    def __iter__(self) -> Iterator[Diagnostic]:
        return iter(self.diagnostics)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def io_reason(error: OSError) -> str:
    """Why a file cannot be read or written, as a message says it after a colon."""
    return (error.strerror or str(error)).lower()


class PlanError(Exception):
    """Raised by the Python API when a plan has errors; carries every diagnostic of the run.

    Attributes:
        rank: the rank that reports the error for all, where all ranks of a run raise it.
    """

    def __init__(self, diagnostics: Iterable[Diagnostic], rank: int | None = None) -> None:
        self.diagnostics, self.rank = tuple(diagnostics), rank
        errors = (d for d in self.diagnostics if d.severity is Severity.ERROR)
        super().__init__("\n".join(d.one_line for d in errors))


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The known names that look most like a misspelled one, best first; only those that differ in
    case alone, if there are any.
    """
    import difflib  # only a mistake needs it

    names = list(known)
    same = [n for n in names if n.lower() == name.lower()]
    return same or difflib.get_close_matches(name, names, n=3, cutoff=0.6)


class DidYouMean(str):
    """A help that asks whether a name was misspelled.

    Attributes:
        written, meant: the name, and the known one that looks most like it.
    """

    __slots__ = ("meant", "written")
    written: str
    meant: str


def did_you_mean(name: str, known: Iterable[str], otherwise: str | None = None) -> str | None:
    """The help for a misspelled name: the known names that look like it, else another help."""
    if advice := elsewhere(name):
        return advice
    close = nearest(name, known)
    if not close:
        return otherwise
    result = DidYouMean(f"did you mean {one_of(f'`{c}`' for c in close)}?")
    result.written, result.meant = name, close[0]
    return result


def _sizes(names: str) -> str:
    return " ".join(f"{name}_{end}" for name in names.split() for end in ("size", "degree"))


_ELSEWHERE = {
    "colwise": "ColwiseParallel",
    "rowwise": "RowwiseParallel",
    "sequence": "SequenceParallel",
    "input(shard(1) -> replicate)": "PrepareModuleInput",
    "output(replicate -> shard(1))": "PrepareModuleOutput",
    "colwise(-> replicate)": "output_layouts",
    "input(shard(1) -> replicate)`, as the style of the module": "input_layouts",
    "local = false": "use_local_output",
    "replicate": "NoParallel",
    "tensor on tp { ... }": "tensor_parallel tp_plan parallelize_module",
    "unit(reshard = always)`; false is `unit(reshard = never)": "reshard_after_forward",
    "context on cp { attention = ring(ulysses = 2) }": "ulysses ulysses_degree ring_degree",
    "fsdp on dp_shard { ... }": "fully_shard fsdp_config",
    "replicate on dp_replicate { ... }": "ddp DDP DistributedDataParallel",
    "fsdp on dp_shard, replicate on dp_replicate { ... }": "hsdp HSDP",
    "precision(param = bf16, reduce = fp32)": "mp_policy MixedPrecisionPolicy mixed_precision",
    "precision(param = bf16)": "param_dtype",
    "precision(reduce = fp32)": "reduce_dtype",
    "precision(output = bf16)": "output_dtype",
    "precision(cast_inputs = true)": "cast_forward_inputs",
    "offload(cpu)": "offload offload_policy CPUOffloadPolicy cpu_offload offload_params",
    "lora(rank = 16)": "r lora_r",
    "lora(rank = 16, alpha = 32)": "lora_alpha",
    "lora(rank = 16, dropout = 0.1)": "lora_dropout",
    "adapters { model.layers.*.self_attn.q_proj : lora(rank = 16) }": "lora peft LoraConfig",
    "adapters { **.{q_proj,v_proj} : lora(rank = 16) }": "target_modules lora_target_modules",
    "lora(rank = 16, rslora = true)": "use_rslora",
    "lora(rank = 16, dora = true)": "use_dora",
    "adapters { $experts : lora(rank = 16) }": "target_parameters lora_target_parameters",
    "load { dtype = bf16 }": "torch_dtype",
    "true": "True yes on",
    "false": "False no off",
    "bf16": "torch.bfloat16",
    "fp32": "torch.float32",
    "fp16": "torch.float16",
    "mesh { cp = 2 }` and `context on cp { attention = all_gather }": "context_parallel",
    "mesh { pp = 2 }` and `pipeline on pp { ... }": "pipeline_parallel",
    "mesh { ep = 2 }` and `expert on ep { ... }": "expert_parallel",
    "mesh { tp = 2 }": _sizes("tp tensor_parallel tensor_model_parallel autotp"),
    "mesh { cp = 2 }": _sizes("cp context_parallel sequence_parallel"),
    "mesh { pp = 2 }": _sizes("pp pipeline_parallel pipeline_model_parallel"),
    "mesh { ep = 2 }": _sizes("ep expert_parallel expert_model_parallel"),
    "mesh { dp_shard = auto }": _sizes("dp_shard data_parallel_shard data_parallel dp fsdp"),
    "mesh { dp_replicate = 2 }": _sizes("dp_replicate data_parallel_replicate"),
}
"""The words of other libraries, torch, transformers, peft and trainers, by what a plan says;
sections that are folders have theirs.
"""


def elsewhere(name: str) -> str | None:
    """The help for a word of another library, its class with or without its module; else None."""
    from planc.sections import SECTIONS  # only a mistake needs them

    bare = name if name.startswith("torch.") and name.count(".") == 1 else name.rpartition(".")[2]
    tables = (_ELSEWHERE, *(section.other_words for section in SECTIONS.values()))
    lines = (line for table in tables for line, words in table.items() if bare in words.split())
    written = next(lines, None)
    return f"`{bare}` is, in a plan, `{written}`" if written else None


def one_of(names: Iterable[str], *, last: str = "or") -> str:
    """`a, b or c`."""
    items = list(names)
    if len(items) <= 1:
        return "".join(items)
    return f"{', '.join(items[:-1])} {last} {items[-1]}"
