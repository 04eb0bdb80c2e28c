"""The requirement of fp8 matmuls on the device."""

import torch

from planc.ops.lowered import Lowered
from planc.runtime.preconditions import stop
from planc.sections.matmul.ops import LowPrecision

CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "mxfp8": (10, 0)}
"""The least compute capability of an NVIDIA GPU by recipe.

Source: `torch._scaled_mm` takes one scale a tensor from Ada on, a scale a row from Hopper on, and
scales of blocks from Blackwell on; not run here.
"""


def require(lowered: Lowered, device: str) -> None:
    """Checks that this device has the fp8 matmuls of a plan.

    Raises:
        PlanError: PL628, the device has no such products.
    """
    if device != "cuda" or torch.version.cuda is None:
        return
    recipes = {op.recipe: op for op in lowered.find_ops(LowPrecision)}
    here = torch.cuda.get_device_capability()
    for recipe, op in recipes.items():
        if not op.emulate and here < CAPABILITY[recipe]:
            least = ".".join(map(str, CAPABILITY[recipe]))
            raise stop(
                "PL628",
                f"{op.headline()} ({op.place}) takes a GPU of compute capability {least} or more, "
                f"and this one has {here[0]}.{here[1]}",
                help="leave out the matmul section on this machine",
            )
