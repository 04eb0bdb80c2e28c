"""Builds a transformers model on the meta device and returns its facts.

Code in a model's folder (`auto_map`) runs only if the user allows it, and only from that folder.
"""

import contextlib
import gc
import importlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from planc.diagnostics.diagnostic import Sink, did_you_mean, one_of
from planc.model.config import Config, buildable
from planc.model.facts import Facts
from planc.model.module_table import facts_of
from planc.model.own_code import own_code
from planc.model.passed_arguments import name_passed_arguments
from planc.model.sources.isolation import import_models, isolate, without_kernels

_ESSENTIAL = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Fields that a file must state: the family defaults would mean another model."""


def from_config(config: Config, sink: Sink) -> Facts | None:
    """The facts of the model that transformers builds; None after PL603 (fields), PL604 (family),
    PL605 (class) or PL606 (transformers raises).
    """
    if not config.valid(sink):
        return None
    with importing():  # the modeling file imports most of torch
        prepared = prepare(config, sink) if _check_known(config, sink) else None
    if prepared is None:
        return None
    cls, part = prepared
    with quiet(), refusals("transformers", config, sink), isolate():
        model = _on_meta(lambda: cls._from_config(part))
        stated_fields = frozenset(config.values)
        return facts_of(
            model, config=model.config, config_name=config.name, stated_fields=stated_fields
        )
    return None


def defaults(family: str) -> tuple[Mapping[str, str], dict[str, Any]]:
    """transformers' own tp_plan of a family, and the values of its configuration; else empty."""
    with contextlib.suppress(ImportError, KeyError):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        cls = CONFIG_MAPPING[family]
        return getattr(cls, "base_model_tp_plan", None) or {}, cls().to_dict()
    return {}, {}


def prepare(config: Config, sink: Sink) -> tuple[Any, Any] | None:
    """The class to build and its configuration object, or None after a finding."""
    with quiet(), refusals("transformers", config, sink), isolate():
        # the file's fields over the family's defaults, as transformers' configuration object
        from transformers import AutoConfig

        values = {k: v for k, v in without_kernels(config.values).items() if k != "model_type"}
        resolved = AutoConfig.for_model(config.values["model_type"], **values)
        prepared = _class_of(config, resolved)
        if prepared is None:
            family = config.values["model_type"]
            named = config.values.get("architectures") or ()
            message = f"transformers has no causal language model for model_type {family!r}"
            if named:
                message += f", and {one_of(named)} is not one of its classes for that family"
            advice = f"name a class of {family} in `architectures`"
            facts = [f"{version_of('transformers')}  ({config.name})"]
            sink.error("PL605", message, facts=facts, help=advice)
            return None
        lacking = dict(_left_to_defaults(config, resolved))
        return prepared if complete(config, lacking, "transformers", sink) else None
    return None


@contextlib.contextmanager
def refusals(library: str, config: Config, sink: Sink) -> Iterator[None]:
    """Reports an exception that a library raises for a configuration (PL606)."""
    try:
        yield
    except Exception as error:
        message = f"{library} cannot build a model from {config.name}: {reason(error)}"
        help = "the fields of the configuration contradict each other, or one is wrong"
        if isinstance(error, ImportError):
            help = "install what is missing, or a version that fits the torch of this environment"
        sink.error("PL606", message, facts=[version_of(library)], help=help)


def from_folder(config: Config, sink: Sink) -> Facts | None:
    """The facts of a model with an `auto_map`, whose code is run; None after PL603 (fields), PL608
    (the code raises) or PL609 (the code is elsewhere).
    """
    if not config.valid(sink):
        return None
    if config.path.name != "config.json" or any("--" in r for r in config.own_code.values()):
        sink.error(
            "PL609",
            f"the code that {config.name} names is not in its folder, and planc downloads none",
            facts=[f"auto_map = {config.own_code}  ({config.name})"],
            help="download the model with its code, and pass that folder",
        )
        return None
    folder = str(config.path.parent.resolve())
    facts = own_facts(folder, None, config.name, sink)
    return facts and replace(facts, code=folder, stated_fields=frozenset(config.values))


def own_facts(folder: str, values: Mapping[str, Any] | None, name: str, sink: Sink) -> Facts | None:
    """The facts of the class that a model's folder (absolute) defines, for the folder's
    configuration or other values; None after PL608.
    """
    with importing():
        import transformers  # noqa: F401
    with quiet():
        try:
            cls, part = prepare_own(folder, values)
            model = _on_meta(lambda: cls._from_config(part))
            facts = facts_of(model, config=model.config, config_name=name)
            return replace(facts, own_code=own_code(model))
        except (Exception, SystemExit) as error:
            message = f"the code that {name} names failed: {reason(error)}"
            sink.error("PL608", message, help="planc runs it as `trust_remote_code` would")
            return None


