"""The families whose plans are mutated, and the ways in which each plan is used."""

from dataclasses import dataclass

from folders import ROOT
from helpers import STATED
from numerics import MODELS

from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.model.load import load
from planc.proxy.shrink import shrink
from planc.syntax import ast
from planc.syntax.parse import parse

PLANS = ROOT / "plans"
SUBJECTS = {
    "llama": "llama",
    "llama-tied": "llama",
    "qwen2": "llama",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3_moe",
    "gpt_oss": "gpt_oss",
    "deepseek_v3": "deepseek_v3",
    "llama4": "llama4",
    "mamba2": "mamba2",
    "nemotron_h": "nemotron_h",
    "jamba": "jamba",
    "qwen3_vl": "qwen3_vl",
    "wan": "wan",
    "llama, stages": "llama",
    "llama-tied, stages": "llama",
    "llama, context": "llama",
    "qwen3, context": "qwen3",
    "llama, ring": "llama",
    "qwen3, ring": "qwen3",
    "mixtral, experts": "mixtral",
    "qwen3_moe, experts": "qwen3_moe",
    "nemotron_h, context": "nemotron_h",
    "qwen3_next, context": "qwen3_next",
    "qwen3_vl, context": "qwen3_vl",
    "mixtral, adapters": "mixtral",
    "qwen3_moe, capacity": "qwen3_moe",
}
"""The plan of each family of `families.py`; wan is a shrunken model of diffusers. Those with a
second word are used along another axis, with adapters on divided experts, or with experts that take
a number of a row's tokens."""

AXES = {
    "stages": ("pp=2", "microbatches=2"),
    "context": ("cp=2",),
    "ring": ("cp=2",),
    "experts": ("ep=2",),
    "adapters": ("ep=2",),
    "capacity": ("ep=2", "cp=2"),
}
ADAPTERS = """
adapters {
    $experts                : lora(rank = 4, init = random)
    $blocks.self_attn.{q,o}_proj : lora(rank = 4, init = random)
}
"""

REPLACED = {
    "ring": ("= all_gather", "= ring"),
    "capacity": ("(all_to_all)", "(all_to_all, capacity = 0.75, drop = position)"),
}

DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
LISTS = ("layer_types", "layers_block_type", "no_rope_layers")


@dataclass(frozen=True)
class Way:
    """A plan for one configuration and with certain settings.

    Args:
        name: for what is printed.
        values: the configuration.
        settings: options and axes; they use all four ranks.
        share: the part of the family's mutants that are drawn from this way.
        conditions: that hold here; rules are then mutated on some layers or under a condition, in
            place of the lines of the text.
    """

    name: str
    values: dict
    settings: tuple[str, ...]
    share: float
    conditions: tuple[str, ...] = ()


def ways(name):
    """The ways of a family's plan: with and without sequence parallelism, and deeper models."""
    family, _, axis = name.partition(", ")
    if axis:
        yield from along(dict(MODELS[family]), AXES[axis])
        return
    values = wan(2) if name == "wan" else dict(MODELS[name])
    text = "\n".join(chain(SUBJECTS[name]).values())
    options = [""]
    if "when sequence" in text:
        none = "require not sequence" in text
        options = ["false"] if none else ["true", "false"]
    for option in options:
        way = (f"sequence={option}",) if option else ()
        yield Way(way[0] if way else "as shipped", values, (*TWO, *way), 0.7 / len(options))
    way = (f"sequence={options[0]}",) if options[0] else ()
    more = deep(values)
    depth = next((f"config.{field} > 3" for field in DEPTHS if field in more), "tp > 1")
    yield Way("deep", more, (*TWO, *way), 0.15, ("tp == 2", "tp * dp_shard == 4", depth))
    wide = wan(4) if name == "wan" else deep(four(values))
    yield Way("tp=4", wide, (*FOUR, *way), 0.15, ("tp >= 4", "tp > 2 and dp_shard == 1"))


def along(values, settings):
    """The ways along another axis: beside two ranks of data, of a tensor axis, and deeper."""
    fp32 = (*settings, "param_dtype=fp32")
    yield Way("data", values, (*fp32, "tp=1"), 0.35)
    yield Way("tensor", values, (*fp32, "tp=2"), 0.35)
    yield Way(
        "deep", deep(values), (*fp32, "tp=2"), 0.3, ("tp == 2", "config.num_hidden_layers > 3")
    )


TWO = ("tp=2", "param_dtype=fp32")
FOUR = ("tp=4", "param_dtype=fp32")


def texts(name):
    """The texts of a family's plan by file name. Ring attention, adapters and slots of experts are
    not what the plans ship; the plan of images that states its layouts has no context.
    """
    plan = SUBJECTS[name]
    found = chain(plan, PLANS if name == "qwen3_vl, context" else STATED)
    if name.endswith(", adapters"):
        return {**found, f"{plan}.plan": found[f"{plan}.plan"] + ADAPTERS}
    for axis, (old, new) in REPLACED.items():
        if name.endswith(f", {axis}"):
            other = {file: text.replace(old, new) for file, text in found.items()}
            assert other != found
            return other
    return found


def chain(plan, folder=STATED):
    """The texts of a plan, by default of one that states all layouts, and of those that it extends,
    by file name.
    """
    path = folder / f"{plan}.plan"
    found = {path.name: path.read_text()}
    for item in parse(Source(path.name, found[path.name]), Sink()).statements:
        if isinstance(item, ast.Extend):
            found |= chain(item.path.removesuffix(".plan"), folder)
    return found


def deep(values):
    """Twice the layers, and the lists that have a word for each."""
    made = dict(values)
    for field in DEPTHS:
        if field in made:
            made[field] *= 2
    for field in LISTS:
        if field in made:
            made[field] = [*made[field]] * 2
    if "text_config" in made:
        made["text_config"] = deep(made["text_config"])
    return made


def four(values):
    """Key and value heads that four ranks can split."""
    made = dict(values)
    if made.get("num_key_value_heads") == 2:
        made["num_key_value_heads"] = 4
    if "text_config" in made:
        made["text_config"] = four(made["text_config"])
    return made


def wan(ranks):
    """The small configuration of a shipped model of diffusers."""
    return shrink(load("wan2.1-t2v-1.3b", Sink()).config, ranks=ranks).values
