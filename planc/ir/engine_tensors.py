"""The tensors of an engine's ranks, as rules lay them out, and what is wrong with the rules."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planc.diagnostics.diagnostic import Label, Sink
from planc.ir.mesh_axes import EXPERTS, TENSOR
from planc.ir.patches import FP8, HeldPatch, Index, Patch, RankTensor, scale_name
from planc.ir.serving import ServeRule, Serving


@dataclass(frozen=True, slots=True, kw_only=True)
class HubTensor:
    """A tensor of the files, with `{}` for the indices of layers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    indices: tuple[Index, ...]

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


class EngineTensors:
    """Collects the patches and the tensors of an engine's ranks, and findings."""

    def __init__(self, serving: Serving, sink: Sink) -> None:
        self.serving, self.sink = serving, sink
        self.held: list[HeldPatch] = []
        self.tensors: list[RankTensor] = []
        self.reported: set[str] = set()

    def hold(self, tensor: HubTensor, patch: Patch, ranks: Sequence[int]) -> None:
        self.held.append(
            HeldPatch(
                patch=replace(patch, key=self.serving.engine_name(patch.key)),
                indices=tensor.indices,
                ranks=tuple(ranks),
                dtype=tensor.dtype,
                scales=tensor.leaf.endswith(scale_name("")),
            )
        )

    def add_tensor(
        self, tensor: HubTensor, key: str, shape: tuple[int, ...], ranks: Sequence[int]
    ) -> None:
        self.tensors.append(
            RankTensor(
                key=self.serving.engine_name(key),
                shape=shape,
                dtype=tensor.dtype,
                indices=tensor.indices,
                ranks=tuple(ranks),
            )
        )

    def report_lack(self, rule: ServeRule, part: str, there: str) -> None:
        if self.first(f"{rule.origin}{part.rpartition('.')[0]}"):
            self.sink.error(
                "PL693",
                f"the model has {there} and lacks {part}, which the engine fuses with it".replace(
                    "{}", "*"
                ),
                rule.origin,
                help="name the parts that the model has, in the engine's order",
            )

    def share(
        self,
        size: int,
        ranks: int,
        what: str,
        rule: ServeRule,
        tensor: HubTensor | None = None,
        *,
        axis: str | None = None,
    ) -> int:
        """The size on a rank: full blocks of a weight in fp8.

        Args:
            axis: the size of the section that decides it; by default that of tp, or of ep.
        """
        if tensor is not None and tensor.dtype == FP8 and ranks > 1:
            blocks = f"blocks of {self.serving.fp8} {what}"
            if size % (ranks * self.serving.fp8):
                self.share(size, ranks * self.serving.fp8, blocks, rule)
                self.reported.add(f"{rule.origin}{ranks}")  # its scales cannot be divided either
        what = what.replace("{}", "*")
        if size % ranks and self.first(f"{rule.origin}{ranks}"):
            axis = axis or (EXPERTS if "expert" in what else TENSOR)
            origin = self.serving.sizes.get(axis)
            text = f"{axis} is {getattr(self.serving, axis)}"
            self.sink.error(
                "PL692",
                f"{size:,} {what} cannot be divided by {ranks}",
                Label(span=rule.origin),
                *([Label(span=origin, text=text)] if origin else []),
                facts=[f"{self.serving.engine_text()} has {self.serving.size} ranks here"],
                help=f"choose another size of {axis}",
            )
        return size // ranks

    def check_blocks(self, rows: int, what: str, rule: ServeRule, tensor: HubTensor) -> None:
        """Refuses a part before another one if its last block would be shared by both."""
        if tensor.dtype == FP8:
            self.share(rows, self.serving.fp8, f"{what} on a rank", rule, axis="fp8")

    def first(self, what: str) -> bool:
        """Whether a finding was not reported yet."""
        new = what not in self.reported
        self.reported.add(what)
        return new
