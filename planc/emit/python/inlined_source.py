"""What a script carries along: the definitions of what torch does not have.

They are taken from the very files that `apply` runs, read as text, so a script computes what apply
does and still needs torch alone.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

_STANDALONE = Path(__file__).resolve().parents[2] / "runtime" / "standalone"
_FILES = (
    "tensor_styles.py",
    "activation_checkpoint.py",
    "shards.py",
    "lora_init.py",
    "load_weights.py",
    "quantization.py",
    "megatron_fsdp.py",
    "rng.py",
)


def carried(body: str) -> list[str]:
    """The definitions that a body of Python needs, and those that they need, in their order.

    Args:
        body: Python source that may call what these files define.

    Returns:
        The source of each, with a newline at its end.
    """
    known = _definitions()
    wanted: set[str] = set()
    waiting = [_names(ast.parse(body))]
    while waiting:
        for name in waiting.pop() & known.keys() - wanted:
            wanted.add(name)
            waiting.append(_names(ast.parse(known[name])))
    return [f"{source}\n" for name, source in known.items() if name in wanted]


@cache
def _definitions() -> dict[str, str]:
    texts = [(_STANDALONE / file).read_text(encoding="utf-8") for file in _FILES]
    return {
        node.name: ast.get_source_segment(text, node) or ""
        for text in texts
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
