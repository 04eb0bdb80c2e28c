"""transformers' own tensor-parallel plan of a model, read as weight splits."""

from collections.abc import Mapping

from planc.elaborate.sections.tensor_styles import split_of_transformers
from planc.model.facts import Facts, Module, Parameter
from planc.proof.small_case import small_model
from planc.tools.init.recipes import SplitChoice, SplitRecipe, StyleRules, experts_choice


def tp_plan(facts: Facts) -> dict[str, str]:
    """The styles of transformers by the names of modules and parameters, with those of all parts of
    the model; empty where transformers has none.
    """
    model = small_model(facts)
    if isinstance(model, str):
        return {}
    try:
        return dict(getattr(model.builder().build(0), "tp_plan", None) or {})
    except Exception:  # of the model's code
        return {}


def given_choices(
    rules: Mapping[str, str], path: str, known: Mapping[str, Module]
) -> list[SplitChoice]:
    """The splits of a list of blocks; of the modules outside of lists for an empty path.

    Args:
        rules: as `tp_plan` has them.
        path: of the list.
        known: the modules in a block, or in the whole model, by name.
    """
    start = f"{path}.*." if path else ""
    styles: StyleRules = {}
    experts: dict[str, SplitChoice] = {}
    for key, style in rules.items():
        name = key.removeprefix(start)
        if not key.startswith(start) or (not path and ".*." in key):
            continue
        holder, _, last = name.rpartition(".")
        fused = next((n for n in (name, holder) if _is_fused(known.get(n))), None)
        split = split_of_transformers(style)
        if fused is not None:
            experts[fused] = experts_choice(fused, known[fused])
        elif split and name in known:
            styles[name] = split
        elif style == "local_params" and any(
            p.name == last for p in _parameters(known.get(holder))
        ):
            styles[holder] = f"parameters({last} = shard(0))"
    if not styles:
        return [*experts.values()]
    recipe = SplitRecipe(rules=styles)
    given = SplitChoice(name=path or "outside", members=tuple(styles), recipes=[recipe])
    return [given, *experts.values()]


def _parameters(module: Module | None) -> tuple[Parameter, ...]:
    return tuple(module.parameters) if module else ()


def _is_fused(module: Module | None) -> bool:
    return module is not None and sum(len(p.shape) == 3 for p in module.parameters) > 1
