"""A lowered plan -> a `DistributedConfig` of transformers, where that can say it.

transformers merges the plans of a configuration into those that it ships for the model, so rules of
the shipped plan that the lowered plan lacks are written as `replicate`.
"""

import json
from collections.abc import Iterator, Mapping
from pprint import pformat
from typing import Any, cast

from planc.diagnostics.diagnostic import Sink
from planc.emit.tp_plan import rules
from planc.model.facts import generic
from planc.model.sources.huggingface import defaults
from planc.ops.base import AxisRole
from planc.ops.expert_parallel import DispatchExperts
from planc.ops.fsdp import FullyShard
from planc.ops.lowered import Lowered

_BESIDE = frozenset({"tensor", "tie", "load", "configure", "random", "draws", "fsdp", "experts"})
"""Operations that a configuration says, or that do not change what is computed."""
_MIXED = {("bfloat16", "float32"): True, (None, None): False}
"""`fsdp_mixed_precision` by the dtypes of parameters and of gradients."""


def render(lowered: Lowered, sink: Sink) -> str | None:
    """The configuration as JSON, or None after an error.

    Args:
        lowered: the plan, for one model on one mesh.
        sink: receives PL739, an error for a rule that no style of transformers is, and PL767 for
            everything that a `DistributedConfig` has no word for.
    """
    config = _config(lowered, sink)
    return None if config is None else json.dumps(config, indent=2) + "\n"


def render_class(lowered: Lowered, sink: Sink) -> str | None:
    """The plans as attributes of a configuration class, relative to its base model; arguments as
    of `render`.
    """
    config = _config(lowered, sink)
    if config is None:
        return None
    lines = []
    for kind in ("tp_plan", "ep_plan", "fsdp_plan"):
        if plan := config.get(kind):
            inside = {n.removeprefix("model."): s for n, s in plan.items() if n != "lm_head"}
            text = pformat(inside, indent=4, width=100, sort_dicts=False)
            lines.append(f"base_model_{kind} = {{\n {text[1:-1]},\n}}")
    return "\n".join(lines).replace("'", '"') + "\n"


def _config(lowered: Lowered, sink: Sink) -> dict[str, Any] | None:
    config = _sizes(lowered, sink)
    tensor: dict[str, str] = {}
    for name, style in rules(lowered, sink).items():
        # transformers has no rules of single layers
        if tensor.setdefault(generic(name), style) != style:
            message = f"a `DistributedConfig` has one style for all layers: see `{generic(name)}`"
            sink.error("PL739", message)
    if sink.has_errors:
        return None
    if config.get("tp_size", 1) > 1:
        config["tp_plan"] = _complete(tensor, lowered.family)
    config |= _experts(lowered, sink)
    if lowered.fsdp_units and config.get("fsdp_size", 1) * config.get("dp_replicate_size", 1) > 1:
        config |= _fsdp(lowered.fsdp_units, lowered, sink)
    # the divisor that transformers itself sets for experts
    mean = lowered.axis_size(*lowered.averaged_axes)
    others = {op.WORD: op.origin for op in lowered.ops if getattr(op, "factor", None) != mean}
    for word, origin in others.items():
        if word not in _BESIDE:
            sink.warning("PL767", f"a `DistributedConfig` has no word for `{word}`", origin)
    return config


def _sizes(lowered: Lowered, sink: Sink) -> dict[str, Any]:
    """The sizes of a configuration by their names, without sizes of 1."""
    names = {AxisRole.TENSOR: "tp_size", AxisRole.STAGE: "pp_size"}
    replicated = {axis for op in lowered.fsdp_units for axis in op.replicate}
    data = {True: "dp_replicate_size", False: "fsdp_size"}
    sizes: dict[str, Any] = {}
    for axis in lowered.axes:
        if axis.size == 1:
            continue
        name = names.get(axis.role)
        if axis.role == AxisRole.DATA:
            name = data[axis.name in replicated]
        if name is None:
            message = f"a `DistributedConfig` has no size for the axis `{axis.name}`"
            sink.warning("PL767", message, axis.origin, help=f"--set {axis.name}=1")
        else:
            sizes[name] = sizes.get(name, 1) * axis.size
    return sizes


def _complete(tensor: Mapping[str, str], family: str) -> dict[str, str]:
    """The rules, with `replicate` for modules that only the shipped plan splits."""
    shipped, _ = defaults(family)
    prefix = _prefix(tensor, shipped)
    others = {f"{prefix}{name}": "replicate" for name in shipped}
    others[f"{prefix}embed_tokens"] = "replicate"  # else transformers splits the vocabulary
    others["lm_head"] = "replicate"
    return {**{n: s for n, s in others.items() if n not in tensor}, **tensor}


def _prefix(tensor: Mapping[str, str], shipped: Mapping[str, str]) -> str:
    """The names from the full model to its base model: `model.`."""
    ends = (
        name.removesuffix(key) for name in tensor for key in shipped if name.endswith(f".{key}")
    )
    return next(ends, "model.")


def _experts(lowered: Lowered, sink: Sink) -> dict[str, Any]:
    """The size, the plan and the implementation of expert parallelism."""
    ops = _dispatches(lowered)
    if not ops or lowered.experts is None or lowered.experts.ranks.size == 1:
        return {}
    if lowered.experts.inside:
        message = "a `DistributedConfig` has no tensor parallelism inside of experts"
        sink.warning("PL767", message, ops[0].origin, help="--set etp=1")
    plan = {}
    for op in ops:
        if op.chunks > 1:
            message = "a `DistributedConfig` has no chunks of an all-to-all"
            sink.warning("PL767", message, op.origin)
        for name in dict.fromkeys(map(generic, op.modules.names())):
            for parameter in op.modules.module.parameters:
                plan[f"{name}.{parameter.name}"] = "grouped_gemm"
            plan[name] = "ep_dispatch_experts"
    size = lowered.experts.ranks.size
    return {"ep_size": size, "ep_plan": plan, "ep_implementation": str(ops[0].dispatch)}


def _dispatches(lowered: Lowered) -> list[DispatchExperts]:
    """The operations that divide experts over ranks."""
    return [cast(DispatchExperts, op) for op in lowered.ops if op.WORD == DispatchExperts.WORD]


def _fsdp(units: list[FullyShard], lowered: Lowered, sink: Sink) -> dict[str, Any]:
    """The plan of FSDP units but for the root, which transformers always has."""
    plan: dict[str, str] = {}
    experts = {name for op in _dispatches(lowered) for name in op.modules.names()}
    for op in units:
        for text in _lacking(op):
            sink.warning("PL767", f"a `DistributedConfig` has no {text}", op.origin)
        style = "free_full_weight" if op.reshard else "keep_full_weight"
        for name in (name for modules in op.members for name in modules.names()):
            # all layers have one style: that of the first, which the last may not have
            if name and name not in experts:
                plan.setdefault(generic(name), style)
    first = units[0]
    return {
        "fsdp_plan": plan,
        "fsdp_mixed_precision": _MIXED.get((first.param, first.reduce), False),
        "fsdp_cpu_offload": first.offload,
    }


def _lacking(op: FullyShard) -> Iterator[str]:
    """Yields properties of a unit that a configuration does not have."""
    if op.group and (op.reshard or len(op.members) > 2):  # it groups the final norm and the head
        yield "units of several modules"
    if type(op.reshard) is int:
        yield f"units that reshard to {op.reshard} ranks"
    if (op.param, op.reduce) not in _MIXED or op.output:
        yield "dtypes but bfloat16 for parameters and float32 for gradients"
    if op.ignored or op.spreads:
        yield "modules outside of units"
