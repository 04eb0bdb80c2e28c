"""Refuses changes by a script or another library to a model under a plan, and names planc's own
way.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planc.ops.base import AxisRole
from planc.ops.contract import output_layout
from planc.ops.lora import BASE_LAYER
from planc.ops.lowered import Lowered
from planc.ops.styles import Shard
from planc.ops.tensor_parallel import Parallelize
from planc.runtime.known_verdict import KnownVerdict
from planc.runtime.preconditions import stop, warning
from planc.runtime.safeguards import leaking_rows, torch_calls
from planc.runtime.safeguards.block_attributes import write_to_blocks
from planc.runtime.safeguards.changes import AFTER_GRADIENTS, ModelChanges
from planc.runtime.safeguards.inputs import different_kinds
from planc.runtime.script_line import script_line
from planc.runtime.sharded_tensors import average_whole
from planc.runtime.standalone.documents import RESETS
from planc.runtime.standalone.fsdp import keep_class_names
from planc.runtime.standalone.shards import plain_name
from planc.runtime.standalone.towers import TOWER

_ADAPTERS = (
    "give `apply` the base model; the plan's `adapters` section adds LoRA, and "
    "`run.load_adapters` and `run.save_adapters` read and write peft's files"
)
_COMPILED = "remove torch.compile; the plan's `compile` section compiles each block"
_AVERAGE = (
    "an average is a list, `average = [p.detach().clone() for p in model.parameters()]`, which "
    "`torch._foreach_lerp_(average, [*model.parameters()], 1 - decay)` updates"
)


_EXPORT = "`run.export(folder)` writes the weights of the whole model, on all ranks"


def require_unwrapped(model: nn.Module) -> None:
    """Refuses a model that peft or torch.compile has changed, for the plan itself does that.

    Raises:
        PlanError: PL489; PL455, parameters have hooks.
    """
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise stop("PL489", "peft has put adapters into this model already", help=_ADAPTERS)
    if type(model).__name__ == "OptimizedModule" or model._compiled_call_impl is not None:
        text = "this model is compiled already, and a plan cannot change what is compiled"
        raise stop("PL489", text, help=_COMPILED)
    hooked = [n for n, p in model.named_parameters() if p._backward_hooks or _after_grad(p)]
    if hooked:
        raise stop(
            "PL455",
            f"{len(hooked)} parameters have hooks, `{hooked[0]}` is the first: the plan replaces "
            "parameters, and the hooks would be gone",
            *script_line("the plan is applied here"),
            help=f"after `planc.apply`, {AFTER_GRADIENTS}",
        )


def _after_grad(parameter: nn.Parameter) -> Any:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A model before its plan changes it; `modules` by name, also once they are wrapped."""

    model: nn.Module
    modules: Mapping[str, nn.Module]
    lowered: Lowered
    known: KnownVerdict | None
    compare: int

    def sequence_outputs(self) -> Iterable[tuple[str, Parallelize]]:
        """The modules whose output the plan shards along the sequence."""
        for op in self.lowered.styles:
            layout = output_layout(op.style)
            if isinstance(layout, Shard) and layout.dim in (1, -2):
                yield from ((name, op) for name in op.modules.names())


# Calls of the model ------------------------------------------------------------------------------

Check = Callable[[nn.Module, Any, Mapping[str, Any]], bool]
"""Raises where the arguments of a call are none that the plan can follow; whether later ones may
be."""


def _embeddings(applied: Applied) -> Check | None:
    """`inputs_embeds` skip the embedding, and with it the rule that shards its output, so that
    every rank would take the full sequence for its shard.
    """
    get = getattr(applied.model, "get_input_embeddings", None)
    try:
        embedding = get() if callable(get) else None
    except NotImplementedError:  # a model without one, such as a vision tower
        return None
    for name, op in applied.sequence_outputs():
        if applied.modules.get(name.removesuffix(f".{BASE_LAYER}")) is embedding:
            return partial(_not_embedded, name, op)
    return None


