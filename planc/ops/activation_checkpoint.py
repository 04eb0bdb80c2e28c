"""`checkpoint_wrapper`: activations are recomputed in backward, or saved by groups of operators.

Selective checkpointing saves what a dispatch mode sees below autograd: `aten.linear` never gets
there, as it is decomposed into `aten.mm` or `aten.addmm` first.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, ClassVar, Self

from planc.files.resources import GRAMMARS
from planc.model.facts import Modules
from planc.model.indices import Indices
from planc.ops import phrases
from planc.ops.base import OMIT, AxisSizes, Form, Op, Operator, Phase, Size, Some, StepFacts, Where
from planc.ops.call import (
    Context,
    Each,
    FunctionCall,
    ImportedName,
    ScriptFunction,
    Step,
    drop_none,
)
from planc.ops.decisions import Decision, Question, decision_around

GROUPS: dict[str, tuple[str, ...]] = {
    "attention": (
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_fused_attention_overrideable.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "higher_order.flex_attention",
        "flash_attn._flash_attn_forward.default",
    ),
    "matmul": (
        "aten.mm.default",
        "aten.addmm.default",
        "aten.bmm.default",
        "aten.baddbmm.default",
        "aten._scaled_mm.default",
        "aten._grouped_mm.default",
    ),
    "reduce": (
        "_c10d_functional.all_reduce.default",
        "_c10d_functional.reduce_scatter_tensor.default",
    ),
    "gather": ("_c10d_functional.all_gather_into_tensor.default",),
    "exchange": ("_c10d_functional.all_to_all_single.default",),
}
"""Groups of operators by their names in a plan. Operators that a build of torch lacks are ignored.

Source: the save list of torchtitan's selective checkpointing, and the operators that torch's
attention, flash-attn and the functional collectives dispatch to.
"""


CallNumber = Annotated[int, Form({"minimum": 0, "maximum": 65535})]


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Operators whose outputs are saved in the forward pass and not recomputed.

    Args:
        name: a group of `GROUPS`, or the operator itself.
        every: of N calls in one module one is saved, the first one first.
        ops: names in torch: namespace, operator, overload.
        calls: the calls in one module whose outputs are saved, from 0, in place of `every`.
        hosted: those of `calls` whose outputs are kept on the CPU until the backward pass, in
            pinned memory where the device is CUDA.
    """

    name: Operator
    every: Size = 1
    ops: Some[Operator]
    calls: tuple[CallNumber, ...] = field(default=(), metadata=OMIT)
    hosted: tuple[CallNumber, ...] = field(default=(), metadata=OMIT)

    def __str__(self) -> str:
        if self.calls:
            short = self.name.removeprefix("aten.").removesuffix(".default")
            here, away = (
                Indices.from_numbers({*self.calls} - {*self.hosted}),
                Indices.from_numbers(self.hosted),
            )
            words = [f"{short}{here}"] * bool(here) + [f"{short}{away} on cpu"] * bool(away)
            return ", ".join(words)
        return self.name if self.every == 1 else f"{self.name}(every = {self.every})"


