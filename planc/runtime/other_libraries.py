"""What other libraries would do to a model under a plan, answered with planc's way to do it."""

import functools
from collections.abc import Mapping
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.context import ContextParallel
from planc.ops.lowered import Lowered
from planc.ops.styles import Rowwise
from planc.ops.tensor_parallel import Parallelize
from planc.runtime.preconditions import stop
from planc.runtime.script_line import script_line

_ADAPTERS = (
    "give `apply` the base model; the plan's `adapters` section adds LoRA, and "
    "`run.load_adapters` and `run.save_adapters` read and write peft's files"
)
_COMPILED = "remove torch.compile; the plan's `compile` section compiles each block"


def require_unwrapped(model: nn.Module) -> None:
    """Refuses a model that peft or torch.compile has changed, for the plan itself does that.

    Raises:
        PlanError: PL489.
    """
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise stop("PL489", "peft has put adapters into this model already", help=_ADAPTERS)
    if type(model).__name__ == "OptimizedModule" or model._compiled_call_impl is not None:
        raise stop(
            "PL489",
            "this model is compiled already, and a plan cannot change what is compiled",
            help=_COMPILED,
        )
    hooked = [n for n, p in model.named_parameters() if p._backward_hooks or _after_grad(p)]
    if hooked:
        raise stop(
            "PL455",
            f"{len(hooked)} parameters have hooks, `{hooked[0]}` is the first: the plan replaces "
            "parameters, and the hooks would be gone",
            *script_line("the plan is applied here"),
            help="register them after `planc.apply`, on the parameters that the model has then",
        )


def _after_grad(parameter: nn.Parameter) -> Any:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


def guard(model: nn.Module, modules: Mapping[str, nn.Module], lowered: Lowered) -> None:
    """Refuses what other libraries would do to a model that is under a plan from now on."""
    _guard_saving(model)
    _guard_compiling(modules, lowered)
    _guard_adapters(model)
    if lowered.has(ContextParallel):
        _refuse(model, "set_attn_implementation", "the attention that knows parts of sequences")
    if lowered.has(Checkpoint):
        _refuse(model, "gradient_checkpointing_enable", "the plan's checkpoints")
    _refuse(model, "resize_token_embeddings", "the shapes that the plan has split")


def _refuse(model: nn.Module, method: str, relied: str) -> None:
    """Refuses a method of transformers that changes what the plan was proved with."""
    if hasattr(model, method):

        def refused(*_args: Any, **_more: Any) -> None:
            raise stop(
                "PL454",
                f"`{method}` after `planc.apply` would undo {relied}",
                *script_line("it is called here"),
                help=f"call `{method}` before `planc.apply`, or change the plan",
            )

        setattr(model, method, refused)


def _guard_adapters(model: nn.Module) -> None:
    """Refuses to run layers that peft has wrapped: their weights are sharded, its factors are not.

    peft notes its configuration on the model, and calls `model.forward` without the model's hooks.
    """
    if not hasattr(model, "save_pretrained"):
        return  # not a model of transformers, which peft is for
    own, whole = model.__dict__.get("peft_config"), ref(model)

    def refuse(_module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        called = whole()
        if called is not None and called.__dict__.get("peft_config") is not own:
            raise stop("PL489", "peft has put adapters into a model under a plan", help=_ADAPTERS)

    for child in model.children():
        child.register_forward_pre_hook(refuse, prepend=True)


def _guard_compiling(modules: Mapping[str, nn.Module], lowered: Lowered) -> None:
    """Refuses to compile an embedding that is split by the vocabulary, as PL435 does in a plan:
    torch fails in the middle of it, with a message about fake tensors.
    """
    for op in lowered.ops:
        if isinstance(op, Parallelize) and isinstance(op.style, Rowwise):
            for name in op.modules.names():
                if isinstance(modules.get(name), nn.Embedding):
                    modules[name].register_forward_pre_hook(functools.partial(_traced, name))


def _traced(name: str, _module: nn.Module, _args: Any) -> None:
    if torch.compiler.is_compiling():
        _refuse_tracing(name)


@torch.compiler.disable(reason="the plan compiles")  # type: ignore[untyped-decorator]
def _refuse_tracing(name: str) -> None:
    raise stop(
        "PL489",
        f"torch.compile cannot trace `{name}`, which the plan splits by the vocabulary",
        help=_COMPILED,
    )


def _guard_saving(model: nn.Module) -> None:
    """Refuses `model.save_pretrained` of shards, which fails on their storage in transformers."""
    save: Any = getattr(model, "save_pretrained", None)
    if save is None:
        return

    @functools.wraps(save)
    def of_whole_tensors(*args: Any, state_dict: Any = None, **more: Any) -> Any:
        if state_dict is None and any(isinstance(p, DTensor) for p in model.parameters()):
            raise stop(
                "PL477",
                "`save_pretrained` would write this rank's shards",
                help="`run.export(folder)` writes the same files of the whole model, on all ranks",
            )
        return save(*args, state_dict=state_dict, **more)

    model.save_pretrained = of_whole_tensors
