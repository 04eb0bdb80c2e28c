"""MODEL, as a user names it -> model facts. The only importer of transformers.

A configuration is read as JSON and checked by a schema; the model is built on the meta device, by
transformers' own code and never by code that a folder brings, and what was found is cached.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from planc.diagnostic import Sink, nearest, one_of
from planc.model import cache as store
from planc.model.config import Config, locate, read
from planc.model.facts import Facts
from planc.model.table import facts_of


def load(model: str, sink: Sink, *, allow_code: bool = False, cache: bool = True) -> Facts | None:
    """The facts of a model, or None after a finding (PL60x).

    Args:
        model: a folder with `config.json`, a JSON file, a shipped model's name, the name of a hub
            model that is in the local cache, or `package.module:factory`.
        sink: receives what is wrong.
        allow_code: whether `package.module:factory` may be imported and called.
        cache: whether facts may come from, and go to, the cache.
    """
    place = locate(model)
    if place is None:
        module, colon, factory = model.partition(":")
        if colon and factory.isidentifier() and "/" not in module:
            return _from_code(model, module, factory, sink, allow_code=allow_code)
        _nowhere(model, sink)
        return None
    config = read(place, sink)
    if config is None:
        return None
    key = store.key_of(config.values)
    if cache:
        facts = store.read(key, config_name=config.name, given=frozenset(config.values))
        if facts is not None:
            return facts
    facts = _build(config, sink)
    if facts is not None and cache:
        store.write(key, facts)
    return facts


def _nowhere(model: str, sink: Sink) -> None:
    known = shipped()
    close = nearest(model, known)
    told = f"did you mean {one_of(close)}?" if close else None
    if told is None:
        told = f"give a folder with config.json, or one of {one_of(known)}"
    sink.error("PL600", f"there is no model {model!r}", help=told)


def shipped() -> tuple[str, ...]:
    """The names of the models whose configurations ship with planc."""
    from planc.share import PLANS

    return tuple(sorted(p.stem for p in (PLANS / "models").glob("*.json")))


def _build(config: Config, sink: Sink) -> Facts | None:
    """Builds the model on meta with transformers; its own refusals are findings."""
    if not config.valid(sink):
        return None
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    family = config.values["model_type"]
    name = _class_name(config, sink)
    if name is None:
        return None
    try:
        values = {k: v for k, v in config.values.items() if k != "model_type"}
        resolved = transformers.AutoConfig.for_model(family, **values)
        with torch.device("meta"), _no_init():
            module = getattr(transformers, name)._from_config(resolved)
        module.tie_weights()
        return facts_of(
            module,
            config=_plain(resolved.to_dict()),
            config_name=config.name,
            given=frozenset(config.values),
        )
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        sink.error(
            "PL606",
            f"transformers cannot build {name} from {config.name}: {type(error).__name__}: {first}",
            facts=[f"transformers {transformers.__version__}"],
            help="the fields of the configuration contradict each other, or one is missing",
        )
        return None


def _no_init() -> contextlib.AbstractContextManager[Any]:
    """Initialising weights on meta does nothing, and takes a while."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers before 5.18
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = no_init_weights()
    return context


def _class_name(config: Config, sink: Sink) -> str | None:
    """The class to build: what `architectures` names, else the family's causal language model."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family = config.values["model_type"]
    fact = f"transformers {transformers.__version__}"
    if family not in CONFIG_MAPPING_NAMES:
        close = nearest(family, CONFIG_MAPPING_NAMES)
        told = f"did you mean {one_of(close)}?" if close else None
        if "auto_map" in config.values:
            told = "this model brings its own code, which planc does not run; give it as "
            told += "`package.module:factory` with --allow-code"
        message = f"transformers knows no model_type {family!r}"
        sink.error("PL604", message, facts=[f"{fact} ({config.name})"], help=told)
        return None
    named: Iterable[Any] = config.values.get("architectures") or ()
    for name in named:
        if isinstance(name, str) and name.isidentifier() and hasattr(transformers, name):
            return name
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family)
    name = causal if isinstance(causal, str) or causal is None else causal[0]
    if name is None:
        message = f"transformers has no causal language model for model_type {family!r}"
        told = "name the class in `architectures`"
        sink.error("PL605", message, facts=[f"{fact} ({config.name})"], help=told)
    return name


def _plain(values: Any) -> Any:
    """A configuration as JSON has it, so that it is the same from the cache and fresh."""
    return json.loads(json.dumps(values, default=str))


def _from_code(
    model: str, module: str, factory: str, sink: Sink, *, allow_code: bool
) -> Facts | None:
    """The model that a user's own code builds, on the meta device."""
    if not allow_code:
        sink.error(
            "PL607",
            f"{model!r} names Python code, which planc does not run unless it is told to",
            help="look at the code, then give --allow-code",
        )
        return None
    import torch

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        make = getattr(importlib.import_module(module), factory)
        with torch.device("meta"):
            built = make()
        if not isinstance(built, torch.nn.Module):
            raise TypeError(f"it gave a {type(built).__name__}, not an nn.Module")
        return facts_of(built, config=getattr(built, "config", None), config_name=model)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        sink.error("PL608", f"{model} failed: {type(error).__name__}: {first}")
        return None
