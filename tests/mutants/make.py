"""Mutants of a plan: its text with one thing changed, as a tired engineer would.

A mutant is the texts of the plan's files. One that lowers to the same operations as another, or
that can't be elaborated at all, is sorted out by who uses it.
"""

import re
from dataclasses import dataclass

from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.syntax import ast
from planc.syntax.parse import parse


@dataclass(frozen=True)
class Mutant:
    """One change.

    Args:
        kind: what the run counts by.
        what: the change in words, with its line.
        files: the texts of the plan and of those that it extends, by name.
    """

    kind: str
    what: str
    files: dict[str, str]


def in_place(files):
    """Mutants that change, drop or add one line of a text."""
    for file, text in files.items():
        parsed = parse(Source(file, text), Sink())
        edits = [*edited_rules(parsed), *inverted(parsed.statements), *added(parsed)]
        edits += edited_settings(parsed)
        seen = {text}
        for kind, name, span, new, *more in edits:
            mutant = "\n".join([text[: span.start] + new + text[span.end :], *more])
            if mutant not in seen:
                seen.add(mutant)
                yield Mutant(kind, f"{file}:{span.line} {name}", {**files, file: mutant})


def in_turn(mutants, chance):
    """All mutants, one of each kind after the other, in an order of chance."""
    kinds = {}
    for mutant in mutants:
        kinds.setdefault(mutant.kind, []).append(mutant)
    for some in kinds.values():
        chance.shuffle(some)
    while kinds:
        for kind in chance.sample(sorted(kinds), len(kinds)):
            yield kinds[kind].pop()
        kinds = {kind: some for kind, some in kinds.items() if some}


def rules(items, section=""):
    """(the section, the rule) for every rule, in branches and blocks too."""
    for item in items:
        match item:
            case ast.Rule() | ast.Directive():
                yield section, item
            case ast.Section():
                yield from rules(item.items, item.name)
            case ast.Block():
                yield from rules(item.items, section)
            case ast.When():
                yield from rules(item.then, section)
                yield from rules(item.otherwise, section)


def edited_rules(parsed):
    for section, rule in rules(parsed.statements):
        whole = rule.origin.text
        for name, new in changes(rule, whole):
            kept = "optional " if whole.startswith("optional ") and new else ""
            yield kind_of(section, rule, name), name, rule.origin, kept + new
        if (
            section == "fsdp"
            and isinstance(rule, ast.Rule)
            and isinstance(rule.target, ast.Selector)
        ):
            target = rule.target.origin.text
            ignored, frozen = f"ignore {target}", f"train {{\n    {target} : frozen\n}}\n"
            yield "ignore", f"{target} ignored", rule.origin, ignored
            yield "ignore", f"{target} ignored and frozen", rule.origin, ignored, frozen


SETTINGS = {
    "schedule": ['"gpipe"', '"zbv"', '"interleaved_1f1b"'],
    "microbatches": ["1", "2"],
    "stages": [
        "even($blocks, first = -1)",
        "weighted($blocks, blocks = [1, 1])",
        "[model.layers[0], model.layers[1]]",
        "[model.layers[0], model.layers[0:2]]",
        "[model.layers[1], model.layers[0]]",
        "[model.layers[0:1], model.layers[2:4]]",
        "[model.layers[0:3], model.layers[3:4]]",
        "even(model.layers[1:])",
        "even($blocks.mlp)",
    ],
    "attention": ["ulysses", "ring", "all_gather"],
    "balance": ["none", "head_tail", "per_document"],
}
"""Other values for the settings of pipelines and split sequences; some fit a deeper model."""


def edited_settings(parsed):
    """Settings of sections with another value, and `balance` where it is left out."""
    for section in sections(parsed.statements):
        given = {item.name: item for item in section.items if isinstance(item, ast.Setting)}
        for name, item in given.items():
            for value in SETTINGS.get(name, ()):
                yield section.name, f"{name} {value}", item.origin, f"{name} = {value}"
        if "attention" in given and "balance" not in given:
            first = given["attention"].origin
            for value in SETTINGS["balance"]:
                line = f"{first.text}\n        balance = {value}"
                yield section.name, f"balance {value}", first, line


