"""Builds a diffusers model on the meta device and returns its facts.

The class is looked up by `_class_name` in the installed diffusers; code in a model's folder is
never run. diffusers is optional: `pip install 'planc[diffusers]'`.
"""

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planc.diagnostics.diagnostic import Sink, nearest, one_of
from planc.model.config import CLASS, Config
from planc.model.facts import Facts
from planc.model.module_table import facts_of
from planc.model.sources.huggingface import complete, refusals, version_of
from planc.model.sources.isolation import (
    import_bitsandbytes,
    import_models,
    isolate,
    quiet_imports,
)

_ESSENTIAL = ("num_layers", "num_attention_heads", "attention_head_dim")
"""Fields that a file must state: the class defaults would mean another model."""


def from_config(config: Config, sink: Sink) -> Facts | None:
    """The facts of the model that diffusers builds; None after PL603 (fields), PL606 (diffusers
    raises), PL675 (no diffusers) or PL676 (no such class).
    """
    if not config.valid(sink):
        return None
    kind = class_of(config, sink)
    if kind is None:
        return None
    taken = inspect.signature(kind.__init__).parameters.items()
    lacking = {
        field: f"{parameter.default}  (default of {kind.__name__})"
        for field, parameter in taken
        if field in _ESSENTIAL and field not in config.values
    }
    if not complete(config, lacking, "diffusers", sink):
        return None
    import torch

    with quiet(), refusals("diffusers", config, sink), isolate(), torch.device("meta"):
        model = build(kind, config.values)
        stated, name = frozenset(config.values), config.name
        facts = facts_of(model, config=model.config, config_name=name, stated_fields=stated)
        return replace(facts, config=normal(facts.config, facts.name))
    return None


def class_of(config: Config, sink: Sink) -> Any | None:
    """The diffusers class that a configuration names, or None after a finding."""
    name = config.values[CLASS]
    try:
        with quiet_imports():
            import diffusers

            import_bitsandbytes()
            import_models()
            from diffusers import ModelMixin
    except ImportError as error:
        message = f"{config.name} needs diffusers, which cannot be imported: {error}"
        help = "pip install 'planc[diffusers]'"
        sink.error("PL675", message, facts=[f"{CLASS} = {name}"], help=help)
        return None
    kind = None
    with quiet(), contextlib.suppress(ImportError, RuntimeError):  # it may need other packages
        kind = getattr(diffusers, name, None)
    if isinstance(kind, type) and issubclass(kind, ModelMixin):
        return kind
    known = [n for n in dir(diffusers) if n.endswith("Model") and not n.startswith("_")]
    close = nearest(name, known)
    advice = f"did you mean {one_of(close)}?" if close else "a newer diffusers may support it"
    if isinstance(kind, type):
        advice = "pass the folder of one of its models, such as its `transformer` folder"
    message = f"diffusers has no model class {name!r}"
    sink.error("PL676", message, facts=[f"{version_of('diffusers')}  ({config.name})"], help=advice)
    return None


def normal(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields that determine the model, without those on its origin."""
    return {CLASS: name, **{k: v for k, v in config.items() if not k.startswith("_")}}


def build(kind: Any, values: Mapping[str, Any]) -> Any:
    """Builds a model of a diffusers class from the fields of a configuration."""
    return kind.from_config({k: v for k, v in values.items() if not k.startswith("_")})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses what diffusers logs about a configuration; planc reports its own findings."""
    from diffusers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)
