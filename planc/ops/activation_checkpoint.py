"""`checkpoint_wrapper`: activations are recomputed in the backward pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from planc.model.facts import Modules
from planc.ops import phrases
from planc.ops.aten_operators import Save
from planc.ops.base import OMIT, AxisSizes, Op
from planc.ops.call import Context, Each, FunctionCall, ImportedName, ScriptFunction, Step, given

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

    SCRIPT: ClassVar = ScriptFunction(
        "checkpoint", "Recomputes activations in the backward pass, to save memory."
    )

    def calls(self, _context: Context) -> Iterator[Step]:
        options = given(
            context_fn=self._saving() if self.save else None,
            preserve_rng_state=None if self.preserve_rng else False,
            early_stop=None if self.early_stop else False,
        )
        if self.offload:
            options = given(
                checkpoint_fn=FunctionCall(
                    f"{_FUNCTIONS}offloading", (), (("pin", self.pin), *options)
                )
            )
        how = ImportedName(f"{_WRAPPER}:CheckpointImpl.NO_REENTRANT")
        keywords = (("checkpoint_impl", how), *options)
        call = FunctionCall(f"{_WRAPPER}:checkpoint_wrapper", (), keywords)
        yield Each(modules=self.modules, calls=(call,), replaces=True, note=self.place)

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
        groups = tuple((save.every, save.ops) for save in self.save)
        if self.offload:
            return FunctionCall(f"{_FUNCTIONS}saving_on_cpu", (self.pin, *groups))
        return FunctionCall(f"{_FUNCTIONS}saving", groups)
