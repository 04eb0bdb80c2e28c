"""Refuses the one way to recompute attention in compiled modules that torch lacks on the CPU."""

from collections.abc import Iterator

from torch import nn

from planc.model.facts import below
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.compile import Compile
from planc.ops.lowered import Lowered
from planc.ops.tensor_parallel import Parallelize
from planc.runtime.preconditions import stop

_ON_CPU = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def require(model: nn.Module, lowered: Lowered, device: str) -> None:
    """Checks that no compiled module recomputes torch's own attention beside DTensors on the CPU.

    Observed with torch 2.13 on two processes: `AssertionError: expected all
    tensors_saved_with_vc_check to be Tensors` in the first forward. That attention counts as
    random, so it is recomputed with the random state of the forward, which `functionalize_rng_ops`
    (torch/_functorch/partitioners.py) returns behind the device mesh that DTensors keep for the
    backward, where the caller looks for the mesh. On CUDA the state is no output of the graph.
    All of these run: attention that is saved, or eager; a checkpoint without attention; one rank; a
    compiled module inside a checkpointed one.

    Raises:
        PlanError: PL485.
    """
    if device != "cpu":
        return
    split = [n for op in lowered.ops if isinstance(op, Parallelize) for n in op.modules.names()]
    modules = dict(model.named_modules())
    for op, compiled, name, outer in _recomputed(lowered):
        inner = modules.get(name)
        if inner and _attends(inner) and any(n == outer or below(n, outer) for n in split):
            raise stop(
                "PL485",
                f"torch cannot run the compiled {outer} ({compiled.place}) on the CPU: {name} "
                f"({op.place}) recomputes its attention, beside DTensors",
                help="save the attention, with `ops(save = [attention])` in the checkpoint "
                "section; or compile on CUDA alone, where this runs",
            )


def _recomputed(lowered: Lowered) -> Iterator[tuple[Checkpoint, Compile, str, str]]:
    """(checkpoint, compilation, names of both modules) where compiled attention is recomputed."""
    every = (op for op in lowered.ops if isinstance(op, Compile))
    compiled = [(op, name) for op in every for name in op.modules.names()]
    for op in lowered.ops if compiled else ():
        if isinstance(op, Checkpoint) and not any(_ON_CPU in saved.ops for saved in op.save):
            for name in op.modules.names():
                for by, outer in compiled:
                    if name == outer or below(name, outer):
                        yield op, by, name, outer


def _attends(module: nn.Module) -> bool:
    """Whether transformers runs attention in a module by torch's own operator."""
    return any(
        "Attention" in type(m).__name__
        and getattr(getattr(m, "config", None), "_attn_implementation", None) == "sdpa"
        for m in module.modules()
    )
