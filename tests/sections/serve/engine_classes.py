"""Reads the layer classes of an engine's model files, and the weights that they fuse.

`python engine_classes.py FOLDER > engine_classes.json` runs none of these files. The folder has the
Python files of the wheels of vLLM and SGLang: `FOLDER/vllm`, `FOLDER/sglang`. `test_pages.py`
compares the result with the shipped pages, `plans/serve/*.plan`.
"""

import ast
import json
import sys
from contextlib import suppress
from pathlib import Path

from planc.diagnostics.diagnostic import Sink
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
}
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


def trees(path, seen):
    """The syntax trees of a file and of the model files that it imports classes from."""
    seen.add(path)
    tree = ast.parse(path.read_text())
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            other = path.parent / f"{node.module.rpartition('.')[2]}.py"
            classes = [a.name for a in node.names if a.name[0].isupper()]
            if classes and other.exists() and other not in seen and other.stem != "utils":
                yield from trees(other, seen)


def layers(path):
    """(kind of a layer by its attribute, parts by the attribute of a fused layer) of a family."""
    kinds, fused = {}, {}
    for tree in trees(path, set()):
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Call(func=cls)):
                    kind = KINDS.get(ast.unparse(cls).rpartition(".")[2])
                    if kind is not None:
                        kinds.setdefault(name, kind)
                case ast.keyword(arg=name, value=value) if name in TABLES:
                    add_parts(fused, value)
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in TABLES:
                    add_parts(fused, value)
    return kinds, {name: [*parts] for name, parts in fused.items()}


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


if __name__ == "__main__":
    found = {engine: {} for engine in FOLDERS}
    for model in shipped_models():
        facts = load(model, Sink())
        for engine, families in found.items():
            path = module_file(Path(sys.argv[1]), engine, facts.name) if facts else None
            if path and facts.family not in families:
                kinds, fused = layers(path)
                families[facts.family] = {"file": path.name, "layers": kinds, "fused": fused}
    for engine, families in found.items():
        rows = (f"  {json.dumps(n)}: {json.dumps(families[n], sort_keys=True)}" for n in families)
        found[engine] = f' "{engine}": {{\n' + ",\n".join(sorted(rows)) + "\n }"
    print("{\n" + ",\n".join(found.values()) + "\n}")
