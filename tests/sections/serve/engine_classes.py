"""Reads the layer classes of an engine's model files, and the weights that they fuse or rename.

`python engine_classes.py FOLDER > engine_classes.json` runs none of these files. The folder has the
Python files of the wheels of vLLM and SGLang: `FOLDER/vllm`, `FOLDER/sglang`. The result has the
engines' versions, and the file and line of each layer. `test_pages.py` compares it with the shipped
pages, `plans/serve/*.plan`. The families are those of the models that ship, and of the pages.
"""

import ast
import json
import re
import sys
from contextlib import suppress
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from planc.diagnostics.diagnostic import Sink
from planc.files.resources import PLANS
from planc.model.config import shipped_models
from planc.model.load import load

FOLDERS = {"vllm": "vllm/model_executor/models", "sglang": "sglang/srt/models"}
KINDS = {
    "QKVParallelLinear": "qkv",
    "MergedColumnParallelLinear": "merged",
    "ColumnParallelLinear": "column",
    "RowParallelLinear": "row",
    "VocabParallelEmbedding": "vocab",
    "ParallelLMHead": "vocab",
    "ReplicatedLinear": "whole",
    "GateLinear": "whole",
    "FusedMoE": "experts",
    "FusedMoEFactory": "experts",
    "MiniMaxText01RMSNormTP": "heads",
}
VERSION = re.compile(r"__version__ = .*'([\d.]+)'")
RENAMES = ("orig_to_new_prefix", "orig_to_new_substr", "orig_to_new_suffix")
DEFINED = ast.FunctionDef | ast.AsyncFunctionDef
TABLES = ("orig_to_new_stacked", "packed_modules_mapping", "stacked_params_mapping")


def module_file(root, engine, architecture):
    """The file with the engine's class for an architecture of transformers; None for none."""
    folder = root / FOLDERS[engine]
    registry = folder / "registry.py"
    if engine == "vllm":
        for node in ast.walk(ast.parse(registry.read_text())):
            for key, value in zip(*pairs(node), strict=True):
                if getattr(key, "value", None) == architecture and isinstance(value, ast.Tuple):
                    path = folder / f"{value.elts[0].value}.py"
                    return path if path.exists() and path.stem != "transformers" else None
    declared = f"class {architecture}("
    return next((p for p in sorted(folder.glob("*.py")) if declared in p.read_text()), None)


def pairs(node):
    """The keys and values of a dictionary in a syntax tree."""
    return (node.keys, node.values) if isinstance(node, ast.Dict) else ((), ())


def definitions(path, seen, wanted=None):
    """The files of a family, each with the classes and functions that it takes from it.

    Args:
        path: a file of the engine.
        seen: (file, name) of what was asked for and given already, which is added to.
        wanted: names of the file that another one imports; None for all of it.
    """
    tree = ast.parse(path.read_text())
    known = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | DEFINED)}
    names = [*known] if wanted is None or not known.keys() & {*wanted} else [*wanted]
    used, nodes = set(), [] if wanted else [n for n in tree.body if n not in known.values()]
    while names:
        name = names.pop()
        if name in known and (path, name) not in seen:
            seen.add((path, name))
            nodes.append(known[name])
            used |= {n.id for n in ast.walk(known[name]) if isinstance(n, ast.Name)}
            names += used & known.keys()
    yield path, nodes
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        taken = {a.name for a in node.names if not used or (a.asname or a.name) in used}
        module = node.module.partition("models.")[2]
        module = module or ("" if node.module.endswith("models") else node.module)
        for name, inside in [(module, taken)] if module else [(name, {""}) for name in taken]:
            other = root_of(path) / f"{name.replace('.', '/')}.py"
            new = {("import", other, inner) for inner in inside} - seen
            if new and other.exists() and other.stem != "utils":
                seen |= new
                yield from definitions(other, seen, None if inside == {""} else inside)


def root_of(path):
    """The folder of an engine's model files."""
    return path.parent if path.parent.name == "models" else root_of(path.parent)


def layers(path):
    """What a family's files say: the kind and the place of a layer by its attribute, its dtype if
    that is its own, the parts by the attribute of a fused layer, and renamed parts of names.
    """
    kinds, dtypes, fused, renames = {}, {}, {}, {}
    for file, nodes in definitions(path, set()):
        for node in (inner for outer in nodes for inner in ast.walk(outer)):
            match node:
                case ast.Assign(
                    targets=[ast.Attribute(attr=name)], value=ast.Call(func=cls) as call
                ):
                    kind = KINDS.get(ast.unparse(cls).rpartition(".")[2])
                    if kind is not None and name not in kinds:
                        kinds[name] = [kind, f"{file.name}:{node.lineno}"]
                        dtypes |= dtype_of(name, call, "params_dtype")
                    elif ast.unparse(cls) == "nn.Parameter" and name != "weight":
                        dtypes |= dtype_of(name, call.args[0], "dtype")
                case ast.keyword(arg=name, value=value) if name in TABLES:
                    add_parts(fused, value)
                case ast.keyword(arg=name, value=value) if name in RENAMES and file == path:
                    with suppress(ValueError):
                        renames |= ast.literal_eval(value)
                case ast.Assign(
                    targets=[ast.Name(id=name) | ast.Attribute(attr=name)], value=value
                ) if name in TABLES:
                    add_parts(fused, value)
    fused = {name: [*parts] for name, parts in fused.items()}
    found = {"layers": kinds, "dtypes": dtypes, "fused": fused, "renames": renames}
    return {"file": path.name, **found}


def dtype_of(name, call, argument):
    """By the attribute, float32 if an argument of its call states that; else nothing."""
    words = call.keywords if isinstance(call, ast.Call) else ()
    values = [ast.unparse(word.value) for word in words if word.arg == argument]
    return {name: "float32"} if values == ["torch.float32"] else {}


def add_parts(fused, value):
    """Adds a table of fused weights, in each of its three forms."""
    with suppress(ValueError):
        table = ast.literal_eval(value)
        rows = [(target, part) for target, part, *_ in table] if isinstance(table, list) else []
        for key, parts in table.items() if isinstance(table, dict) else ():
            named = [(key, p) for p in parts] if isinstance(parts, list) else [(parts[0], key)]
            rows += named
        for target, part in rows:
            ends = [name.strip(".").rpartition(".")[2] for name in (target, part)]
            if ends[0] != ends[1]:
                fused.setdefault(ends[0], {})[ends[1]] = None


def version(root, engine):
    return VERSION.search((root / engine / "_version.py").read_text())[1]


def families_of(engine):
    """The families that a page names."""
    text = (PLANS / "serve" / f"{engine}.plan").read_text()
    return re.findall(r'"(\w+)"', text.partition("require")[2].partition("]")[0])


def architectures():
    """The family and the architecture of each shipped model, and of each family of a page."""
    for model in shipped_models():
        if facts := load(model, Sink()):
            yield facts.family, facts.name
    for family in (family for engine in FOLDERS for family in families_of(engine)):
        yield family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]


if __name__ == "__main__":
    root, found = Path(sys.argv[1]), {engine: {} for engine in FOLDERS}
    for family, architecture in architectures():
        for engine, families in found.items():
            path = module_file(root, engine, architecture)
            if path and family not in families:
                families[family] = layers(path)
    for engine, families in found.items():
        rows = (f"  {json.dumps(n)}: {json.dumps(families[n], sort_keys=True)}" for n in families)
        head = f' "{engine}": {{\n  "version": "{version(root, engine)}",\n'
        found[engine] = head + ",\n".join(sorted(rows)) + "\n }"
    print("{\n" + ",\n".join(found.values()) + "\n}")