def sections(items):
    """The sections, in branches too."""
    for item in items:
        match item:
            case ast.Section():
                yield item
            case ast.When():
                yield from sections((*item.then, *item.otherwise))


def kind_of(section, rule, name):
    """The kind of a change to one rule."""
    if name.startswith("reduce"):
        return "reduce dtype"
    if section in ("fsdp", "replicate"):
        return "unit dropped" if name == "dropped" else "unit"
    if section != "tensor":
        return section
    for word in ("output", "input", "to a part"):
        if name.startswith(word):
            return "layout"
    if name in ("dropped", "retargeted"):
        return f"rule {name}"
    if "local" in name:
        return "local"
    return "experts" if rule.action.name == "experts" else "style"


def changes(rule, whole):
    """(what is done, what the rule becomes); an empty text drops it."""
    yield "dropped", ""
    if isinstance(rule, ast.Directive):
        for dtype in ("bf16", "fp16") if rule.call.name == "precision" else ():
            yield f"reduce {dtype}", re.sub(r"reduce = \w+", f"reduce = {dtype}", whole)
        return
    target, action = rule.target.origin.text, rule.action.origin.text
    yield from (("retargeted", f"{t} : {action}") for t in targets(target))
    for name, new in actions(rule.action.name, action):
        yield name, f"{target} : {new}"
    match rule.action.name:
        case "full":
            for inside in ("mlp", "self_attn"):
                yield f"only {inside}", f"{target}.{inside} : full"
        case "unit":
            if target.startswith("group("):
                members = [m.strip() for m in target[6:-1].split(",") if m.strip()]
                yield "one less", f"group({', '.join(members[1:])}) : {action}"
                yield "apart", "\n".join(f"{m} : {action}" for m in members)


def actions(name, action):
    """(what is done, another action)."""
    match name:
        case "colwise" | "rowwise":
            yield from of_linear(name, action)
        case "experts":
            yield from of_experts(action)
        case "sequence":
            for dim in (0, 1, 2):
                for local in ("true", "false"):
                    yield f"dim {dim} local {local}", f"sequence(dim = {dim}, local = {local})"
        case "input" | "output":
            yield "the other way", swapped(action)
            yield "to a part", action.replace("-> replicate", "-> shard(0)")
            yield "local", re.sub(r",?\s*\)$", ", local = true)", action)
        case "replicate" | "features" | "mla_kv":
            yield "plain", "replicate"
            yield "sum", "replicate(gradient = sum)"
            yield "sequence", "sequence(dim = 2, local = true)"
        case "parameters":
            yield "whole", re.sub(r"shard\(\w\)", "replicate", action)
            yield "a part", re.sub(r"shard\(\w\)", "partial", action)
        case "attributes":
            yield "sum", "replicate(gradient = sum)"
        case "dispatch":
            yield "all-reduce", "dispatch(all_reduce)"
            yield "all-to-all", "dispatch(all_to_all)"
            yield "other tokens dropped", action.replace("drop = position", "drop = probs")
            yield "chunks", action.replace("(all_to_all", "(all_to_all, chunks = 2")
            yield "replicated", "replicate"
        case "full":
            yield "none", "none"
        case "unit":
            yield "never", "unit(reshard = never)"
            yield "always", "unit(reshard = always)"
            yield "everywhere", re.sub(r"on = ep_shard, ?", "", action)


def of_linear(name, action):
    other = "rowwise" if name == "colwise" else "colwise"
    yield "other style", action.replace(name, other, 1)
    yield "without arguments", name
    yield "sequence instead", "sequence"
    for layout in ("replicate", "partial", "shard(0)", "shard(1)", "shard(-1)"):
        yield f"output {layout}", f"{name}(-> {layout})"
    for layout in ("replicate", "shard(1)", "shard(-1)"):
        yield f"input {layout}", f"{name}({layout} -> {output(action)})"
    local = "false" if "local = false" not in action else "true"
    bare = re.sub(r",? ?local = \w+", "", action).replace("()", "")
    inner = bare[len(name) + 1 : -1] if "(" in bare else ""
    yield f"local {local}", f"{name}({', '.join(filter(None, [inner, f'local = {local}']))})"
    if "parts" in action:
        plain = re.sub(r",? ?parts = \w+", "", action).replace("(, ", "(")
        yield "not packed", plain.replace("()", "")
        yield "other parts", re.sub("parts = .", "parts = 4", action)


