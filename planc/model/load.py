"""Resolves the MODEL argument of a command to model facts.

The configuration is read as JSON, validated by a schema and looked up in the cache. Only a
configuration that is not in the cache is built as a model, on the meta device.
"""

import re
from typing import Any

from planc.diagnostics.diagnostic import Sink, did_you_mean
from planc.files.resources import PLANS
from planc.model import cache as store
from planc.model.config import Config, config_of, is_diffusers, locate_config, read, shipped_models
from planc.model.facts import Facts


def load(model: str, sink: Sink, *, allow_code: bool = False, cache: bool = True) -> Facts | None:
    """The facts of a model, or None after a finding (PL60x).

    Args:
        model: a folder with `config.json`, a JSON file, the name of a shipped model, the name of a
            hub model that is in the local cache, or `package.module:factory`.
        allow_code: whether planc may run `package.module:factory`, or the code in a model's folder.
        cache: whether to read facts from, and write them to, the cache.
    """
    place = locate_config(model)
    if place is None or (model.endswith(".plan") and place.path.is_file()):
        module, colon, factory = model.partition(":")
        names = (factory, *module.split("."))
        if colon and names[-1] != "py" and all(n.isidentifier() for n in names):
            return _from_code(module, factory, sink, allow_code=allow_code)
        _not_found(model, sink)
        return None
    config = read(place, sink)
    if config is None:
        return None
    if {"format_version", "stages"} <= config.values.keys():
        hint = "name the model before it, also where two lowered plans are compared"
        sink.error("PL600", f"{model} is a lowered plan, not a model", help=hint)
        return None
    if allow_code and config.own_model:
        if _lacks_libraries(config.name, sink):
            return None
        from planc.model.sources.huggingface import from_folder

        return from_folder(config, sink)  # never cached: the key does not cover the code
    facts = _from_config(config, sink, cache=cache)
    if facts is not None:
        _report_ignored(config, facts, sink)
    return facts


def _from_config(config: Config, sink: Sink, *, cache: bool) -> Facts | None:
    key = store.key_of(config.values)
    if cache:
        facts = store.read(key, config_name=config.name, stated_fields=frozenset(config.values))
        if facts is not None:
            return facts
    if _lacks_libraries(config.name, sink):
        return None
    if is_diffusers(config.values):
        from planc.model.sources.diffusers import from_config
    else:
        from planc.model.sources.huggingface import from_config
    facts = from_config(config, sink)
    if facts is not None and cache:
        store.write(key, facts)
    return facts


def load_values(
    values: dict[str, Any], name: str, sink: Sink, *, folder: str = "", cache: bool = True
) -> Facts | None:
    """The facts of a configuration given as a dict, from the cache or built.

    Args:
        values: the fields.
        folder: of a model whose own code the user allowed, else empty.
        cache: as of `load`.
    """
    if folder:
        from planc.model.sources.huggingface import own_facts

        return own_facts(folder, values, name, sink)
    return _from_config(config_of(values, name), sink, cache=cache)


def _lacks_libraries(name: str, sink: Sink) -> bool:
    """Reports PL760 where torch or transformers, which build a model, is not installed."""
    if store.missing():
        message = f"the modules of {name} are unknown: {store.not_installed()}"
        sink.error("PL760", message, help=store.UNPACK)
    return bool(store.missing())


def _report_ignored(config: Config, facts: Facts, sink: Sink) -> None:
    """Reports what the configuration asks for and the facts do not contain (PL609, PL610)."""
    if config.own_code:
        sink.info(
            "PL609",
            f"{config.name} names custom code, which planc did not run: the facts are those of "
            f"{facts.name} of transformers",
            help="if you train with `trust_remote_code`, pass --allow-code",
        )
    if config.values.get("quantization_config"):
        sink.info(
            "PL610",
            f"planc did not read `quantization_config` of {config.name}: shapes and dtypes are "
            "those of the model before quantization",
            help="`load { dequantize = fp8 }`, or `mxfp4`, reads weights that are stored so",
        )


def _from_code(module: str, factory: str, sink: Sink, *, allow_code: bool) -> Facts | None:
    if allow_code:
        if _lacks_libraries(f"{module}:{factory}", sink):
            return None
        from planc.model.sources.huggingface import from_factory

        return from_factory(module, factory, sink)
    message = f"{module}:{factory} names Python code, which planc runs only with --allow-code"
    sink.error("PL607", message, help="review the code, then pass --allow-code")
    return None


def _not_found(model: str, sink: Sink) -> None:
    if model.endswith(".plan") or model in {path.stem for path in PLANS.glob("*.plan")}:
        hint = "name a model before the plan; `planc list models` has those that ship"
        sink.error("PL600", f"{model} is a plan, not a model", help=hint)
        return
    if file := re.fullmatch(r"(?:\./)?([\w/]+)\.py:(\w+)", model):
        named = f"{file[1].replace('/', '.')}:{file[2]}"
        hint = f"name the module, as `import` does, and not its file: `{named}`"
        sink.error("PL600", f"there is no model {model!r}", help=hint)
        return
    close = did_you_mean(model, shipped_models())
    advice = close or "pass a folder with config.json, or a name that `planc list models` has"
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model):
        hub = f"nothing is downloaded; for a model of the hub, `hf download {model} config.json`"
        advice = f"{close} If not: {hub}" if close else hub
    sink.error("PL600", f"there is no model {model!r}", help=advice)
