"""Finds tokens of a proxy model that see tokens that they must not: packed documents, and padding.

Attention isolates the documents of a row if positions restart at 0 and there is no mask, and
leaves out what a mask pads. Recurrent states and convolutions do neither, unless their code does so
or the plan resets them. A comparison with one process cannot show it, because that leaks too. The
proxy model runs twice, with other tokens in the first document, or in the padding, and no other
output may change.
"""

import inspect
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from planc.diagnostics.diagnostic import first_line
from planc.model import cache
from planc.proxy.shrink import shrink

_LIMIT = 1e-4
"""The least change, of the largest entry of the output, that counts."""
DOCUMENTS, PADDING = "documents", "padding"
_FORMAT = 3
_FIRST = 7  # tokens of the first document
_PADS = 3
_LOCK = threading.Lock()  # of the random state, where ranks are threads


def leaks(
    config: Mapping[str, Any], name: str, parts: Sequence[str] = ()
) -> dict[str, float] | str:
    """Measures the largest change of tokens that must not change, by `documents` and `padding`;
    empty if none changes. If planc cannot build or run a proxy model, the reason, which is not
    cached.

    Args:
        config: of the model, with its `model_type`.
        name: of its class, one of transformers.
        parts: the functions whose states are reset at documents; empty for none.
    """
    try:
        small = shrink(config, ranks=1).values
    except Exception as error:
        return f"the model cannot be shrunk: {first_line(error)}"
    values = json.loads(json.dumps({**small, "architectures": [name]}, default=str))
    key = cache.entry_name(f"leaks {_FORMAT}", *parts, config=values)
    known = cache.recall(key)
    if not isinstance(known, dict):
        if cache.missing():
            return cache.unproved_reason()
        try:
            with _LOCK:
                known = _measure(values, parts)
        except Exception as error:
            return f"the proxy model does not run: {first_line(error)}"
        cache.keep(key, known)
    return {str(kind): float(value) for kind, value in known.items()}


def _measure(values: dict[str, Any], parts: Sequence[str]) -> dict[str, float]:
    import torch

    from planc.model.randomness import random_numbers_kept
    from planc.proxy.input_search import BatchShape
    from planc.proxy.transformers_model import TransformersBuilder, without_cache
    from planc.runtime.standalone.documents import reset_states

    with random_numbers_kept(), torch.device("cpu"), torch.no_grad():
        builder = TransformersBuilder(values)
        model = builder.build(0).eval()
        without_cache(model)
        reset_states(model, *parts)
        ids, other = (
            BatchShape(rows=2, seed=seed, ends=8).text(builder.vocabulary)["input_ids"]
            for seed in (1, 2)
        )
        positions = torch.cat([torch.arange(_FIRST), torch.arange(ids.shape[1] - _FIRST)])
        mask = (torch.arange(ids.shape[1]) >= _PADS).long().expand(2, -1).contiguous()
        packed = {"position_ids": positions.expand(2, -1).contiguous()}
        changes = {
            DOCUMENTS: _change(model, ids, other, _FIRST, packed),
            PADDING: _change(model, ids, other, _PADS, {"attention_mask": mask}),
        }
    return {kind: change for kind, change in changes.items() if change > _LIMIT}


def _change(model: Any, ids: Any, other: Any, first: int, more: dict[str, Any]) -> float:
    """The largest change of the outputs behind the `first` tokens, which are replaced; 0 for a
    model whose forward does not have these arguments.
    """
    if not _accepts(model, "input_ids", *more):
        return 0.0
    changed = ids.clone()
    changed[:, :first] = other[:, :first]
    before, after = (_output(model(input_ids=tokens, **more)) for tokens in (ids, changed))
    scale = before[:, first:].abs().max().clamp(min=1e-12)
    return float((before - after)[:, first:].abs().max() / scale)


def _accepts(model: Any, *names: str) -> bool:
    parameters = inspect.signature(model.forward).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return any_name or set(names) <= parameters.keys()


def _output(output: Any) -> Any:
    logits = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits
