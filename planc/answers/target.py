"""The model and the plan that a question names: the same for the Python API and the commands."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planc.compiler import Compiled, Draft, compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.files.project import ProjectError
from planc.model.config import buildable, locate_config
from planc.model.facts import Facts
from planc.syntax.plan_files import locate

if TYPE_CHECKING:
    from torch import nn

Overrides = str | Iterable[str] | Mapping[str, Any]
"""`name=value` for mesh axes and options: one, several, or as a mapping."""


def compile_for(
    model: str | os.PathLike[str] | nn.Module | Facts,
    plan: str | os.PathLike[str] | None,
    world_size: int | None,
    overrides: Overrides,
    allow_code: bool,
    *,
    draft: Draft | None = None,
) -> tuple[Compiled, Sink]:
    """A plan compiled for the arguments of a function of the API, and the findings; for a family
    without a plan its `draft`, else PL022.

    Raises:
        TypeError: an argument is of another type than it says.
    """
    if not isinstance(plan, str | os.PathLike | None):
        raise TypeError(f"a plan is a path or a name, not {type(plan).__name__}")
    if isinstance(plan, str) and "\n" in plan:
        raise TypeError("a plan is a path or a name, not the text of a plan: write it to a file")
    if not isinstance(world_size, int | None) or isinstance(world_size, bool):
        raise TypeError(f"world_size is a number of ranks, not {world_size!r}")
    known, settings, sink = model_of(model), settings_of(overrides), Sink()
    options = {"world_size": world_size, "settings": settings, "allow_code": allow_code}
    name = None if plan is None else os.fspath(plan)
    return compile_named(known, name, sink, draft=draft, **options), sink


def compile_named(model: str | Facts, plan: str | None, sink: Sink, **options: Any) -> Compiled:
    """A plan compiled with the `options` of `compile_plan`, if the names are in the right order."""
    if isinstance(model, str) and report_wrong_order(model, plan, sink):
        return Compiled()
    return compile_plan(model, plan, sink, **options)


def chosen_plan(compiled: Compiled) -> str:
    """The sentence that names the plan chosen for a family; empty for a lowered plan."""
    files, facts = compiled.files, compiled.facts
    if facts is None or not isinstance(files, tuple):
        return ""
    return f"the plan is {files[-1].origin.source.name}, for {facts.family}"


def settings_of(overrides: Overrides) -> tuple[str, ...]:
    """Overrides as texts `name=value`.

    Raises:
        TypeError: they are neither texts nor a mapping.
    """
    if isinstance(overrides, Mapping):
        words = {n: str(v).lower() if isinstance(v, bool) else v for n, v in overrides.items()}
        return tuple(f"{name}={value}" for name, value in words.items())
    if isinstance(overrides, str):
        return (overrides,)
    settings = tuple(overrides) if isinstance(overrides, Iterable) else (overrides,)
    if not all(isinstance(setting, str) for setting in settings):
        raise TypeError(f"overrides are texts `name=value`, or a mapping, not {overrides!r}")
    return settings


def report_wrong_order(model: str, plan: str | None, sink: Sink) -> bool:
    """Reports a model in the place of a plan, and perhaps a plan in that of the model."""
    if plan is None or ":" in model or plan.endswith(".plan"):
        return False
    try:
        if names_plan(model) and locate_config(plan):  # in this order: a hub name is slow
            message = f"{model} is a plan, and {plan} is a model: MODEL comes before PLAN"
            sink.error("PL600", message, help=f"write {plan} {model}")
            return True
        if names_model(plan):
            message = f"{plan} is a model, in the place of a plan"
            sink.error("PL006", message, help="models come first, and then plans")
            return True
    except ProjectError:  # reported where the plan is read
        pass
    return False


def split_models(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The models and the plans among names: models come first, and what can be read as a plan is
    one.
    """
    models, plans = [*names[:1]], [*names[1:]]
    try:
        swapped = plans and names_plan(models[0])  # `report_wrong_order` reports it
        while plans and not swapped and names_model(plans[0]):
            models.append(plans.pop(0))
    except ProjectError:  # reported where the plan is read
        return [*names[:1]], [*names[1:]]
    return models, plans


def names_plan(model: str) -> bool:
    """Whether what stands in the place of the model is a plan."""
    return (model.endswith(".plan") or not locate_config(model)) and locate(model) is not None


def names_model(word: str) -> bool:
    """Whether a word names a configuration, and no plan."""
    plan = locate(word)
    if plan is not None and not (plan.path and plan.path.is_dir()):
        return word.endswith("config.json")
    config = locate_config(word)
    return config is not None and config.path.is_file()


def model_of(model: Any) -> str | Facts:
    """The name of a model, or the facts of a module.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    if isinstance(model, Facts):
        return model
    if not hasattr(model, "named_modules"):
        raise TypeError(f"a model is a folder, a name, or an nn.Module, not {type(model).__name__}")
    return module_facts(model)


def module_facts(module: nn.Module) -> Facts:
    """The facts of a module. Library models are proved on a small copy; models that run functions
    of the script's own are kept, to be run themselves or to compare a small one with them.
    """
    from planc.model.module_table import facts_of
    from planc.model.own_code import own_code
    from planc.model.passed_arguments import name_passed_arguments

    name_passed_arguments(module)
    config = getattr(module, "config", None)
    facts = facts_of(module, config=config, config_name="model.config")
    if type(module).__module__.startswith("diffusers."):  # whose configuration names no class
        from planc.model.sources.diffusers import normal

        facts = replace(facts, config=normal(facts.config, facts.name))
    tied = _ties_head(module)
    if tied is not None and tied != bool(facts.config.get(_TIES)):
        facts = replace(facts, config={**facts.config, _TIES: tied})
    known = buildable(facts.config)
    facts = replace(facts, built=True, own_code=own_code(module, alone=not known))
    if known and not facts.own_code and not hasattr(module, "planc_inputs"):
        return facts
    return replace(facts, user_model=module)


_TIES = "tie_word_embeddings"
"""The field by which plans decide on one unit for the embedding and the head."""


def _ties_head(module: nn.Module) -> bool | None:
    """Whether the head of a model of transformers has the weight of the embedding; None without
    both. The configuration may state otherwise: a script can tie or untie them before `apply`.
    """
    if not hasattr(module, "save_pretrained"):
        return None
    try:
        layers: Any = module.get_input_embeddings(), module.get_output_embeddings()
    except (NotImplementedError, AttributeError):  # a model without an embedding
        return None
    weights = [getattr(layer, "weight", None) for layer in layers]
    if any(weight is None for weight in weights):
        return None
    return weights[0] is weights[1]