@cache
def _table() -> dict[str, bool]:
    """Each operator in the lists of torch, and whether a dispatch mode sees it."""
    known: dict[str, bool] = {}
    for line in (GRAMMARS / "operators.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        name, *overloads = line.split()
        for overload in overloads:
            known[f"{name}.{overload.removesuffix('-')}"] = not overload.endswith("-")
    return known


def has_operator_list(name: str) -> bool:
    """Whether planc has a list of the operators in the name's namespace."""
    return name.partition(".")[0] in ("aten", "_c10d_functional")


def is_dispatched(name: str) -> bool | None:
    """Whether a dispatch mode sees the operator; None where torch has no operator of that name."""
    return _table().get(name)


def like(name: str) -> list[str]:
    """Operators with the same base name; all operators where there are none."""
    base = name.removesuffix(".default").removesuffix(".")
    same = [n for n in _table() if n.rpartition(".")[0] == base]
    return same or list(_table())


_FUNCTIONS = "standalone.activation_checkpoint:"
_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Op):
    """`checkpoint_wrapper` (non-reentrant) around each module.

    Args:
        save: selective checkpointing: the operators whose outputs are saved; empty saves none.
        offload: whether saved tensors and the inputs of the modules are kept on the CPU until the
            backward pass.
        pin: whether that CPU memory is pinned, where the device is CUDA.
        preserve_rng: `preserve_rng_state`.
        early_stop: `early_stop`.
    """

    modules: Modules
    save: tuple[Save, ...] = field(default=(), metadata=OMIT)
    offload: bool = field(default=False, metadata=OMIT)
    pin: bool = field(default=True, metadata=OMIT)
    preserve_rng: bool = field(default=True, metadata=OMIT)
    early_stop: bool = field(default=True, metadata=OMIT)

    def problems(self) -> Iterator[tuple[Where, str]]:
        for i, save in enumerate(self.save):
            if not {*save.hosted} <= {*save.calls}:
                yield ("save", i, "hosted"), "only calls that are saved are kept on the CPU"
            elif save.hosted and self.offload:
                yield ("save", i, "hosted"), "`offload` keeps all calls on the CPU"

    @property
    def hosts(self) -> bool:
        """Whether anything waits in the host's memory for the backward pass."""
        return self.offload or any(save.hosted for save in self.save)

    @property
    def traced_modules(self) -> tuple[Modules, ...]:
        return (self.modules,)

    SCRIPT: ClassVar = ScriptFunction(
        "checkpoint", "Recomputes activations in the backward pass, to save memory."
    )

    def calls(self, _context: Context) -> Iterator[Step]:
        options = drop_none(
            context_fn=self._saving() if self.save else None,
            preserve_rng_state=None if self.preserve_rng else False,
            early_stop=None if self.early_stop else False,
        )
        if self.offload:
            options = drop_none(
                checkpoint_fn=FunctionCall(
                    f"{_FUNCTIONS}offloading", (), (("pin", self.pin), *options)
                )
            )
        how = ImportedName(f"{_WRAPPER}:CheckpointImpl.NO_REENTRANT")
        keywords = (("checkpoint_impl", how), *options)
        call = FunctionCall(f"{_WRAPPER}:checkpoint_wrapper", (), keywords)
        yield Each(modules=self.modules, calls=(call,), replaces=True, note=self.place)

    def decisions(self, question: Question) -> Iterator[Decision]:
        how = self.headline()
        text = f"{'' if how == 'full' else f'{how}: '}activations are recomputed in backward"
        yield from decision_around(self.modules, text, question)

    def uncounted_traffic(self, step: StepFacts) -> str:
        return f"what backward repeats of {self.modules}" if self.save else ""

    UNDONE_BY: ClassVar = {"gradient_checkpointing_enable": "the plan's checkpoints"}
    SENDS_ACTIVATIONS: ClassVar = True
    PHASE: ClassVar = Phase.CHECKPOINT
    WORD: ClassVar = "checkpoint"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules",)
    WORDS: ClassVar = {
        "offload": ("offload", lambda away: "cpu" if away else "none"),
        "pin": ("pinned", phrases.value),
    }

    def headline(self, _mesh: AxisSizes | None = None) -> str:
        """`full`, or `ops(save = [...], offload = cpu)`."""
        words = [f"save = [{', '.join(map(str, self.save))}]"] if self.save else []
        words += ["offload = cpu"] if self.offload else []
        terms = ("pin", "preserve_rng", "early_stop")
        words += [f"{name} = false" for name in terms if not getattr(self, name)]
        kind = "ops" if self.save else "full"
        return f"{kind}({', '.join(words)})" if words else kind

    @classmethod
    def section(cls, ops: Sequence[Self], _mesh: AxisSizes) -> Iterator[str]:
        notes = ((op, op.headline()) for op in ops)
        return phrases.listing(
            (cls.WORD, str(op.modules), "" if how == "full" else how) for op, how in notes
        )

    def _saving(self) -> FunctionCall:
        groups = tuple(
            (save.calls or save.every, save.ops, *([save.hosted] if save.hosted else []))
            for save in self.save
        )
        if self.offload:
            return FunctionCall(f"{_FUNCTIONS}saving_on_cpu", (self.pin, *groups))
        return FunctionCall(f"{_FUNCTIONS}saving", groups)


def checkpoints(rules: Iterable[object]) -> tuple[Checkpoint, ...]:
    """The rules, or operations, whose modules are computed again in the backward pass."""
    return tuple(rule for rule in rules if isinstance(rule, Checkpoint))
