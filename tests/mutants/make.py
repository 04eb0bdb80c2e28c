"""Mutants of a plan: its text with one rule changed, as a tired engineer would.

A mutant is a text. One that lowers to the same operations as the original, or that can't be
elaborated at all, is sorted out by who uses it.
"""

import re

from planc.diagnostic import Sink
from planc.source import Source
from planc.syntax import ast, parse


def rules(items):
    """Every rule of a file or section, in branches and blocks too."""
    for item in items:
        match item:
            case ast.Rule() | ast.Directive():
                yield item
            case ast.Section() | ast.Block():
                yield from rules(item.items)
            case ast.When():
                yield from rules(item.then)
                yield from rules(item.otherwise)


def mutants(text):
    """(what was done, the new text), each text once."""
    file = parse(Source("base.plan", text), Sink())
    seen = {text}
    for rule in rules(file.statements):
        whole = rule.origin.text
        for name, new in changes(rule, whole):
            kept = "optional " if whole.startswith("optional ") and new else ""
            mutant = text[: rule.origin.start] + kept + new + text[rule.origin.end :]
            if mutant not in seen:
                seen.add(mutant)
                yield f"line {rule.origin.line}: {name}", mutant


def changes(rule, whole):
    """(what is done, what the rule becomes); an empty text drops it."""
    yield "dropped", ""
    if isinstance(rule, ast.Directive):
        return
    target, action = rule.target.origin.text, rule.action.origin.text
    yield from (("retargeted", f"{t} : {action}") for t in targets(target))
    match rule.action.name:
        case "colwise" | "rowwise" as name:
            other = "rowwise" if name == "colwise" else "colwise"
            yield "other style", f"{target} : {action.replace(name, other, 1)}"
            yield "without arguments", f"{target} : {name}"
            yield "sequence instead", f"{target} : sequence"
            for layout in ("replicate", "partial", "shard(0)", "shard(1)", "shard(-1)"):
                yield f"output {layout}", f"{target} : {name}(-> {layout})"
            for layout in ("replicate", "shard(1)", "shard(-1)"):
                yield f"input {layout}", f"{target} : {name}({layout} -> {output(action)})"
            local = "false" if "local = false" not in action else "true"
            bare = re.sub(r",? ?local = \w+", "", action).replace("()", "")
            inner = bare[len(name) + 1 : -1] if "(" in bare else ""
            arguments = ", ".join(filter(None, [inner, f"local = {local}"]))
            yield f"local {local}", f"{target} : {name}({arguments})"
            if "parts" in action:
                plain = re.sub(r",? ?parts = \w+", "", action).replace("(, ", "(")
                yield "not packed", f"{target} : {plain.replace('()', '')}"
                yield "other parts", f"{target} : {re.sub('parts = .', 'parts = 4', action)}"
        case "experts":
            yield "not packed", f"{target} : {re.sub(', parts = .', '', action)}"
            swapped_dims = re.sub(r"shard\((\d)", lambda m: f"shard({3 - int(m[1])}", action)
            yield "other dims", f"{target} : {swapped_dims}"
            yield "by expert", f"{target} : {re.sub(r'shard.[12]', 'shard(0', action)}"
            inner = action[:-1].rstrip().rstrip(",")
            for layout in ("partial", "shard(0)", "shard(-1)"):
                yield f"output {layout}", f"{target} : {inner}, -> {layout})"
            yield "whole sums", f"{target} : replicate(gradient = sum)"
        case "sequence":
            for dim in (0, 1, 2):
                for local in ("true", "false"):
                    yield (
                        f"dim {dim} local {local}",
                        f"{target} : sequence(dim = {dim}, local = {local})",
                    )
        case "input":
            yield "the other way", f"{target} : {swapped(action)}"
            yield "to a part", f"{target} : {action.replace('-> replicate', '-> shard(0)')}"
            yield "local", f"{target} : {action[:-1]}, local = true)"
        case "full":
            for inside in ("mlp", "self_attn"):
                yield f"only {inside}", f"{target}.{inside} : full"
        case "unit":
            yield "never", f"{target} : unit(reshard = never)"
            yield "always", f"{target} : unit(reshard = always)"
            if target.startswith("group("):
                members = [m.strip() for m in target[6:-1].split(",")]
                yield "one less", f"group({', '.join(members[1:])}) : {action}"
                yield "apart", "\n".join(f"{m} : {action}" for m in members)


def targets(target):
    """Selectors that miss a module, or hit another."""
    braces = re.search(r"\{([^}]*)\}", target)
    if braces:
        names = braces[1].split(",")
        for i in range(len(names)):
            rest = names[:i] + names[i + 1 :]
            inner = f"{{{','.join(rest)}}}" if len(rest) > 1 else rest[0]
            yield target[: braces.start()] + inner + target[braces.end() :]
    if target.startswith("$block"):
        yield target.replace("$block", "model.layers[0]", 1)
    if "o_proj" in target:
        yield target.replace("o_proj", "v_proj")


def output(action):
    """The layout on the right of an arrow, or that of the style's default."""
    found = re.search(r"->\s*([\w()-]+?)(?:,|\)$|$)", action)
    if found:
        return found[1] + (")" if found[1].count("(") > found[1].count(")") else "")
    return "shard(-1)" if action.startswith("colwise") else "replicate"


def swapped(action):
    return re.sub(r"([\w()-]+) -> ([\w()-]+?)(?=[,)]$|, )", r"\2 -> \1", action)