def _not_embedded(name: str, op: Parallelize, _model: nn.Module, _args: Any, kwargs: Any) -> bool:
    given = kwargs.get("inputs_embeds")
    if isinstance(given, Tensor) and not isinstance(given, DTensor):
        raise stop(
            "PL476",
            f"`inputs_embeds` skip `{name}`, whose output the plan shards along the sequence "
            f"({op.place})",
            help="pass `input_ids`; or shard the embeddings as this rule does: `DTensor.from_local("
            f'inputs_embeds, run.meshes["{op.axes[0]}"], [Replicate()]).redistribute(placements='
            "[Shard(1)])`",
        )
    return True


def _lengths(applied: Applied) -> Check | None:
    """Requires equal sequence shards if the plan is proved for these alone."""
    sizes = (a.size for a in applied.lowered.axes if a.role is AxisRole.TENSOR)
    ranks, known = math.lcm(*sizes), applied.known
    return (
        partial(_require_divisible, ranks)
        if known is not None and known.even and ranks > 1
        else None
    )


def _require_divisible(ranks: int, _model: nn.Module, args: Any, kwargs: Any) -> bool:
    found = (v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim() > 1)
    first = next(found, None)
    if first is not None and first.shape[1] % ranks:
        raise stop(
            "PL516",
            f"{first.shape[1]} tokens are not divisible by {ranks} ranks of the tensor axis, and "
            "the plan was proved to be wrong or to fail for such lengths",
            *script_line("the batch arrives here"),
            help=f"pad rows on the right to a multiple of {ranks}, with labels of -100; `planc "
            "check` says which rule is at fault",
        )
    return True


def _documents(applied: Applied) -> Check | None:
    """The check of each batch for packed documents whose states leak; None if it is not needed. If
    sequences are split, `run.batch` checks instead.
    """
    if (reset := applied.model.__dict__.get(RESETS)) is not None:
        reset.raised = leaking_rows.not_apart
    watched = applied.compare > 0 and not applied.lowered.split_axes(AxisRole.SEQUENCE)
    if not watched or leaking_rows.class_of(applied.model) is None:
        return None
    return lambda model, _args, kwargs: leaking_rows.refuse(model, kwargs)


def guard(applied: Applied) -> ModelChanges:
    """Refuses, from now on, calls of the model and of its methods that the plan cannot follow.

    Returns:
        The comparison of the model with its state now, which each forward pass makes.
    """
    checks = [check for make in (_embeddings, _lengths, _documents) if (check := make(applied))]
    model, lowered = applied.model, applied.lowered

    def before(model: nn.Module, args: Any, kwargs: Any) -> None:
        checks[:] = [check for check in checks if check(model, args, kwargs)]
        if not checks:
            handle.remove()

    if checks:
        handle = model.register_forward_pre_hook(before, with_kwargs=True)
    if (tower := model.__dict__.get(TOWER)) is not None:
        tower.raised = different_kinds
    if lowered.checkpoint_ops and "use_cache" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(_disable_cache, with_kwargs=True)
    if next(iter(applied.sequence_outputs()), None):
        model.register_forward_hook(_whole_states)
    keep_class_names(model)
    write_to_blocks(applied.modules[n] for op in lowered.checkpoint_ops for n in op.modules.names())
    average_whole(model, lowered.experts.ranks.name if lowered.experts else "")
    _guard_lookups(applied.modules, lowered)
    _guard_saving(model)
    _guard_loading(model)
    undone = {method: relied for op in lowered.ops for method, relied in op.UNDONE_BY.items()}
    for method, relied in (undone | _UNDONE).items():
        if hasattr(model, method):
            text = f"`{method}` after `planc.apply` would undo {relied}"
            help = f"call `{method}` before `planc.apply`, or change the plan"
            setattr(model, method, refuse_call("PL454", text, help))
    if lowered.fsdp_units:
        text = "FSDP units cannot be copied, which `AveragedModel` and `copy.deepcopy` do"
        model.__deepcopy__ = refuse_call("PL463", text, _AVERAGE)
    if lowered.fsdp_units or lowered.split_axes(AxisRole.TENSOR):
        text = "`pickle` and `torch.save(model)` would write this rank's shards"
        model.__reduce_ex__ = refuse_call("PL477", text, _EXPORT)
    torch_calls.cover(model)
    changes = ModelChanges(model, lowered)
    changes.watch()
    _guard_adapters(model)  # its hooks run before those of ModelChanges, which would say less
    return changes


def _disable_cache(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Blocks that are recomputed would enter the cache twice, so it is off, as in transformers."""
    if not torch.is_grad_enabled():
        return None
    wanted = kwargs.get("use_cache")
    if wanted is None:
        wanted = getattr(getattr(model, "config", None), "use_cache", False)
    told = torch.compiler.is_compiling() or "_planc_uncached" in model.__dict__
    if wanted and not told:
        model.__dict__["_planc_uncached"] = True
        warning(
            "PL462",
            "`use_cache` is off in passes with gradients: the plan recomputes blocks, and each "
            "would enter the cache twice",
            *script_line("the pass is here"),
            help="leave it out in training; passes under `torch.no_grad()` keep it",
        )
    return args, {**kwargs, "use_cache": False}


def _whole_states(_model: nn.Module, _args: Any, output: Any) -> None:
    """Gives a loss whole hidden states: the plan shards them along the sequence between blocks."""
    states = getattr(output, "hidden_states", None)
    if isinstance(states, tuple) and any(isinstance(each, DTensor) for each in states):
        output.hidden_states = tuple(
            each.full_tensor() if isinstance(each, DTensor) else each for each in states
        )


# Methods of the model ----------------------------------------------------------------------------

_UNDONE = {"resize_token_embeddings": "the shapes that the plan has split"}
"""A method of transformers' models that any plan forbids, and what it would undo, in words."""


def refuse_call(code: str, text: str, help: str) -> Callable[..., None]:
    def method(*_args: Any, **_more: Any) -> None:
        raise stop(code, text, *script_line("it is called here"), help=help)

    return method


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

    for module in (model, *model.children()):
        module.register_forward_pre_hook(refuse, prepend=True)


def _guard_lookups(modules: Mapping[str, nn.Module], lowered: Lowered) -> None:
    """Refuses to compile an embedding that is split by the vocabulary, as PL435 does in a plan:
    torch fails in the middle of it, with a message about fake tensors.
    """
    for op in lowered.styles:
        if op.splits_vocabulary:
            for name in op.modules.names():
                module = modules[name.removesuffix(f".{BASE_LAYER}")]
                module.register_forward_pre_hook(partial(_before_lookup, name), prepend=True)


def _before_lookup(name: str, _module: nn.Module, _args: Any) -> None:
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

    @wraps(save)
    def of_whole_tensors(*args: Any, state_dict: Any = None, **more: Any) -> Any:
        if state_dict is None and any(isinstance(p, DTensor) for p in model.parameters()):
            raise stop(
                "PL477",
                "`save_pretrained` would write this rank's shards",
                help=_EXPORT,
            )
        return save(*args, state_dict=state_dict, **more)

    model.save_pretrained = of_whole_tensors


def _guard_loading(model: nn.Module) -> None:
    """Refuses `load_state_dict` of full tensors: torch cannot copy them to shards."""
    for module in model.modules():
        if any(isinstance(p, DTensor) for p in module._parameters.values()):
            module.register_load_state_dict_pre_hook(_require_shards)


def _require_shards(
    module: nn.Module, state: Mapping[str, Any], prefix: str, *_others: Any
) -> None:
    for name, parameter in module._parameters.items():
        value = state.get(f"{prefix}{name}")
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
            continue
        if not isinstance(value, DTensor):
            raise stop(
                "PL437",
                f"`{plain_name(prefix + name)}` is loaded from a plain tensor "
                f"{list(value.shape)}, and this rank holds a shard of {list(parameter.shape)}",
                *script_line("it is loaded here"),
                help="load full tensors before `planc.apply`; or write them with "
                "`safetensors.torch.save_file(state, 'folder/model.safetensors')`, and call "
                "`run.load('folder')` on all ranks",
            )
