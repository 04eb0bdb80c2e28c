"""Broken plans, configurations and lowered plans, made of those that ship by small changes.

Case N of a seed is always the same, whatever cases run before it.
"""

import json
import random
import re
import string
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from planc.diagnostics import FORMATS
from planc.files.resources import PLANS
from planc.syntax.plan_files import families

TOKEN = re.compile(r"\w+|[ \t]+|\n|.")
GOLDENS = Path(__file__).parent.parent / "goldens"
DIGITS = ("9" * 400, "9" * 5_000, "-" + "9" * 5_000)
ODD = ["{", "}", "(", ")", "[", "]", '"', "#", ":", "->", "\n", "=", "not ", "-", "when ", "\\"]
ODD += ["\x00", "\ud800", "\u202e", "\ufeff", "\r", "\t", "\x0c", "$", "**", "*", "<A>", " has "]
ODD += [
    "extend ",
    f'extend "{"x" * 300}"\n',
    'extend "p.plan"\n',
    "let a = a * a\n",
    "let ",
    "override ",
]
ODD += [
    "optional ",
    "0",
    "-1",
    "1e99",
    "1.5",
    "null",
    "true",
    "auto",
    "[0:4]",
    "[-1]",
    "[::0]",
    "{a,b}",
]
ODD += [
    "config.hidden_size",
    "config.layer_types",
    "config",
    "tp",
    "dp_shard",
    "len",
    "require ",
    *DIGITS,
]
VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    64,
    2**31,
    2**63,
    10**9,
    10**400,
    10**4_200,
    0.5,
    -0.0,
]
VALUES += [
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x",
    "auto",
    "org/kernel",
    "\ud800",
    "a\x00b",
    "../..",
]
VALUES += [
    [],
    [[]],
    {},
    [None],
    ["full_attention"],
    [1, 2],
    {"": 1},
    {"a": {"b": [1]}},
    "x" * 5_000,
]
VALUES += [{"__float__": "Infinity"}, {"__float__": "NaN"}, {"__float__": "1"}, {"__float__": []}]
FIELDS = ["attn_implementation", "_attn_implementation", "experts_implementation", "auto_map"]
FIELDS += ["num_labels", "num_hidden_layers", "layer_types", "quantization_config", "text_config"]
FIELDS += [
    "architectures",
    "model_type",
    "dtype",
    "tie_word_embeddings",
    "rope_scaling",
    "backbone",
]
FIELDS += ["hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
FIELDS += ["per_layer_config", "id2label", "problem_type", "pad_token_id", "_class_name"]
SETTINGS = [
    "tp=2",
    "tp=4",
    "tp=8",
    "cp=2",
    "dp_replicate=2",
    "sequence=false",
    "tp=0",
    "tp=auto",
]
SETTINGS += [
    "tp=-1",
    "tp",
    "=",
    "tp=1.5",
    "recompute=false",
    "pp=2",
    f"tp={DIGITS[1]}",
    "tp=10000000",
]
WORLDS = ["1", "4", "6", "8", "64", "4096", "100000000000000000", "0", "x", DIGITS[1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command line, and the files that it names.

    Args:
        kind: `plan`, `config` or `lowered`.
        files: bytes by name, in the folder that the command runs in.
        words: the arguments of `planc`.
        json: whether standard output is JSON wherever something is printed.
        seconds: the CPU time that it may take.
    """

    kind: str
    files: dict
    words: tuple
    json: bool
    seconds: float


def case(seed, number):
    """Case `number` of a seed."""
    draw = random.Random(f"{seed}/{number}")
    kind = draw.choices(("plan", "config", "lowered"), (60, 15, 25))[0]
    return {"plan": plan_case, "config": config_case, "lowered": lowered_case}[kind](draw)


def plan_case(draw):
    name = draw.choice(sorted(plans()))
    text = changed_text(draw, plans()[name])
    if draw.random() < 0.05:
        text = plans()[draw.choice(sorted(plans()))] + text
    model = draw.choice(models_of(name)) if draw.random() < 0.9 else draw.choice(sorted(configs()))
    files = {"p.plan": text.encode("utf-8", "surrogatepass"), "old.plan": plans()[name].encode()}
    command = draw.choices(("check", "lower", "fmt", "why", "diff"), (65, 15, 10, 5, 5))[0]
    words, is_json = commanded(draw, command, model, "p.plan")
    return Case(kind="plan", files=files, words=words, json=is_json, seconds=10)


def config_case(draw):
    name = draw.choice(sorted(configs()))
    values = json.loads(configs()[name])
    if draw.random() < 0.8:
        for _ in range(draw.choice((1, 1, 2, 4))):
            values = changed_value(draw, values, FIELDS)
        text = json.dumps(values)
    else:
        text = changed_text(draw, configs()[name])
    plan = draw.choice(plans_of(name))
    words, is_json = commanded(draw, draw.choice(("check", "lower", "why")), "config.json", plan)
    data = text.encode("utf-8", "surrogatepass")
    return Case(kind="config", files={"config.json": data}, words=words, json=is_json, seconds=90)


def lowered_case(draw):
    model, text = draw.choice(documents())
    if draw.random() < 0.8:
        values = json.loads(text)
        for _ in range(draw.choice((1, 1, 2, 4))):
            values = changed_value(draw, values, ("kind", "modules", "axes", "size", "ops", "x"))
        data = json.dumps(values)
    else:
        data = changed_text(draw, text)
    files = {"p.json": data.encode("utf-8", "surrogatepass"), "old.json": text.encode()}
    words, is_json = commanded(
        draw, draw.choice(("check", "lower", "diff", "why")), model, "p.json"
    )
    return Case(kind="lowered", files=files, words=words, json=is_json, seconds=10)


def commanded(draw, command, model, plan):
    """The words of a command, and whether it prints JSON."""
    if command == "fmt":
        return ("fmt", draw.choice(("--diff", "--check")), plan), False
    words = [command, model]
    if command == "diff":
        words += [f"old.{plan.partition('.')[2]}"]
    words += [plan]
    if command == "why":
        words += [draw.choice(("model.layers.0", "lm_head", "x", "", "model.layers.99999999999"))]
    if draw.random() < 0.4:
        words += [f"--set={draw.choice(SETTINGS)}"]
    if draw.random() < 0.5:
        words += [f"--world-size={draw.choice(WORLDS)}"]
    format = draw.choice(FORMATS if command == "check" else ("text", "json"))
    if command == "lower" and draw.random() < 0.3:
        format = "python"
    words += [f"--format={format}"]
    if command == "check":
        words += ["--level=structure"]
    return tuple(words), format in ("json", "sarif")


# Changes -----------------------------------------------------------------------------------------


def changed_text(draw, text):
    """A text with a few of its tokens, lines or characters changed."""
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        text = draw.choice((with_token, with_token, with_token, with_line, with_characters))(
            draw, text
        )
    return text


def with_token(draw, text):
    tokens = TOKEN.findall(text) or [""]
    at, other = draw.randrange(len(tokens)), draw.randrange(len(tokens))
    match draw.randrange(6):
        case 0:
            tokens[at] = ""
        case 1:
            tokens[at] *= draw.choice((2, 3, 100))
        case 2:
            tokens[at], tokens[other] = tokens[other], tokens[at]
        case 3 | 4:
            tokens[at] = draw.choice(ODD)
        case 5:
            tokens.insert(at, draw.choice(ODD))
    return "".join(tokens)


def with_line(draw, text):
    lines = text.splitlines(keepends=True) or [""]
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    match draw.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, lines[other])
        case 2:
            lines[at] *= draw.choice((2, 50))
        case 3:
            stranger = draw.choice(sorted(plans()))
            lines.insert(at, draw.choice(plans()[stranger].splitlines(keepends=True)))
        case 4:
            lines = lines[:at]
    return "".join(lines)


def with_characters(draw, text):
    at = draw.randrange(len(text) + 1)
    piece = "".join(
        draw.choice(string.printable) if draw.random() < 0.8 else chr(draw.randrange(0x110000))
        for _ in range(draw.choice((1, 1, 3, 20)))
    )
    return text[:at] + piece + text[at + draw.choice((0, 1, 5)) :]


def changed_value(draw, data, names):
    """JSON data with one value, at any depth, replaced, removed, doubled or added."""
    places = list(containers(data))
    at = draw.choice(places)
    if isinstance(at, dict):
        key = draw.choice(sorted(at)) if at and draw.random() < 0.8 else draw.choice(names)
        if draw.random() < 0.15:
            at.pop(key, None)
        else:
            at[key] = new_value(draw, data, at.get(key))
    elif not at or draw.random() < 0.2:
        at.append(new_value(draw, data, None))
    elif draw.random() < 0.2:
        at.pop(draw.randrange(len(at)))
    else:
        index = draw.randrange(len(at))
        at[index] = new_value(draw, data, at[index])
    return data


def new_value(draw, data, old):
    match draw.randrange(4):
        case 0 if isinstance(old, int | float):
            return draw.choice((old + 1, old * 2, -old, old * 1_000, str(old)))
        case 0 if isinstance(old, str):
            return changed_text(draw, old)
        case 1:
            return json.loads(json.dumps(draw.choice(list(containers(data)))))
    return json.loads(json.dumps(draw.choice(VALUES)))


def containers(data):
    """Every object and array of JSON data."""
    if isinstance(data, dict | list):
        yield data
        for inner in data.values() if isinstance(data, dict) else data:
            yield from containers(inner)


# What ships --------------------------------------------------------------------------------------


@cache
def plans():
    return {p.stem: p.read_text() for p in PLANS.glob("*.plan")}


@cache
def configs():
    return {p.stem: p.read_text() for p in (PLANS / "models").glob("*.json")}


@cache
def family(model):
    return json.loads(configs()[model]).get("model_type", "")


@cache
def models_of(plan):
    """The shipped models that a plan is for."""
    found = [m for m in sorted(configs()) if family(m) in families(PLANS / f"{plan}.plan")]
    return found or sorted(configs())


@cache
def plans_of(model):
    return [p for p in sorted(plans()) if family(model) in families(PLANS / f"{p}.plan")] or [
        "llama"
    ]


@cache
def documents():
    """(model, lowered plan as JSON) of a few plans with different sections."""
    import planc
    from planc.ops.document import dumps

    found = []
    for model, plan, settings in (
        ("llama-3.1-8b", "llama", ["tp=8"]),
        ("gemma-2-9b", "gemma2", ["tp=2"]),
        ("mixtral-8x7b", "mixtral", ["tp=4"]),
        ("gpt2", "gpt2", []),
        ("qwen3-8b", "qwen3", ["tp=4", "dp_replicate=2"]),
    ):
        found.append((model, dumps(planc.lower(model, plan, world_size=64, overrides=settings))))
    for name in ("llama.lowered.json", "megatron.json"):
        found.append(("llama-3.1-8b", (GOLDENS / name).read_text()))
    return found
