"""Torch operators: the groups that a plan can name, and the names that torch has.

Selective checkpointing saves what a dispatch mode sees below autograd. `aten.linear` never gets
there: it is decomposed into `aten.mm` or `aten.addmm` first.
"""

from dataclasses import dataclass
from functools import cache

from planc.ops.base import Operator, Size, Some
from planc.resources import GRAMMARS

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Operators whose outputs are saved in the forward pass and not recomputed.

    Args:
        name: a group of `GROUPS`, or the operator itself.
        every: of N calls in one module one is saved, the first one first.
        ops: names in torch: namespace, operator, overload.
    """

    name: Operator
    every: Size = 1
    ops: Some[Operator]

    def __str__(self) -> str:
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


def listed(name: str) -> bool:
    """Whether planc has a list of the operators in the name's namespace."""
    return name.partition(".")[0] in ("aten", "_c10d_functional")


def seen(name: str) -> bool | None:
    """Whether a dispatch mode sees the operator; None where torch has no operator of that name."""
    return _table().get(name)


def like(name: str) -> list[str]:
    """Operators with the same base name; all operators where there are none."""
    base = name.removesuffix(".default").removesuffix(".")
    same = [n for n in _table() if n.rpartition(".")[0] == base]
    return same or list(_table())


__all__ = ["GROUPS", "Save", "like", "listed", "seen"]