def prepare_own(folder: str, values: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """The class that a model's folder defines, and its configuration object. Runs the code.

    Args:
        folder: an absolute path; its `config.json` has an `auto_map`.
        values: the fields of the configuration object; None for those of the folder.

    Raises:
        Exception: whatever transformers or the code raises.
    """
    from transformers import AutoConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    part = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=True)
    config = Config(name="", path=Path(folder), values=part.to_dict())
    reference = config.own_code[config.own_model]
    cls = get_class_from_dynamic_module(reference, folder, local_files_only=True)
    if values is not None:
        part = type(part)(**{k: v for k, v in values.items() if k != "model_type"})
    return cls, part


def from_factory(module: str, factory: str, sink: Sink) -> Facts | None:
    """The facts of the model that `factory` of `module` builds on meta; None after PL608."""
    with importing():
        import torch
    name = f"{module}:{factory}"
    try:
        model = _on_meta(user_factory(name))
        if not isinstance(model, torch.nn.Module):
            kind = type(model).__name__
            raise TypeError(f"it returned an object of type {kind}, not an nn.Module")
        name_passed_arguments(model)
        facts = facts_of(model, config=getattr(model, "config", None), config_name=name)
        alone = not buildable(facts.config)
        return replace(facts, code=name, own_code=own_code(model, alone=alone))
    except (Exception, SystemExit) as error:
        advice = "it is called without arguments, on the meta device, and returns an nn.Module"
        sink.error("PL608", f"{name} failed: {reason(error)}", help=advice)
        return None


def user_factory(code: str) -> Callable[[], Any]:
    """The object that `package.module:factory` names, which the user allows planc to run.

    Raises:
        Exception: whatever importing the module raises; the current folder is searched first.
    """
    module, _, factory = code.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    function: Callable[[], Any] = getattr(importlib.import_module(module), factory)
    return function


def reason(error: BaseException) -> str:
    """An exception on one line; a long message keeps its beginning and its end."""
    text = re.sub(r"\s+", " ", str(error)).strip()
    text = text if len(text) <= 300 else f"{text[:200]} ... {text[-90:]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disables garbage collection while torch is imported.

    The import creates millions of objects that are never freed; collecting among them takes a
    third of the time, and so does the collection at exit unless they are frozen. A no-op if
    torch was imported before: its objects are then the user's to freeze.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses what transformers logs about a configuration; planc reports its own findings."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def version_of(library: str) -> str:
    """A library that was imported, and its version."""
    return f"{library} {sys.modules[library].__version__}"


def complete(config: Config, lacking: Mapping[str, str], library: str, sink: Sink) -> bool:
    """Whether a file leaves no field to a default that means another model; PL603 for each of those
    that are `lacking`, by name with the default.
    """
    help = f"add it: {library} would use its default, which is another model's"
    for field, default in lacking.items():
        message = f"{config.name} lacks `{field}`"
        sink.error("PL603", message, facts=[f"{field} = {default}"], help=help)
    return not lacking


def _check_known(config: Config, sink: Sink) -> bool:
    import_models()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    family = config.values["model_type"]
    if family in CONFIG_MAPPING_NAMES:
        return True
    advice = did_you_mean(family, CONFIG_MAPPING_NAMES, "a newer transformers may support it")
    if config.own_code:
        advice = "the model needs custom code, which planc runs only with --allow-code"
    message = f"transformers does not support model_type {family!r}"
    facts = [f"{version_of('transformers')}  ({config.name})"]
    sink.error("PL604", message, facts=facts, help=advice)
    return False


def _class_of(config: Config, resolved: Any) -> tuple[Any, Any] | None:
    """The class to build and the (part of the) configuration that it takes.

    The class is the first of `architectures` that transformers has, else the family's causal
    language model. None if there is neither, or the class belongs to another family.

    Raises:
        ImportError: a class of that name cannot be imported, and there is no other.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    names = list(config.values.get("architectures") or ())
    causal = CAUSAL.get(config.values["model_type"]) or ()
    causal_names, failed = [causal] if isinstance(causal, str) else list(causal), ""
    for name in [*names, *causal_names]:
        try:
            cls = getattr(transformers, name, None) or _inner_class(name, resolved)
        except (ImportError, RuntimeError) as error:  # the imports of the class fail
            failed = failed or f"{name} cannot be imported: {reason(error.__cause__ or error)}"
            continue
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            continue
        takes = getattr(cls, "config_class", None)
        for part in (resolved, resolved.get_text_config(decoder=True)):
            if takes is not None and isinstance(part, takes):
                return cls, part
        if name in causal_names:  # a class of another family that accepts this configuration
            return cls, resolved
    if failed:
        raise ImportError(failed)
    return None


def _inner_class(name: str, resolved: Any) -> Any:
    """A part of a model, such as `WhisperEncoder`, which only the family's own module has."""
    home = type(resolved).__module__.replace(".configuration_", ".modeling_")
    if not home.startswith("transformers.models."):
        return None
    return getattr(importlib.import_module(home), name, None)


