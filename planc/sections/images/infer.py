"""Adds rules for axes that shard the images of a batch: each rank has partial gradients of the
vision encoder, and they are summed once.
"""

from collections.abc import Iterator
from dataclasses import replace

from planc.diagnostics.diagnostic import Label, Sink
from planc.infer.apply_adapters import adapt_plan
from planc.ir.nodes import ImagesSetting, Inferred, Plan, TensorRule
from planc.ir.parameter_owners import Owned, owned_modules
from planc.model.facts import Facts, Modules
from planc.model.module_table import parts_of_images, puts_images, towers
from planc.ops import styles as st
from planc.ops.layouts import Replicate

_REASON = "each rank runs it on its own images, so its gradient is partial"


def complete(plan: Plan, facts: Facts, sink: Sink) -> Plan:
    """Makes the gradients of a vision encoder right if ranks encode different images of equal rows.

    Before:
        tensor on tp { images = rows }    (each rank has the gradients of its own images)
        no rule on the vision encoder
        no factor of the features' gradients

    After:
        tensor on tp { images = rows }
        replicate(gradient = sum) on the vision encoder, if FSDP does not reduce over tp
        else the features' gradients are multiplied by tp, because FSDP takes their mean

    Reports PL572.
    """
    settled = []
    for setting in plan.images:
        found = setting
        if setting.divided and plan.mesh.size(setting.axis) > 1 and not plan.broken:
            holder = next(puts_images(facts), None)
            if holder is None or not parts_of_images(holder):
                _without_tower(setting, facts, sink)
            elif not setting.parts:
                plan, found = _over_copies(plan, setting, holder, facts, sink)
        settled.append(found)
    return replace(plan, images=tuple(settled))


def _without_tower(setting: ImagesSetting, facts: Facts, sink: Sink) -> None:
    sink.error(
        "PL572",
        f"{facts.name} puts no features of images among embeddings of tokens as planc knows it, so "
        f"its images cannot be divided over {setting.axis}",
        setting.origin,
        help="remove `images = rows`",
    )


def _over_copies(
    plan: Plan, setting: ImagesSetting, holder: Modules, facts: Facts, sink: Sink
) -> tuple[Plan, ImagesSetting]:
    """Ranks that have the same rows, and so the whole gradient of the features each."""
    if other := next((n for n, times in parts_of_images(holder).items() if times > 1), None):
        _also_elsewhere(setting, holder, other, sink)
        return plan, setting
    over, others = list[Owned](), list[Owned]()
    applied, with_factors = adapt_plan(plan, facts)
    for own in owned_modules(applied, with_factors):
        placed = own.spread or own.unit
        axes = plan.fsdp.extra_axes(placed) if plan.fsdp and placed else ()
        if not _of_tower(own.modules, holder):
            continue
        if setting.axis in axes:
            over.append(own)
        elif own.has_trainable:
            others.append(own)
    if over and others:
        _report_mixed_axes(setting, over[0], others[0], sink)
        return plan, setting
    if _report_style(plan, setting, holder, sink):
        return plan, setting
    if over:  # whose mean FSDP takes
        return plan, replace(setting, times=plan.mesh.size(setting.axis))
    return replace(plan, tensor=(*plan.tensor, *_sum_rules(setting, holder, facts))), setting


def _of_tower(modules: Modules, holder: Modules) -> bool:
    """Whether modules compute features of images, or are the holder with such a parameter."""
    depth, parts = len(holder.path), parts_of_images(holder)
    if modules.path == holder.path:
        return any(p.name in parts for p in holder.module.parameters)
    inside = modules.path[:depth] == holder.path
    return inside and modules.path[depth] in parts


def _also_elsewhere(setting: ImagesSetting, holder: Modules, part: str, sink: Sink) -> None:
    sink.error(
        "PL572",
        f"`{holder}.{part}` computes features of images, and `{holder}` also uses it for other "
        f"inputs: on a rank of {setting.axis} its gradient would be partial for images, and "
        "complete for the others",
        setting.origin,
        help="remove `images = rows`",
    )


def _report_mixed_axes(setting: ImagesSetting, over: Owned, other: Owned, sink: Sink) -> None:
    placed = over.spread or over.unit
    labels = [Label(span=placed.origin, text=f"this one is over {setting.axis}")] if placed else []
    sink.error(
        "PL572",
        f"some units of the tower are over {setting.axis}, and the parameters of `{other.modules}` "
        "are not: FSDP would take the mean of some gradients, and others are to be summed",
        Label(span=setting.origin, text=f"divides the images over {setting.axis}"),
        *labels,
        help="write a unit over the same axes for all modules of the tower, or for none",
    )


def _report_style(plan: Plan, setting: ImagesSetting, holder: Modules, sink: Sink) -> bool:
    """Reports the first rule on a tower over the same axis; whether there is one."""
    rules = (r for r in plan.tensor if r.axis == setting.axis and r.style != st.Replicated())
    rule = next((r for r in rules if _on_tower(r, holder)), None)
    if rule is None:
        return False
    message = (
        f"gradients of `{rule.modules}` would be summed twice over {setting.axis}: dividing the "
        "images sums those of the tower"
        if _sums(rule)
        else f"this rule is for ranks that run `{rule.modules}` on the same images, and those of "
        f"{setting.axis} have other images each"
    )
    sink.error(
        "PL572",
        message,
        Label(span=rule.origin, text=f"on `{rule.modules}`"),
        Label(span=setting.origin, text=f"divides the images over {setting.axis}"),
        help="remove the rule: with `images = rows` the tower is whole on each rank, and its "
        "gradients are summed",
    )
    return True


def _sums(rule: TensorRule) -> bool:
    return isinstance(rule.style, st.Replicated)


def _on_tower(rule: TensorRule, holder: Modules) -> bool:
    """Whether a rule is on modules of a tower, or sums the gradients of all inside of one above."""
    above = holder.path[: len(rule.modules.path)] == rule.modules.path
    if above and rule.modules.path == holder.path and isinstance(rule.style, st.Parameters):
        return _of_tower(rule.modules, holder)
    return _sums(rule) if above else _of_tower(rule.modules, holder)


def _sum_rules(setting: ImagesSetting, holder: Modules, facts: Facts) -> Iterator[TensorRule]:
    """The rules by which gradients are summed: of the tower, and of parameters that the holder has
    itself, such as one that stands between the rows of an image.
    """
    found: list[tuple[Modules, st.Style]] = []
    parts = parts_of_images(holder)
    if own := [p.name for p in holder.module.parameters if p.name in parts]:
        layouts = tuple((name, st.ParameterLayout(layout=Replicate())) for name in own)
        found.append((holder, st.Parameters(layouts=layouts)))
    found += [(modules, st.Replicated(summed=True)) for modules in towers(facts)]
    for modules, style in found:
        yield TensorRule(
            modules=modules,
            axis=setting.axis,
            style=style,
            inferred=Inferred(reason=_REASON),
            origin=setting.origin,
        )
