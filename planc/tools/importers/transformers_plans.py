"""The rules of transformers' four plans -> rules of a plan.

Sources, in transformers 5.23: `distributed/tensor_parallel.py`, `expert_parallel.py`, `fsdp.py` and
`pipeline_parallel.py`. Keys are relative to the base model, or start at the whole one.
"""

import re
from collections.abc import Mapping
from typing import Any, Protocol

from planc.elaborate.sections.tensor_styles import split_of_transformers
from planc.elaborate.settings import SEQUENCE
from planc.model.facts import is_inside
from planc.tools.importers.family import Base

PLANS = ("rule", "ep_rule", "fsdp_rule", "pp_rule")
"""Settings with one value for each key of a plan: tensor, expert, FSDP and pipeline parallelism."""

_EXPERTS = ("moe_tp_experts", "moe_experts_allreduce")
_DISPATCHED = ("ep_dispatch_experts", "grouped_gemm")
_OF_EXPERTS = {
    "colwise": "shard(1)",
    "rowwise": "shard(2)",
    "packed_colwise": "shard(1, parts = 2)",
    "packed_rowwise": "shard(2, parts = 2)",
}
"""The shard dims of the weights of experts, [experts, out, in], by the style of each."""
_ROOT = ("embed", "norm", "head", "dropout")
"""Words in the names of modules outside of the list of blocks."""


class RuleWriter(Protocol):
    """The writer of a plan, which records what becomes of each key."""

    base: Base
    name: str
    given: dict[str, Any]
    fate: dict[str, tuple[str, str]]

    def record(self, kind: str, why: str, *words: str) -> list[str]: ...

    def add_line(self, text: str, *words: str) -> list[str]: ...


def tensor_section(writer: RuleWriter, blocks: str) -> list[str]:
    """The section with the splits of a `tp_plan`."""
    if not (rules := writer.given.get("rule")):
        return _no_rules(writer)
    names = {key: _relative(key) for key in rules}
    styles = {names[key]: style for key, style in rules.items()}
    if not any("base_model_tp_plan" in key or key == name for key, name in names.items()):
        # a DistributedConfig changes rules of the model's own plan
        shipped_rules = writer.base.own_rules()
        styles, names = (
            {**shipped_rules, **styles},
            {**{key: key for key in shipped_rules}, **names},
        )
    # alone they shard little
    single = writer.base.known and not any("rowwise" in style for style in styles.values())
    lacking = frozenset[str]() if single else writer.base.lacking(names.values())
    lines = list[str]()
    for key, name in names.items():
        if key not in rules and name in map(_relative, rules):
            continue
        split, path = _split(name, styles), _path(name, blocks)
        if _expert_parallel(writer, name, styles):
            writer.record("same", "the rules of the experts in `ep_plan` come first", key)
        elif owner := _owner(name, styles):
            writer.record("same", f"the rule of the {owner} has their parameters", key)
        elif split is None or not re.fullmatch(r"[$\w.*]+", path):
            writer.record("lost", f"{styles[name]} needs a rule of your own", key)
        elif not split:
            writer.record("same", "it follows from how weights are split", key)
        elif single:
            text = f"override {path} : {split}"
            writer.record("lost", f"in place of the rule of {writer.name}, write `{text}`", key)
        else:
            rule = f"{'optional ' * (name in lacking)}{path} : {split}"
            writer.record("plan", rule, key)
            lines.append(f"    {rule}")
    head = ["override tensor on tp {    # tp_plan", f"    sequence = {SEQUENCE.word}"]
    return [*head, *lines, "}", ""] if lines else []


def _no_rules(writer: RuleWriter) -> list[str]:
    """The section of an empty `tp_plan`: the ranks of the axis compute the same."""
    if not writer.given.get("no_rule"):
        return []
    if (writer.given.get("tp_size") or 1) == 1:
        return writer.record("same", "without effect: tp = 1", "no_rule")
    head = writer.add_line("override tensor on tp {", "no_rule")
    return [*head, f"    sequence = {SEQUENCE.word}", "}", ""]


def expert_section(writer: RuleWriter, experts: str) -> list[str]:
    """The section of an `ep_plan` whose implementation is not the all-to-all of a family's plan."""
    given, rules = writer.given, writer.given.get("ep_rule") or {}
    size = given.get("ep_size") or 1
    how = given.get("ep_implementation") or "all_to_all"
    without = writer.fate["ep_size"][0] == "lost"
    for key, style in rules.items():
        if size == 1:
            writer.record("same", "without effect: ep = 1", key)
        elif without:
            writer.record("lost", writer.fate["ep_size"][1], key)
        elif style in _DISPATCHED:
            writer.record("same", f"`{experts} : dispatch(...)` of {writer.name}", key)
        elif size == given.get("tp_size"):
            writer.record("same", "its ranks are those of tp, whose rules have the module", key)
        else:
            writer.record("lost", f"{style} over the ranks of ep, which are not those of tp", key)
    if size == 1 or how == "all_to_all" or without:
        return writer.record("same", "`dispatch(all_to_all)`, as in training", "ep_implementation")
    if how == "megamoe":
        why = "experts are computed by torch's grouped products"
        return writer.record("cost", why, "ep_implementation")
    rule = writer.add_line(f"    {experts} : dispatch({how})", "ep_implementation")
    return ["override expert on ep {", *rule, "}", ""]


