"""Records one plain run of a small model: execution order, inputs and outputs of modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from planc.draft.roles import RunRecord

if TYPE_CHECKING:
    import torch

    from planc.model.small.user_model import ModelBuilder
    from planc.trial.trace import Trace


def run(builder: ModelBuilder) -> RunRecord | str:
    """The record of a run, or the reason why there is none."""
    import torch

    from planc.model.small.transformers_model import without_cache
    from planc.model.sources.huggingface import reason
    from planc.trial.trace import Trace

    model, trace, inputs = builder.build(0), Trace(), builder.sample()
    without_cache(model)
    output_counts: dict[str, int] = {}
    positional: dict[str, int] = {}

    def hook(name: str) -> Any:
        def keep(_module: Any, inputs: Any, output: Any) -> None:
            positional[name] = len(inputs)
            output_counts[name] = len(output) if isinstance(output, tuple) else 0

        return keep

    modules = dict(model.named_modules())
    for name, module in modules.items():
        module.register_forward_hook(hook(name))
    try:
        with trace.of(modules), torch.no_grad():
            model(**inputs)
    except Exception as error:
        at = f" in `{trace.running[-1]}`" if trace.running and trace.running[-1] else ""
        missing = f" ({builder.choice.missing})" if builder.choice.missing else ""
        return f"the small model does not run: {reason(error)}{at}{missing}"
    width = _width(trace)
    if width is None:
        states = "hidden states [batch, sequence, features]"
        return f"the small model does not run: no module takes {states}"
    given = {n: c.output.tensor.dim() for n, c in trace.calls.items() if c.output is not None}
    return RunRecord(
        dims=given,
        order=list(trace.calls),
        hidden=dict(_takers(trace, width, positional)),
        output_counts=output_counts,
        width=width,
    )


def _takers(trace: Trace, width: int, positional: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The modules that take hidden states, and the layouts of what they take."""
    for name, call in trace.calls.items():
        for which, value in call.inputs.items():
            if _hidden(value.tensor) and value.tensor.shape[-1] == width:
                yield name, _gathered(which, positional.get(name, 1))
                break


def _hidden(value: torch.Tensor) -> bool:
    """Whether the tensor can be hidden states: [batch, sequence, features]."""
    return bool(value.is_floating_point()) and value.dim() == 3


def _width(trace: Trace) -> int | None:
    """The width of hidden states: the one that most modules take."""
    calls = trace.calls.values()
    tensors = (seen.tensor for call in calls for seen in call.inputs.values())
    widths = Counter(tensor.shape[-1] for tensor in tensors if _hidden(tensor))
    return widths.most_common(1)[0][0] if widths else None


def _gathered(which: str, positional: int) -> str:
    """The argument of `input(...)` that gathers one input, by name or by position."""
    change = "shard(1) -> replicate"
    if not which.isdecimal():
        return f"{which} = {change}"
    places = ["null"] * max(positional, int(which) + 1)
    places[int(which)] = change
    return ", ".join(places)
