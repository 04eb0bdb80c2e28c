"""Reads the layer classes of an engine's model files, and the weights that they fuse or rename.

`python engine_classes.py FOLDER > engine_classes.json` runs none of these files. The folder has the
Python files of the wheels of vLLM and SGLang: `FOLDER/vllm`, `FOLDER/sglang`. The result has the
engines' versions, and the file and line of each layer. `test_pages.py` compares it with the shipped
pages, `plans/serve/*.plan`.
"""

import ast
import json
import re
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
    "ReplicatedLinear": "whole",
    "GateLinear": "whole",
    "FusedMoE": "experts",
    "FusedMoEFactory": "experts",
    "MiniMaxText01RMSNormTP": "heads",
}
VERSION = re.compile(r"__version__ = .*'([\d.]+)'")
RENAMES = ("orig_to_new_prefix", "orig_to_new_substr", "orig_to_new_suffix")
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
    """The files, with their trees, of a family: the engine's, and those that it imports from."""
    seen.add(path)
    tree = ast.parse(path.read_text())
    yield path, tree
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names, module = (
                [alias.name for alias in node.names],
                node.module.partition("models.")[2],
            )
            module = module or ("" if node.module.endswith("models") else node.module)
            modules = [module] if module and any(name[0].isupper() for name in names) else []
            modules += [] if module else names
            for one in modules:
                other = root_of(path) / f"{one.replace('.', '/')}.py"
                if other.exists() and other not in seen and other.stem != "utils":
                    yield from trees(other, seen)


def root_of(path):
    """The folder of an engine's model files."""
    return path.parent if path.parent.name == "models" else root_of(path.parent)


def layers(path):
    """What a family's files say: the kind and the place of a layer by its attribute, the parts by
    the attribute of a fused layer, and renamed parts of names.
    """
    kinds, fused, renames = {}, {}, {}
    for file, tree in trees(path, set()):
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Call(func=cls)):
                    kind = KINDS.get(ast.unparse(cls).rpartition(".")[2])
                    if kind is not None:
                        kinds.setdefault(name, [kind, f"{file.name}:{node.lineno}"])
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
    return {"file": path.name, "layers": kinds, "fused": fused, "renames": renames}


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


if __name__ == "__main__":
    root, found = Path(sys.argv[1]), {engine: {} for engine in FOLDERS}
    for model in shipped_models():
        facts = load(model, Sink())
        for engine, families in found.items():
            path = module_file(root, engine, facts.name) if facts else None
            if path and facts.family not in families:
                families[facts.family] = layers(path)
    for engine, families in found.items():
        rows = (f"  {json.dumps(n)}: {json.dumps(families[n], sort_keys=True)}" for n in families)
        head = f' "{engine}": {{\n  "version": "{version(root, engine)}",\n'
        found[engine] = head + ",\n".join(sorted(rows)) + "\n }"
    print("{\n" + ",\n".join(found.values()) + "\n}")