def of_experts(action):
    yield "not packed", re.sub(", parts = .(, interleaved = true)?", "", action)
    yield "not interleaved", re.sub(", interleaved = true", "", action)
    yield (
        "other dims",
        re.sub(r"shard\((\d)", lambda m: f"shard({3 - int(m[1])}", action),
    )
    yield "by expert", re.sub(r"shard.[12]", "shard(0", action)
    yield "every bias added", re.sub("= partial", "= replicate", action)
    inner = action[:-1].rstrip().rstrip(",")
    for layout in ("partial", "shard(0)", "shard(-1)"):
        yield f"output {layout}", f"{inner}, -> {layout})"
    yield "whole sums", "replicate(gradient = sum)"


def targets(target):
    """Selectors that miss a module, or hit another."""
    braces = re.search(r"\{([^}]*)\}", target)
    if braces:
        names = braces[1].split(",")
        for i in range(len(names)):
            rest = names[:i] + names[i + 1 :]
            inner = f"{{{','.join(rest)}}}" if len(rest) > 1 else rest[0]
            yield target[: braces.start()] + inner + target[braces.end() :]
    if target.startswith("$blocks"):
        yield target.replace("$blocks", "model.layers[0]", 1)
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


# Other lines -------------------------------------------------------------------------------------


def inverted(items):
    """Every condition the other way round."""
    for item in items:
        match item:
            case ast.When():
                span = item.condition.origin
                yield "condition", "inverted", span, f"not ({span.text})"
                yield from inverted((*item.then, *item.otherwise))
            case ast.Section() | ast.Block():
                yield from inverted(item.items)


def added(parsed):
    """Settings that an fsdp section did not have."""
    for item in parsed.statements:
        if isinstance(item, ast.Section) and item.name == "fsdp":
            first = item.items[0].origin
            for factor in (1, 2, 3):
                line = f"divide = {factor}\n    {first.text}"
                yield "divide", f"divide by {factor}", first, line


def of_modules(files, name, plan):
    """Mutants for the modules that the plan's rules select.

    Args:
        files: the texts.
        name: of the file that is compiled.
        plan: what it means for a model.
    """
    text = files[name]
    units = [str(u.members[0]) for u in plan.fsdp.units if not u.root]
    styled = [str(rule.modules) for rule in plan.tensor]
    for path in dict.fromkeys((*units, *styled)):
        more = f"\ntrain {{\n    {path} : frozen\n}}\n"
        yield Mutant("frozen", f"{path} frozen", {**files, name: text + more})


PARTS = ("[0:2]", "[1]", "[-1]", "[::2]")


def on_layers(files, name, plan):
    """Mutants whose changed rule holds for some layers only."""
    for what, paths, axis, new in overrides(plan):
        for part in PARTS:
            some = [re.sub(r"\[0:\d+\]", part, p, count=1) for p in paths]
            if some == paths:
                continue
            lines = "".join(f"    override {p} : {new}\n" for p in some)
            more = f"\n{axis} {{\n{lines}}}\n"
            files_of = {**files, name: files[name] + more}
            yield Mutant("layers", f"{what} on layers{part}", files_of)


def on_degrees(files, name, plan, conditions):
    """Mutants whose changed rule holds for some meshes or sizes only."""
    for what, paths, axis, new in overrides(plan):
        for condition in conditions:
            lines = "".join(f"        override {p} : {new}\n" for p in paths)
            more = f"\n{axis} {{\n    when {condition} {{\n{lines}    }}\n}}\n"
            files_of = {**files, name: files[name] + more}
            yield Mutant("degree", f"{what} when {condition}", files_of)


def overrides(plan):
    """(what is done, the modules, the section, the other action) for each rule that acts."""
    acting = {}
    for rule in plan.tensor:
        acting.setdefault((rule.origin.line, rule.origin.text), []).append(rule)
    for (line, text), some in acting.items():
        action = text.partition(" : ")[2].strip()
        written = re.match(r"\w+", action)
        for name, new in actions(written[0], action) if written else ():
            if new != action:
                paths = [str(r.modules) for r in some]
                yield f"line {line}: {name}", paths, f"tensor on {some[0].axis}", new