def fsdp_units(writer: RuleWriter, blocks: str) -> list[str]:
    """Units of an `fsdp_plan` that a family's plan does not have; records all rules of it."""
    lines, has_block_unit = list[str](), blocks in writer.base.units
    for key, style in (writer.given.get("fsdp_rule") or {}).items():
        path, kept = _path(_relative(key), blocks), style == "keep_full_weight"
        reshard = "never" if kept else "always"
        if path == blocks or (path.endswith(".*") and path.count("*") == 2):
            if not kept:
                writer.record("same", "units reshard after forward, but for the last", key)
            elif has_block_unit:
                writer.record("plan", f"override {blocks} : unit(reshard = never)", key)
                lines.append(f"    override {blocks} : unit(reshard = never)    # {key}")
            else:
                writer.record("lost", "override the family's units with `reshard = never`", key)
        elif blocks not in path and (kept or any(word in path for word in _ROOT)):
            writer.record("same", "it is in the unit of the root, which does not reshard", key)
        else:
            writer.record("plan", f"{path} : unit(reshard = {reshard})", key)
            lines.append(f"    {path} : unit(reshard = {reshard})    # {key}")
    return lines


def record_stages(writer: RuleWriter) -> None:
    """Records the rules of a `pp_plan`, which name the modules around the blocks of all stages."""
    staged = (writer.given.get("pp_size") or 1) > 1
    for key in writer.given.get("pp_rule") or {}:
        if not staged:
            writer.record("same", "without effect: one pipeline stage", key)
        elif writer.fate.get("pp_size", ("",))[0] == "plan":
            why = (
                "stages are cut between blocks; the first has what precedes them, the last the rest"
            )
            writer.record("same", why, key)
        else:
            writer.record("lost", f"{writer.name} has no pipeline", key)


def _split(name: str, styles: Mapping[str, str]) -> str | None:
    """The style for a module in a plan; empty if other rules imply it, None if there is none."""
    style = styles[name]
    inside = {key.rpartition(".")[2]: key for key in styles if key.rpartition(".")[0] == name}
    if style == "local_params":
        shards = [f"{last} = shard(0)" for last, key in inside.items() if _owner(key, styles)]
        return f"parameters({', '.join(shards)})" if shards else None
    weights = {last: styles[key] for last, key in inside.items() if styles[key] in _OF_EXPERTS}
    if style in _EXPERTS and weights:
        return f"experts({', '.join(f'{last} = {_OF_EXPERTS[s]}' for last, s in weights.items())})"
    return split_of_transformers(style)


def _expert_parallel(writer: RuleWriter, name: str, styles: Mapping[str, str]) -> bool:
    """Whether a tensor rule has no effect because its module is expert-parallel."""
    if (writer.given.get("ep_size") or 1) == 1:
        return False
    rules = writer.given.get("ep_rule") or {}
    divided = [_relative(key) for key, style in rules.items() if style in _DISPATCHED]
    divided += [key for key, style in styles.items() if style in _EXPERTS]
    return is_inside(name, divided)


def _owner(name: str, styles: Mapping[str, str]) -> str:
    """Returns `experts` or `module` if a name is of a parameter that the rule of its module covers;
    empty if it is the name of a module.
    """
    holder, _, last = name.rpartition(".")
    if styles.get(holder) in _EXPERTS or holder.endswith(".experts"):
        return "experts"
    bare = styles[name] == "colwise" and not last.endswith("proj")
    return "module" if styles.get(holder) == "local_params" and bare else ""


def _relative(key: str) -> str:
    """The name of modules in a key, without the prefix of the plan, such as `tp_plan.`."""
    return re.sub(r"^(.*\.)?(base_model_)?(tp|ep|fsdp|pp)_plan\.(model\.(?=layers\.))?", "", key)


def _path(name: str, blocks: str) -> str:
    """The selector for a name that is relative to the base model."""
    if name.startswith(("lm_head", "model.")):
        return name
    if re.fullmatch(r"\w+\.\*", name):
        return blocks
    inside = re.fullmatch(r"\w+\.\*\.(.+)", name)
    return f"{blocks}.{inside[1]}" if inside else f"*.{name}"