def _left_to_defaults(config: Config, resolved: Any) -> Iterator[tuple[str, str]]:
    """The fields whose family defaults would mean another model and that the file does not state.

    A composite configuration (`text_config`) is not checked: those on the hub rely on defaults.
    """
    names = getattr(type(resolved), "attribute_map", {})
    defaults = resolved.to_dict()
    for field in _ESSENTIAL:
        name = names.get(field, field)  # gpt2's `n_embd` is hidden_size
        default = defaults.get(name)
        if isinstance(default, int) and not {field, name} & config.values.keys():
            yield name, f"{default}  (default of {config.values['model_type']})"


def _on_meta(make: Any) -> Any:
    import torch

    with torch.device("meta"):
        return _without_values(make)


def _without_values(make: Any) -> Any:
    """A model whose weights are not initialized; tied ones are, which transformers does later."""
    with _skip_initialization():
        module = make()
    tie = getattr(module, "tie_weights", None)
    if callable(tie):
        tie()
    return module


@contextlib.contextmanager
def _skip_initialization() -> Iterator[None]:
    """This thread initializes no weights, which takes seconds for thousands of modules, on meta
    too. transformers' `no_init_weights` would leave out those of other threads' models as well.
    """
    if sys.modules.get("transformers") is None:
        yield
        return
    from transformers import PreTrainedModel

    original, left_out = PreTrainedModel.init_weights, {threading.get_ident()}

    def initialize(model: Any) -> None:
        if threading.get_ident() not in left_out:
            original(model)

    try:
        with mock.patch.object(PreTrainedModel, "init_weights", initialize):
            yield
    finally:
        left_out.clear()  # another thread may put `initialize` back later


def training_model(cls: Any, part: Any, dtype: str, attention: str) -> Any:
    """A model that trains, of what `prepare` returns, on the current device; to be run on fake
    tensors.

    Args:
        dtype: of its parameters, such as `bfloat16`.
        attention: its `attn_implementation`; models that have no `sdpa` get the one that
            transformers chooses.
    """
    import torch

    without: dict[str, float] = {"use_cache": False}
    if attention != "eager":  # a flash kernel keeps no mask of its dropout, as the CPU's would
        names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
        without |= dict.fromkeys(names, 0.0)
    for config in (part, *vars(part).values()):  # towers and language models have their own
        for name, value in without.items():
            if getattr(config, name, None):  # mpt takes no 0.0 for its 0
                setattr(config, name, value)
    chosen = None if attention == "sdpa" else attention
    with quiet(), isolate():
        set_by = {"attn_implementation": chosen, "dtype": getattr(torch, dtype)}
        model = _without_values(lambda: cls._from_config(part, **set_by))
    return model.train()


def classifies_rows(cls: Any) -> bool:
    """Whether a class of model has a label for each row, and not for each token."""
    return str(cls.__name__).endswith("ForSequenceClassification")


def one_sequence_a_row() -> contextlib.AbstractContextManager[Any]:
    """Each row of a batch counts as one sequence: to find several, transformers reads data, which
    fake tensors do not have.
    """
    from planc.compat.transformers import masking_utils

    name = "find_packed_sequence_indices"
    return mock.patch.object(masking_utils, name, lambda *_args, **_kwargs: None)


def uncounted_images() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which transformers does not compare the numbers of image features and
    placeholder tokens, which fake tensors do not have.
    """
    return mock.patch.dict("os.environ", {"TRANSFORMERS_DISABLE_TORCH_CHECK": "1"})


def merged_windows() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which transformers' vision encoders call sdpa attention for two parts of
    the patches instead of each window or image.

    The tensors of all parts together have the same bytes, whatever the number of parts, so this is
    for fake tensors: one call of each window of a large image takes minutes.
    """
    import torch

    split = torch.split

    def split_in_two(tensor: Any, sizes: Any, dim: int = 0) -> Any:
        if isinstance(sizes, list) and len(sizes) > 2 and dim == 2 and _in_sdpa(sys._getframe(1)):
            sizes = [sizes[0], sum(sizes[1:])]
        return split(tensor, sizes, dim=dim)

    return mock.patch.object(torch, "split", split_in_two)


def _in_sdpa(frame: Any) -> bool:
    """Whether a module of transformers with sdpa attention calls here, or in a comprehension."""
    for caller in (frame, frame.f_back):
        module = caller.f_locals.get("self")
        if module is not None and caller.f_globals["__name__"].startswith("transformers."):
            return getattr(getattr(module, "config", None), "_attn_implementation", "") == "sdpa"
    return False
