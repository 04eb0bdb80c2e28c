"""What the tokens of a small model see that they must not: packed documents, and padding.

Attention tells the documents of a row apart where positions begin again and there is no mask, and
leaves out what a mask pads. States and convolutions that go from token to token do neither, unless
their code says so or the plan resets them. A single process shows it, so no comparison with one
does: the small model runs twice, with other tokens in the first document, or in the padding, and
nothing else may move.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from planc.model import cache
from planc.model.small.shrink import shrink

_LIMIT = 1e-4
"""The least change, of the largest entry of the output, that counts."""
DOCUMENTS, PADDING = "documents", "padding"
_FORMAT = 2
_FIRST = 7  # tokens of the first document
_PADS = 3
_LOCK = threading.Lock()  # of the random state, where ranks are threads


def leaks(config: Mapping[str, Any], name: str, parts: Sequence[str] = ()) -> dict[str, float]:
    """How far the other tokens of a small model move, by `documents` and `padding`; empty where
    nothing moves, and where planc cannot build or run a small model.

    Args:
        config: of the model, with its `model_type`.
        name: of its class, one of transformers.
        parts: of `ResetStates`, which the model is run with; empty for none.
    """
    try:
        made = shrink(config, ranks=1).values
    except Exception:
        return {}
    values = json.loads(json.dumps({**made, "architectures": [name]}, default=str))
    key = cache.entry_name(f"leaks {_FORMAT}", *parts, config=values)
    kept = cache.recall(key)
    if not isinstance(kept, dict):
        if cache.missing():
            return {}
        with _LOCK:
            kept = _measured(values, parts)
        cache.keep(key, kept)
    return {str(kind): float(value) for kind, value in kept.items()}


def _measured(values: dict[str, Any], parts: Sequence[str]) -> dict[str, float]:
    import torch

    from planc.model.randomness import random_numbers_kept
    from planc.model.small.input_search import BatchShape
    from planc.model.small.transformers_model import TransformersBuilder, without_cache
    from planc.runtime.standalone.documents import reset_states

    try:
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
            kinds = {
                DOCUMENTS: _moved(model, ids, other, _FIRST, packed),
                PADDING: _moved(model, ids, other, _PADS, {"attention_mask": mask}),
            }
    except Exception:  # there is no such model, or it takes other inputs
        return {}
    return {kind: found for kind, found in kinds.items() if found > _LIMIT}


def _moved(model: Any, ids: Any, other: Any, first: int, given: dict[str, Any]) -> float:
    """The largest change of the outputs behind the `first` tokens, which become others."""
    changed = ids.clone()
    changed[:, :first] = other[:, :first]
    try:
        one, two = (_output(model(input_ids=some, **given)) for some in (ids, changed))
    except Exception:  # the model does not take such inputs: a run says so itself
        return 0.0
    scale = one[:, first:].abs().max().clamp(min=1e-12)
    return float((one - two)[:, first:].abs().max() / scale)


def _output(output: Any) -> Any:
    logits = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits
