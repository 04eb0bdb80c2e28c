"""Compares a model with its state after `planc.apply`, before each forward pass.

A plan is proved for the modules, parameters, functions, hooks and configuration that the model had
when the plan was applied. A script can change them later by plain assignments, which call nothing
of planc. A change is adopted if the plan still holds; otherwise the next pass raises.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planc.compat.fakes import FakeTensor
from planc.compat.recompute import CheckpointWrapper
from planc.compat.trees import _pytree
from planc.diagnostics.diagnostic import PlanError
from planc.ops.base import AxisRole
from planc.ops.lowered import Lowered
from planc.ops.styles import Colwise, Rowwise
from planc.runtime.preconditions import stop
from planc.runtime.script_line import script_line
from planc.runtime.standalone.pipeline import Inactive, stages_of
from planc.runtime.standalone.shards import WRAPPERS, fsdp_units, groups_of, plain_name

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_EARLIER = "make the change before `planc.apply`, where the proof includes it"
_VALUES = (
    "FSDP computes with its own shards: change the parameters in place under `torch.no_grad()`, "
    "or load others with `run.load`"
)
AFTER_GRADIENTS = (
    "`register_post_accumulate_grad_hook` is called with the parameter after its gradient is "
    "reduced; `parameter.grad` is this rank's shard"
)
_NO_GRADIENT = "the plan does not reduce its gradient, so the ranks would diverge"

Hook = Callable[..., Any]


def _change_error(code: str, text: str, help: str = _EARLIER) -> PlanError:
    return stop(code, text, *script_line("this is the first pass after the change"), help=help)


@dataclass(slots=True)
class _Record:
    """A module at the last comparison.

    Args:
        children, parameters: by name. They keep the objects alive, so that ids remain unique.
        hooks: the keys of its hooks of all kinds.
        state: the ids of all this.
    """

    name: str
    module: nn.Module
    children: dict[str, nn.Module | None]
    parameters: dict[str, nn.Parameter | None]
    hooks: set[int]
    forward: Any
    state: tuple[Any, ...]

    @classmethod
    def from_module(cls, name: str, module: nn.Module) -> "_Record":
        return cls(
            name,
            module,
            {name: _unwrap(child) for name, child in module._modules.items()},
            dict(module._parameters),
            {key for kind in _HOOKS for key in getattr(module, kind)},
            module.__dict__.get("forward"),
            _state(module),
        )

    def path(self, name: str) -> str:
        return plain_name(f"{self.name}.{name}".strip("."))


def _state(module: nn.Module) -> tuple[Any, ...]:
    fields = module.__dict__
    return (
        type(module),
        id(fields.get("forward")),
        *map(id, fields["_modules"].values()),
        None,  # separates children from parameters
        *map(id, fields["_parameters"].values()),
        *fields["_forward_pre_hooks"],
        *fields["_forward_hooks"],
        *fields["_backward_pre_hooks"],
        *fields["_backward_hooks"],
    )


def _unwrap(module: nn.Module | None) -> nn.Module | None:
    """The module inside wrappers that leave its function unchanged, or itself."""
    while module is not None:
        if isinstance(module, Inactive):
            inside = module.__dict__["module"]
        elif isinstance(module, CheckpointWrapper) or "_orig_mod" in module._modules:
            inside = next(m for n in WRAPPERS if (m := module._modules.get(n)) is not None)
        else:
            break
        module = inside
    return module


class ModelChanges:
    """Finds the changes that a script makes to a model after its plan was applied.

    Args:
        model: a model that a plan was applied to.
        lowered: the plan.
    """

    def __init__(self, model: nn.Module, lowered: Lowered) -> None:
        self._model = model
        self._sharded_tokens = bool(lowered.split_axes(AxisRole.SEQUENCE))
        layers = AxisRole.TENSOR, AxisRole.SEQUENCE, AxisRole.STAGE
        self._splits = bool(lowered.split_axes(*layers))
        stages = stages_of(model)
        self._absent = set(stages.absent) if stages else set()
        self._partial = _sharded_features(model, lowered)
        named = model.named_modules()
        self._records = {module: _Record.from_module(name, module) for name, module in named}
        self._kinds = {type(module): type(module).forward for module in self._records}
        self._fields = [*_relied_fields(model, lowered)]
        units = () if lowered.backend else fsdp_units(model)
        groups = {id(group): group for unit in units for group in groups_of(unit)}
        shards = [each for group in groups.values() for each in group.fsdp_params]
        self._shards = [(each, _local(each)) for each in shards]
        self._shard_at = {place: each for each in shards for place in _places(each)}
        self._replaces_parameters = bool(lowered.backend)
        self._running = False
        self._replacements: dict[int, tuple[Tensor, Tensor]] = {}
        """In one comparison, parameters and those in their place, by the id of the former."""

    def watch(self) -> None:
        """Compares before each forward pass of the model, and of its children by themselves."""
        model = self._model
        model.register_forward_pre_hook(self._before, prepend=True)
        model.register_forward_hook(self._after, always_call=True)
        for child in model.children():
            child.register_forward_pre_hook(self._before_child, prepend=True)
        for record in (self._records[model], *map(self._records.get, model.children())):
            assert record is not None
            self._update(record)

    def _before(self, _model: nn.Module, _args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.require()
            self._running = True

    def _after(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._running = False

    def _before_child(self, _child: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or self._running:
            return
        if torch._C._current_graph_task_id() == -1:  # a backward pass recomputes children
            self.require()

    def require(self) -> None:
        """Compares the model with its state after `planc.apply`, or after the last accepted change.

        Raises:
            PlanError: PL425, modules or parameters; PL454, hooks, functions or the configuration;
                PL455, hooks on shards.
        """
        changed = [r for r in self._records.values() if _state(r.module) != r.state]
        self._replacements.clear()
        for record in changed:
            self._require_children(record)
            self._require_parameters(record)
            self._require_forward(record)
            self._wrap_hooks(record)
            self._update(record)
        self._require_shards()
        for kind, forward in self._kinds.items() if self._splits else ():
            if kind.forward is not forward:
                raise _change_error("PL454", f"`{kind.__name__}.forward` was replaced")
        for config, name, value in self._fields:
            if (now := getattr(config, name, None)) != value:
                text = f"`config.{name}` was set to {now!r}, and the plan relies on {value!r}"
                raise _change_error("PL454", text)

    def _update(self, record: _Record) -> None:
        self._records[record.module] = _Record.from_module(record.name, record.module)

    # Modules and functions -----------------------------------------------------------------------

    def _require_children(self, record: _Record) -> None:
        now = {name: _unwrap(child) for name, child in record.module._modules.items()}
        for name in {**record.children, **now}:
            before, after = record.children.get(name), now.get(name)
            trains = after is not None and any(p.requires_grad for p in after.parameters())
            if before is after or not (trains or _has_parameters(before)):
                continue
            if before is None:
                raise _change_error("PL425", f"`{record.path(name)}` was added, and {_NO_GRADIENT}")
            verb = "removed" if after is None else "replaced by another module"
            raise _change_error("PL425", f"`{record.path(name)}` was {verb}")

    def _require_forward(self, record: _Record) -> None:
        forward = record.module.__dict__.get("forward")
        same = forward is record.forward and record.state[0] is type(record.module)
        same = same or record.module is self._model or _of_planc(forward)
        if self._splits and not same:
            raise _change_error("PL454", f"the forward of `{plain_name(record.name)}` was replaced")

    # Parameters ----------------------------------------------------------------------------------

    def _require_parameters(self, record: _Record) -> None:
        if self._replaces_parameters:
            return
        now = record.module._parameters
        for name in {**record.parameters, **now}:
            before, after = record.parameters.get(name), now.get(name)
            if before is not after:
                shard = self._shard_at.get((record.module, name))
                self._require_parameter(record.path(name), before, after, shard)

    def _require_parameter(
        self, path: str, before: Tensor | None, after: Tensor | None, shard: Any
    ) -> None:
        if after is None:
            raise _change_error("PL425", f"the parameter `{path}` was removed")
        if before is None:
            if after.requires_grad:
                raise _change_error("PL425", f"`{path}` was added, and {_NO_GRADIENT}")
            return
        if shard is not None and any(after is p for p in _fsdp_tensors(shard)):
            return
        known = (p for r in self._records.values() for p in r.parameters.values())
        _, replacement = self._replacements.get(id(before), (None, None))
        if replacement is not after and any(p is after for p in known):  # else both stay tied
            raise _change_error("PL425", f"`{path}` was tied to another parameter")
        if not _alike(before, after):
            raise _change_error(
                "PL425", f"`{path}` was replaced by a tensor of another layout", _VALUES
            )
        if shard is not None:
            if not isinstance(after, nn.Parameter):
                raise _change_error(
                    "PL425", f"`{path}` has other values in this call alone", _VALUES
                )
            shard.reset_sharded_param()
        self._replacements[id(before)] = before, after

    def _require_shards(self) -> None:
        """Makes FSDP compute with the local tensors of its parameters, as torch does where a model
        is moved or loaded; refuses hooks that FSDP never calls.
        """
        for index, (shard, local) in enumerate(self._shards):
            parameter = shard.sharded_param
            module, name = next(_places(shard))
            if _local(shard) is not local and module._parameters.get(name) is parameter:
                shard.reset_sharded_param()
                self._shards[index] = (shard, _local(shard))
            if parameter._backward_hooks and torch.is_grad_enabled():
                raise _change_error(
                    "PL455",
                    f"FSDP never calls the hook of `{plain_name(shard._param_fqn or 'a parameter')}"
                    "`: autograd computes the gradients of unsharded parameters",
                    AFTER_GRADIENTS,
                )

    # Hooks ---------------------------------------------------------------------------------------

    def _wrap_hooks(self, record: _Record) -> None:
        """Restricts new hooks: a pipeline rank calls none of modules that it does not compute, and
        a hook that gets a part of the values must not change them.
        """
        if record.module in self._absent:
            restrict: Callable[[Hook], Hook] = _not_called
        elif self._sharded_tokens:
            restrict = partial(partial, _observe, record.path(""), "the tokens", False)
        elif record.module in self._partial:
            restrict = partial(partial, _observe, record.path(""), "the features", True)
        else:
            return
        for kind in _HOOKS:
            hooks = getattr(record.module, kind)
            for key in [key for key in hooks if key not in record.hooks]:
                if not _of_a_library(hooks[key]):
                    hooks[key] = restrict(hooks[key])


def _not_called(_hook: Hook) -> Hook:
    return lambda *_args, **_kwargs: None


def _observe(
    path: str, what: str, global_values: bool, hook: Hook, *args: Any, **kwargs: Any
) -> Any:
    """Calls a hook, and refuses a change of the values that it gets.

    Args:
        what: the dim that ranks shard, for the message.
        global_values: whether a DTensor, which has the values of all ranks, may be changed.
    """
    tensors = [t for t in _pytree.tree_leaves((args[1:], kwargs)) if isinstance(t, Tensor)]
    versions = [0 if t.is_inference() else t._version for t in tensors]
    result = hook(*args, **kwargs)
    if result is None and versions == [0 if t.is_inference() else t._version for t in tensors]:
        return None
    if global_values and any(isinstance(t, DTensor) for t in tensors):
        return result
    raise stop(
        "PL454",
        f"a hook of `{path}` changes values, and each rank calls it with a part of {what}",
        *script_line("this pass calls the hook"),
        help="register it before `planc.apply`, where the proof includes it; hooks that return "
        "None may read values",
    )


def _of_a_library(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).split(".")[0] in ("planc", "torch")


def _of_planc(forward: Any) -> bool:
    """Whether planc has put a function into its place: documents replace some in the first pass."""
    function = getattr(forward, "__func__", forward)
    while function is not None:
        if str(getattr(function, "__globals__", {}).get("__name__", "")).startswith("planc."):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


# What a plan relies on ---------------------------------------------------------------------------


def _relied_fields(model: nn.Module, lowered: Lowered) -> Iterator[tuple[Any, str, Any]]:
    """The configuration fields that a plan sets or relies on, with their values."""
    names = ["_experts_implementation"] if lowered.split_axes(AxisRole.TENSOR) else []
    names += ["_attn_implementation"] if lowered.split_axes(AxisRole.SEQUENCE) else []
    names += ["output_router_logits"] if lowered.pipeline else []
    configs = {id(c): c for m in model.modules() if (c := m.__dict__.get("config")) is not None}
    for config in configs.values():
        for name in names:
            if hasattr(config, name):
                yield config, name, getattr(config, name)


def _sharded_features(model: nn.Module, lowered: Lowered) -> set[nn.Module]:
    """The modules between a column-wise and a row-wise layer of one parent: their outputs are
    local tensors with a part of the features.
    """
    parents: dict[type, set[str]] = {Colwise: set(), Rowwise: set()}
    rowwise: set[str] = set()
    for op in lowered.styles:
        for kind, names in parents.items():
            if isinstance(op.style, kind):
                names |= {name.rpartition(".")[0] for name in op.modules.names()}
                rowwise |= set(op.modules.names()) if kind is Rowwise else set()
    modules = {plain_name(name): module for name, module in model.named_modules()}
    children = (
        (f"{parent}.{name}", child)
        for parent in parents[Colwise] & parents[Rowwise]
        if parent and parent in modules
        for name, child in modules[parent].named_children()
    )
    return {child for name, child in children if name not in rowwise}


def _places(shard: Any) -> Iterator[tuple[nn.Module, str]]:
    """The modules and names under which a model has a parameter of an FSDP unit."""
    info = shard._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names, strict=True)


def _fsdp_tensors(shard: Any) -> tuple[Any, Any]:
    """The tensors that FSDP itself lists in a module, between passes or between microbatches."""
    return shard.sharded_param, getattr(shard, "_unsharded_param", None)


def _local(shard: Any) -> Tensor | None:
    return getattr(shard.sharded_param, "_local_tensor", None)


def _has_parameters(module: nn.Module | None) -> bool:
    return module is not None and next(module.parameters(), None) is not None


def _alike(before: Tensor, after: Tensor) -> bool:
    """Whether two parameters have one shape and one placement."""
    if isinstance(before, DTensor) and isinstance(after, DTensor):
        layouts = [(t.device_mesh, t.placements) for t in (before, after)]
        return before.shape == after.shape and layouts[0] == layouts[1]
    # `planc measure` gives a model fake tensors
    same = type(before) is type(after) or isinstance(after, FakeTensor)
    return same and before.shape == after.shape
